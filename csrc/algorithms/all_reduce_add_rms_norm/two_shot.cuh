// Two-shot all-reduce + residual add + RMSNorm: reduce-scatter, then all-gather, both by pushed lines, in one kernel.
//
// Rank k owns segment k of every row, not whole rows. The threads that collect a row's sums therefore hold the whole
// row together and normalize it without another exchange. The traffic is that of all_reduce/two_shot.cuh. Segments are
// multiples of chunks (operation.cuh), so the last ones may be short or empty. Slot layout: [phase][sender][row][line
// of segment], where the sender of phase 0 (scatter) is the contributing rank and the sender of phase 1 (gather) is the
// owner.
//
// Rules of operation.cuh:
//   R1  Segment 0 is never empty. Its owner reduces it only after it has received a line from every rank. Every other
//       rank ends after it has received those sums.
//   R2  The thread that receives a line resets it.
//
// The kernel also serves two_shot_switch.cuh, where the owner stores sums to all ranks at once, and
// two_shot_ld_reduce.cuh, where the switch adds (`Exchange`). Those files explain the differences.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/rms_norm.cuh"
#include "algorithms/block_sum.cuh"
#include "llm_comm/ll_session.cuh"
#include "llm_comm/switch_channel.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceAddRmsNormTwoShot = kKindOf<struct AllReduceAddRmsNormTwoShot>;

// Way of the sums to the other ranks: the owner of a segment sends them to each rank, or stores them to all at once.
struct Pushed {
  static constexpr bool kToAll = false;
  static constexpr bool kIsSummedBySwitch = false;
};
struct StoredToAll {
  static constexpr bool kToAll = true;
  static constexpr bool kIsSummedBySwitch = false;
};

