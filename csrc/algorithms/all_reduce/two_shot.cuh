// Two-shot all-reduce (2PA, LL): reduce-scatter, then all-gather, both by pushed lines, in one kernel without a
// barrier.
//
// The lines are cut into one slice for each rank, of ceil(lines / world size). Rank k owns slice k: it reduces the slice and sends the
// sums to all ranks. Two hops; each rank sends 2 (N-1)/N * bytes. Slot layout: [phase][sender][line of slice], where
// the sender of phase 0 (scatter) is the contributing rank and the sender of phase 1 (gather) is the owner.
//
// Rules of operation.cuh:
//   R1  Slice 0 is never empty. Its owner reduces it only after it has received a line from every rank. Every other
//       rank ends after it has received those sums.
//   R2  The thread that receives a line resets it.
//
// With `BySwitch` the kernel serves two_shot_switch.cuh, where the owner stores sums to all ranks at once. That file
// explains the differences.
#pragma once

#include "algorithms/all_reduce/message.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "algorithms/block_sum.cuh"
#include "llm_comm/ll_session.cuh"
#include "llm_comm/switch_channel.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShot = kKindOf<struct AllReduceTwoShot>;

// `SingleTile`: the grid has one block per tile.
template <DataType D, int World, bool SingleTile, bool BySwitch>
LLM_COMM_DEVICE void sum_in_two_shots(const AllReduceArgs& args, OperationKind kind) {
  const uint32_t block = block_number(args.comm);
  const Ranks<World> ranks(args.comm.world_size);
  const PeerParallel self(args);
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const uint32_t slice = (lines + ranks.count() - 1) / ranks.count();
  const uint32_t peer_lines = lines_of_slice(self.peer, slice, lines);
  const uint32_t own_lines = lines_of_slice(self.rank, slice, lines);
  const uint32_t first = block * self.tile_lines;
  const uint32_t stride = block_count() * self.tile_lines;
  // Set by threads of the block whose wait was aborted: there is no valid sum then.
  uint32_t* const incomplete = shared_memory<Line>()->word;
  Line* const contributions = shared_memory<Line>() + 1;               // [rank][column]
  Line* const sums = contributions + ranks.count() * self.tile_lines;  // [column]
  if (thread_index() == 0) *incomplete = 0;

  LLSession session(args.comm, kind, message.bytes(), self.rank, self.peer);
  session.divide_slots(slice);
  const uint64_t gather = static_cast<uint64_t>(ranks.count() - 1) * slice;  // start of phase 1 in a slot
  const SwitchChannel all(args.comm);
  // Line of this rank's slot that receives the sum of line i, which `owner` stores to all ranks.
  const auto sum_for_all = [&](uint32_t owner, uint32_t i) {
    return reinterpret_cast<Line*>(session.own_slot()) + gather + owner * slice + i;
  };
  Line next;  // to be sent

  typename Message<D>::Load coming(message, self.peer * slice + first + self.column, first + self.column < peer_lines,
                                   args.comm.workspace[self.rank]);
  session.wait_for_grids_before(message.precomputed(), coming.precomputed(), first,
                                reinterpret_cast<uint64_t>(contributions));
  // The next line to send is always in flight. The first one is loaded together with the operation number, which has
  // the same latency. If begin() fails, the thread stays and does nothing: others of its block may have begun and must
  // learn that a slice is incomplete.
  const bool begun = session.begin_with_loads(coming, next);

  const auto scatter = [&](uint32_t tile) {
    const uint32_t i = tile + self.column;
    if (begun && !self.is_own && i < peer_lines) session.send(i, next);
    if (!SingleTile && i + stride < peer_lines) next = message.load(self.peer * slice + i + stride);
  };
  const auto reduce = [&](uint32_t tile) {
    const uint32_t i = tile + self.column;
    if (BySwitch && self.is_own && tile == first) fence_aliases();
    if (i < own_lines) {
      contributions[thread_index()] =
          self.is_own ? (SingleTile ? next : message.load(self.rank * slice + i)) : session.receive(i, kScatter);
    }
    block_sync();
    if (session.aborted()) *incomplete = 1;  // zero before the first barrier, read after the second
    if (tile == first && thread_index() == 0) session.arrive();
    sum_tile<D, World>(contributions, self.tile_lines, sums, ranks);
    // `sums` is written after the next tile's first block_sync() and read before it. `contributions` is read before
    // this one and written after it.
    block_sync();
    if (i >= own_lines || *incomplete != 0) return;
    if (self.is_own) {
      if constexpr (BySwitch) {
        all.send(all.at(sum_for_all(self.rank, i)), sums[self.column]);
      } else {
        message.store(self.rank * slice + i, sums[self.column]);
      }
    } else {
      if constexpr (!BySwitch) session.send(i, sums[self.column], gather);
      session.reset(i);
    }
  };
  const auto collect = [&](uint32_t tile) {
    const uint32_t i = tile + self.column;
    if (!begun || (self.is_own && !BySwitch) || i >= peer_lines) return;
    Line* const sum = BySwitch ? sum_for_all(self.peer, i) : session.incoming(i, gather);
    message.store(self.peer * slice + i, session.receive(sum, kGather));
    session.reset(sum);
  };

  if constexpr (SingleTile) {
    scatter(first);
    reduce(first);
    collect(first);
  } else {
    // Reducing lags scattering by `depth` tiles, and collecting lags reducing by as many. The links carry later tiles
    // while earlier ones wait for their answer.
    const uint32_t lag = args.depth * stride;
    for (uint32_t tile = first; tile < slice + 2 * lag; tile += stride) {
      if (tile < slice) scatter(tile);
      if (tile >= first + lag && tile - lag < slice) reduce(tile - lag);
      if (tile >= first + 2 * lag && tile - 2 * lag < slice) collect(tile - 2 * lag);
    }
  }
}

template <DataType D, int World, bool SingleTile>
LLM_COMM_KERNEL(kMaxBlockThreads)
all_reduce_two_shot(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  sum_in_two_shots<D, World, SingleTile, false>(args, kAllReduceTwoShot);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

// Algorithm defines gathered_slices(world): slices that a rank receives in the second phase.
template <class Algorithm>
struct TwoShotInTiles : TiledAllReduce<Algorithm> {
  static constexpr uint64_t slice_lines(uint64_t lines, uint64_t world) { return divide_up(lines, world); }
  // The first phase has one slice for each of the other ranks.
  static constexpr uint64_t slot_lines(uint64_t lines, uint64_t world) {
    return (world - 1 + Algorithm::gathered_slices(world)) * slice_lines(lines, world);
  }
  static constexpr uint64_t tiled_lines(uint64_t lines, uint64_t world) { return slice_lines(lines, world); }
  static constexpr uint64_t threads_of_line(uint64_t world) { return world; }
  // `incomplete`, the contributions to a tile, its sums.
  static constexpr uint64_t shared_lines(uint64_t tile_lines, uint64_t world) { return 1 + (world + 1) * tile_lines; }
  static constexpr bool is_worth_measuring(uint64_t, uint64_t) { return true; }
};

struct AllReduceTwoShot : TwoShotInTiles<AllReduceTwoShot> {
  static constexpr AlgorithmInfo kInfo{"two_shot", "LL", "two-shot all-reduce"};
  static constexpr uint64_t gathered_slices(uint64_t world) { return world - 1; }

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_two_shot<D, World, Variant == 1>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
