// Scales of FP8 factors, and the bias, on their way from memory to the sums.
#pragma once

#include "algorithms/linear/args.h"
#include "algorithms/linear/layer.h"
#include "llm_comm/reduce.cuh"
#include "llm_comm/tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Scales and bias of the rows that a block has. Thread t of the first team loads the scale of token t. Thread t of the
// second team loads the scale of row t of the block's box of the weight, and thread kMaxBlockOutputs + t the bias of row
// t: before they multiply, so that nobody waits for memory at the end. Scales of the weight and the bias are there from
// the start. They are loaded before the grids ahead have ended, as the weight is. In shared memory lie the scales of
// tokens, the scales of rows, and the bias of rows. bf16 and fp16 have no scales.
template <FactorType F, DataType D>
class LinearScales {
 public:
  LLM_COMM_DEVICE LinearScales(const LinearArgs& args, SharedPlace place) : args_(args), place_(place) {}

  // By all threads of the teams. Row r of the box is output `first_output` + r of the first part of the weight, or, from
  // `outputs` on, as many of the second.
  LLM_COMM_DEVICE void load(uint32_t team, uint32_t first_output, uint32_t outputs) {
    if (!is_used()) return;
    const uint32_t t = thread_index() % kTeamThreads;
    if (team == 0) {
      if constexpr (kIsScaled) {
        grid_dependency_wait();  // for the grid that quantized x
        if (t < args_.x.rows) own_ = load_bits(args_.x_scale + (args_.x_scale_of == ScaleOf::kRow ? t : 0));
      }
      return;
    }
    const uint32_t r = t % linear::kMaxBlockOutputs;
    const uint32_t output = first_output + r % outputs;
    if (r >= args_.block_outputs || output >= args_.weight.rows) return;
    const uint64_t row = uint64_t{r / outputs} * args_.weight.rows + output;
    if (t >= linear::kMaxBlockOutputs) {
      if (has_bias()) own_ = static_cast<const uint16_t*>(args_.bias)[row];
    } else if constexpr (kIsScaled) {
      own_ = load_bits(args_.weight_scale + (args_.weight_scale_of == ScaleOf::kRow ? row : 0));
    }
  }

  // Behind the multiplications, and before a block_sync().
  LLM_COMM_DEVICE void share(uint32_t team) const {
    const uint32_t t = thread_index() % kTeamThreads;
    if (!is_used() || (team == 0 && t >= linear::kMaxTokens)) return;
    const bool is_bias = t >= linear::kMaxBlockOutputs;
    pointer_to<float>(place_)[team * linear::kMaxTokens + t] = is_bias ? Element<D>::value(own_) : bits_to_float(own_);
  }

  // Makes results of the sums of some rows of the box, the first of which is `row`. The order is that of vLLM's CUTLASS
  // epilogues (ScaledEpilogue, ScaledEpilogueBias): the product with the scale of the token and the sum with the bias are
  // rounded together. Without a bias nothing is added, so -0.0 stays.
  template <uint32_t N>
  LLM_COMM_DEVICE void apply(float (&sums)[N], uint32_t token, uint32_t row) const {
    const float of_token = kIsScaled ? pointer_to<float>(place_)[token] : 1.0f;
    const float* const of_rows = pointer_to<float>(place_) + linear::kMaxTokens + row;
    const float* const bias = of_rows + linear::kMaxBlockOutputs;
    if constexpr (kIsScaled) {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < N; ++i) sums[i] *= of_rows[i];
    }
    if (has_bias()) {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < N; ++i) sums[i] = multiply_add(of_token, sums[i], bias[i]);
    } else if constexpr (kIsScaled) {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < N; ++i) sums[i] *= of_token;
    }
  }

 private:
  static constexpr bool kIsScaled = F == FactorType::kFloat8;

  LLM_COMM_DEVICE bool has_bias() const { return args_.bias != nullptr; }
  LLM_COMM_DEVICE bool is_used() const { return kIsScaled || has_bias(); }
  static LLM_COMM_DEVICE uint32_t load_bits(const float* scale) { return float_to_bits(load_plain(scale)); }

  const LinearArgs& args_;
  SharedPlace place_;
  uint32_t own_ = 0;  // bits of a scale, or of an element of the bias: a conversion would wait for the load
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
