// One HB operation as one block sees it, which exchanges chunks with the blocks of the same number on the other ranks:
//
//   HBSession session(comm, kind, bytes, SignalRow::of<CommonSignals>(block), shared);
//   session.wait_for_grids_before();
//   session.begin();                               // all threads
//   session.run(chunks, depth, [&](uint32_t step) {
//     ... plain loads and stores, to this rank's memory and to that of peers ...
//   });
//
// In step t a block sends chunk t, and takes what the peers sent `depth` steps before: the step begins when the blocks of its
// number have ended their step t - depth. There are 2 depth steps more than chunks, so a rank has two turns to do something with
// what it got, and ends only after every peer has had the first. 2 depth buffers in turn are enough for what is sent: chunk t
// overwrites chunk t - 2 depth, which the peer took in its step t - depth.
//
// The first warp of a block talks to the peers, the others work. While they work on step t, it signals that step t - 1 has ended
// and waits for what step t + 1 needs: a release takes as long as a trip to the peers and back, and would hold up the block. So a
// step is signalled during the next one, and depth is 2 or more: with 1, a step would begin only after its own signal.
//
// Data is stored plainly and ordered by one signal a step, a release, for all that it stands for. A signal is a word with the
// number of the operation and the step in it. So nothing is re-armed or counted, and any grid may follow any other. A step that
// is not waited for need not be signalled.
//
// Who waits for a step may find a later one: of the same operation, or of the next one, which a peer may have begun. A peer is not
// further ahead (R1). Anything else is a word of long ago, or what the region holds at first: no operation has that number in
// practice, the 2^46th.
//
// Staging memory, where peers store to, has two halves, which the kernel that runs divides as it likes. What a kernel may store
// to which half before it has waited for anything depends on what the kernels before have left there to be read:
//
//   H1  A rank ends an operation only after every peer has read what it had stored to the first half of the peer.
//   H2  A rank stores to the second half of a peer only when it has waited for a step of the peer in this operation: so the
//       peer has ended the one before, and all that was there has been read.
#pragma once

#include "llm_comm/steps.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

class HBSession {
 public:
  struct NothingMore {
    LLM_COMM_DEVICE void operator()(uint32_t) const {}
  };

  // `shared`: a line of shared memory.
  LLM_COMM_DEVICE HBSession(const DeviceComm& comm, OperationKind kind, uint64_t bytes, SignalRow row, Line* shared)
      : comm_(comm), op_(comm, kind, bytes), row_(row), incomplete_(shared->word) {}

  // A smaller block, which only tests have, has a thread for each rank in place of the first warp.
  static constexpr uint32_t kFewestThreadsInWarps = 2 * kWarpThreads;

  LLM_COMM_DEVICE uint32_t workers() const { return block_threads() - talkers(); }
  // Of a thread that works.
  LLM_COMM_DEVICE uint32_t worker() const { return thread_index() - talkers(); }

  template <class... Values>
  LLM_COMM_DEVICE void wait_for_grids_before(Values... precomputed) const {
    grid_dependency_wait_after((op_.precomputed() + ... + precomputed));
    grid_dependency_trigger();
  }

  // All threads of the block.
  LLM_COMM_DEVICE void begin() {
    if (thread_index() == 0) incomplete_[0] = incomplete_[1] = 0;
    block_sync();
    if (!op_.begin())
      incomplete_[0] = incomplete_[1] = 1;  // threads may get different answers: the block goes on as one
    block_sync();
  }

