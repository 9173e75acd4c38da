// All-reduce + residual add + RMSNorm in tiles of whole rows (HB, push), for messages of megabytes: rows are normed while
// the links carry other rows. Used by two_shot_hb.cuh and two_shot_fp8_hb.cuh.
//
// A block takes tiles of whole rows. Rank k adds the k-th part of each tile. The steps are those of
// all_reduce/two_shot_hb.cuh, with a tile's part as chunk. The owner of a part keeps a copy of its sums beside those that
// the other ranks send, so the team that collects finds the whole tile in one place and norms its rows:
//
//   team 0   sends the other ranks' parts of tile t
//   team 1   adds this rank's part of tile t - depth, sends the sums to all ranks and keeps them
//   team 2   adds the residual to tile t - 2 * depth, norms its rows and stores both
//
// The copy is written depth steps before team 2 reads it, and overwritten 2 * depth steps after it is written, like the
// sums of other ranks (step_pipeline.cuh).
//
// `normed` may be the input, and `new_residual` the residual. A row of `normed` is stored 2 * depth and depth steps after
// its parts of the input were read, by this block alone. An element of the residual is read by the thread that stores it.
#pragma once

#include "algorithms/all_reduce/chunked_slices.cuh"
#include "algorithms/all_reduce_add_rms_norm/rms_norm.cuh"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

using RowTeams = TeamShares<1, 1, 2>;
inline constexpr uint32_t kMaxShareThreads = 128;  // with more, threads would have too few registers
inline constexpr uint32_t kMaxRowThreads = RowTeams::kAll * kMaxShareThreads + kWarpThreads;

// The tiles of a block, and the part of each that a rank adds. The parts have args.tile_lines lines; the last ones may
// be short or empty.
class RowTiles {
 public:
  LLM_COMM_DEVICE RowTiles(const AddRmsNormArgs& args, uint32_t world, uint32_t block)
      : args_(args), block_(block), rows_of_tile_(args.tile_lines * world / args.row_lines) {}

  // Tiles of all blocks.
  LLM_COMM_DEVICE uint32_t count() const { return (args_.rows + rows_of_tile_ - 1) / rows_of_tile_; }
  LLM_COMM_DEVICE uint32_t first_row(uint32_t t) const { return (block_ + t * block_count()) * rows_of_tile_; }
  // Lines of a rank's parts of all tiles.
  LLM_COMM_DEVICE uint32_t all_part_lines() const { return count() * args_.tile_lines; }
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

// Adds the residual to the rows of a tile, norms them and stores both. All threads of a team call it. `sums`: the tile's
// sums, as Exchange::tile() returns them.
template <class Norm, class Sums>
LLM_COMM_DEVICE void norm_rows(const AddRmsNormArgs& args, Norm& norm, const Team& team, uint32_t first, uint32_t rows,
                               const Sums& sums, float given_scale) {
  using Values = typename Norm::Values;
  using Position = typename Norm::Position;
  constexpr uint32_t kHeldTiles = 4;
  constexpr uint32_t kThreads = RowTeams::kLast * kMaxShareThreads;
  const auto position_of = [&](uint32_t line) -> Position { return {line * kElementsPerLine, line < args.row_lines}; };
  using Loaded = decltype(sums.load(0));
  const auto load = [&](uint32_t row, Position at) {
    return at.exists ? sums.load((row - first) * args.row_lines + at.index / kElementsPerLine) : Loaded{};
  };
  const auto sum_of = [&](const Loaded& loaded) { return __builtin_bit_cast(Values, Sums::line(loaded)); };
  if (team.thread / kWarpThreads * kWarpThreads >= args.row_lines) return;  // RmsNorm wants only warps with values
  if (team.threads != kThreads || args.row_lines > kHeldTiles * kThreads || !norm.is_aligned()) {
    const auto position = [&](uint32_t tile) { return position_of(tile * team.threads + team.thread); };
    const uint32_t tiles = (args.row_lines + team.threads - 1) / team.threads;
    for (uint32_t row = first; row < first + rows; ++row) {
      Values values{};
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const Position at = position(tile);
        values = norm.add(row, at, sum_of(load(row, at)), norm.load_residual(row, at));
      }
      norm.finish(row, tiles, position, values, norm.load_weight(position(0)), given_scale);
    }
    return;
  }
  // The row stays in registers. The number of threads is a constant: otherwise the addresses of all lines take registers
  // too.
  const auto position = [&](uint32_t tile) { return position_of(tile * kThreads + team.thread); };
  norm.run_aligned([&](Norm& aligned) {
    LLM_COMM_UNROLL(1)
    for (uint32_t row = first; row < first + rows; ++row) {
      Loaded loaded[kHeldTiles];
      Values residual[kHeldTiles];
      LLM_COMM_UNROLL(4)
      for (uint32_t tile = 0; tile < kHeldTiles; ++tile) {
        loaded[tile] = load(row, position(tile));
        residual[tile] = aligned.load_residual(row, position(tile));
      }
      Values values[kHeldTiles];
      LLM_COMM_UNROLL(4)
      for (uint32_t tile = 0; tile < kHeldTiles; ++tile) {
        values[tile] = aligned.add(row, position(tile), sum_of(loaded[tile]), residual[tile]);
      }
      const auto each_tile = [&](auto step) {
        LLM_COMM_UNROLL(4)
        for (uint32_t tile = 0; tile < kHeldTiles; ++tile) {
          step(position(tile), values[tile], aligned.load_weight(position(tile)));
        }
      };
      aligned.finish_tiles(row, each_tile, given_scale);
    }
  });
}

