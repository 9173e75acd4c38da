// What algorithms share whose data is moved by copies that stand in the stream: CE, for copy engine. A launch of such an algorithm is
// two grids, with the copies between them:
//
//   meeting  one block. It tells the peers where this rank's tensor lies, and that it may be written: the grids before it have ended.
//            It ends when it knows that of all peers
//   copies   to the tensors of the peers and to this rank's own: by copy engines on a GPU, and small ones, or those of the GPU to
//            itself, by the stores of a kernel beside them
//   parting  one block. It tells the peers that this rank's copies have ended, and ends when theirs have: the tensor is whole
//
// Where a kernel works on what has come before it goes on, the copies are in pieces, in a stream beside that of the grids. There stand
// the copies that come, of piece 0, of piece 1 and so on, and behind all of these the copies that go, in the same order. The grid of a
// piece (piece_between_copies()) runs behind those of its copies that come, and before those that go. The link carries other pieces
// meanwhile.
//
// Each grid is an operation of its own. Nothing waits for a thread of the host while it runs, as copies of a proxy do
// (docs/experiments/channels.md), and in a graph the copies are nodes.
//
// The host names where copies go when it enqueues them, which is before any peer has said where its tensor lies. So it must lie at
// the same place of the symmetric heap on every rank, as symmetric memory of NCCL has it too. The meeting compares the places, and ends
// the communicator, with an error on all ranks, where they differ. But no grid can take back what is enqueued behind it: after an error
// there the copies are made nevertheless. They stay inside of the heap, whose tensors may then hold anything.
//
// The places that meet_before_copies() tells go by the first half of the staging memory, as in direct.cuh. A rank may leave the
// meeting while a peer still reads what it was told. But the grids behind it store nothing there, and the next one ends only when all
// peers have left the meeting. So H1 of hb_session.cuh holds for all grids of a launch together, and nothing comes between them.
#pragma once

#include <algorithm>
#include <vector>

#include "algorithms/copy_head.h"
#include "algorithms/direct.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kStreamCopyThreads = 32;
inline constexpr uint32_t kMaxCopyPieces = 8;  // of a launch

// Which grid of a launch it is: kFirstPiece + i is the one between the copies of piece i.
inline constexpr uint32_t kMeeting = 0;
inline constexpr uint32_t kParting = 1;
inline constexpr uint32_t kFirstPiece = 2;

// So many bytes to the symmetric tensor of a rank, from a tensor of this rank, both counted from where the tensors begin.
struct StreamCopy {
  uint32_t rank;
  uint32_t buffer;  // which of this rank's
  uint64_t from;
  uint64_t to;
  uint64_t bytes;
  bool is_stored = false;  // by a kernel beside the copy engines: of each call at most one copy to each rank
};

template <class ArgsOfOperation>
struct StreamCopyArgs : DirectArgs<ArgsOfOperation> {
  uint32_t stage;
};

// Of the input, what all peers get alike, the head of it by stores.
inline void add_copies_to_peers(std::vector<StreamCopy>& all, uint32_t world, uint32_t rank, uint64_t from, uint64_t to,
                                uint64_t bytes) {
  const uint64_t lines = bytes / sizeof(Line);
  const uint64_t head = std::min<uint64_t>(lines / kPiecesPerHead, kMaxHeadLines / (world - 1)) * sizeof(Line);
  for (uint32_t i = 1; i < world; ++i) {
    const uint32_t peer = (rank + i) % world;  // every rank begins with another one
    if (head < bytes) all.push_back({peer, 0, from + head, to + head, bytes - head});
    if (head != 0) all.push_back({peer, 0, from, to, head, true});
  }
}

// An operation whose kernels take StreamCopyArgs. Besides what DirectOperation wants it enqueues its launches:
//   enqueue(args, problem, tiling, grid, launch, copies)   launch(grid) launches a grid with `args`, `copies` (host/heap_copies.h)
//                                                          makes this rank's copies into buffer 1, the one symmetric tensor
template <class Operation>
struct StreamCopyOperation : DirectOperation<Operation> {
  using Args = StreamCopyArgs<typename Operation::Args>;
  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid& grid) {
    return {DirectOperation<Operation>::arguments(problem, tiling, grid), 0};
  }

  // How many grids a launch has.
  static uint64_t grids(const Problem&, const Tiling&) { return kFirstPiece; }

  static Grid meeting() { return {1, kStreamCopyThreads, DirectSession<kMaxWorldSize, kMaxPlaces>::shared_bytes()}; }

 protected:
  // Enqueues the meeting, `between()`, and the parting.
  template <class Launch, class Between>
  static void enqueue_around(Args& args, Launch launch, Between between) {
    Grid grid = meeting();
    args.stage = kMeeting;
    launch(grid);
    between();
    grid.is_behind_copies = true;
    args.stage = kParting;
    launch(grid);
  }
};

template <int World, class Args>
LLM_COMM_DEVICE void meet_before_copies(const Args& args, OperationKind kind, uint64_t bytes) {
  DirectSession<World, 1> session(args.comm, kind, bytes, 0);
  session.wait_for_grids_before(args.places[0]);
  session.begin();
  session.meet(args.places);
}

template <int World, class Args>
LLM_COMM_DEVICE void part_behind_copies(const Args& args, OperationKind kind, uint64_t bytes) {
  DirectSession<World, 1> session(args.comm, kind, bytes, 0);
  session.wait_for_grids_before();
  session.begin();
  session.part();
}

// What a block does of the grid of a piece: it works on what has come, before it goes on.
//
// A rank's grid begins when its own copies of the piece have come to its peers. That those of the peers have come to this rank, a block
// hears from the blocks of its number there, and then it works. Where `IsReadByAll`, the copies that go from here may overwrite what
// blocks of a peer read. There a block ends when those of its number have done their work: so when a rank's grid has ended, all blocks
// of all ranks have done theirs.
template <int World, bool IsReadByAll, class Args, class Work>
LLM_COMM_DEVICE void piece_between_copies(const Args& args, OperationKind kind, uint64_t bytes, uint32_t block,
                                          uint64_t precomputed, Work work) {
  DirectSession<World, 1> session(args.comm, kind, bytes, block);
  session.wait_for_grids_before(precomputed);
  session.begin();
  session.template run_behind_copies<IsReadByAll>(work);
}

// Nothing is left to tune.
struct ByStreamCopies {
  static constexpr Tunables kTunables{};
  static constexpr uint32_t kVariants = 1;

  static Tiling tile(const Problem& problem, const Choice&, const Limits&) { return {1, 1, 1, 0, problem.count}; }
};

inline void check_room_for_places(const Problem& problem, const Limits& limits) {
  if (2 * problem.world * sizeof(Line) > limits.staging_bytes) {
    throw std::invalid_argument("the staging memory has " + std::to_string(limits.staging_bytes) +
                                " bytes, too few to say where a tensor lies: raise workspace_bytes");
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
