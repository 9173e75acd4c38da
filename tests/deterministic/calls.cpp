#include "calls.h"

#include <iterator>
#include <optional>
#include <type_traits>

#include "algorithms/registry.h"
#include "all_reduce_call.h"
#include "any_call.h"
#include "experts_call.h"
#include "fused_call.h"
#include "linear_call.h"
#include "message_call.h"
#include "moe_call.h"
#include "rope_call.h"
#include "router_call.h"
#include "sized_call.h"
#include "tilings.h"

namespace drill {

namespace {

// Numbers of the algorithms of an operation.
template <class Operation>
std::vector<uint32_t> algorithms_of() {
  std::vector<uint32_t> found;
  uint32_t number = 0;
  Registry::for_each([&]<class A>() {
    if (std::is_same_v<typename A::Operation, Operation>) found.push_back(number);
    ++number;
  });
  return found;
}

std::unique_ptr<Call> draw_call_of(const Subject& subject, uint32_t ranks, Random& random, const Call* before) {
  const uint32_t algorithm = subject.algorithm;
  const DataType type = subject.type;
  std::unique_ptr<Call> call;
  Registry::at(algorithm, [&]<class A>() {
    if constexpr (std::is_base_of_v<AllReduce, typename A::Operation> && A::kInfo.symmetric == 0) {
      const auto* const sums = dynamic_cast<const AllReduceCall*>(before);
      call = std::make_unique<AllReduceCall>(algorithm, type, ranks, random, sums);
    } else if constexpr (std::is_same_v<typename A::Operation, AllReduceAddRmsNorm>) {
      if (type == DataType::kFloat16) {
        call = std::make_unique<FusedCall<DataType::kFloat16>>(algorithm, subject.quantization, ranks, random);
      } else {
        call = std::make_unique<FusedCall<DataType::kBFloat16>>(algorithm, subject.quantization, ranks, random);
      }
    } else if constexpr (std::is_same_v<typename A::Operation, MoeDispatch>) {
      call = std::make_unique<DispatchCall>(algorithm, type, ranks, random);
    } else if constexpr (std::is_same_v<typename A::Operation, MoeCombine>) {
      call = std::make_unique<CombineCall>(algorithm, type, ranks, random);
    } else if constexpr (std::is_same_v<typename A::Operation, AllToAllV>) {
      call = std::make_unique<SizedCall>(algorithm, ranks, random);
    } else {
      call = std::make_unique<AnyCall<A>>(algorithm, type, ranks, random);
    }
  });
  return call;
}

template <DataType D>
std::unique_ptr<Call> draw_linear(const Subject& subject, Random& random) {
  constexpr OperandType kAlike = operands_of_type(D);
  if (subject.is_fp8) return std::make_unique<LinearCall<OperandType::kFloat8, D>>(subject.epilogue, random);
  return std::make_unique<LinearCall<kAlike, D>>(subject.epilogue, random);
}

template <DataType D>
std::unique_ptr<Call> draw_few_tokens(FewTokensKernel kernel, Random& random) {
  if (kernel == FewTokensKernel::kRope) return std::make_unique<RopeCall<D>>(random);
  if (kernel == FewTokensKernel::kRoute) return std::make_unique<RouterCall<D>>(random);
  return std::make_unique<ExpertsCall<D>>(random);
}

}  // namespace

const std::vector<NamedSubject>& subjects() {
  static const std::vector<NamedSubject> all = [] {
    std::vector<NamedSubject> found;
    const auto add = [&](uint32_t number, Quantization quantization) {
      for (const DataType type : info_of(number).types) {
        found.push_back({name_of(number) + suffix_of(quantization), {number, std::nullopt, type, quantization}});
      }
    };
    for (uint32_t number = 0; number < host::algorithms().size(); ++number) add(number, Quantization::kNone);
    for (const uint32_t number : algorithms_of<AllReduceAddRmsNorm>()) {
      for (const Quantization quantization :
           {Quantization::kStatic, Quantization::kDynamic, Quantization::kGroup,
            Quantization::kGroupColumnsAlignedUe8m0, Quantization::kNvfp4, Quantization::kMxfp8}) {
        add(number, quantization);
      }
    }
    const char* const forms[] = {"put", "get", "packets", "port"};
    for (uint32_t form = 0; form < std::size(forms); ++form) {
      found.push_back({forms[form], {0, static_cast<Form>(form), DataType::kBFloat16, Quantization::kNone}});
    }
    if (kWarpThreads != 32) return found;  // they are written for warps of 32
    const char* const layers[] = {"linear", "linear_silu_and_mul", "linear_gelu_tanh_and_mul"};
    for (uint32_t number = 0; number < std::size(layers); ++number) {
      const std::string name = layers[number];
      const auto epilogue = static_cast<LinearEpilogue>(number);
      for (const bool is_fp8 : {false, true}) {
        for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
          found.push_back(
              {name + (is_fp8 ? "+fp8" : ""), {0, std::nullopt, type, Quantization::kNone, true, epilogue, is_fp8}});
        }
      }
    }
    const char* const kernels[] = {"fused_experts", "moe_route", "linear_rope"};
    for (uint32_t number = 0; number < std::size(kernels); ++number) {
      for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
        Subject subject{0, std::nullopt, type, Quantization::kNone};
        subject.few_tokens = static_cast<FewTokensKernel>(number);
        found.push_back({kernels[number], subject});
      }
    }
    return found;
  }();
  return all;
}

std::unique_ptr<Call> draw_call(const Subject& subject, bool alone, uint32_t index, uint32_t ranks, Random& random,
                                const Call* before) {
  if (random.chance(64) && !alone) {
    static const std::vector<uint32_t> all_reduces = algorithms_of<AllReduce>();
    const uint32_t algorithm = all_reduces[random.below(all_reduces.size())];
    const auto type = info_of(algorithm).types[random.below(info_of(algorithm).types.size())];
    return draw_call_of({algorithm, std::nullopt, type, Quantization::kNone}, ranks, random, before);
  }
  const bool is_bf16 = subject.type == DataType::kBFloat16;
  if (subject.is_linear) {
    return is_bf16 ? draw_linear<DataType::kBFloat16>(subject, random)
                   : draw_linear<DataType::kFloat16>(subject, random);
  }
  if (subject.few_tokens) {
    return is_bf16 ? draw_few_tokens<DataType::kBFloat16>(*subject.few_tokens, random)
                   : draw_few_tokens<DataType::kFloat16>(*subject.few_tokens, random);
  }
  if (subject.form) return std::make_unique<MessageCall>(*subject.form, index, ranks, random);
  return draw_call_of(subject, ranks, random, before);
}

}  // namespace drill
