// Two-shot all-reduce + residual add + RMSNorm (HB, push), for messages of megabytes: rows are normed while the links
// carry other rows.
//
// A block takes tiles of whole rows. Rank k adds the k-th part of each tile. The steps are those of
// all_reduce/two_shot_hb.cuh, with a tile's part as chunk. The owner of a part keeps a copy of its sums beside those that
// the other ranks send, so the team that collects finds the whole tile in one place and norms its rows:
//
//   team 0   sends the other ranks' parts of tile t
//   team 1   adds this rank's part of tile t - depth, sends the sums to all ranks and keeps them
//   team 2   adds the residual to tile t - 2 * depth, norms its rows and stores both; as many threads as the others have
//
// The copy is written depth steps before team 2 reads it, and overwritten 2 * depth steps later, like the sums of other
// ranks (step_pipeline.cuh). Sums and squares are added in the order of the other algorithms, so a row has the same bits.
//
// `normed` may be the input, and `new_residual` the residual. A row of `normed` is stored 2 * depth and depth steps after
// its parts of the input were read, by this block alone. An element of the residual is read by the thread that stores it.
#pragma once

#include "algorithms/all_reduce/chunked_slices.cuh"
#include "algorithms/all_reduce_add_rms_norm/rms_norm.cuh"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceAddRmsNormTwoShotHB = kKindOf<struct AllReduceAddRmsNormTwoShotHB>;

inline constexpr uint32_t kNormShare = 2;  // threads of team 2, as Team::of() takes them
inline constexpr uint32_t kNormShares = kTwoShotTeams - 1 + kNormShare;
inline constexpr uint32_t kMaxShareThreads = 128;  // more threads would have too few registers

// The tiles of a block, and the part of each that a rank adds. The parts have args.tile_lines lines; the last ones may
// be short or empty.
class RowTiles {
 public:
  LLM_COMM_DEVICE RowTiles(const AddRmsNormArgs& args, uint32_t world, uint32_t block)
      : args_(args), block_(block), rows_of_tile_(args.tile_lines * world / args.row_lines) {}

  // Tiles of all blocks.
  LLM_COMM_DEVICE uint32_t count() const { return (args_.rows + rows_of_tile_ - 1) / rows_of_tile_; }
  LLM_COMM_DEVICE uint32_t first_row(uint32_t t) const { return (block_ + t * block_count()) * rows_of_tile_; }
  // Rows of tile t; the last tile may be short or empty.
  LLM_COMM_DEVICE uint32_t rows(uint32_t t) const {
    const uint32_t first = first_row(t);
    if (first >= args_.rows) return 0;
    return args_.rows - first < rows_of_tile_ ? args_.rows - first : rows_of_tile_;
  }
  // First line of a part in a tensor, and its number of lines.
  LLM_COMM_DEVICE uint64_t first_line(uint32_t t, uint32_t owner) const {
    return uint64_t{first_row(t)} * args_.row_lines + owner * args_.tile_lines;
  }
  LLM_COMM_DEVICE uint32_t lines(uint32_t t, uint32_t owner) const {
    const uint32_t tile = rows(t) * args_.row_lines;
    const uint32_t before = owner * args_.tile_lines;
    return before >= tile ? 0 : tile - before < args_.tile_lines ? tile - before : args_.tile_lines;
  }

 private:
  const AddRmsNormArgs& args_;
  uint32_t block_;
  uint32_t rows_of_tile_;
};

// Part of tile t, as a view of lines numbered from `first`, as StepPipeline numbers those of a shard.
template <DataType D>
class TilePart {
 public:
  LLM_COMM_DEVICE TilePart(const ElementLines<D>& tensor, const RowTiles& tiles, uint32_t t, uint32_t owner,
                           uint32_t first)
      : tensor_(tensor), begin_(tiles.first_line(t, owner) - first), lines_(first + tiles.lines(t, owner)) {}

  LLM_COMM_DEVICE uint32_t lines() const { return lines_; }
  LLM_COMM_DEVICE Line load(uint32_t line) const { return tensor_.load_line(begin_ + line); }

 private:
  const ElementLines<D>& tensor_;
  uint64_t begin_;
  uint32_t lines_;
};

// The lines in a buffer, as such a view.
class KeptPart {
 public:
  LLM_COMM_DEVICE KeptPart(Line* buffer, uint32_t first) : buffer_(buffer), first_(first) {}
  LLM_COMM_DEVICE void store(uint32_t line, Line value) const { store_line(buffer_ + (line - first_), value); }

 private:
  Line* buffer_;
  uint32_t first_;
};

