// All-gather of symmetric outputs by copy engines (CE): every rank copies its shard to its position in the output of
// each rank, with one copy per peer enqueued on the stream.
//
// One hop. Each rank sends its shard to N-1 peers, and nothing is staged. Copy engines reach a higher bandwidth than
// stores of a kernel, but they start late, and a copy within the GPU slows down a copy to a peer
// (docs/experiments/channels.md). A kernel beside them therefore stores the head of the shard to the peers, and the
// whole shard to this rank's own output.
//
// The input may be any tensor. The output has the same symmetric offset on every rank. stream_copies.cuh proves that
// the outputs may be written and that they are complete at the end.
#pragma once

#include <vector>

#include "algorithms/all_gather/operation.cuh"
#include "algorithms/stream_copies.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherDirectCE = kKindOf<struct AllGatherDirectCE>;

template <int World>
LLM_COMM_KERNEL(kStreamCopyThreads)
all_gather_direct_ce(LLM_COMM_KERNEL_PARAM StreamCopyArgs<ShardsArgs> args) {
  if (args.stage == kEntryBarrier) {
    entry_barrier_before_copies<World>(args, kAllGatherDirectCE, args.range.count);
  } else {
    exit_barrier_after_copies<World>(args, kAllGatherDirectCE, args.range.count);
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherDirectCE : ByStreamCopies {
  struct Operation : StreamCopyOperation<AllGather> {
    static uint64_t buffer_bytes(const Problem& problem, uint32_t buffer) {
      return AllGather::elements(problem, buffer, 0) * element_bytes(problem.type);
    }

    template <class Launch, class Copies>
    static void enqueue(Args& args, const Problem& problem, const Tiling&, const Grid&, Launch launch, Copies& copies) {
      enqueue_around(args, launch, [&] { copies.copy(copies_of(problem, args.comm.rank)); });
    }

   private:
    static std::vector<StreamCopy> copies_of(const Problem& problem, uint32_t rank) {
      const Shard shard = shards_of(problem).shard[rank];
      const uint64_t width = element_bytes(problem.type);
      const uint64_t to = shard.first * width;
      const uint64_t bytes = shard.length * width;
      std::vector<StreamCopy> all;
      add_copies_to_peers(all, problem.world, rank, 0, to, bytes);
      if (bytes != 0) all.push_back({rank, 0, 0, to, bytes, true});
      return all;
    }
  };
  static constexpr AlgorithmInfo kInfo{.name = "direct_ce",
                                       .protocol = "CE",
                                       .title = "all-gather of symmetric tensors by copies in the stream",
                                       .symmetric = 0b10};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_direct_ce<World>;
  }

  // Copy engines would copy each row separately, so only single-row shards are supported. Shards may begin at any
  // address.
  static bool is_served(const Problem& problem) { return problem.parameter[kRows] == 1; }

  static Grid grid(const Problem& problem, const Tiling&, uint64_t, const Limits& limits) {
    if (!is_served(problem))
      throw std::invalid_argument("copy engines take shards that lie in one piece: dim must be 0");
    check_room_for_offsets(problem, limits);
    return Operation::entry_barrier_grid();
  }

  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits&) {
    return is_served(problem) ? std::vector<TuningParameters>{TuningParameters{}} : std::vector<TuningParameters>{};
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
