// Fused all-reduce + residual add + RMSNorm, as it occurs in transformers, in one kernel.
//
// This file has the kernel arguments, the mapping of a row to threads, and the launch shape. A cluster processes a row
// of `row_lines` lines. Its blocks take tiles of `tile_lines` lines for each peer; block m takes the m-th of every
// `cluster_blocks` tiles. Rows are assigned to clusters round-robin. Threads (k, c) of a block are those of
// all_reduce/operation.cuh. A block is rounded up to whole warps; the last threads may have no line.
#pragma once

#include <cmath>
#include <limits>

#include "algorithms/algorithm.h"
#include "llm_comm/operation.cuh"
#include "llm_comm/ranks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Maximum threads of a block. Kernels with more registers allow fewer: two-shot, and kernels that walk over several
// tiles.
inline constexpr uint32_t kMaxFusedThreads = 1024;
inline constexpr uint32_t kFewestThreads = 64;  // minimum in a table
inline constexpr uint32_t kMaxTwoShotThreads = 512;
inline constexpr uint32_t kMaxLoopThreads = 512;
inline constexpr uint32_t kMaxClusterBlocks = 16;  // 8 on every GPU with clusters, 16 where the device permits it
inline constexpr uint32_t kMaxHidden = 16384;
// Squares are summed in chunks of this many lines, in an order that depends only on `row_lines`. A row's norm therefore
// does not depend on the kernel, the grid or the other rows. Tiles and segments are multiples of chunks.
inline constexpr uint32_t kChunkLines = 8;
inline constexpr uint32_t kElementsPerLine = 8;  // of bf16 and fp16, the types of these kernels
inline constexpr uint32_t kMaxChunks = kMaxHidden / (kChunkLines * kElementsPerLine);
// Elements of a row that share a scale, and their lines. With group scales, tiles and segments are multiples of groups,
// so that the threads of a group are in one warp.
inline constexpr uint32_t kGroupSize = 128;
inline constexpr uint32_t kGroupLines = kGroupSize / kElementsPerLine;
static_assert(kGroupLines % kChunkLines == 0);

// Quantization of the normed rows. Input are the values that kNone returns, rounded to their type.
//   kStatic    e4m3(normed / *scale)
//   kDynamic   scale[row] = max(|normed row|) / 448, at least 1 / (448 * 512), and e4m3(normed / scale[row])
//   kGroup...  per group of 128 elements of a row: scale = max(|group|, 1e-10) / 448. UE8M0 rounds the scale up to a
//              power of two. Scales are stored by rows (row * groups + group), or by columns, with the groups of a row
//              `rows` apart. ...Aligned rounds that distance up to a multiple of 4, because TMA needs rows of 16 bytes.
//   kNvfp4...  per block of 16 elements: scale = e4m3(*global_scale * max(|block|) / 6), and
//              e2m1(normed * *global_scale / scale)
//   kMxfp8...  per block of 32 elements: scale = max(|block|) / 448, rounded up to a power of two, and
//              e4m3(normed / scale)
//              Scales of blocks are bytes (block_formats.cuh). They lie in tiles of 128 rows and 4 blocks, with zeros
//              as padding; ...Linear: by rows.
enum class Quantization : uint32_t {
  kNone = 0,
  kStatic = 1,
  kDynamic = 2,
  kGroup = 3,
  kGroupColumns = 4,
  kGroupColumnsAligned = 5,
  kGroupUe8m0 = 6,
  kGroupColumnsUe8m0 = 7,
  kGroupColumnsAlignedUe8m0 = 8,
  kNvfp4 = 9,
  kNvfp4Linear = 10,
  kMxfp8 = 11,
  kMxfp8Linear = 12,
};
inline constexpr uint32_t kQuantizations = 13;
inline constexpr uint32_t kScaleAlignment = 4;  // fp32 scales in 16 bytes

