// Reduce-scatter by push (HB): every rank stores its contribution to a peer's shard, chunk by chunk, to the staging
// memory of that peer, which reduces it. It is the first hop of two-shot all-reduce (HB). step_pipeline.cuh proves that
// the buffers may be reused.
#pragma once

#include "algorithms/reduce_scatter/operation.cuh"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kReduceScatterPushHB = kKindOf<struct ReduceScatterPushHB>;
inline constexpr uint32_t kReduceScatterTeams = 2;  // one sends, one reduces

template <DataType D, int World, template <int> class Buffers>
LLM_COMM_DEVICE void reduce_scatter_in_steps(const ShardsArgs& args, OperationKind kind) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const auto source_of = [&](uint32_t owner) {
    return ShardView<D>(args.input, args.shards.shard[owner], args.shards.row_elements, args.range);
  };
  const ShardView<D> own = source_of(rank);
  const ShardView<D> target(args.output, args.shards.shard[rank], 0, args.range);

  HBSession session(args.comm, kind, ShardView<D>::bytes_of(args.range.count), SignalRow::of<CommonSignals>(block),
                    shared_memory<Line>());
  const StepPipeline<D, World, Buffers<World>> steps(session, args.comm, block, args.tile_lines, args.depth,
                                                     ShardView<D>::lines_of(args.range.count));
  session.wait_for_grids_before(own.precomputed(), target.precomputed());
  session.begin();
  steps.run([&](const Team& team, uint32_t t) { steps.stage(team, t, source_of); },
            [&](const Team& team, uint32_t t) { steps.sum(team, t, own, target); });
}

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kReduceScatterTeams))
reduce_scatter_push_hb(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  reduce_scatter_in_steps<D, World, ChunkBuffers>(args, kReduceScatterPushHB);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct ReduceScatterPushHB : Chunked<ReduceScatterPushHB> {
  using Operation = ReduceScatter;
  static constexpr AlgorithmInfo kInfo{"push_hb", "HB", "reduce-scatter by push (HB)"};
  static constexpr uint32_t kTeams = kReduceScatterTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &reduce_scatter_push_hb<D, World>;
  }

  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
