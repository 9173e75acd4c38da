// One-shot all-reduce + residual add + RMSNorm: every rank sends its whole message to every other rank, reduces what it
// receives, and normalizes all rows.
//
// One hop, as in all_reduce/one_shot.cuh. Slot layout: [sender][row][line].
//
// Rules of operation.cuh:
//   R1  A rank ends after it has received line 0 from every peer.
//   R2  The thread that receives a line resets it.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/rms_norm.cuh"
#include "llm_comm/ll_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceAddRmsNormOneShot = kKindOf<struct AllReduceAddRmsNormOneShot>;

// Elements that a thread reduces and normalizes together. With 4, half of the threads or fewer have a pack of the tile.
// Measured: 2 makes twice as many warps deliver twice as many partial sums; with 8 each thread takes too long.
inline constexpr uint32_t kNormWidth = 4;

// `SingleTile`: the grid has one block per tile.
template <DataType D, int World, bool SingleTile, Output Rows>
LLM_COMM_KERNEL(SingleTile ? kMaxFusedThreads : kMaxLoopThreads)
all_reduce_add_rms_norm_one_shot(LLM_COMM_KERNEL_PARAM AddRmsNormArgs args) {
  constexpr uint32_t kWidth = kNormWidth;
  using Norm = RmsNorm<D, kWidth, SingleTile, Rows>;
  using Values = typename Norm::Values;

  const Ranks<World> ranks(args.comm.world_size);
  const auto self = RowThread::of<World>(args, cluster_number(args.comm, args.cluster_blocks));
  const uint32_t round_lines = args.tile_lines * args.cluster_blocks;
  const uint32_t tiles = SingleTile ? 1 : (args.row_lines + round_lines - 1) / round_lines;
  const uint32_t tile_packs = args.tile_lines * kElementsPerLine / kWidth;
  const Elements<D> input(args, args.input);
  Norm norm(args, shared_memory<float>(), args.row_lines);
  // Two buffers of contributions by rank: a tile is written while slow threads still add the previous one.
  Line* const contributions = shared_memory<Line>() + kPartialBytes / sizeof(Line);

  LLSession session(args.comm, kAllReduceAddRmsNormOneShot,
                    static_cast<uint64_t>(args.rows) * args.row_lines * sizeof(Line), self.rank, self.peer);
  const uint64_t lines = static_cast<uint64_t>(args.rows) * args.row_lines;

  // Line of the row that this thread exchanges, and values of the row that it normalizes.
  const auto line_of = [&](const TileCursor& at) { return at.first + self.member * args.tile_lines + self.column; };
  const auto has_line = [&](const TileCursor& at) { return self.has_line && line_of(at) < args.row_lines; };
  const auto line_index = [&](const TileCursor& at) { return at.row * args.row_lines + line_of(at); };
  const auto position_of = [&](uint32_t first) -> typename Norm::Position {
    const uint32_t index = (first + self.member * args.tile_lines) * kElementsPerLine + thread_index() * kWidth;
    return {index, thread_index() < tile_packs && index < args.row_lines * kElementsPerLine};
  };
  // True if this warp has values to normalize. If it has any, the first tile of a row has some.
  const uint32_t warp = thread_index() / kWarpThreads * kWarpThreads;
  const bool norms = warp < tile_packs && self.member * args.tile_lines * kElementsPerLine + warp * kWidth <
                                              args.row_lines * kElementsPerLine;

  TileCursor sending{self.cluster, 0};
  TileCursor reducing = sending;
  // This thread's line of the first tile.
  const uint64_t first_line = line_index(sending);
  session.divide_slots(lines, first_line);
  const auto from_first = [&](uint64_t line) { return SingleTile ? 0 : line - first_line; };
  LineLoad<D> coming = input.load_of_line(has_line(sending), first_line);
  auto first_residual = norm.residual_load(sending.row, position_of(0));
  auto first_weight = norm.weight_load(position_of(0));
  session.wait_for_grids_before(coming.precomputed(), first_residual.precomputed(), first_weight.precomputed(),
                                norm.precomputed(), reinterpret_cast<uint64_t>(contributions));
  // The next line to send is always in flight. The first one is loaded together with the operation number, which has
  // the same latency, and with the residual and the weight. Nothing waits in between.
  const Line state = session.load_state();
  coming.begin();
  first_residual.begin();
  first_weight.begin();
  Values residual{};
  Values weight{};
  const float given_scale = norm.load_scale();
  // If begin() fails, the thread continues without waiting, sending or storing results. Threads that have begun, in its
  // block and in others of the cluster, wait for what it delivers.
  norm.set_begun(session.begin_in_slot(state));

  Line line{};  // last line sent
  const auto send = [&] {
    line = __builtin_bit_cast(Line, coming.end());
    if (!self.is_own && has_line(sending) && !session.aborted()) session.send(from_first(line_index(sending)), line);
    if (SingleTile) return;
    sending.advance(args.row_lines, round_lines, self.clusters);
    coming = input.load_of_line(sending.row < args.rows && has_line(sending), line_index(sending));
    coming.begin();
  };
  bool is_first = true;
  uint32_t parity = 0;
  const auto reduce = [&] {
    const bool has = has_line(reducing);
    const uint64_t index = line_index(reducing);
    Line* const received = session.incoming(from_first(index));
    const auto at = position_of(reducing.first);
    if (is_first) {
      norm.wait_for_cluster();  // while the first lines are in flight
    } else {
      residual = norm.load_residual(reducing.row, at);
      if (tiles > 1) weight = norm.load_weight(at);
    }
    Line* const columns = contributions + parity * block_threads();
    parity ^= 1;
    if (has) {
      columns[thread_index()] =
          self.is_own ? (SingleTile ? line : input.load_line(index)) : session.receive(received, 0);
    }
    if (is_first) {
      residual = first_residual.end();
      weight = first_weight.end();
    }
    block_sync();
    if (is_first && thread_index() == 0) session.arrive();
    is_first = false;
    Values sums{};
    if (norms) {
      const auto* const packs = reinterpret_cast<const Values*>(columns);
      if (at.exists) sums = sum_in_rank_order<D, World>(packs + thread_index(), tile_packs, ranks);
      sums = norm.add(reducing.row, at, sums, residual);
    }
    // Reset while the squares travel to the other blocks.
    if (!self.is_own && has) session.reset(received);
    if (SingleTile || reducing.is_last_of_row(args.row_lines, round_lines)) {
      if (norms || warp == 0) {
        norm.finish(
            reducing.row, tiles, [&](uint32_t tile) { return position_of(tile * round_lines); }, sums, weight,
            given_scale);
      }
    }
    if (!SingleTile) reducing.advance(args.row_lines, round_lines, self.clusters);
  };

  if constexpr (SingleTile) {
    send();
    reduce();
  } else {
    // Reducing lags sending by `depth` tiles, so that the links carry later tiles while earlier ones are waited for.
    for (uint32_t ahead = 0; ahead < args.depth && sending.row < args.rows; ++ahead) send();
    while (reducing.row < args.rows) {
      if (sending.row < args.rows) send();
      reduce();
    }
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceAddRmsNormOneShot : RowsInClusters<AllReduceAddRmsNormOneShot> {
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot all-reduce + RMSNorm"};
  static constexpr uint32_t kMaxThreads = kMaxFusedThreads;

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_add_rms_norm_one_shot<D, World, (Variant & 1) != 0, output_of(Variant >> 1, kVariants / 2)>;
  }

  static constexpr uint32_t resident_threads(const Limits&) { return kMaxThreads; }
  static constexpr uint32_t span(const Problem& problem) { return Operation::row_lines(problem); }
  // One copy of the row for each of the other ranks.
  static constexpr uint64_t row_slot_lines(const Problem& problem) {
    return uint64_t{problem.world - 1} * Operation::row_lines(problem);
  }
  // Shared memory of the norm, and the contributions to a tile; two buffers of them if another tile follows.
  static constexpr uint64_t shared_lines(uint64_t, uint64_t, uint64_t threads, bool is_single_tile) {
    return kPartialBytes / sizeof(Line) + (is_single_tile ? threads : 2 * threads);
  }
  // As for one-shot all-reduce.
  static constexpr bool is_worth_measuring(uint64_t bytes, uint64_t world) { return bytes * (world - 1) <= 4 << 20; }

  // The largest block of all fused kernels: a device that runs this launch runs them all.
  static constexpr Grid widest_cluster() {
    return {kMaxClusterBlocks, kMaxThreads, static_cast<uint32_t>(kPartialBytes + kMaxThreads * sizeof(Line)),
            kMaxClusterBlocks, 3};
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