// Elements of a row that share a scale of one byte. A chunk has whole blocks.
inline constexpr uint32_t kNvfp4Block = 16;
inline constexpr uint32_t kMxfp8Block = 32;
static_assert(kChunkLines * kElementsPerLine % kMxfp8Block == 0);
// Rows and blocks of a tile of scales.
inline constexpr uint32_t kTileRows = 128;
inline constexpr uint32_t kTileBlocks = 4;

constexpr bool is_nvfp4(Quantization quantization) {
  return quantization == Quantization::kNvfp4 || quantization == Quantization::kNvfp4Linear;
}
constexpr bool has_blocks(Quantization quantization) { return quantization >= Quantization::kNvfp4; }
constexpr bool has_groups(Quantization quantization) {
  return quantization >= Quantization::kGroup && !has_blocks(quantization);
}
constexpr uint32_t block_size(Quantization quantization) { return is_nvfp4(quantization) ? kNvfp4Block : kMxfp8Block; }

// Quantizations that a kernel has code for. kFP8: all without blocks. Kernels are separate, because code that a kernel
// does not run slows down the code it runs (docs/experiments/cold_code.md).
enum class Output : uint32_t { kPlain = 0, kFP8 = 1, kBlocks = 2, kFP8OrBlocks = 3 };

constexpr bool includes(Output output, Output one) {
  return (static_cast<uint32_t>(output) & static_cast<uint32_t>(one)) != 0;
}
// Number of a quantization's kernel among the `kernels` of an algorithm that differ in Output. Three kernels: one for
// each of kPlain, kFP8 and kBlocks. Two: kPlain and kFP8OrBlocks.
constexpr uint32_t output_number(Quantization quantization, uint32_t kernels) {
  return quantization == Quantization::kNone ? 0 : has_blocks(quantization) ? kernels - 1 : 1;
}
constexpr Output output_of(uint32_t number, uint32_t kernels) {
  return number == 1 && kernels == 2 ? Output::kFP8OrBlocks : static_cast<Output>(number);
}

struct AddRmsNormArgs {
  DeviceComm comm;
  const void* input;     // [rows, row_lines * 8]; this and all other tensors: element-aligned, rows contiguous
  const void* residual;  // shaped like the input; nullptr: none
  const void* weight;    // [row_lines * 8]
  void* normed;          // shaped like the input (may be the input), or quantized
  void* new_residual;    // shaped like the input (may be the residual): the sum plus the residual
  float* scale;          // see Quantization; bytes for blocks
  uint32_t rows;         // at least 1; the same on all ranks, like row_lines and tile_lines
  uint32_t row_lines;
  uint32_t segment_lines;  // two-shot: lines of a row that one rank owns; a multiple of kChunkLines
  uint32_t tile_lines;     // LL: a multiple of kChunkLines. HB: lines of a rank's part of a tile (row_tiles.cuh)
  uint32_t cluster_blocks;
  uint32_t depth;             // tiles that a block sends ahead of the one it reduces; HB: at least 2
  Quantization quantization;  // kGroup, kGroupUe8m0, kNvfp4 or kMxfp8 for every layout of the scales
  float epsilon;
  float weight_bias;  // added to each weight in fp32, as in Gemma's norms. For none it is -0, which changes no weight
  float reciprocal_hidden;
  uint32_t scale_row_stride;    // distance of the scales of adjacent rows; 0: in tiles
  uint32_t scale_group_stride;  // distance of the scales of adjacent groups; in tiles: tiles side by side
  uint32_t first_row;           // of this launch among all rows of the call
  uint32_t call_rows;           // rows of all launches of the call
  const float* global_scale;    // see kNvfp4
};

// Thread (k, c) and the rows of its cluster.
struct RowThread {
  uint32_t peer;
  uint32_t column;
  bool has_line;
  uint32_t member;   // rank of this block in the cluster
  uint32_t cluster;  // number of the cluster (cluster_number)
  uint32_t clusters;
  uint32_t rank;
  bool is_own;  // exchanges nothing; contributes this rank's own lines

