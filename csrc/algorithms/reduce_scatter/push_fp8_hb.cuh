// Reduce-scatter by push (HB) of quantized values: contributions travel as FP8 (e4m3) with a scale for each block
// (quantized.cuh), as in the first hop of all_reduce/two_shot_quantized_hb.cuh. For option `wire`.
//
// A rank adds its own contribution unquantized, in fp32 and in rank order, and rounds the sum once. Blocks are counted
// from the beginning of a shard; the last one is filled up with zeros. step_pipeline.cuh proves that the buffers may be
// reused.
#pragma once

#include "algorithms/quantized_reference.h"
#include "algorithms/quantized_steps.cuh"
#include "algorithms/reduce_scatter/push_hb.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kReduceScatterPushFP8HB = kKindOf<struct ReduceScatterPushFP8HB>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kReduceScatterTeams))
reduce_scatter_push_fp8_hb(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  const uint32_t block = block_number(args.comm);
  const auto source_of = [&](uint32_t owner) {
    return ShardView<D>(args.input, args.shards.shard[owner], args.shards.row_elements, args.range);
  };
  const ShardView<D> own = source_of(args.comm.rank);
  const ShardView<D> target(args.output, args.shards.shard[args.comm.rank], 0, args.range);
  const uint32_t lines = ShardView<D>::lines_of(args.range.count);

  HBSession session(args.comm, kReduceScatterPushFP8HB, ShardView<D>::bytes_of(args.range.count),
                    SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const StepPipeline<D, World> pipeline(session, args.comm, block, args.tile_lines, args.depth, lines);
  const QuantizedSteps<D, World, Wire::kFP8> steps(args.comm, block, args.tile_lines, args.depth, lines);
  session.wait_for_grids_before(own.precomputed(), target.precomputed());
  session.begin();
  pipeline.run([&](const Team& team, uint32_t t) { steps.stage(team, t, source_of); },
               [&](const Team& team, uint32_t t) { steps.sum_exactly(team, t, own, target); });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct ReduceScatterPushFP8HB : QuantizedChunks<ReduceScatterPushFP8HB> {
  static constexpr AlgorithmInfo kInfo{.name = "push_fp8_hb",
                                       .protocol = "HB",
                                       .title = "reduce-scatter by push of quantized values (fp8)",
                                       .wire = "fp8"};
  static constexpr uint32_t kTeams = kReduceScatterTeams;

  struct Operation : ReduceScatter {
    template <class Input>
    static uint32_t expect(const Problem& problem, uint32_t rank, uint64_t i, Input input) {
      return quantized_sum_of_owner<Wire::kFP8>(
          problem.type, problem.world, shards_of(problem).shard[rank].length, rank, i,
          [&](uint32_t of, uint64_t j) { return input(of, place(problem, rank, j)); }, false);
    }
  };

  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &reduce_scatter_push_fp8_hb<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
