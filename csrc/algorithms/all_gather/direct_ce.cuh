// All-gather of symmetric outputs by copies in the stream (CE): every rank has its part copied to where it belongs in the output of
// each rank, as one copy to each peer.
//
// One hop, (N-1)/N of the output sent by each rank, and nothing is copied twice. Copy engines carry more than the stores of a kernel.
// But they begin late, and a copy of the GPU to itself slows one to a peer down (docs/experiments/channels.md). So a kernel beside them
// stores the head of the part to the peers, and the whole part to this rank's own output. The input is any tensor, the output lies at
// the same place of the symmetric heap on every rank (stream_copies.cuh, with the argument why it may be written, and is whole at the
// end).
#pragma once

#include <vector>

#include "algorithms/all_gather/operation.cuh"
#include "algorithms/stream_copies.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherDirectCE = kKindOf<struct AllGatherDirectCE>;

template <int World>
LLM_COMM_KERNEL(kStreamCopyThreads)
all_gather_direct_ce(LLM_COMM_KERNEL_PARAM StreamCopyArgs<PartsArgs> args) {
  if (args.stage == kMeeting) {
    meet_before_copies<World>(args, kAllGatherDirectCE, args.range.count);
  } else {
    part_behind_copies<World>(args, kAllGatherDirectCE, args.range.count);
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
      const Part part = parts_of(problem).part[rank];
      const uint64_t width = element_bytes(problem.type);
      const uint64_t to = part.first * width;
      const uint64_t bytes = part.length * width;
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

  // An engine would take rows one by one. Parts may begin anywhere.
  static bool is_served(const Problem& problem) { return problem.parameter[kRows] == 1; }

  static Grid grid(const Problem& problem, const Tiling&, uint64_t, const Limits& limits) {
    if (!is_served(problem))
      throw std::invalid_argument("copy engines take parts that lie in one piece: dim must be 0");
    check_room_for_places(problem, limits);
    return Operation::meeting();
  }

  static std::vector<Choice> candidates(const Problem& problem, const Limits&) {
    return is_served(problem) ? std::vector<Choice>{Choice{}} : std::vector<Choice>{};
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
