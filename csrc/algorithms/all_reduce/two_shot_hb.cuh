// Two-shot all-reduce (2PA, HB, push): every rank reduces one slice of the message and sends the sums to all. Plain
// stores, one synchronization per chunk of a slice.
//
// Two hops; each rank sends 2 (N-1)/N of the message. A block scatters this rank's contribution to each slice, reduces
// this rank's slice, and collects the other slices. step_pipeline.cuh proves that the buffers may be reused.
#pragma once

#include "algorithms/all_reduce/chunked_slices.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotHB = kKindOf<struct AllReduceTwoShotHB>;

template <DataType D, int World, template <int> class Buffers>
LLM_COMM_DEVICE void two_shot_in_steps(const AllReduceArgs& args, OperationKind kind) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // arguments() may lower it
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const Ranks<World> ranks(args.comm.world_size);
  const uint32_t slice = (lines + ranks.count() - 1) / ranks.count();
  const auto slice_of = [&](uint32_t owner) { return Slice<D>(message, owner, slice, lines); };

  HBSession session(args.comm, kind, message.bytes(), SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const StepPipeline<D, World, Buffers<World>> steps(session, args.comm, block, args.tile_lines, depth, slice);
  session.wait_for_grids_before(message.precomputed());
  session.begin();
  steps.run([&](const Team& team, uint32_t t) { steps.stage(team, t, slice_of); },
            [&](const Team& team, uint32_t t) { steps.sum_for_all(team, t, slice_of(rank), slice_of(rank)); },
            [&](const Team& team, uint32_t t) { steps.collect(team, kSecondHop, t, slice_of); });
}

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kTwoShotTeams))
all_reduce_two_shot_hb(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  two_shot_in_steps<D, World, ChunkBuffers>(args, kAllReduceTwoShotHB);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotHB : ChunkedSlices<AllReduceTwoShotHB> {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{"two_shot_hb", "HB", "two-shot all-reduce (HB)"};
  static constexpr uint32_t kTeams = kTwoShotTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_hb<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