  template <int World>
  static LLM_COMM_DEVICE RowThread of(const AddRmsNormArgs& args, uint32_t cluster) {
    const Ranks<World> ranks(args.comm.world_size);
    RowThread self;
    // Comparisons instead of a division, which takes longer and would be on the critical path if the grid does not
    // overlap the previous one.
    self.peer = 0;
    LLM_COMM_UNROLL(8)
    for (uint32_t k = 1; k < ranks.count(); ++k) self.peer += thread_index() >= k * args.tile_lines;
    self.column = thread_index() - self.peer * args.tile_lines;
    self.has_line = self.column < args.tile_lines;
    self.cluster = cluster;
    self.member = cluster_block_rank();
    self.clusters = block_count() / args.cluster_blocks;
    self.rank = args.comm.rank;
    self.is_own = self.peer == self.rank;
    return self;
  }
};

// Order of a block's tiles: all tiles of its first row, all of its next row, ...
struct TileCursor {
  uint32_t row;
  uint32_t first;  // line of the row (two-shot: of the segment) where this round of the cluster begins

  LLM_COMM_DEVICE bool is_last_of_row(uint32_t span, uint32_t round_lines) const { return first + round_lines >= span; }

  // `span`: lines that the tiles of a row cover. `round_lines`: lines of one tile of each block of the cluster.
  LLM_COMM_DEVICE void advance(uint32_t span, uint32_t round_lines, uint32_t clusters) {
    first += round_lines;
    if (first < span) return;
    first = 0;
    row += clusters;
  }
};

// ---- Descriptor of the operation -----------------------------------------------------------------------------------

struct AllReduceAddRmsNorm {
  using Args = AddRmsNormArgs;
  enum Parameter { kEpsilon, kQuantization, kWeightBias };
  static constexpr OperationInfo kInfo{
      .name = "all_reduce_add_rms_norm",
      .title = "all-reduce + RMSNorm",
      .buffers = {{"input"},
                  {.name = "residual", .is_optional = true},
                  {"weight"},
                  {.name = "normed", .is_output = true},
                  {.name = "new_residual", .is_output = true},
                  {.name = "scale", .is_optional = true},
                  {.name = "global_scale", .is_optional = true}},
      .parameters = {{"epsilon"},
                     {.name = "quantization",
                      .value_names = {"none", "static", "dynamic", "group", "group_column_major",
                                      "group_column_major_tma", "group_ue8m0", "group_column_major_ue8m0",
                                      "group_column_major_tma_ue8m0", "nvfp4", "nvfp4_linear", "mxfp8",
                                      "mxfp8_linear"}},
                     {"weight_bias"}},
      .row_multiple = kElementsPerLine,
      .max_row = kMaxHidden};

  static constexpr bool serves(DataType type) { return type == DataType::kBFloat16 || type == DataType::kFloat16; }

  static constexpr Quantization quantization(const Problem& problem) {
    return static_cast<Quantization>(static_cast<uint32_t>(problem.parameter[kQuantization]));
  }

  static void check(const Problem& problem) {
    const double code = problem.parameter[kQuantization];
    if (!(code >= 0 && code < kQuantizations && code == static_cast<uint32_t>(code))) {
      throw std::invalid_argument("there is no quantization " + std::to_string(code));
    }
    if (has_groups(quantization(problem)) && problem.row % kGroupSize != 0) {
      throw std::invalid_argument("rows of " + std::to_string(problem.row) +
                                  " elements; FP8 by groups takes a multiple of " + std::to_string(kGroupSize));
    }
    if (has_blocks(quantization(problem)) && problem.row % block_size(quantization(problem)) != 0) {
      throw std::invalid_argument("rows of " + std::to_string(problem.row) + " elements; " +
                                  (is_nvfp4(quantization(problem)) ? "NVFP4" : "MXFP8") + " takes a multiple of " +
                                  std::to_string(block_size(quantization(problem))));
    }
    const double bias = problem.parameter[kWeightBias];
    if (!(std::abs(bias) <= std::numeric_limits<float>::max())) {
      throw std::invalid_argument("weight_bias is " + std::to_string(bias) + "; it must be a finite number in fp32");
    }
  }

