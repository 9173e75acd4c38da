// One-shot all-reduce (1PA, HB, push): every rank stores its whole message, chunk by chunk, to the staging memory of
// all peers, and reduces all of it. Plain stores, one synchronization per chunk.
//
// One hop; each rank sends N-1 times the message. For two ranks that is as much as in two hops, so it is meant for two.
//
// A block sends the message to each peer and reduces what has arrived (step_pipeline.cuh).
#pragma once

#include "algorithms/all_reduce/message.cuh"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceOneShotHB = kKindOf<struct AllReduceOneShotHB>;
inline constexpr uint32_t kOneShotTeams = 2;  // one sends, one reduces

// `stage(steps, team, t, message)`: sends or stages chunk t of the message before it is reduced.
template <DataType D, int World, class Buffers, class Stage>
LLM_COMM_DEVICE void one_shot_in_steps(const AllReduceArgs& args, OperationKind kind, Stage stage) {
  const uint32_t block = block_number(args.comm);
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // arguments() may lower it
  const Message<D> message(args);
  HBSession session(args.comm, kind, message.bytes(), SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const StepPipeline<D, World, Buffers> steps(session, args.comm, block, args.tile_lines, depth, message.lines());
  session.wait_for_grids_before(message.precomputed());
  session.begin();
  steps.run([&](const Team& team, uint32_t t) { stage(steps, team, t, message); },
            [&](const Team& team, uint32_t t) { steps.sum(team, t, message, message); });
}

// Target for results that need not be stored.
struct Nowhere {
  LLM_COMM_DEVICE void store(uint32_t, Line) const {}
};

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kOneShotTeams))
all_reduce_one_shot_hb(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  one_shot_in_steps<D, World, ChunkBuffers<World>>(
      args, kAllReduceOneShotHB, [](const auto& steps, const Team& team, uint32_t t, const Message<D>& message) {
        steps.spread(team, t, message, Nowhere());
      });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceOneShotHB : Chunked<AllReduceOneShotHB> {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{"one_shot_hb", "HB", "one-shot all-reduce (HB)"};
  static constexpr uint32_t kTeams = kOneShotTeams;
  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_one_shot_hb<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
