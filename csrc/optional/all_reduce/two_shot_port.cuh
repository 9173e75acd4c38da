// Two-shot all-reduce of symmetric outputs (2PA): every rank reduces one slice of the message, which the peers store to
// its staging memory (HB, push). Copy engines bring the sums to all outputs (PortChannel).
//
// Two hops; each rank sends 2 (N-1)/N of the message. The first hop is that of two_shot_hb.cuh (step_pipeline.cuh). A
// slice has two pieces: what the blocks reduce in the first steps, and the rest. The block that finishes a piece last
// requests one copy of it to every peer, because copy engines reach a high bandwidth only in large copies. The input
// may be any tensor; the output is in symmetric memory on every rank and may be the input.
//
// Why a peer's output may be written:
//   1. The peer has begun this operation, so earlier users of its output have ended.
//   2. This rank writes a piece of its own slice. All contributions to the piece have arrived, so the peer sends no
//      more of it.
//   3. A rank ends when all peers' slices have arrived here and all peers have said the same. So everything that it has
//      put has left its own output.
//
// Symmetric offsets. A rank tells each peer the offset of its output in one word, before its first signal. Blocks that
// finish a piece read the word: they have seen what block 0 had seen when it finished its part of the piece. The next
// operation may write the word again, because this rank waits for the peer's end word. A rank without a symmetric
// output sends kNoSymmetricOffset, and all ranks end with an error that names it.
//
// P1 of operation.cuh: blocks wait for blocks of their own number. The block that finishes the last piece also waits
// for such blocks of all ranks. At that point no other block of this rank waits for anything.
#pragma once

#include "algorithms/all_reduce/chunked_slices.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "algorithms/direct.cuh"
#include "algorithms/step_pipeline.cuh"
#include "llm_comm/port_words.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotPort = kKindOf<struct AllReduceTwoShotPort>;
inline constexpr uint32_t kSumSlicesTeams = 2;  // one scatters, one reduces

// The two pieces of a launch's slices. The second one is small. It is scattered while the host sees the request for the
// first one and a copy engine starts; the engine still copies the first piece when the second is complete
// (docs/experiments/channels.md).
class Pieces {
 public:
  LLM_COMM_DEVICE Pieces(uint32_t chunks, uint32_t chunk_lines) : chunks_(chunks) {
    steps_ = chunks - (chunks + 7) / 8;
    lines_ = steps_ * block_count() * chunk_lines;
  }

  static constexpr uint32_t kLast = kPieces - 1;

  // ends_with(t): true if a piece ends with chunk t of each block. of(t): that piece.
  LLM_COMM_DEVICE bool ends_with(uint32_t t) const { return t + 1 == steps_ || t + 1 == chunks_; }
  LLM_COMM_DEVICE uint32_t of(uint32_t t) const { return t < steps_ ? 0 : kLast; }
  // Lines of a piece, in a slice of `slice_lines` lines.
  LLM_COMM_DEVICE uint32_t first_line(uint32_t piece) const { return piece * lines_; }
  LLM_COMM_DEVICE uint32_t lines(uint32_t piece, uint32_t slice_lines) const {
    if (piece == 0) return slice_lines < lines_ ? slice_lines : lines_;
    return slice_lines < lines_ ? 0 : slice_lines - lines_;
  }

