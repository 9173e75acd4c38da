// The first hop of a two-shot all-reduce whose second one goes by copy engines (two_shot_port.cuh): every rank sums its slice of the
// message (HB, push).
//
// Step by step (hb_session.cuh) a block scatters chunk t of each slice to the staging memory of its owner, and reduces chunk
// t - depth of this rank's. H1: chunks are scattered to the first half, and all are reduced when a rank ends.
#pragma once

#include "algorithms/all_reduce/message.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "algorithms/chunked.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kSumSlicesTeams = 2;  // one scatters, one reduces

// As one block sees it.
template <DataType D, int World>
class SumSlices {
 public:
  LLM_COMM_DEVICE SumSlices(const AllReduceArgs& args, const Message<D>& message, uint32_t block)
      : comm_(args.comm),
        rank_(args.comm.rank),
        depth_(args.depth < kMinHBDepth ? kMinHBDepth : args.depth),  // it is cut where chunks are few
        chunk_lines_(args.tile_lines),
        block_(block),
        message_(message),
        lines_(message.lines()),
        slice_((lines_ + World - 1) / World),
        chunks_(block, args.tile_lines, slice_) {}

  LLM_COMM_DEVICE uint32_t depth() const { return depth_; }
  LLM_COMM_DEVICE uint32_t chunks() const { return chunks_.count(); }
  // Of the message: where a rank's slice begins, and how much there is of it.
  LLM_COMM_DEVICE uint32_t first_line(uint32_t owner) const { return owner * slice_; }
  LLM_COMM_DEVICE uint32_t lines_of(uint32_t owner) const { return lines_of_slice(owner, slice_, lines_); }

  // Tells the peers, before the first signal, where this rank's output is. Not once the communicator has failed: a late peer may be
  // about to use what belongs to the operation before. By all threads.
  LLM_COMM_DEVICE void tell_place(const HBSession& session, uint64_t place) const {
    const uint32_t peer = thread_index();
    if (block_ != 0 || peer >= World || peer == rank_ || session.has_ended_early()) return;
    store_relaxed(place_word(comm_, peer, rank_), place);
  }
  // What a peer has told.
  LLM_COMM_DEVICE uint64_t place_of(uint32_t peer) const { return load_relaxed(place_word(comm_, rank_, peer)); }

  // All steps. `ended`: as of HBSession::run().
  template <class Ended>
  LLM_COMM_DEVICE void run(HBSession& session, Ended ended) const {
    const ChunkBuffers buffers(session, World, block_, chunk_lines_, depth_);
    const auto work = [&](uint32_t t) {
      const Team team = Team::of(session, kSumSlicesTeams);
      if (team.number == 0 && t < chunks()) scatter(team, buffers, t);
      if (team.number == 1 && t >= depth_ && t - depth_ < chunks()) sum(team, buffers, t - depth_);
    };
    session.run(chunks(), depth_, work, [](uint32_t) { return kScatter; }, ended);
  }

 private:
  LLM_COMM_DEVICE uint32_t lines_of(uint32_t t, uint32_t owner) const { return chunks_.lines(t, lines_of(owner)); }

  LLM_COMM_DEVICE void scatter(const Team& team, const ChunkBuffers& buffers, uint32_t t) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t i = 1; i < World; ++i) {
      const uint32_t to = (rank_ + i) % World;  // every rank begins with another one
      Line* const target = buffers.of(to, 0, t, rank_);
      const uint32_t first = first_line(to) + chunks_.first(t);
      move_lines(
          team, lines_of(t, to), [&](uint32_t k) { return message_.load(first + k); },
          [&](uint32_t k, Line line) { store_line(target + k, line); });
    }
  }

  LLM_COMM_DEVICE void sum(const Team& team, const ChunkBuffers& buffers, uint32_t u) const {
    const uint32_t first = first_line(rank_) + chunks_.first(u);
    sum_chunk<D, World>(
        team, lines_of(u, rank_),
        [&](uint32_t of, uint32_t k) {
          return of == rank_ ? message_.load(first + k) : load_line(buffers.of(rank_, 0, u, of) + k);
        },
        [&](uint32_t k, Line line) { message_.store(first + k, line); });
  }

  const DeviceComm& comm_;
  uint32_t rank_;
  uint32_t depth_;
  uint32_t chunk_lines_;
  uint32_t block_;
  const Message<D>& message_;
  uint32_t lines_;
  uint32_t slice_;
  Chunks chunks_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
