// Base of algorithms that read or write peers' tensors in symmetric memory directly, without staging.
//
// Steps (hb_session.cuh):
//   step 0  A block tells the blocks of its number the symmetric offsets of this rank's tensors. The tensors may be
//           accessed: the earlier grids of the stream have ended.
//   step 1  The block has the offsets of all ranks and does all its work.
//   step 2  The block knows that all ranks have finished step 1: no peer accesses this rank's tensors any longer, and
//           everything that peers stored is visible.
// One synchronization each way is enough for a message of any size.
//
// Only its own rank knows whether a tensor is in symmetric memory. A rank without such a tensor sends
// kNoSymmetricOffset instead of keeping silent: all ranks then fail with an error that names it, and none waits. A peer
// takes the offset from the rank that owns the tensor, never from its own tensor.
//
// The offsets travel through the first half of the staging memory, one line for each block and sender. They are read in
// step 1, and the sender ends only after the reader has finished step 1 (H1). R1 of operation.cuh: a block waits for
// each peer. R2: no slot is used.
//
// The tensors determine which algorithm runs, so ranks with different kinds of tensors run different algorithms. Their
// signals must not be confused. These algorithms use DirectSignals and others use other words, so each rank waits in
// vain and the time-out reports the error.
#pragma once

#include <type_traits>

#include "algorithms/chunked.cuh"
#include "llm_comm/symmetric.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMaxDirectThreads = 512;
inline constexpr uint32_t kMaxDirectBlocks = DirectSignals::kBlocks;  // maximum per grid
inline constexpr uint32_t kMaxSymmetricOffsets = 2;  // symmetric offsets of a call; they fit in one line

// Phases, as errors number them.
inline constexpr uint32_t kReady = 0;
inline constexpr uint32_t kDone = 1;

inline constexpr const char* kWholeLines =
    "peers access whole lines: every exit_barrier must have a multiple of 16 bytes";

// Kernel arguments of an operation plus the symmetric offsets of the tensors that peers access, in the order of its
// buffers.
template <class ArgsOfOperation>
struct DirectArgs : ArgsOfOperation {
  uint64_t symmetric_offsets[kMaxSymmetricOffsets];
};

// An operation whose kernels take DirectArgs. It defines buffer_bytes(problem, i): bytes of buffer i that must be in
// symmetric memory.
template <class Operation>
struct DirectOperation : Operation {
  using Args = DirectArgs<typename Operation::Args>;
  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid& grid) {
    return {Operation::arguments(problem, tiling, grid), {}};
  }
};

// Fails the communicator if a rank has no symmetric offset, or another one than rank 0. All ranks name the same rank.
// Called by one thread, during or after the steps of the session.
template <int World, class OffsetOf>
LLM_COMM_DEVICE void fail_unless_offsets_agree(const HBSession& session, uint32_t phase, Ranks<World> ranks,
                                               OffsetOf offset_of) {
  uint32_t missing = ranks.count();
  uint32_t elsewhere = ranks.count();
  LLM_COMM_UNROLL(1)
  for (uint32_t rank = ranks.count(); rank-- > 0;) {
    const uint64_t symmetric_offset = offset_of(rank);
    if (symmetric_offset == kNoSymmetricOffset) missing = rank;
    if (symmetric_offset != offset_of(0)) elsewhere = rank;
  }
  if (missing != ranks.count()) {
    session.fail(ErrorCause::kNotSymmetric, missing, phase);
  } else if (elsewhere != ranks.count()) {
    session.fail(ErrorCause::kOtherSymmetricOffset, elsewhere, phase);
  }
}

// `Tensors`: number of tensors of each rank that peers access.
template <int World, uint32_t Tensors>
class DirectSession {
 public:
  LLM_COMM_DEVICE DirectSession(const DeviceComm& comm, OperationKind kind, uint64_t bytes, uint32_t block)
      : comm_(comm),
        ranks_(comm.world_size),
        block_(block),
        shared_(shared_memory<Shared>()),
        session_(comm, kind, bytes, SignalRow::of<DirectSignals>(block), &shared_->incomplete) {}

  // As HBSession.
  template <class... Values>
  LLM_COMM_DEVICE void wait_for_grids_before(Values... precomputed) const {
    session_.wait_for_grids_before(precomputed...);
  }
  LLM_COMM_DEVICE void begin() { session_.begin(); }

  // Runs the three steps. `symmetric_offsets`: symmetric offsets of this rank's tensors. `work()` does all work of the
  // block once address() is valid. It is not called if a rank has no symmetric tensor.
  template <class Work>
  LLM_COMM_DEVICE void run(const uint64_t (&symmetric_offsets)[kMaxSymmetricOffsets], Work work) {
    const Line said = in_line(symmetric_offsets);
    session_.run_at_once(
        1, 1,
        [&](uint32_t step) {
          if (step == 0) tell(said);
          if (step == 1 && learn(said)) work();
        },
        [](uint32_t step) { return step == 1 ? kReady : kDone; });
  }