  // All steps of the block, which arrives with the last one. Ends early, on all threads alike, where a wait is aborted. `depth`: at
  // least 2. `phase_of(step)`: for errors. `ended(step)`: by the thread of the first warp that has no peer, when the block has ended a
  // step, of all but the last two. `before_signal(step)`: by each of the others, before it signals that the block has ended the step.
  template <class Work, class Phase, class Ended = NothingMore, class Before = NothingMore>
  LLM_COMM_DEVICE void run(uint32_t chunks, uint32_t depth, Work work, Phase phase_of, Ended ended = {},
                           Before before_signal = {}) {
    const uint32_t peer = thread_index();
    const bool works = peer >= talkers();
    const bool has_peer = peer < comm_.world_size && peer != comm_.rank;
    const uint32_t steps = chunks + 2 * depth;
    for (uint32_t t = 0; t < steps; ++t) {
      if (has_peer && t >= 2 && t - 2 < chunks + depth) {
        before_signal(t - 2);
        signal(peer, t - 2);
      }
      if (peer == comm_.rank && t >= 2) ended(t - 2);
      if (has_peer && t >= depth && !wait(peer, t - depth, phase_of(t))) incomplete_[t % 2] = 1;
      block_sync();
      // What is told before this barrier is read before the next one, and told anew behind that: two words in turn.
      if (incomplete_[t % 2] != 0) return;
      if (works) work(t);
    }
    if (thread_index() == 0) op_.arrive();  // a thread that talks: it has nothing to do in the last step
  }

  // Ends the communicator on this GPU, in run(). No step is signalled any more, but for the one under way.
  LLM_COMM_DEVICE void fail(ErrorCause cause, uint32_t peer, uint32_t phase) const {
    op_.fail(cause, peer, phase, [] {});
    *incomplete_ = 1;
  }

  // The same where a step is signalled at once, when the block has ended it, and all threads work: for few steps, which have
  // nothing to hide a signal behind. `depth`: at least 1.
  template <class Work, class Phase>
  LLM_COMM_DEVICE void run_at_once(uint32_t chunks, uint32_t depth, Work work, Phase phase_of) {
    const uint32_t peer = thread_index();
    const bool has_peer = peer < comm_.world_size && peer != comm_.rank;
    const uint32_t last = chunks + 2 * depth - 1;
    for (uint32_t t = 0; t <= last; ++t) {
      // While the peers end: behind the last wait it would make the kernel longer.
      if (t == last && thread_index() == 0) op_.arrive();
      if (t >= depth && has_peer && !wait(peer, t - depth, phase_of(t))) incomplete_[0] = 1;
      block_sync();
      if (incomplete_[0] != 0) return;
      work(t);
      block_sync();
      if (t < chunks + depth && has_peer) signal(peer, t);
    }
  }

  LLM_COMM_DEVICE Line* staging(uint32_t rank, uint32_t half) const { return staging_of(comm_, rank, half); }

  // Whether begin() or run() has ended early. After a barrier.
  LLM_COMM_DEVICE bool has_ended_early() const { return incomplete_[0] != 0 || incomplete_[1] != 0; }

  // For words besides the signals: what stands for a step in them, and another bounded wait.
  LLM_COMM_DEVICE uint64_t value_of(uint32_t step) const { return word_of_step(op_.sequence(), step); }
  template <class Poll>
  LLM_COMM_DEVICE bool wait_until(Poll poll, uint32_t peer, uint32_t phase) {
    return op_.wait_until(poll, peer, phase);
  }

 private:
  LLM_COMM_DEVICE uint32_t talkers() const {
    return block_threads() < kFewestThreadsInWarps ? comm_.world_size : kWarpThreads;
  }

  LLM_COMM_DEVICE void signal(uint32_t peer, uint32_t step) const {
    store_release(row_.word(comm_, peer, comm_.rank), value_of(step));
  }

  // False if the wait ended without it.
  LLM_COMM_DEVICE bool wait(uint32_t peer, uint32_t step, uint32_t phase) {
    const uint64_t* const word = row_.word(comm_, comm_.rank, peer);
    return op_.wait_until([&] { return load_acquire(word) - value_of(step) < kFurthestAhead; }, peer, phase);
  }

  const DeviceComm& comm_;
  Operation op_;
  SignalRow row_;
  uint32_t* incomplete_;  // two words: whether the block ends before an even step, and before an odd one
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
