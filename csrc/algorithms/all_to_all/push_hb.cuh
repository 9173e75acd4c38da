// All-to-all by push (HB): every rank stores each shard, chunk by chunk, to the staging memory of its rank. That rank
// copies it to its place in the output. step_pipeline.cuh proves that the buffers may be reused.
#pragma once

#include "algorithms/all_to_all/operation.cuh"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllToAllPushHB = kKindOf<struct AllToAllPushHB>;
inline constexpr uint32_t kAllToAllTeams = 2;  // one sends, one copies to the output

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kAllToAllTeams))
all_to_all_push_hb(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const auto source_of = [&](uint32_t owner) { return AllToAll::shard<D>(args, args.input, owner); };
  const auto target_of = [&](uint32_t owner) { return AllToAll::shard<D>(args, args.output, owner); };
  const ShardView<D> own = source_of(rank);
  const ShardView<D> copy = target_of(rank);

  HBSession session(args.comm, kAllToAllPushHB, ShardView<D>::bytes_of(args.range.count),
                    SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const StepPipeline<D, World> steps(session, args.comm, block, args.tile_lines, args.depth,
                                     ShardView<D>::lines_of(args.range.count));
  session.wait_for_grids_before(own.precomputed(), copy.precomputed());
  session.begin();
  steps.run([&](const Team& team, uint32_t t) { steps.stage(team, t, source_of); },
            [&](const Team& team, uint32_t t) {
              steps.copy(team, t, own, copy);
              steps.collect(team, kFirstHop, t, target_of);
            });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllToAllPushHB : Chunked<AllToAllPushHB> {
  using Operation = AllToAll;
  static constexpr AlgorithmInfo kInfo{"push_hb", "HB", "all-to-all by push (HB)"};
  static constexpr uint32_t kTeams = kAllToAllTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_to_all_push_hb<D, World>;
  }

  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
