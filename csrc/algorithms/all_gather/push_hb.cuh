// All-gather by push (HB): every rank stores its shard, chunk by chunk, to the staging memory of all peers, which copy
// it to its position in the output. step_pipeline.cuh proves that the buffers may be reused.
#pragma once

#include "algorithms/all_gather/operation.cuh"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherPushHB = kKindOf<struct AllGatherPushHB>;
inline constexpr uint32_t kAllGatherPushTeams = 2;  // one sends, one copies to the output

template <DataType D, int World, template <int> class Buffers>
LLM_COMM_DEVICE void all_gather_in_steps(const ShardsArgs& args, OperationKind kind) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const auto target_of = [&](uint32_t owner) {
    return ShardView<D>(args.output, args.shards.shard[owner], args.shards.row_elements, args.range);
  };
  const ShardView<D> source(args.input, args.shards.shard[rank], 0, args.range);
  const ShardView<D> own = target_of(rank);

  HBSession session(args.comm, kind, ShardView<D>::bytes_of(args.range.count), SignalRow::of<CommonSignals>(block),
                    shared_memory<Line>());
  const StepPipeline<D, World, Buffers<World>> steps(session, args.comm, block, args.tile_lines, args.depth,
                                                     ShardView<D>::lines_of(args.range.count));
  session.wait_for_grids_before(source.precomputed(), own.precomputed());
  session.begin();
  Buffers<World>::fence();
  steps.run([&](const Team& team, uint32_t t) { steps.spread(team, t, source, own); },
            [&](const Team& team, uint32_t t) { steps.collect(team, kFirstHop, t, target_of); });
}

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kAllGatherPushTeams))
all_gather_push_hb(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  all_gather_in_steps<D, World, ChunkBuffers>(args, kAllGatherPushHB);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherPushHB : Chunked<AllGatherPushHB> {
  using Operation = AllGather;
  static constexpr AlgorithmInfo kInfo{"push_hb", "HB", "all-gather by push (HB)"};
  static constexpr uint32_t kTeams = kAllGatherPushTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_push_hb<D, World>;
  }

  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
