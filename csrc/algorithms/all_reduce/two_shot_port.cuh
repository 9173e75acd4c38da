// Two-shot all-reduce of symmetric outputs (2PA): every rank sums a slice of the message, which the others store to its staging memory
// (HB, push), and copy engines bring the sums to the outputs of all (PortChannel).
//
// Two hops, 2 (N-1)/N of the message sent by each rank. In the first, step by step (hb_session.cuh), a block scatters chunk t of each
// slice and reduces chunk t - depth of this rank's. The block that ends it last has the whole slice copied to every peer, as one copy:
// a copy engine carries more than the stores of a kernel, but only in large copies. The input is any tensor, the output lies in the
// symmetric heap on every rank, and may be the input.
//
// Why the output of a peer may be written: the peer has begun this operation, and what this rank writes there is its slice, of which
// the peer has no more to send, as it has all come. A rank ends when the slices of all peers have come and all peers have said that
// theirs have; so what it has put has left its own output.
//
// Where its output is a rank tells each peer in a word, before its first signal. It is read by the block that ends last: it has
// seen what block 0 had seen when it ended. The next operation may write the word again: this rank has waited for the peer's
// last word. A rank without a symmetric output says so; then all ranks end with an error that names it.
//
// R1 of operation.cuh: a block waits for each peer. R2: it uses no slot. H1: chunks are scattered to the first half, and all are
// reduced when a rank ends. P1: blocks wait for those of their number; the last one for the last ones of all ranks, when no other
// block of this rank is left.
#pragma once

#include "algorithms/all_reduce/message.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "algorithms/direct.cuh"
#include "llm_comm/port_words.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotPort{16};
inline constexpr uint32_t kTwoShotPortTeams = 2;  // one scatters, one reduces

// Numbers of blocks in the region of signals: those of the blocks of this algorithm, and behind them two more, for the places of
// outputs and for the last words.
inline constexpr uint32_t kFirstOfTwoShotPort = kMaxChunkedBlocks;
inline constexpr uint32_t kPlacesOfTwoShotPort = 2 * kMaxChunkedBlocks;
inline constexpr uint32_t kLastOfTwoShotPort = kPlacesOfTwoShotPort + 1;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kTwoShotPortTeams))
all_reduce_two_shot_port(LLM_COMM_KERNEL_PARAM DirectArgs<AllReduceArgs> args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // it is cut where chunks are few
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const uint32_t slice = (lines + World - 1) / World;
  const Chunks chunks(block, args.tile_lines, slice);
  const uint32_t peer = thread_index();
  const bool has_peer = peer < World && peer != rank;

  Line* const shared = shared_memory<Line>();
  HBSession session(args.comm, kAllReduceTwoShotPort, message.bytes(), kFirstOfTwoShotPort + block, shared);
  const ChunkBuffers buffers(session, World, block, args.tile_lines, depth);
  session.wait_for_grids_before(message.precomputed());
  session.begin();
  // Not once the communicator has failed: a late peer may be about to put what belongs to the operation before.
  if (block == 0 && has_peer && !session.has_ended_early()) {
    store_relaxed(session.word(kPlacesOfTwoShotPort, peer, rank), args.places[0]);
  }

  const auto lines_of = [&](uint32_t t, uint32_t owner) {
    return chunks.lines(t, lines_of_slice(owner, slice, lines));
  };
  const auto work = [&](uint32_t t) {
    const Team team = Team::of(session, kTwoShotPortTeams);
    if (team.number == 0 && t < chunks.count()) {
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i < World; ++i) {
        const uint32_t to = (rank + i) % World;  // every rank begins with another one
        Line* const target = buffers.of(to, 0, t, rank);
        const uint32_t first = to * slice + chunks.first(t);
        move_lines(
            team, lines_of(t, to), [&](uint32_t k) { return message.load(first + k); },
            [&](uint32_t k, Line line) { store_line(target + k, line); });
      }
    }
    if (team.number == 1 && t >= depth && t - depth < chunks.count()) {
      const uint32_t u = t - depth;
      const uint32_t first = rank * slice + chunks.first(u);
      sum_chunk<D, World>(
          team, lines_of(u, rank),
          [&](uint32_t of, uint32_t k) {
            return of == rank ? message.load(first + k) : load_line(buffers.of(rank, 0, u, of) + k);
          },
          [&](uint32_t k, Line line) { message.store(first + k, line); });
    }
  };
  session.run(chunks.count(), depth, work, [](uint32_t) { return kScatter; });
  block_sync();
  if (session.has_ended_early()) return;

  uint32_t* const is_last = &shared->word[2];
  if (thread_index() == 0) {
    fence_system();  // what the block has summed, before the count
    *is_last = count_up(&state_of(args.comm)->ended, block_count() - 1) == block_count() - 1;
    fence_system();  // and the sums of all blocks behind it
  }
  block_sync();
  if (*is_last == 0) return;

  const PortWords words(args.comm, 0);
  const auto wait = [&](auto poll) { return session.wait_until(poll, peer, kGather); };
  const auto bytes_of = [&](uint32_t owner) {
    return message.bytes_of_lines(owner * slice, lines_of_slice(owner, slice, lines));
  };
  if (!has_peer) return;
  const uint64_t place = load_relaxed(session.word(kPlacesOfTwoShotPort, rank, peer));
  if (place == kNoPlace || args.places[0] == kNoPlace) {
    session.fail(ErrorCause::kNotSymmetric, place == kNoPlace ? peer : rank, kGather);
    return;
  }
  if (lines_of_slice(rank, slice, lines) != 0) {
    const uint64_t offset = message.bytes_of_lines(0, rank * slice);
    if (!words.put_to_heap(peer, place + offset, message.output_from(rank * slice), bytes_of(rank), 0,
                           session.value_of(0), wait)) {
      return;
    }
  }
  if (lines_of_slice(peer, slice, lines) != 0 && !words.wait_for_data(peer, 0, session.value_of(0), wait)) return;
  store_release(session.word(kLastOfTwoShotPort, peer, rank), session.value_of(0));
  const uint64_t* const last = session.word(kLastOfTwoShotPort, rank, peer);
  wait([&] { return load_acquire(last) - session.value_of(0) < kFurthestAhead; });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotPort : Chunked<AllReduceTwoShotPort> {
  struct Operation : DirectOperation<AllReduce> {
    static uint64_t buffer_bytes(const Problem& problem, uint32_t) { return problem.bytes(); }
  };
  static constexpr AlgorithmInfo kInfo{
      .name = "two_shot_port", .protocol = "Port", .title = "two-shot all-reduce with copy engines", .symmetric = 0b10};
  static constexpr OperationKind kKind = kAllReduceTwoShotPort;
  static constexpr bool kUsesPorts = true;
  static constexpr uint32_t kTeams = kTwoShotPortTeams;
  static constexpr uint64_t part_lines(const Problem& problem, uint64_t units) {
    return divide_up(divide_up(units * element_bytes(problem.type), sizeof(Line)), uint64_t{problem.world});
  }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_port<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
