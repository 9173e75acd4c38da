// What algorithms share whose data is moved by copies that stand in the stream: CE, for copy engine. A launch of such an algorithm is
// two grids, with the copies between them:
//
//   before   tells the peers where this rank's tensor lies, and that it may be written: the grids before it have ended. It ends when
//            it knows that of all peers. It may do more.
//   copies   to the tensors of the peers and to this rank's own: by copy engines on a GPU, and small ones, or those of the GPU to
//            itself, by the stores of a kernel beside them
//   after    one block. It tells the peers that this rank's copies have ended, and ends when theirs have: the tensor is whole
//
// Each grid is an operation of its own. Nothing waits for a thread of the host while it runs, as copies of
// a proxy do (docs/experiments/channels.md), and in a graph the copies are nodes.
//
// The host names where copies go when it enqueues them, which is before any peer has said where its tensor lies. So it must lie at
// the same place of the symmetric heap on every rank, as symmetric memory of NCCL has it too. `before` compares the places, and ends
// the communicator, with an error on all ranks, where they differ. But no grid can take back what is enqueued behind it: after an error
// in `before` the copies are made nevertheless. They stay inside of the heap, whose tensors may then hold anything.
//
// The places that meet_before_copies() tells go by the first half of the staging memory, as in direct.cuh. A rank may leave `before` while a peer still reads what it
// was told. But next comes `after`, which stores nothing there and ends only when all peers have left `before`. So H1 of
// hb_session.cuh holds for the two together, and nothing comes between them.
#pragma once

#include <algorithm>
#include <vector>

#include "algorithms/copy_head.h"
#include "algorithms/direct.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kStreamCopyThreads = 32;
inline constexpr uint32_t kGridsAroundCopies = 2;  // of a launch

// So many bytes to the symmetric tensor of a rank, from a tensor of this rank, both counted from where the tensors begin.
struct StreamCopy {
  uint32_t rank;
  uint64_t from;
  uint64_t to;
  uint64_t bytes;
  bool is_stored = false;  // by a kernel beside the copy engines: of each call at most one copy to each rank
};

template <class ArgsOfOperation>
struct StreamCopyArgs : DirectArgs<ArgsOfOperation> {
  uint32_t is_after;
};

// What all peers get alike, the head of it by stores.
inline void add_copies_to_peers(std::vector<StreamCopy>& all, uint32_t world, uint32_t rank, uint64_t from, uint64_t to,
                                uint64_t bytes) {
  const uint64_t lines = bytes / sizeof(Line);
  const uint64_t head = std::min<uint64_t>(lines / kPiecesPerHead, kMaxHeadLines / (world - 1)) * sizeof(Line);
  for (uint32_t i = 1; i < world; ++i) {
    const uint32_t peer = (rank + i) % world;  // every rank begins with another one
    if (head < bytes) all.push_back({peer, from + head, to + head, bytes - head});
    if (head != 0) all.push_back({peer, from, to, head, true});
  }
}

// An operation whose kernels take StreamCopyArgs. Besides what DirectOperation wants it says which copies a rank makes into buffer 1,
// the one symmetric tensor, copies(problem, rank), and of which of its buffers, kCopied.
template <class Operation>
struct StreamCopyOperation : DirectOperation<Operation> {
  using Args = StreamCopyArgs<typename Operation::Args>;
  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid& grid) {
    return {DirectOperation<Operation>::arguments(problem, tiling, grid), 0};
  }

  static Grid grid_behind_copies() {
    Grid grid{1, kStreamCopyThreads, DirectSession<kMaxWorldSize, kMaxPlaces>::shared_bytes()};
    grid.is_behind_copies = true;
    return grid;
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

// Nothing is left to tune.
struct ByStreamCopies {
  static constexpr Tunables kTunables{};
  static constexpr uint32_t kVariants = 1;

  static Tiling tile(const Problem& problem, const Choice&, const Limits&) { return {1, 1, 1, 0, problem.count}; }
};

inline Grid grid_around_copies(const Problem& problem, const Limits& limits) {
  if (2 * problem.world * sizeof(Line) > limits.staging_bytes) {
    throw std::invalid_argument("the staging memory has " + std::to_string(limits.staging_bytes) +
                                " bytes, too few to say where a tensor lies: raise workspace_bytes");
  }
  return {1, kStreamCopyThreads, DirectSession<kMaxWorldSize, kMaxPlaces>::shared_bytes()};
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