// Adds the residual to rows, whose sums stand one behind the other in `sums`, norms them and stores both. All threads of
// a team call it.
template <class Norm>
LLM_COMM_DEVICE void norm_rows(const AddRmsNormArgs& args, Norm& norm, const Team& team, uint32_t first, uint32_t rows,
                               const Line* sums, float static_scale) {
  using Values = typename Norm::Values;
  using Position = typename Norm::Position;
  constexpr uint32_t kHeldTiles = 4;
  constexpr uint32_t kThreads = kNormShare * kMaxShareThreads;
  const auto position_of = [&](uint32_t line) -> Position {
    return {line * kElementsPerLine, line < args.row_lines};
  };
  const auto sum_of = [&](uint32_t row, Position at) {
    const Line* const from = sums + (row - first) * args.row_lines + at.index / kElementsPerLine;
    return at.exists ? __builtin_bit_cast(Values, load_line(from)) : Values{};
  };
  if (team.thread / kWarpThreads * kWarpThreads >= args.row_lines) return;  // RmsNorm wants only warps with values
  if (team.threads != kThreads || args.row_lines > kHeldTiles * kThreads || !norm.is_aligned()) {
    const auto position = [&](uint32_t tile) { return position_of(tile * team.threads + team.thread); };
    const uint32_t tiles = (args.row_lines + team.threads - 1) / team.threads;
    for (uint32_t row = first; row < first + rows; ++row) {
      Values values{};
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const Position at = position(tile);
        values = norm.add(row, at, sum_of(row, at), norm.load_residual(row, at));
      }
      norm.finish(row, tiles, position, values, norm.load_weight(position(0)), static_scale);
    }
    return;
  }
  // The row stays in registers. The number of threads is a constant: otherwise the addresses of all lines take registers
  // too.
  const auto position = [&](uint32_t tile) { return position_of(tile * kThreads + team.thread); };
  norm.run_aligned([&](Norm& aligned) {
    LLM_COMM_UNROLL(1)
    for (uint32_t row = first; row < first + rows; ++row) {
      Values values[kHeldTiles];
      Values residual[kHeldTiles];
      LLM_COMM_UNROLL(4)
      for (uint32_t tile = 0; tile < kHeldTiles; ++tile) {
        values[tile] = sum_of(row, position(tile));
        residual[tile] = aligned.load_residual(row, position(tile));
      }
      LLM_COMM_UNROLL(4)
      for (uint32_t tile = 0; tile < kHeldTiles; ++tile) {
        values[tile] = aligned.add(row, position(tile), values[tile], residual[tile]);
      }
      const auto each_tile = [&](auto step) {
        LLM_COMM_UNROLL(4)
        for (uint32_t tile = 0; tile < kHeldTiles; ++tile) {
          step(position(tile), values[tile], aligned.load_weight(position(tile)));
        }
      };
      aligned.finish_tiles(row, each_tile, static_scale);
    }
  });
}

