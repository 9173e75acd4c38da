// Two-shot all-reduce of symmetric outputs (2PA) with copies in the stream (CE): every rank sums a slice of the message, which the
// others store to its staging memory (HB, push), and has its sums copied to the outputs of all.
//
// Two hops, 2 (N-1)/N of the message sent by each rank; the first is that of sum_slices.cuh. The second is one copy to each peer,
// which begins when the slice is whole: copy engines carry more than the stores of a kernel, but not while they share the link with
// those (docs/experiments/channels.md). Until they begin, a kernel stores the head of the slice. The input is any tensor, the output
// lies at the same place of the symmetric heap on every rank (stream_copies.cuh), and may be the input.
//
// Why the output of a peer may be written: the peer has begun this operation, and what this rank writes there is its slice, of which
// the peer has no more to send, as it has all come.
//
// Where its output is a rank tells each peer in a word, before its first signal. Block 0 compares them when it has done its work. The
// next operation may write the words again: its rank has waited for the grid behind the copies of every peer.
//
// R1 of operation.cuh: a block waits for each peer. R2: it uses no slot.
#pragma once

#include <vector>

#include "algorithms/all_reduce/chunked_slices.cuh"
#include "algorithms/all_reduce/sum_slices.cuh"
#include "algorithms/stream_copies.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotCE{18};

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kSumSlicesTeams))
all_reduce_two_shot_ce(LLM_COMM_KERNEL_PARAM StreamCopyArgs<AllReduceArgs> args) {
  const Message<D> message(args);
  if (args.is_after != 0) {
    part_behind_copies<World>(args, kAllReduceTwoShotCE, message.bytes());
    return;
  }
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const SumSlices<D, World> sums(args, message, block);
  HBSession session(args.comm, kAllReduceTwoShotCE, message.bytes(), kFirstOfSumSlices + block, shared_memory<Line>());
  session.wait_for_grids_before(message.precomputed());
  session.begin();
  sums.tell_place(session, args.places[0]);
  sums.run(session, [](uint32_t) {});
  if (block != 0 || thread_index() != 0 || session.has_ended_early()) return;
  fail_unless_at_one_place<World>(
      session, kGather, [&](uint32_t of) { return of == rank ? args.places[0] : sums.place_of(session, of); });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotCE : ChunkedSlices<AllReduceTwoShotCE> {
  struct Operation : StreamCopyOperation<AllReduce> {
    static constexpr uint32_t kCopied = 1;  // the output

    static uint64_t buffer_bytes(const Problem& problem, uint32_t) { return problem.bytes(); }

    static std::vector<StreamCopy> copies(const Problem& problem, uint32_t rank) {
      const uint64_t slice = part_lines(problem, problem.count) * sizeof(Line);
      const uint64_t first = rank * slice;
      if (first >= problem.bytes()) return {};
      const uint64_t bytes = problem.bytes() - first < slice ? problem.bytes() - first : slice;
      std::vector<StreamCopy> all;
      add_copies_to_peers(all, problem.world, rank, first, first, bytes);
      return all;
    }
  };
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_ce",
                                       .protocol = "CE",
                                       .title = "two-shot all-reduce with copies in the stream",
                                       .symmetric = 0b10,
                                       .grids = kGridsAroundCopies};
  static constexpr OperationKind kKind = kAllReduceTwoShotCE;
  static constexpr uint32_t kTeams = kSumSlicesTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_ce<D, World>;
  }

  // Few of what HB has: it is worth it for large messages only, where a grid of all multiprocessors and large chunks are best.
  static std::vector<Choice> candidates(const Problem& problem, const Limits& limits) {
    std::vector<Choice> found;
    for (const Choice& choice : ChunkedSlices::candidates(problem, limits)) {
      const bool is_whole = choice.blocks == (limits.sm_count == 0 ? 1 : limits.sm_count);
      if (is_whole && choice.depth == kMinHBDepth && choice.tile_lines >= 512) found.push_back(choice);
    }
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