  // Refuses a call without a buffer that its quantization reads or writes. Such buffers are optional in kInfo.
  static void check_buffers(const Problem& problem, const uint64_t* buffers) {
    if (quantization(problem) != Quantization::kNone && buffers[5] == 0) {
      throw std::invalid_argument("this quantization takes a tensor of scales, and none is given");
    }
    if (is_nvfp4(quantization(problem)) && buffers[6] == 0) {
      throw std::invalid_argument("NVFP4 takes a global scale, and none is given");
    }
  }

  static constexpr uint32_t row_lines(const Problem& problem) { return problem.row / kElementsPerLine; }
  // Lines that tiles and segments are multiples of. No warp-level reduction crosses such a boundary.
  static constexpr uint32_t unit_lines(const Problem& problem) {
    return has_groups(quantization(problem)) ? kGroupLines : kChunkLines;
  }
  // Two-shot: lines of a row that one rank owns.
  static constexpr uint32_t segment_lines(const Problem& problem) {
    return divide_up(row_lines(problem), unit_lines(problem) * problem.world) * unit_lines(problem);
  }

  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid&) {
    Args args{};
    args.row_lines = row_lines(problem);
    args.segment_lines = segment_lines(problem);
    args.tile_lines = tiling.tile_lines;
    args.cluster_blocks = tiling.cluster;
    // Limited to the tiles of a block: no block sends further ahead, and kernels count tiles in 32 bits.
    const uint64_t launch_rows = problem.units() < tiling.launch_units ? problem.units() : tiling.launch_units;
    const uint64_t tiles_of_block = launch_rows * args.row_lines;
    args.depth = static_cast<uint32_t>(tiling.depth < tiles_of_block ? tiling.depth : tiles_of_block);
    set_quantization(args, problem);
    args.epsilon = static_cast<float>(problem.parameter[kEpsilon]);
    const auto bias = static_cast<float>(problem.parameter[kWeightBias]);
    args.weight_bias = bias == 0.0f ? -0.0f : bias;  // +0 would turn a weight of -0 into +0
    args.reciprocal_hidden = 1.0f / static_cast<float>(problem.row);
    return args;
  }

  static void set_launch(Args& args, const Problem& problem, const uint64_t* buffers, uint64_t first, uint64_t units) {
    const uint64_t skipped = first * problem.unit_bytes();
    const uint64_t normed_bits = args.quantization == Quantization::kNone ? 16 : is_nvfp4(args.quantization) ? 4 : 8;
    args.input = reinterpret_cast<const void*>(buffers[0] + skipped);
    args.residual = buffers[1] == 0 ? nullptr : reinterpret_cast<const void*>(buffers[1] + skipped);
    args.weight = reinterpret_cast<const void*>(buffers[2]);
    args.normed = reinterpret_cast<void*>(buffers[3] + skipped * normed_bits / 16);
    args.new_residual = reinterpret_cast<void*>(buffers[4] + skipped);
    const uint64_t scale_bytes = has_blocks(args.quantization) ? 1 : sizeof(float);
    args.scale = reinterpret_cast<float*>(buffers[5] + first * args.scale_row_stride * scale_bytes);
    args.global_scale = reinterpret_cast<const float*>(buffers[6]);
    args.first_row = static_cast<uint32_t>(first);
    args.rows = static_cast<uint32_t>(units);
  }

 private:
  static void set_quantization(Args& args, const Problem& problem) {
    const Quantization wanted = quantization(problem);
    const auto is = [&](Quantization one, Quantization ue8m0) { return wanted == one || wanted == ue8m0; };
    const bool by_columns = is(Quantization::kGroupColumns, Quantization::kGroupColumnsUe8m0);
    const bool by_aligned_columns = is(Quantization::kGroupColumnsAligned, Quantization::kGroupColumnsAlignedUe8m0);
    const auto rows = static_cast<uint32_t>(problem.units());
    args.call_rows = rows;
    if (has_blocks(wanted)) {
      const uint32_t blocks = problem.row / block_size(wanted);
      const bool is_linear = wanted == Quantization::kNvfp4Linear || wanted == Quantization::kMxfp8Linear;
      args.quantization = is_nvfp4(wanted) ? Quantization::kNvfp4 : Quantization::kMxfp8;
      args.scale_row_stride = is_linear ? blocks : 0;
      args.scale_group_stride = is_linear ? 1 : divide_up(blocks, kTileBlocks);
      return;
    }
    if (!has_groups(wanted)) {
      args.quantization = wanted;
      args.scale_row_stride = wanted == Quantization::kDynamic ? 1 : 0;
      return;
    }
    args.quantization = wanted < Quantization::kGroupUe8m0 ? Quantization::kGroup : Quantization::kGroupUe8m0;
    args.scale_row_stride = by_columns || by_aligned_columns ? 1 : problem.row / kGroupSize;
    args.scale_group_stride = by_columns ? rows : by_aligned_columns ? aligned(rows) : 1;
  }

  static uint32_t aligned(uint32_t rows) { return divide_up(rows, kScaleAlignment) * kScaleAlignment; }
};