// `Exchange`: sends, adds and hands out the parts of tiles. It has
//   stage(team, t, part_of)       team 0; part_of(owner): this rank's contribution to a part, as a view of lines
//   sum_and_keep(team, t, part)   team 1
//   tile(t)                       the sums of tile t: load(line of the tile), and line(what load() has returned)
template <DataType D, int World, Output Rows, template <DataType, int, class> class Exchange>
LLM_COMM_DEVICE void sum_and_norm_in_tiles(const AddRmsNormArgs& args, OperationKind kind) {
  using Norm = RmsNorm<D, kElementsPerLine, false, Rows, ElementLines>;
  const uint32_t block = block_number(args.comm);
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // arguments() may lower it
  const RowTiles tiles(args, Ranks<World>(args.comm.world_size).count(), block);
  const ElementLines<D> input(args, args.input);

  HBSession session(args.comm, kind, uint64_t{args.rows} * args.row_lines * sizeof(Line),
                    SignalRow::of<CommonSignals>(block), shared_memory<Line>() + kPartialBytes / sizeof(Line));
  const uint32_t leader =
      block_threads() - session.workers() / RowTeams::kAll * RowTeams::kLast;  // the first of team 2
  Norm norm(args, shared_memory<float>(), args.row_lines, leader);
  using Steps = StepPipeline<D, World, ChunkBuffersWithOwn<World>, RowTeams>;
  const Steps steps(session, args.comm, block, args.tile_lines, depth, tiles.all_part_lines());
  const Exchange<D, World, Steps> exchange(args, tiles, block, depth, steps);
  session.wait_for_grids_before(input.precomputed(), norm.precomputed());
  const float given_scale = norm.load_scale();
  session.begin();
  const auto part_of = [&](const ElementLines<D>& tensor, uint32_t t, uint32_t owner) {
    return TilePart<D>(tensor, tiles, t, owner, steps.first(t));
  };
  steps.run(
      [&](const Team& team, uint32_t t) {
        input.visit([&](const ElementLines<D>& tensor) {
          exchange.stage(team, t, [&](uint32_t owner) { return part_of(tensor, t, owner); });
        });
      },
      [&](const Team& team, uint32_t t) {
        input.visit(
            [&](const ElementLines<D>& tensor) { exchange.sum_and_keep(team, t, part_of(tensor, t, args.comm.rank)); });
      },
      [&](const Team& team, uint32_t t) {
        norm_rows(args, norm, team, tiles.first_row(t), tiles.rows(t), exchange.tile(t), given_scale);
      });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

// Algorithm defines kPartUnit, the lines that parts are multiples of, and kLeastBytes, the smallest message that has
// candidates.
template <class Algorithm>
struct RowsInTiles : Chunked<Algorithm> {
  using Operation = AllReduceAddRmsNorm;
  using KernelPointer = void (*)(AddRmsNormArgs);
  using Base = Chunked<Algorithm>;
  static constexpr uint32_t kTeams = kTwoShotTeams;
  static constexpr uint64_t kLeastMeasuredBytes = 1 << 20;  // smaller messages get the first candidate alone
  static constexpr uint32_t kVariants = 3;                  // output_number()

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
  // A line of a row or more for each thread that norms, in whole warps.
  static constexpr uint32_t workers(const Problem& problem, const Tiling&) {
    const uint32_t threads = Operation::row_lines(problem) / RowTeams::kLast / kWarpThreads * kWarpThreads;
    return RowTeams::kAll * std::clamp(threads, kWarpThreads, kMaxShareThreads);
  }
  static constexpr uint64_t shared_bytes() { return kPartialBytes + sizeof(Line); }

  // Lines of a rank's part of a tile.
  static constexpr uint32_t part_lines(const Problem& problem, uint64_t rows) {
    const uint64_t lines = rows * Operation::row_lines(problem);
    return static_cast<uint32_t>(divide_up(lines, uint64_t{problem.world} * Algorithm::kPartUnit)) *
           Algorithm::kPartUnit;
  }

  // If the staging memory is too small, tiles shrink down to one row, then the number of blocks.
  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    const uint32_t depth = tuning.depth < kMinHBDepth ? kMinHBDepth : tuning.depth;
    const auto blocks_that_fit = [&](uint64_t rows) {
      return limits.staging_bytes / Base::staging_bytes({1, part_lines(problem, rows), 1, depth, 0}, problem.world);
    };
    uint64_t rows = std::min(rows_of_tile(problem, tuning.tile_lines), problem.units());
    while (rows > 1 && blocks_that_fit(rows) < tuning.blocks) --rows;
    const uint64_t blocks = std::clamp<uint64_t>(blocks_that_fit(rows), 1, tuning.blocks);
    return {static_cast<uint32_t>(blocks), part_lines(problem, rows), 1, depth, problem.units()};
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    if (tiling.tile_lines < part_lines(problem, 1) || tiling.tile_lines % Algorithm::kPartUnit != 0) {
      throw std::invalid_argument("tile_lines is " + std::to_string(tiling.tile_lines) + "; it must be at least " +
                                  std::to_string(part_lines(problem, 1)) + ", a row's lines on each of " +
                                  std::to_string(problem.world) + " ranks, and a multiple of " +
                                  std::to_string(Algorithm::kPartUnit));
    }
    Grid grid = Base::grid(problem, tiling, units, limits);
    grid.variant = output_number(Operation::quantization(problem), Algorithm::kVariants);
    return grid;
  }

  // First a shape for any size: tiles of about kTileLines. Larger tiles, and a longer way ahead, are worth measuring.
  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    constexpr uint32_t kTileLines = 1024;
    std::vector<TuningParameters> found;
    if (problem.bytes() < Algorithm::kLeastBytes) return found;
    const uint32_t blocks = std::min(limits.multiprocessors(), kMaxChunkedBlocks);
    const uint32_t usual = std::max(kTileLines / Operation::row_lines(problem), 1u);
    for (const uint32_t rows : {usual, 2 * usual, usual / 2}) {
      for (const uint32_t depth : {2u, 3u, 4u}) {
        if (rows == 0) continue;
        found.push_back({.blocks = blocks, .tile_lines = part_lines(problem, rows), .depth = depth});
        if (problem.bytes() < kLeastMeasuredBytes) return found;
      }
    }
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