// `SingleTile`: the grid has one block per tile. `Exchange`: Pushed, StoredToAll, or a class that reduces in the switch
// (two_shot_ld_reduce.cuh).
template <DataType D, int World, bool SingleTile, Output Rows, class Exchange>
LLM_COMM_DEVICE void sum_and_norm_in_two_shots(const AddRmsNormArgs& args, OperationKind kind) {
  constexpr bool kToAll = Exchange::kToAll;
  constexpr bool kIsSummedBySwitch = Exchange::kIsSummedBySwitch;
  using Norm = RmsNorm<D, kElementsPerLine, SingleTile, Rows>;
  using Values = typename Norm::Values;

  const Ranks<World> ranks(args.comm.world_size);
  const auto self = RowThread::of<World>(args, cluster_number(args.comm, args.cluster_blocks));
  const uint32_t segment = args.segment_lines;
  const uint32_t round_lines = args.tile_lines * args.cluster_blocks;
  const uint32_t tiles = SingleTile ? 1 : (segment + round_lines - 1) / round_lines;
  const Elements<D> input(args, args.input);
  Norm norm(args, shared_memory<float>(), args.segment_lines);
  Line* const contributions = shared_memory<Line>() + kPartialBytes / sizeof(Line);  // [rank][column]
  Line* const sums = contributions + ranks.count() * args.tile_lines;                // [column]
  // Set by threads of the block whose wait was aborted: there is no valid sum then.
  uint32_t* const incomplete = (sums + args.tile_lines)->word;
  if (thread_index() == 0) *incomplete = 0;

  LLSession session(args.comm, kind, static_cast<uint64_t>(args.rows) * args.row_lines * sizeof(Line), self.rank,
                    self.peer);
  const uint64_t sent_lines = static_cast<uint64_t>(args.rows) * segment;  // lines from one rank to another in a phase
  session.divide_slots(sent_lines);
  const uint64_t gather = kIsSummedBySwitch ? 0 : (ranks.count() - 1) * sent_lines;  // start of phase 1 in a slot
  const SwitchChannel all(args.comm);
  // Line of this rank's slot that receives a sum which `owner` stores to all ranks.
  const auto sum_for_all = [&](uint32_t owner, uint64_t index) {
    return reinterpret_cast<Line*>(session.own_slot()) + gather + owner * sent_lines + index;
  };
  // All threads of the block make its calls.
  [[maybe_unused]] auto exchange = [&] {
    if constexpr (kIsSummedBySwitch) {
      return Exchange(args, self, session, sent_lines, incomplete);
    } else {
      return Exchange();
    }
  }();

  // Lines of segments: whether the tile's column exists, and its index in the segment's region of a slot.
  const auto line_of = [&](const TileCursor& at) { return at.first + self.member * args.tile_lines + self.column; };
  const auto has_line = [&](const TileCursor& at, uint32_t owner) {
    return self.has_line && line_of(at) < segment && owner * segment + line_of(at) < args.row_lines;
  };
  const auto slot_index = [&](const TileCursor& at) { return at.row * segment + line_of(at); };
  const auto line_index = [&](const TileCursor& at, uint32_t owner) {
    return at.row * args.row_lines + owner * segment + line_of(at);
  };
  // Values of the row that this thread collects and normalizes.
  const auto position_of = [&](uint32_t first) -> typename Norm::Position {
    const TileCursor at{0, first};
    return {(self.peer * segment + line_of(at)) * kElementsPerLine, has_line(at, self.peer)};
  };

  // True if this warp has values to normalize. If it has any, the first tile of a row has some.
  const bool norms = any_lane(position_of(0).exists);

  TileCursor scattering{self.cluster, 0};
  TileCursor reducing = scattering;
  TileCursor collecting = scattering;
  LineLoad<D> coming = input.load_of_line(has_line(scattering, self.peer), line_index(scattering, self.peer));
  auto first_residual = norm.residual_load(collecting.row, position_of(0));
  auto first_weight = norm.weight_load(position_of(0));
  session.wait_for_grids_before(coming.precomputed(), first_residual.precomputed(), first_weight.precomputed(),
                                norm.precomputed(), slot_index(scattering), reinterpret_cast<uint64_t>(contributions));
  // The next line to send is always in flight. The first one is loaded together with the operation number, which has
  // the same latency, and with the residual and the weight. Nothing waits in between.
  const Line state = session.load_state();
  coming.begin();
  first_residual.begin();
  first_weight.begin();
  const float given_scale = norm.load_scale();
  Line line{};  // last line sent
  // If begin() fails, the thread continues without waiting, sending or storing results. Threads that have begun, in its
  // block and in others of the cluster, wait for what it delivers.
  norm.set_begun(session.begin_in_slot(state));

  const auto scatter = [&] {
    line = __builtin_bit_cast(Line, coming.end());
    if constexpr (kIsSummedBySwitch) {
      exchange.stage(has_line(scattering, self.peer), slot_index(scattering), line);
    } else if (!self.is_own && has_line(scattering, self.peer) && !session.aborted()) {
      session.send(slot_index(scattering), line);
    }
    if (SingleTile) return;
    scattering.advance(segment, round_lines, self.clusters);
    const bool has_next = scattering.row < args.rows && has_line(scattering, self.peer);
    coming = input.load_of_line(has_next, line_index(scattering, self.peer));
    coming.begin();
  };
  bool is_first = true;
  const auto reduce = [&] {
    const bool has = has_line(reducing, self.rank);
    const uint64_t index = slot_index(reducing);
    if (is_first) norm.wait_for_cluster();  // while the first lines are in flight
    if constexpr (kIsSummedBySwitch) {
      exchange.wait();
      if (is_first && thread_index() == 0) session.arrive();
      is_first = false;
      exchange.template sum<D>(has && self.is_own, index, sum_for_all(self.rank, index));
    } else {
      if (kToAll && is_first && self.is_own) fence_aliases();
      if (has) {
        contributions[thread_index()] = self.is_own
                                            ? (SingleTile ? line : input.load_line(line_index(reducing, self.rank)))
                                            : session.receive(index, kScatter);
      }
      block_sync();
      if (session.aborted()) *incomplete = 1;  // zero before the first barrier, read after the second
      if (is_first && thread_index() == 0) session.arrive();
      is_first = false;
      sum_tile<D, World>(contributions, args.tile_lines, sums, ranks);
      // `sums` is written after the next tile's first block_sync() and read before it. `contributions` is read before
      // this one and written after it.
      block_sync();
      if (has && *incomplete == 0) {
        // If a row has several tiles, or rows follow each other, the owner also collects from its own slot.
        if constexpr (kToAll) {
          if (self.is_own) all.send(all.at(sum_for_all(self.rank, index)), sums[self.column]);
        } else if (!self.is_own || !SingleTile) {
          session.send(index, sums[self.column], gather);
        }
        if (!self.is_own) session.reset(index);
      }
    }
    if (!SingleTile) reducing.advance(segment, round_lines, self.clusters);
  };
  bool is_first_collected = true;
  Values residual{};
  Values weight{};
  const auto collect = [&] {
    const auto at = position_of(collecting.first);
    const uint64_t index = gather + slot_index(collecting);
    Line* const for_all = kToAll ? sum_for_all(self.peer, slot_index(collecting)) : nullptr;
    if (is_first_collected) {
      residual = first_residual.end();
      weight = first_weight.end();
    } else {
      residual = norm.load_residual(collecting.row, at);
      if (tiles > 1) weight = norm.load_weight(at);
    }
    is_first_collected = false;
    const bool receives = at.exists && (kToAll || !self.is_own || !SingleTile);
    Line sum = sentinel_line();
    if (receives) {
      sum = session.receive(kToAll ? for_all : session.incoming(index), kGather);
    } else if (at.exists) {
      sum = sums[self.column];
    }
    const Values values = norms ? norm.add(collecting.row, at, as_pack<D>(sum), residual) : Values{};
    // Reset while the squares travel to the other blocks.
    if (receives) session.reset(kToAll ? for_all : session.incoming(index));
    if (SingleTile || collecting.is_last_of_row(segment, round_lines)) {
      if (norms || thread_index() < kWarpThreads) {
        norm.finish(
            collecting.row, tiles, [&](uint32_t tile) { return position_of(tile * round_lines); }, values, weight,
            given_scale);
      }
    }
    if (!SingleTile) collecting.advance(segment, round_lines, self.clusters);
  };

  if constexpr (SingleTile) {
    scatter();
    reduce();
    collect();
  } else {
    // Reducing lags scattering by `depth` tiles, and collecting lags reducing by as many. The links carry later tiles
    // while earlier ones wait for their answer.
    for (uint32_t ahead = 0; ahead < args.depth; ++ahead) {
      if (scattering.row < args.rows) scatter();
    }
    for (uint32_t behind = 0; collecting.row < args.rows; ++behind) {
      if (scattering.row < args.rows) scatter();
      if (reducing.row < args.rows) reduce();
      if (behind >= args.depth) collect();
    }
  }
}