// Launch shape of fused algorithms. Algorithm defines:
//   kMaxThreads                            maximum threads of a block
//   resident_threads(limits)               threads of its blocks for which an SM has registers
//   span(problem)                          lines of a row that a cluster walks over
//   row_slot_lines(problem)                lines of a slot for one row
//   shared_lines(tile_lines, world, threads, is_single_tile)   shared memory of a block, in lines
//   is_worth_measuring(bytes, world)       true if the tuner should try it
template <class Algorithm>
struct RowsInClusters {
  using Operation = AllReduceAddRmsNorm;
  using KernelPointer = void (*)(AddRmsNormArgs);
  static constexpr Tunables kTunables{{{"blocks", 1, kArrivalsPerOperation - 1},
                                       {"threads", kFewestThreads, kMaxFusedThreads},
                                       {"cluster", 1, kMaxClusterBlocks, true},
                                       {"depth", 0, 65535}}};
  // Bit 0: the grid has one block per tile. Other bits: output_number().
  static constexpr uint32_t kVariants = 6;

  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    const uint64_t rows = problem.units();
    const uint64_t fitting_rows = most_units(limits.slot_bytes / sizeof(Line),
                                             [&](uint64_t n) { return n * Algorithm::row_slot_lines(problem); });
    const uint64_t launch_rows = rows < fitting_rows ? rows : fitting_rows;
    const uint32_t unit_lines = Operation::unit_lines(problem);
    const uint32_t span_units = divide_up(Algorithm::span(problem), unit_lines);
    const uint32_t unit_threads = unit_lines * problem.world;
    const uint32_t resident_threads = Algorithm::resident_threads(limits);
    // If the device's clusters are smaller than the table assumes, a block gets more of the row and may have more
    // threads.
    const uint32_t chosen_threads = tuning.cluster <= limits.max_cluster ? tuning.threads : kMaxFusedThreads;
    const uint32_t most_threads = chosen_threads < Algorithm::kMaxThreads ? chosen_threads : Algorithm::kMaxThreads;

    const auto threads_of = [&](uint32_t in_cluster) {
      return whole_warps(divide_up(span_units, in_cluster) * unit_threads);
    };
    const auto is_enough = [&](uint32_t in_cluster) {
      const uint32_t threads = threads_of(in_cluster);
      return threads <= most_threads && resident_clusters(limits, in_cluster, threads, resident_threads) >= launch_rows;
    };

