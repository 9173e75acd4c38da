// Scales of FP8 factors on their way from memory to the sums.
#pragma once

#include "algorithms/linear/args.h"
#include "algorithms/linear/layer.h"
#include "llm_comm/tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// bf16 and fp16 have none.
template <FactorType F>
class LinearScales {
 public:
  LLM_COMM_DEVICE explicit LinearScales(SharedPlace) {}
  LLM_COMM_DEVICE void load(const LinearArgs&, uint32_t, uint32_t, uint32_t) {}
  LLM_COMM_DEVICE void share(uint32_t, uint32_t) const {}
  LLM_COMM_DEVICE float scaled(float sum, uint32_t, uint32_t) const { return sum; }
};

// Thread t of the first team loads that of token t, thread t of the second one that of row t of the block's box of the weight: before
// they multiply, so that nobody waits for memory at the end. What is there from the start, the scales of the weight, is loaded before
// the grids ahead have ended, as the weight is. In shared memory lie the scales of tokens and then those of rows.
template <>
class LinearScales<FactorType::kFloat8> {
 public:
  LLM_COMM_DEVICE explicit LinearScales(SharedPlace place) : place_(place) {}

  // By all threads of the teams. Row t of the box is output `first_output` + t of the first part of the weight, or, from `outputs` on,
  // as many of the second.
  LLM_COMM_DEVICE void load(const LinearArgs& args, uint32_t team, uint32_t first_output, uint32_t outputs) {
    const uint32_t t = thread_index() % kTeamThreads;
    if (team == 0) {
      grid_dependency_wait();  // for the grid that quantized x
      if (t < args.x.rows) own_ = load_plain(args.x_scale + (args.x_scale_of == ScaleOf::kRow ? t : 0));
    } else {
      const uint32_t output = first_output + t % outputs;
      if (t >= args.block_outputs || output >= args.weight.rows) return;
      const uint64_t row = uint64_t{t / outputs} * args.weight.rows + output;
      own_ = load_plain(args.weight_scale + (args.weight_scale_of == ScaleOf::kRow ? row : 0));
    }
  }

  // Behind the multiplications, and before a block_sync().
  LLM_COMM_DEVICE void share(uint32_t team, uint32_t block_outputs) const {
    const uint32_t t = thread_index() % kTeamThreads;
    if (t >= (team == 0 ? linear::kMaxTokens : block_outputs)) return;
    pointer_to<float>(place_)[team * linear::kMaxTokens + t] = own_;
  }

  // In the order in which CUTLASS's epilogue of vLLM multiplies (ScaledEpilogue).
  LLM_COMM_DEVICE float scaled(float sum, uint32_t token, uint32_t row) const {
    const float* const scale = pointer_to<float>(place_);
    return scale[token] * (scale[linear::kMaxTokens + row] * sum);
  }

 private:
  SharedPlace place_;
  float own_ = 0;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