template <DataType D, int World, bool SingleTile, Output Rows>
LLM_COMM_KERNEL(kMaxTwoShotThreads)
all_reduce_add_rms_norm_two_shot(LLM_COMM_KERNEL_PARAM AddRmsNormArgs args) {
  sum_and_norm_in_two_shots<D, World, SingleTile, Rows, Pushed>(args, kAllReduceAddRmsNormTwoShot);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

// Algorithm defines slot_segments(world): segments of a slot for each row.
template <class Algorithm>
struct TwoShotInClusters : RowsInClusters<Algorithm> {
  static constexpr uint32_t kMaxThreads = kMaxTwoShotThreads;

  // Its kernels use up to 88 registers per thread on sm_100 and 80 elsewhere (docs/results/2026-11-22_ptxas.json).
  static constexpr uint32_t resident_threads(const Limits& limits) {
    return limits.compute_capability >= 100 ? 704 : 768;
  }
  static constexpr uint32_t span(const Problem& problem) { return AllReduceAddRmsNorm::segment_lines(problem); }
  static constexpr uint64_t row_slot_lines(const Problem& problem) {
    return Algorithm::slot_segments(problem.world) * AllReduceAddRmsNorm::segment_lines(problem);
  }
  // Shared memory of the norm, the contributions to a tile, its sums, and `incomplete`.
  static constexpr uint64_t shared_lines(uint64_t tile_lines, uint64_t world, uint64_t, bool) {
    return kPartialBytes / sizeof(Line) + (world + 1) * tile_lines + 1;
  }
  static constexpr bool is_worth_measuring(uint64_t, uint64_t) { return true; }
};

struct AllReduceAddRmsNormTwoShot : TwoShotInClusters<AllReduceAddRmsNormTwoShot> {
  static constexpr AlgorithmInfo kInfo{"two_shot", "LL", "two-shot all-reduce + RMSNorm"};
  // One for each of the other ranks, and in the second phase one for the rank itself.
  static constexpr uint64_t slot_segments(uint64_t world) { return 2 * world - 1; }

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_add_rms_norm_two_shot<D, World, (Variant & 1) != 0, output_of(Variant >> 1, kVariants / 2)>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
