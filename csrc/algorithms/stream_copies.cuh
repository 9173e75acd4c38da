// Base of algorithms whose data is moved by copies enqueued on the stream: CE, for copy engine. A launch consists of
// two grids with copies between them:
//
//   entry barrier  one block. Tells the peers the symmetric offset of this rank's tensor, and that it may be
//                  written because the earlier grids have ended. Ends when it has heard the same from all peers
//   copies         to the peers' tensors and to this rank's own. Copy engines do most of them. A kernel beside them
//                  stores small copies and those within the GPU
//   exit barrier   one block. Tells the peers that this rank's copies have ended. Ends when theirs have: the
//                  tensor is complete
//
// An algorithm whose kernel processes received data before it is sent on divides the copies into pieces, on a side
// stream. The side stream first has the incoming copies of piece 0, 1, ..., then the outgoing copies in the same order.
// The grid of a piece (piece_between_copies()) runs after its incoming copies and before its outgoing ones. The links
// carry other pieces in the meantime.
//
// Each grid is an operation of its own. Nothing waits for a host thread, unlike the copies of a proxy
// (docs/experiments/channels.md). In a graph the copies are nodes.
//
// The host fixes the destinations when it enqueues the copies, before any peer has announced its offset. The tensor
// must therefore have the same symmetric offset on every rank, as in NCCL's symmetric memory. The entry barrier
// compares the offsets; if they differ, the communicator fails with an error on all ranks. A grid cannot cancel what is
// enqueued after it, so the copies run even then. They stay inside the heap, whose tensors may then have any content.
//
// Why the offsets may be staged (H1 of hb_session.cuh). entry_barrier_before_copies() sends them through the first half
// of the staging memory, as in direct.cuh. A rank may leave the entry barrier while a peer still reads the rank's
// offset. The later grids of the launch store nothing there, and the next of them ends only when every peer has left
// the entry barrier. So H1 holds for all grids of a launch together, and no other operation runs between them.
#pragma once

#include <algorithm>
#include <vector>

#include "algorithms/copy_head.h"
#include "algorithms/direct.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kStreamCopyThreads = 32;
inline constexpr uint32_t kMaxCopyPieces = 8;  // maximum per launch

// Index of a grid in its launch. kFirstPiece + i: the grid between the copies of piece i.
inline constexpr uint32_t kEntryBarrier = 0;
inline constexpr uint32_t kExitBarrier = 1;
inline constexpr uint32_t kFirstPiece = 2;

// Copy of `bytes` to the symmetric tensor of a rank, from a tensor of this rank. Offsets count from the start of each
// tensor.
struct StreamCopy {
  uint32_t rank;
  uint32_t buffer;  // index of this rank's buffer
  uint64_t from;
  uint64_t to;
  uint64_t bytes;
  bool is_stored = false;  // a kernel beside the copy engines stores it; at most one such copy to each rank per call
};

template <class ArgsOfOperation>
struct StreamCopyArgs : DirectArgs<ArgsOfOperation> {
  uint32_t stage;
};

// Adds copies of the same range of the input to all peers. A kernel stores the head (copy_head.h).
inline void add_copies_to_peers(std::vector<StreamCopy>& all, uint32_t world, uint32_t rank, uint64_t from, uint64_t to,
                                uint64_t bytes) {
  const uint64_t lines = bytes / sizeof(Line);
  const uint64_t head = std::min<uint64_t>(lines / kPiecesPerHead, kMaxHeadLines / (world - 1)) * sizeof(Line);
  for (uint32_t i = 1; i < world; ++i) {
    const uint32_t peer = (rank + i) % world;  // every rank starts with another peer
    if (head < bytes) all.push_back({peer, 0, from + head, to + head, bytes - head});
    if (head != 0) all.push_back({peer, 0, from, to, head, true});
  }
}

// An operation whose kernels take StreamCopyArgs. Besides the members for DirectOperation it defines
//   enqueue(args, problem, tiling, grid, launch, copies)   enqueues a launch. launch(grid) launches a grid with `args`;
//                                                          `copies` (host/heap_copies.h) makes this rank's copies into
//                                                          buffer 1, the only symmetric tensor
template <class Operation>
struct StreamCopyOperation : DirectOperation<Operation> {
  using Args = StreamCopyArgs<typename Operation::Args>;
  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid& grid) {
    return {DirectOperation<Operation>::arguments(problem, tiling, grid), 0};
  }

  // Number of grids of a launch.
  static uint64_t grids(const Problem&, const Tiling&) { return kFirstPiece; }

  static Grid entry_barrier_grid() {
    return {1, kStreamCopyThreads, DirectSession<kMaxWorldSize, kMaxSymmetricOffsets>::shared_bytes()};
  }

 protected:
  // Enqueues the entry barrier, then between(), then the exit barrier.
  template <class Launch, class Between>
  static void enqueue_around(Args& args, Launch launch, Between between) {
    Grid grid = entry_barrier_grid();
    args.stage = kEntryBarrier;
    launch(grid);
    between();
    grid.is_after_copies = true;
    args.stage = kExitBarrier;
    launch(grid);
  }
};

template <int World, class Args>
LLM_COMM_DEVICE void entry_barrier_before_copies(const Args& args, OperationKind kind, uint64_t bytes) {
  DirectSession<World, 1> session(args.comm, kind, bytes, 0);
  session.wait_for_grids_before(args.symmetric_offsets[0]);
  session.begin();
  session.entry_barrier(args.symmetric_offsets);
}

template <int World, class Args>
LLM_COMM_DEVICE void exit_barrier_after_copies(const Args& args, OperationKind kind, uint64_t bytes) {
  DirectSession<World, 1> session(args.comm, kind, bytes, 0);
  session.wait_for_grids_before();
  session.begin();
  session.exit_barrier();
}

// A block of the grid of a piece: processes the received data of the piece before it is sent on.
//
// A rank's grid starts when its own copies of the piece have reached the peers. A block learns from the blocks of its
// number that the peers' copies have reached this rank; then it works. With `IsReadByAll` the outgoing copies may
// overwrite data that blocks of a peer read. A block then ends only after the blocks of its number have finished their
// work. So when a rank's grid has ended, all blocks of all ranks have finished.
template <int World, bool IsReadByAll, class Args, class Work>
LLM_COMM_DEVICE void piece_between_copies(const Args& args, OperationKind kind, uint64_t bytes, uint32_t block,
                                          uint64_t precomputed, Work work) {
  DirectSession<World, 1> session(args.comm, kind, bytes, block);
  session.wait_for_grids_before(precomputed);
  session.begin();
  session.template run_after_copies<IsReadByAll>(work);
}

// Base of descriptors without tuning parameters.
struct ByStreamCopies {
  static constexpr Tunables kTunables{};
  static constexpr uint32_t kVariants = 1;

  static Tiling tile(const Problem& problem, const TuningParameters&, const Limits&) {
    return {1, 1, 1, 0, problem.count};
  }
};

inline void check_room_for_offsets(const Problem& problem, const Limits& limits) {
  if (2 * problem.world * sizeof(Line) > limits.staging_bytes) {
    throw std::invalid_argument("the staging memory has " + std::to_string(limits.staging_bytes) +
                                " bytes, too few to say where a tensor lies: raise workspace_bytes");
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