 private:
  uint32_t chunks_;
  uint32_t steps_;  // steps of the first piece
  uint32_t lines_;  // lines of the first piece
};

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kSumSlicesTeams))
all_reduce_two_shot_port(LLM_COMM_KERNEL_PARAM DirectArgs<AllReduceArgs> args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // arguments() may lower it
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const Ranks<World> ranks(args.comm.world_size);
  const uint32_t slice = (lines + ranks.count() - 1) / ranks.count();
  const auto slice_of = [&](uint32_t owner) { return Slice<D>(message, owner, slice, lines); };
  const uint32_t peer = thread_index();
  const bool has_peer = peer < ranks.count() && peer != rank;

  Line* const shared = shared_memory<Line>();
  uint32_t* const ends_last_piece = &shared->word[2];
  if (thread_index() == 0) *ends_last_piece = 0;
  HBSession session(args.comm, kAllReduceTwoShotPort, message.bytes(), SignalRow::of<SumSlicesSignals>(block), shared);
  const StepPipeline<D, World> steps(session, args.comm, block, args.tile_lines, depth, slice);
  const Pieces pieces(steps.chunks(), args.tile_lines);
  session.wait_for_grids_before(message.precomputed());
  session.begin();
  // Written before the first signal. Not after the communicator has failed: a late peer may still read the word of the
  // previous operation.
  if (block == 0 && has_peer && !session.has_ended_early()) {
    store_relaxed(offset_word(args.comm, peer, rank), args.symmetric_offsets[0]);
  }

  const PortWords words(args.comm, 0);
  const auto offset_of = [&](uint32_t of) { return load_relaxed(offset_word(args.comm, rank, of)); };
  // Called by one thread of the block that finishes the piece last. A missing offset is reported by all ranks at the
  // end.
  const auto put = [&](uint32_t piece) {
    const uint32_t own = slice_of(rank).lines();
    const uint32_t first = rank * slice + pieces.first_line(piece);
    const uint32_t count = pieces.lines(piece, own);
    if (count == 0 || args.symmetric_offsets[0] == kNoSymmetricOffset) return;
    const bool is_last = piece == Pieces::kLast || pieces.lines(Pieces::kLast, own) == 0;
    const uint64_t bytes = message.bytes_of_lines(first, count);
    for (uint32_t i = 1; i < ranks.count(); ++i) {
      const uint32_t to = ranks.after(rank, i);
      const uint64_t symmetric_offset = offset_of(to);
      if (symmetric_offset == kNoSymmetricOffset) continue;
      const uint64_t target = symmetric_offset + message.bytes_of_lines(0, first);
      const auto wait = [&](auto poll) { return session.wait_until(poll, to, kGather); };
      if (is_last) {
        words.put_to_heap(to, target, message.output_from(first), bytes, 0, session.value_of(0), wait);
      } else {
        words.put_to_heap_unsignalled(to, target, message.output_from(first), bytes, wait);
      }
    }
  };
  const auto ended = [&](uint32_t step) {
    const uint32_t u = step - depth;
    if (step < depth || u >= steps.chunks() || !pieces.ends_with(u)) return;
    const uint32_t piece = pieces.of(u);
    fence_system();  // what the block reduced, ordered before the count
    if (count_up(&state_of(args.comm)->summed[piece], block_count() - 1) != block_count() - 1) return;
    fence_system();  // and the sums of all blocks, ordered after it
    put(piece);
    if (piece == Pieces::kLast) *ends_last_piece = 1;
  };
  steps.run_and_tell(
      ended, [&](const Team& team, uint32_t t) { steps.stage(team, t, slice_of); },
      [&](const Team& team, uint32_t t) { steps.sum(team, t, slice_of(rank), slice_of(rank)); });
  // The last piece ends two steps before the last step, so a barrier of the block follows it.
  if (session.has_ended_early() || *ends_last_piece == 0 || !has_peer) return;

  const auto wait = [&](auto poll) { return session.wait_until(poll, peer, kGather); };
  if (offset_of(peer) == kNoSymmetricOffset || args.symmetric_offsets[0] == kNoSymmetricOffset) {
    session.fail(ErrorCause::kNotSymmetric, args.symmetric_offsets[0] == kNoSymmetricOffset ? rank : peer, kGather);
    return;
  }
  if (slice_of(peer).lines() != 0 && !words.wait_for_data(peer, 0, session.value_of(0), wait)) return;
  store_release(end_word(args.comm, peer, rank), session.value_of(0));
  const uint64_t* const last = end_word(args.comm, rank, peer);
  wait([&] { return poll_acquire(last, HasReached{session.value_of(0)}); });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotPort : ChunkedSlices<AllReduceTwoShotPort> {
  struct Operation : DirectOperation<AllReduce> {
    static uint64_t buffer_bytes(const Problem& problem, uint32_t) { return problem.bytes(); }
  };
  static constexpr AlgorithmInfo kInfo{
      .name = "two_shot_port", .protocol = "Port", .title = "two-shot all-reduce with copy engines", .symmetric = 0b10};
  static constexpr bool kUsesPorts = true;
  // Its blocks use signal words of their own.
  static constexpr Tunables kTunables{
      {{"blocks", 1, SumSlicesSignals::kBlocks}, {"tile_lines", 1, 1u << 16}, {"depth", kMinHBDepth, kMaxDepth}}};
  static constexpr uint32_t kTeams = kSumSlicesTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_port<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