  // Entry barrier of stream copies (stream_copies.cuh): first half of run(), as an operation of its own. Fails if a
  // rank has no symmetric tensor or has it at another offset.
  LLM_COMM_DEVICE void entry_barrier(const uint64_t (&symmetric_offsets)[kMaxSymmetricOffsets]) {
    static_assert(Tensors == 1);
    const Line said = in_line(symmetric_offsets);
    run_one_step(kReady, [&](uint32_t step) {
      if (step == 0) tell(said);
      if (step == 0 || thread_index() != 0) return;
      fail_unless_offsets_agree(session_, kReady, ranks_, [&](uint32_t rank) {
        return offset_in(rank == comm_.rank ? said : load_line(word(comm_.rank, rank)), 0);
      });
    });
  }
  // Exit barrier of stream copies: second half of run().
  LLM_COMM_DEVICE void exit_barrier() {
    run_one_step(kDone, [](uint32_t) {});
  }

  // Barrier between two rounds of copies. `work()` starts when the peers have begun this operation: their copies of the
  // first round have then ended. With `WaitsForWork` it returns only after the blocks of this number have finished
  // work() on all ranks.
  template <bool WaitsForWork, class Work>
  LLM_COMM_DEVICE void run_after_copies(Work work) {
    session_.run_at_once(
        WaitsForWork ? 1 : 0, 1,
        [&](uint32_t step) {
          if (step == 1) work();
        },
        [](uint32_t step) { return step == 1 ? kScatter : kGather; });
  }

  // For work() with words of its own besides the signals.
  template <class Poll>
  LLM_COMM_DEVICE bool wait_until(Poll poll, uint32_t peer, uint32_t phase) {
    return session_.wait_until(poll, peer, phase);
  }
  LLM_COMM_DEVICE uint64_t value_of(uint32_t step) const { return session_.value_of(step); }

  // Address of a rank's tensor, valid in work().
  LLM_COMM_DEVICE char* address(uint32_t tensor, uint32_t rank) const { return shared_->address[tensor][rank]; }

  // Addresses of a tensor on all ranks, in order from rank `first` on, modulo the world size.
  class AddressesInRegisters {
   public:
    LLM_COMM_DEVICE AddressesInRegisters(const DirectSession& session, uint32_t tensor, uint32_t first) {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < World; ++i) address_[i] = session.address(tensor, (first + i) % World);
    }
    LLM_COMM_DEVICE char* at(uint32_t i) const { return address_[i]; }
    // Calls visit(address) for each rank.
    template <class Visit>
    LLM_COMM_DEVICE void for_each(Visit visit) const {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < World; ++i) visit(address_[i]);
    }

   private:
    char* address_[World];
  };
  // The same for worlds whose addresses take too many registers: they stay in shared memory.
  class ManyAddresses {
   public:
    LLM_COMM_DEVICE ManyAddresses(const DirectSession& session, uint32_t tensor, uint32_t first)
        : session_(session), tensor_(tensor), first_(first) {}
    LLM_COMM_DEVICE char* at(uint32_t i) const { return session_.address(tensor_, session_.ranks_.after(first_, i)); }
    template <class Visit>
    LLM_COMM_DEVICE void for_each(Visit visit) const {
      LLM_COMM_UNROLL(4)
      for (uint32_t i = 0; i < session_.ranks_.count(); ++i) visit(at(i));
    }

   private:
    const DirectSession& session_;
    uint32_t tensor_;
    uint32_t first_;
  };
  using Addresses = std::conditional_t<kIsExactWorld<World>, AddressesInRegisters, ManyAddresses>;

  // Symmetric offset of a peer's tensor, for requests to the proxy.
  LLM_COMM_DEVICE uint64_t symmetric_offset(uint32_t tensor, uint32_t peer) const {
    return offset_in(load_line(word(comm_.rank, peer)), tensor);
  }

  static constexpr uint32_t shared_bytes() { return sizeof(Shared); }

 private:
  struct alignas(16) Shared {
    Line incomplete;
    char* address[Tensors][World];
  };

  // A session without data steps: it only publishes in step 0 and reads in step 1.
  template <class Work>
  LLM_COMM_DEVICE void run_one_step(uint32_t phase, Work work) {
    session_.run_at_once(0, 1, work, [phase](uint32_t) { return phase; });
  }

  LLM_COMM_DEVICE static Line in_line(const uint64_t (&symmetric_offsets)[kMaxSymmetricOffsets]) {
    return {{static_cast<uint32_t>(symmetric_offsets[0]), static_cast<uint32_t>(symmetric_offsets[0] >> 32),
             static_cast<uint32_t>(symmetric_offsets[1]), static_cast<uint32_t>(symmetric_offsets[1] >> 32)}};
  }

  LLM_COMM_DEVICE Line* word(uint32_t receiver, uint32_t sender) const {
    return session_.staging(receiver, 0) + block_ * ranks_.count() + sender;
  }

  LLM_COMM_DEVICE static uint64_t offset_in(Line said, uint32_t tensor) {
    return static_cast<uint64_t>(said.word[2 * tensor + 1]) << 32 | said.word[2 * tensor];
  }

  LLM_COMM_DEVICE void tell(Line said) const {
    const uint32_t peer = thread_index();
    if (peer < ranks_.count() && peer != comm_.rank) store_line(word(peer, comm_.rank), said);
  }

  // Reads the offsets of all ranks. Returns false, on all threads, if a rank has no symmetric tensor.
  LLM_COMM_DEVICE bool learn(Line own) const {
    const uint32_t rank = thread_index();
    if (rank < ranks_.count()) {
      const Line said = rank == comm_.rank ? own : load_line(word(comm_.rank, rank));
      LLM_COMM_UNROLL(2)
      for (uint32_t i = 0; i < Tensors; ++i) {
        const uint64_t symmetric_offset = offset_in(said, i);
        shared_->address[i][rank] =
            symmetric_offset == kNoSymmetricOffset ? nullptr : address_of(comm_, rank, symmetric_offset);
      }
    }
    block_sync();
    uint32_t missing = ranks_.count();
    LLM_COMM_UNROLL(8)
    for (uint32_t of = ranks_.count(); of-- > 0;) {
      LLM_COMM_UNROLL(2)
      for (uint32_t i = 0; i < Tensors; ++i) {
        if (address(i, of) == nullptr) missing = of;
      }
    }
    if (missing == ranks_.count()) return true;
    if (thread_index() == 0) session_.fail(ErrorCause::kNotSymmetric, missing, kReady);
    return false;
  }

  const DeviceComm& comm_;
  Ranks<World> ranks_;
  uint32_t block_;
  Shared* shared_;
  HBSession session_;
};