    uint32_t cluster = floor_power_of_two(span_units);
    if (cluster > tuning.cluster) cluster = tuning.cluster;
    if (cluster > limits.max_cluster) cluster = limits.max_cluster;
    while (has_empty_block(span_units, cluster, divide_up(span_units, cluster))) cluster /= 2;
    const auto is_crowded = [&] { return tuning.crowded_above != 0 && launch_rows * cluster > tuning.crowded_above; };
    while (cluster > 1 && is_crowded() && is_enough(cluster / 2)) cluster /= 2;

    const uint64_t chosen_clusters = tuning.blocks < cluster ? 1 : tuning.blocks / cluster;
    const uint64_t most_clusters = launch_rows < chosen_clusters ? launch_rows : chosen_clusters;
    uint32_t tile_units = divide_up(span_units, cluster);
    uint32_t threads = threads_of(cluster);
    // All blocks run at once, by estimate, so progress does not depend on the order in which a device starts clusters.
    uint64_t clusters = resident_clusters(limits, cluster, threads, resident_threads);
    if (clusters > most_clusters) clusters = most_clusters;
    if (clusters < launch_rows || threads > most_threads) {
      const uint32_t loop_threads = most_threads < kMaxLoopThreads ? most_threads : kMaxLoopThreads;
      if (tile_units > loop_threads / unit_threads) tile_units = loop_threads / unit_threads;
      if (tile_units == 0) tile_units = 1;
      threads = whole_warps(tile_units * unit_threads);
      clusters = resident_clusters(limits, cluster, threads, kMaxLoopThreads);
      if (clusters > most_clusters) clusters = most_clusters;
      if (clusters == 0) clusters = 1;
    }
    return {static_cast<uint32_t>(cluster * clusters), unit_lines * tile_units, cluster, tuning.depth, fitting_rows};
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    const uint64_t world = problem.world;
    const uint64_t row_bytes = problem.unit_bytes();
    const uint64_t slot_bytes = units * Algorithm::row_slot_lines(problem) * sizeof(Line);
    if (units * row_bytes / sizeof(Line) >> 32 != 0)
      throw std::invalid_argument("a launch must have fewer than 2^32 lines");
    if (slot_bytes > limits.slot_bytes) {
      throw std::invalid_argument(std::to_string(units) + " rows of " + std::to_string(row_bytes) +
                                  " bytes need a slot of " + std::to_string(slot_bytes) +
                                  " bytes, the workspace has slots of " + std::to_string(limits.slot_bytes) +
                                  ": lower launch_units or raise workspace_bytes");
    }
    const uint64_t exchanging = world * tiling.tile_lines;
    const uint32_t threads = whole_warps(static_cast<uint32_t>(exchanging));
    const uint32_t unit_lines = Operation::unit_lines(problem);
    if (tiling.tile_lines == 0 || tiling.tile_lines % unit_lines != 0 || exchanging > Algorithm::kMaxThreads) {
      throw std::invalid_argument("tile_lines is " + std::to_string(tiling.tile_lines) + "; it must be a multiple of " +
                                  std::to_string(unit_lines) + ", and world times it at most " +
                                  std::to_string(Algorithm::kMaxThreads));
    }
    const uint64_t cluster = tiling.cluster;
    if (cluster == 0 || cluster > limits.max_cluster) {
      throw std::invalid_argument("cluster is " + std::to_string(cluster) + "; this device takes 1 to " +
                                  std::to_string(limits.max_cluster));
    }
    const uint64_t clusters = tiling.blocks / cluster < units ? tiling.blocks / cluster : units;
    if (clusters == 0) {
      throw std::invalid_argument("blocks is " + std::to_string(tiling.blocks) + ", less than a cluster of " +
                                  std::to_string(cluster));
    }
    const uint64_t span = Algorithm::span(problem);
    const bool is_single_tile = clusters == units && span <= cluster * tiling.tile_lines;
    // The argument in rms_norm.cuh about consecutive rows requires that every block has a share of every row.
    if (!is_single_tile && (threads > kMaxLoopThreads || has_empty_block(span, cluster, tiling.tile_lines))) {
      throw std::invalid_argument("blocks of " + std::to_string(threads) + " threads in clusters of " +
                                  std::to_string(cluster) + " cannot walk over rows of " + std::to_string(row_bytes) +
                                  " bytes: they have more than 512 threads, or no share of a row");
    }
    const uint64_t shared_lines = Algorithm::shared_lines(tiling.tile_lines, world, threads, is_single_tile);
    const uint32_t output = output_number(Operation::quantization(problem), Algorithm::kVariants / 2);
    return {static_cast<uint32_t>(clusters * cluster), threads, static_cast<uint32_t>(shared_lines * sizeof(Line)),
            static_cast<uint32_t>(cluster), (is_single_tile ? 1u : 0u) | output << 1};
  }

  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    std::vector<TuningParameters> found;
    if (!Algorithm::is_worth_measuring(problem.bytes(), problem.world)) return found;
    const uint64_t rows = problem.units();
    const uint32_t span = Algorithm::span(problem);
    const uint32_t unit_lines = Operation::unit_lines(problem);
    const uint32_t sms = limits.multiprocessors();
    for (uint32_t cluster = 1; cluster <= kMaxClusterBlocks; cluster *= 2) {
      if (cluster > 1 && cluster * unit_lines > span) break;  // a block would have no share
      const uint32_t share = divide_up(span, unit_lines * cluster) * unit_lines * problem.world;
      const uint32_t whole = share < kFewestThreads ? kFewestThreads : share;  // threads that process a row in one tile
      for (const uint32_t threads : without_repeats(whole, whole / 2, kMaxLoopThreads)) {
        if (threads < kFewestThreads || threads > whole || threads > kMaxFusedThreads || whole > 4 * threads) continue;
        const uint32_t resident = sms * kMaxFusedThreads / threads > 0 ? sms * kMaxFusedThreads / threads : 1;
        const uint32_t many = 4 * resident < 8 * sms ? 4 * resident : 8 * sms;
        for (const uint32_t blocks : without_repeats(many, resident, sms)) {
          if (blocks < cluster || rows * cluster > 16 * uint64_t{blocks}) continue;
          found.push_back({.blocks = blocks, .threads = threads, .cluster = cluster});
          if (threads < whole || rows * cluster > blocks) {
            found.push_back({.blocks = blocks, .threads = threads, .cluster = cluster, .depth = 1});
          }
          if (rows * cluster <= blocks / 2) break;  // smaller grids would be the same
        }
      }
    }
    return found;
  }

 private:
  static constexpr uint32_t whole_warps(uint32_t threads) { return divide_up(threads, kWarpThreads) * kWarpThreads; }

  static constexpr bool has_empty_block(uint64_t span, uint64_t cluster, uint64_t tile) {
    return (cluster - 1) * tile >= span;
  }

  // Estimate of the clusters that run at once. An SM has registers for as many blocks as make `resident_threads`
  // threads. A cluster stays within a GPC: of the 18 SMs of an H100's GPC, 2 may remain unused. On a GPU with a smaller
  // GPC the remaining clusters start, in order of their numbers, when others have ended, like the blocks of a plain
  // grid.
  static constexpr uint64_t resident_clusters(const Limits& limits, uint32_t cluster, uint32_t threads,
                                              uint32_t resident_threads) {
    const uint64_t sms = cluster == 1 ? limits.sm_count : limits.sm_count * 16 / 18;
    return sms * (resident_threads / threads) / cluster;
  }

  static std::vector<uint32_t> without_repeats(uint32_t a, uint32_t b, uint32_t c) {
    std::vector<uint32_t> values{a};
    if (b != a) values.push_back(b);
    if (c != a && c != b) values.push_back(c);
    return values;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