template <DataType D, int World, bool Quantized>
LLM_COMM_KERNEL(kNormShares * kMaxShareThreads + kWarpThreads)
all_reduce_add_rms_norm_two_shot_hb(LLM_COMM_KERNEL_PARAM AddRmsNormArgs args) {
  using Norm = RmsNorm<D, kElementsPerLine, false, Quantized, ElementLines>;
  const uint32_t block = block_number(args.comm);
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // arguments() may lower it
  const RowTiles tiles(args, World, block);
  const ElementLines<D> input(args, args.input);

  HBSession session(args.comm, kAllReduceAddRmsNormTwoShotHB, uint64_t{args.rows} * args.row_lines * sizeof(Line),
                    SignalRow::of<CommonSignals>(block), shared_memory<Line>() + kPartialBytes / sizeof(Line));
  const uint32_t leader = block_threads() - session.workers() / kNormShares * kNormShare;  // the first of team 2
  Norm norm(args, shared_memory<float>(), args.row_lines, leader);
  const StepPipeline<D, World, ChunkBuffersWithOwn<World>, kNormShare> steps(
      session, args.comm, block, args.tile_lines, depth, tiles.count() * args.tile_lines);
  session.wait_for_grids_before(input.precomputed(), norm.precomputed());
  const float static_scale = norm.load_scale();
  session.begin();
  const auto part_of = [&](const ElementLines<D>& tensor, uint32_t t, uint32_t owner) {
    return TilePart<D>(tensor, tiles, t, owner, steps.first(t));
  };
  steps.run(
      [&](const Team& team, uint32_t t) {
        input.visit([&](const ElementLines<D>& tensor) {
          steps.stage(team, t, [&](uint32_t owner) { return part_of(tensor, t, owner); });
        });
      },
      [&](const Team& team, uint32_t t) {
        const KeptPart kept(steps.buffers().own(kSecondHop, t), steps.first(t));
        input.visit([&](const ElementLines<D>& tensor) {
          steps.sum_for_all(team, t, part_of(tensor, t, args.comm.rank), kept);
        });
      },
      [&](const Team& team, uint32_t t) {
        const Line* const sums = steps.buffers().from(kSecondHop, t, 0);
        norm_rows(args, norm, team, tiles.first_row(t), tiles.rows(t), sums, static_scale);
      });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceAddRmsNormTwoShotHB : Chunked<AllReduceAddRmsNormTwoShotHB> {
  using Operation = AllReduceAddRmsNorm;
  using KernelPointer = void (*)(AddRmsNormArgs);
  using Base = Chunked<AllReduceAddRmsNormTwoShotHB>;
  static constexpr AlgorithmInfo kInfo{"two_shot_hb", "HB", "two-shot all-reduce + RMSNorm (HB)"};
  static constexpr uint32_t kTeams = kTwoShotTeams;
  static constexpr uint32_t kVariants = 2;  // 1: the normed rows are FP8

  // A rank keeps its own sums too.
  static constexpr uint64_t senders(uint64_t world) { return world; }

  // Whole rows that a tile has if each rank adds up to `lines` lines of it; at least one.
  static constexpr uint64_t rows_of_tile(const Problem& problem, uint64_t lines) {
    const uint64_t rows = lines * problem.world / Operation::row_lines(problem);
    return rows == 0 ? 1 : rows;
  }
  static constexpr uint64_t tiles(const Problem& problem, const Tiling& tiling, uint64_t units) {
    return divide_up(units, rows_of_tile(problem, tiling.tile_lines));
  }
  // Two lines of a row or more for each thread that norms, in whole warps.
  static constexpr uint32_t workers(const Problem& problem, const Tiling&) {
    const uint32_t threads = Operation::row_lines(problem) / (2 * kNormShare) / kWarpThreads * kWarpThreads;
    return kNormShares * std::clamp(threads, kWarpThreads, kMaxShareThreads);
  }
  static constexpr uint64_t shared_bytes() { return kPartialBytes + sizeof(Line); }

  // If the staging memory is too small, tiles shrink down to one row, then the number of blocks.
  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    const uint32_t depth = tuning.depth < kMinHBDepth ? kMinHBDepth : tuning.depth;
    const auto part_lines = [&](uint64_t rows) {
      return static_cast<uint32_t>(divide_up(rows * Operation::row_lines(problem), uint64_t{problem.world}));
    };
    const auto blocks_that_fit = [&](uint64_t rows) {
      return limits.staging_bytes / Base::staging_bytes({1, part_lines(rows), 1, depth, 0}, problem.world);
    };
    uint64_t rows = std::min(rows_of_tile(problem, tuning.tile_lines), problem.units());
    while (rows > 1 && blocks_that_fit(rows) < tuning.blocks) --rows;
    const uint64_t blocks = std::clamp<uint64_t>(blocks_that_fit(rows), 1, tuning.blocks);
    return {static_cast<uint32_t>(blocks), part_lines(rows), 1, depth, problem.units()};
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    if (uint64_t{tiling.tile_lines} * problem.world < Operation::row_lines(problem)) {
      throw std::invalid_argument("tile_lines is " + std::to_string(tiling.tile_lines) + "; " +
                                  std::to_string(problem.world) + " ranks must have a row of " +
                                  std::to_string(Operation::row_lines(problem)) + " lines");
    }
    Grid grid = Base::grid(problem, tiling, units, limits);
    grid.variant = Operation::quantization(problem) == Quantization::kNone ? 0 : 1;
    return grid;
  }

  // Tiles of one row, or of several short ones.
  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    std::vector<TuningParameters> found;
    if (problem.bytes() < 1 << 20) return found;
    const uint32_t sms = limits.multiprocessors();
    for (uint64_t rows : {1, 2, 4}) {
      const auto lines = static_cast<uint32_t>(
          divide_up(rows * Operation::row_lines(problem), uint64_t{problem.world}));
      for (uint32_t depth : {2u, 3u}) {
        const Tiling tiling{sms, lines, 1, depth, 0};
        if (rows > 1 && staging_bytes(tiling, problem.world) > limits.staging_bytes) continue;
        found.push_back({.blocks = std::min(sms, kMaxChunkedBlocks), .tile_lines = lines, .depth = depth});
      }
    }
    return found;
  }

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_add_rms_norm_two_shot_hb<D, World, Variant != 0>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