// Grid of blocks that walk over `lines` lines in tiles.
inline Grid grid_over_lines(const Problem& problem, const Tiling& tiling, uint64_t lines, const Limits& limits) {
  if (lines >> 31 != 0) throw std::invalid_argument("a rank's share of the message must have fewer than 2^31 lines");
  const uint64_t tiles = divide_up(lines, uint64_t{tiling.tile_lines});
  const uint64_t blocks = tiling.blocks < tiles ? tiling.blocks : tiles;
  if (2 * blocks * problem.world * sizeof(Line) > limits.staging_bytes) {
    throw std::invalid_argument(std::to_string(blocks) + " blocks take more staging memory than there is, " +
                                std::to_string(limits.staging_bytes) + " bytes: lower blocks or raise workspace_bytes");
  }
  const uint32_t threads = tiling.tile_lines < kMaxDirectThreads ? tiling.tile_lines : kMaxDirectThreads;
  return {static_cast<uint32_t>(blocks), threads < problem.world ? problem.world : threads,
          DirectSession<kMaxWorldSize, kMaxSymmetricOffsets>::shared_bytes()};
}

// Launch shape of direct algorithms. Algorithm defines, for a problem,
//   is_served(problem)      true if peers can access the tensors; kServed: the condition, for errors
//   lines(problem)          lines that the blocks of a rank walk over
template <class Algorithm>
struct Direct {
  static constexpr Tunables kTunables{{{"blocks", 1, kMaxDirectBlocks}, {"tile_lines", 1, 1u << 16}}};
  static constexpr uint32_t kVariants = 1;

  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits&) {
    return {tuning.blocks, tuning.tile_lines, 1, 0, problem.count};
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t, const Limits& limits) {
    if (!Algorithm::is_served(problem)) throw std::invalid_argument(Algorithm::kServed);
    return grid_over_lines(problem, tiling, Algorithm::lines(problem), limits);
  }

  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    std::vector<TuningParameters> found;
    if (!Algorithm::is_served(problem)) return found;
    const uint32_t sms = limits.multiprocessors();
    for (uint32_t blocks : up_to(kTunables.max("blocks"), {sms, sms / 2 + 1, sms / 4 + 1})) {
      for (uint32_t tile_lines : {1024u, 2048u, 512u}) found.push_back({.blocks = blocks, .tile_lines = tile_lines});
    }
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
