// Look-up of an algorithm's kernels by data type, world size and variant. Worlds above kMaxExactWorld share kernels
// (ranks.cuh), which belong to the odd worlds: so both halves have as many. CMake generates translation units from the
// lists of algorithms. For GPUs there is one for each algorithm, data type and parity of the world size, so that a
// build uses all cores (with LLM_COMM_SPLIT_KERNELS=OFF one per algorithm). All other code only asks for addresses.
#pragma once

#include <utility>

#include "algorithms/algorithm.h"
#include "algorithms/kinds.h"

namespace llm_comm::inline LLM_COMM_TARGET {

enum class Worlds : uint32_t { kEven = 0, kOdd = 1 };  // kOdd: with those above kMaxExactWorld

template <class Algorithm>
using KernelOf = void (*)(typename Algorithm::Operation::Args);

template <class Algorithm, DataType D, Worlds Half>
struct Kernels {
  // Returns nullptr if there is no such kernel. Instantiated only in the translation unit that compiles the kernels.
  static KernelOf<Algorithm> find(uint32_t world, uint32_t variant);
};

template <class Algorithm, DataType D, Worlds Half>
KernelOf<Algorithm> Kernels<Algorithm, D, Half>::find(uint32_t world, uint32_t variant) {
  KernelOf<Algorithm> found = nullptr;
  const auto look_at_world = [&]<int World>() {
    [&]<uint32_t... Variant>(std::integer_sequence<uint32_t, Variant...>) {
      ((variant == Variant ? void(found = Algorithm::template kernel<D, World, Variant>()) : void()), ...);
    }(std::make_integer_sequence<uint32_t, Algorithm::kVariants>());
  };
  constexpr int kFirst = 2 + static_cast<int>(Half);
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((world == kFirst + 2 * I ? look_at_world.template operator()<kFirst + 2 * I>() : void()), ...);
  }(std::make_integer_sequence<int, (kMaxExactWorld - kFirst) / 2 + 1>());
  if constexpr (Half == Worlds::kOdd) {
    if (world > kMaxExactWorld && world <= kMaxWorldSize) look_at_world.template operator()<kMaxWorldSize>();
  }
  return found;
}

// Kernels::find() for a type and world size known only at run time.
template <class Algorithm>
KernelOf<Algorithm> find_kernel(DataType type, uint32_t world, uint32_t variant) {
  KernelOf<Algorithm> found = nullptr;
  const auto look_at_type = [&]<DataType D>() {
    if constexpr (Algorithm::Operation::serves(D)) {
      if (type != D) return;
      found = world % 2 == 0 && world <= kMaxExactWorld ? Kernels<Algorithm, D, Worlds::kEven>::find(world, variant)
                                                        : Kernels<Algorithm, D, Worlds::kOdd>::find(world, variant);
    }
  };
  look_at_type.template operator()<DataType::kBFloat16>();
  look_at_type.template operator()<DataType::kFloat16>();
  look_at_type.template operator()<DataType::kFloat32>();
  look_at_type.template operator()<DataType::kByte>();
  return found;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
