// HBSession: one block's view of an HB operation (plain stores, one release per chunk). The HB algorithms use it to
// exchange chunks with the block of the same number on every other rank:
//
//   HBSession session(comm, kind, bytes, SignalRow::of<CommonSignals>(block), shared);
//   session.wait_for_grids_before();
//   session.begin();                               // all threads
//   session.run(chunks, depth, [&](uint32_t step) {
//     ... plain loads and stores, to this rank's memory and to that of peers ...
//   });
//
// Steps. In step t a block sends chunk t and consumes the chunks that the peers sent in their step t - depth. Step t
// starts when the peer blocks of this number have finished step t - depth. There are chunks + 2 * depth steps: the
// extra 2 * depth give a rank two passes over the received data. It ends only after every peer has finished the first.
//
// Buffers. 2 * depth buffers are enough. Chunk t overwrites chunk t - 2 * depth. The peer consumed that chunk in its
// step t - depth, and step t starts only after the peer has signalled that step.
//
// Warp roles. The first warp of a block exchanges signals with the peers; the other warps compute. While step t runs,
// the signal warp signals the end of step t - 1 and waits for what step t + 1 needs. A system-scope release takes a
// round trip to the peers, so the compute warps must not wait for it. Step t is therefore signalled during step t + 1,
// and `depth` must be at least 2: with depth 1 a step would wait for a signal that is sent only after it starts.
//
// Signals. A signal is a release store of one 64-bit word, which holds the operation number and the step. It covers all
// plain stores of that step. Nothing is reset or counted, so any grid may follow any other. A step that no peer waits
// for needs no signal.
//
// A waiter may read a later step: of the same operation, or of the next one. The peer cannot be further ahead (R1 of
// operation.cuh). Any other value is a stale word or the initial fill of the region. Stale words are smaller and fail
// the test. The initial fill equals an operation number near 2^47, which is never reached.
//
// Staging memory. Peers store chunks into this rank's staging memory, which has two halves. Each kernel divides them as
// it needs. Two rules make it safe to store before the first wait of an operation:
//
//   H1  A rank ends an operation only after every peer has read what this rank stored into the peer's first half.
//   H2  A rank stores into a peer's second half only after it has waited for a step of that peer in this operation.
//
// By H1 the first half is free as soon as an operation begins. By H2 the peer has ended its previous operation before
// anybody stores into its second half, so the data of that operation has been read.
#pragma once

#include "llm_comm/steps.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

class HBSession {
 public:
  struct NothingMore {
    LLM_COMM_DEVICE void operator()(uint32_t) const {}
  };

  // `shared`: one line of shared memory.
  LLM_COMM_DEVICE HBSession(const DeviceComm& comm, OperationKind kind, uint64_t bytes, SignalRow row, Line* shared)
      : comm_(comm), op_(comm, kind, bytes), row_(row), incomplete_(shared->word) {}

  // Blocks below this size use one thread per rank instead of the first warp for signals. Only tests have such blocks.
  static constexpr uint32_t kFewestThreadsInWarps = 2 * kWarpThreads;

  LLM_COMM_DEVICE uint32_t workers() const { return block_threads() - talkers(); }
  // Index of a compute thread.
  LLM_COMM_DEVICE uint32_t worker() const { return thread_index() - talkers(); }

  template <class... Values>
  LLM_COMM_DEVICE void wait_for_grids_before(Values... precomputed) const {
    grid_dependency_wait_after((op_.precomputed() + ... + precomputed));
    grid_dependency_trigger();
  }

  // Collective over the block: all threads call it.
  LLM_COMM_DEVICE void begin() {
    if (thread_index() == 0) incomplete_[0] = incomplete_[1] = 0;
    block_sync();
    if (!op_.begin())
      incomplete_[0] = incomplete_[1] = 1;  // threads may get different results: the block decides as one
    block_sync();
  }

  // Runs all steps of the block; all threads call it. The block arrives (Operation::arrive) in the last step. Returns
  // early, on all threads alike, when a wait is aborted.
  // - `depth`: at least 2.
  // - `phase_of(step)`: phase number for error reports.
  // - `ended(step)`: called when the block has finished `step`, by the signal-warp thread whose index is this rank. Not
  //   called
  // for the last two steps.
  // - `before_signal(step)`: called by each other signal thread before it signals the end of `step`.
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
      // A flag that is set before this barrier is read after it and may be set again after the next barrier. Two flags,
      // used in alternate steps, keep a slow reader from seeing the flag of the next step.
      if (incomplete_[t % 2] != 0) return;
      if (works) work(t);
    }
    if (thread_index() == 0) op_.arrive();  // a thread of the signal warp, which is idle in the last step
  }

  // Fails the communicator on this GPU; called inside run(). At most the signal under way is still sent.
  LLM_COMM_DEVICE void fail(ErrorCause cause, uint32_t peer, uint32_t phase) const {
    op_.fail(cause, peer, phase, [] {});
    *incomplete_ = 1;
  }

  // Variant of run() for few steps, where no later step could hide a signal: all threads compute, and a step is
  // signalled as soon as the block has finished it. `depth`: at least 1.
  template <class Work, class Phase>
  LLM_COMM_DEVICE void run_at_once(uint32_t chunks, uint32_t depth, Work work, Phase phase_of) {
    const uint32_t peer = thread_index();
    const bool has_peer = peer < comm_.world_size && peer != comm_.rank;
    const uint32_t last = chunks + 2 * depth - 1;
    for (uint32_t t = 0; t <= last; ++t) {
      // Arrive before the last wait, while the peers finish. After the wait it would lengthen the kernel.
      if (t == last && thread_index() == 0) op_.arrive();
      if (t >= depth && has_peer && !wait(peer, t - depth, phase_of(t))) incomplete_[0] = 1;
      block_sync();
      if (incomplete_[0] != 0) return;
      work(t);
      block_sync();
      if (t < chunks + depth && has_peer) signal(peer, t);
    }
  }

  // For an error that a separate function reports (Operation::in_wait).
  LLM_COMM_DEVICE OperationInWait in_wait() const { return op_.in_wait(); }

  LLM_COMM_DEVICE Line* staging(uint32_t rank, uint32_t half) const { return staging_of(comm_, rank, half); }

  // True if begin() or run() ended early. Call it after a barrier.
  LLM_COMM_DEVICE bool has_ended_early() const { return incomplete_[0] != 0 || incomplete_[1] != 0; }

  // For protocols with words of their own besides the signals: the word value of a step, and another bounded wait.
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

  // Returns false if the wait was aborted.
  LLM_COMM_DEVICE bool wait(uint32_t peer, uint32_t step, uint32_t phase) {
    const uint64_t* const word = row_.word(comm_, comm_.rank, peer);
    return op_.wait_until([&] { return poll_acquire(word, HasReached{value_of(step)}); }, peer, phase);
  }

  const DeviceComm& comm_;
  Operation op_;
  SignalRow row_;
  uint32_t* incomplete_;  // two flags in shared memory: the block must end before an even / odd step
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
