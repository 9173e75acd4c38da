// Base of HB algorithms that send shards in chunks: how blocks divide the lines, where chunks lie in the staging
// memory, and how launches are shaped.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "algorithms/algorithm.h"
#include "llm_comm/hb_session.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMinHBDepth = 2;  // required by HBSession::run()

// Compute threads of a block form teams (warp roles), and each team does another part of a step. The links therefore
// carry what one team sends while another one adds. The work of the teams in one step is independent.
inline constexpr uint32_t kMaxTeamThreads = 256;

constexpr uint32_t max_hb_threads(uint32_t teams) { return teams * kMaxTeamThreads + kWarpThreads; }

struct Team {
  uint32_t number;
  uint32_t threads;
  uint32_t thread;

  static LLM_COMM_DEVICE Team whole_block() { return {0, block_threads(), thread_index()}; }
};

// Teams of equal size. of(): the team of a compute thread.
struct EqualTeams {
  static LLM_COMM_DEVICE Team of(const HBSession& session, uint32_t teams) {
    const uint32_t threads = session.workers() / teams;
    const uint32_t number = session.worker() / threads;
    return {number, threads, session.worker() - number * threads};
  }
};

// Teams whose sizes are in the ratio of `Shares`.
template <uint32_t... Shares>
struct TeamShares {
  static constexpr uint32_t kAll = (Shares + ...);
  static constexpr uint32_t kShares[] = {Shares...};
  static constexpr uint32_t kLast = kShares[sizeof...(Shares) - 1];

  static LLM_COMM_DEVICE Team of(const HBSession& session, uint32_t) {
    const uint32_t unit = session.workers() / kAll;
    Team team{};
    uint32_t number = 0;
    uint32_t first = 0;
    const auto consider = [&](uint32_t share) {
      if (session.worker() >= first) team = {number, share * unit, session.worker() - first};
      first += share * unit;
      ++number;
    };
    (consider(Shares), ...);
    return team;
  }
};

// Chunks of a block: chunk t of each shard. Shards have up to `shard_lines` lines.
class Chunks {
 public:
  LLM_COMM_DEVICE Chunks(uint32_t block, uint32_t chunk_lines, uint32_t shard_lines)
      : chunk_lines_(chunk_lines),
        first_(block * chunk_lines),
        stride_(block_count() * chunk_lines),
        count_((shard_lines + stride_ - 1) / stride_) {}

  // Number of chunks, the same for all blocks of a grid. The last chunk of some blocks may be empty.
  LLM_COMM_DEVICE uint32_t count() const { return count_; }
  // Lines of a chunk that the shard does not cut.
  LLM_COMM_DEVICE uint32_t chunk_lines() const { return chunk_lines_; }
  // First line of chunk t in a shard.
  LLM_COMM_DEVICE uint32_t first(uint32_t t) const { return first_ + t * stride_; }
  // Lines of chunk t of a shard with `shard_lines` lines.
  LLM_COMM_DEVICE uint32_t lines(uint32_t t, uint32_t shard_lines) const {
    if (first(t) >= shard_lines) return 0;
    return shard_lines - first(t) < chunk_lines_ ? shard_lines - first(t) : chunk_lines_;
  }

 private:
  uint32_t chunk_lines_;
  uint32_t first_;
  uint32_t stride_;
  uint32_t count_;
};

// Moves `lines` lines. Each thread of the team has several loads in flight.
template <class Load, class Store>
LLM_COMM_DEVICE void move_lines(const Team& team, uint32_t lines, Load load, Store store) {
  constexpr uint32_t kBatch = 4;
  const uint32_t threads = team.threads;
  for (uint32_t i = team.thread; i < lines; i += kBatch * threads) {
    Line line[kBatch];
    LLM_COMM_UNROLL(4)
    for (uint32_t j = 0; j < kBatch; ++j) {
      if (i + j * threads < lines) line[j] = load(i + j * threads);
    }
    LLM_COMM_UNROLL(4)
    for (uint32_t j = 0; j < kBatch; ++j) {
      if (i + j * threads < lines) store(i + j * threads, line[j]);
    }
  }
}

// Lines that a thread reduces at a time: their loads are in flight together.
template <int World>
inline constexpr uint32_t kReducedTogether = World <= 2   ? 4
                                             : World <= 4 ? 2
                                                          : 1;

// Reduces a chunk of `lines` lines. load(rank, line) returns a rank's contribution.
template <DataType D, int World, class Load, class Store>
LLM_COMM_DEVICE void sum_chunk(const Team& team, uint32_t lines, Load load, Store store,
                               Ranks<World> ranks = Ranks<World>()) {
  const uint32_t threads = team.threads;
  if constexpr (!kIsExactWorld<World>) {
    using Elements = Pack<D, sizeof(Line) / sizeof(typename Element<D>::Storage)>;
    LLM_COMM_UNROLL(1)
    for (uint32_t i = team.thread; i < lines; i += threads) {
      RunningSum<D, sizeof(Elements) / sizeof(typename Element<D>::Storage)> sum;
      add_in_batches<Line>(
          ranks.count(), [&](uint32_t of) { return load(of, i); },
          [&](bool is_first, Line line) { sum.add(is_first, __builtin_bit_cast(Elements, line)); });
      store(i, __builtin_bit_cast(Line, sum.round()));
    }
  } else {
    constexpr uint32_t kBatch = kReducedTogether<World>;
    for (uint32_t i = team.thread; i < lines; i += kBatch * threads) {
      Line contribution[kBatch][World];
      LLM_COMM_UNROLL(4)
      for (uint32_t j = 0; j < kBatch; ++j) {
        if (i + j * threads >= lines) continue;
        LLM_COMM_UNROLL(8)
        for (uint32_t of = 0; of < World; ++of) contribution[j][of] = load(of, i + j * threads);
      }
      LLM_COMM_UNROLL(4)
      for (uint32_t j = 0; j < kBatch; ++j) {
        if (i + j * threads < lines) store(i + j * threads, sum_lines<D, World>(contribution[j]));
      }
    }
  }
}

// Maximum blocks of a grid: each needs a row of signal words.
inline constexpr uint32_t kMaxChunkedBlocks = CommonSignals::kBlocks;

// Values of `wanted` clamped to 1..most, without repeats, in order.
inline std::vector<uint32_t> up_to(uint32_t most, std::initializer_list<uint32_t> wanted) {
  std::vector<uint32_t> found;
  for (uint32_t blocks : wanted) {
    blocks = std::clamp(blocks, 1u, most);
    if (std::find(found.begin(), found.end(), blocks) == found.end()) found.push_back(blocks);
  }
  return found;
}

// Launch shape of chunked algorithms. Algorithm defines kTeams and shard_lines(problem, units), the lines of the
// largest shard of a launch of `units` units; or, for other chunks, tiles(), workers() and shared_bytes().
template <class Algorithm>
struct Chunked {
  static constexpr uint32_t kMaxDepth = 8;
  static constexpr Tunables kTunables{
      {{"blocks", 1, kMaxChunkedBlocks}, {"tile_lines", 1, 1u << 16}, {"depth", kMinHBDepth, kMaxDepth}}};
  static constexpr uint32_t kVariants = 1;

  // Number of ranks whose chunks a rank buffers in each stage.
  static constexpr uint64_t senders(uint64_t world) { return world - 1; }
  // Lines of a buffer for a chunk of `tile_lines` lines.
  static constexpr uint64_t buffer_lines(uint64_t tile_lines) { return tile_lines; }
  // Staging memory of a grid. Each hop uses one half.
  static constexpr uint64_t staging_bytes(const Tiling& tiling, uint64_t world) {
    return 2 * 2 * uint64_t{tiling.depth} * tiling.blocks * Algorithm::senders(world) *
           Algorithm::buffer_lines(tiling.tile_lines) * sizeof(Line);
  }

  // Chunks of all blocks for each shard.
  static constexpr uint64_t tiles(const Problem& problem, const Tiling& tiling, uint64_t units) {
    return divide_up(Algorithm::shard_lines(problem, units), uint64_t{tiling.tile_lines});
  }
  static constexpr uint64_t shared_bytes() { return sizeof(Line); }

  // If the staging memory is too small, chunks shrink and the number of blocks stays.
  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    Tiling tiling{tuning.blocks, tuning.tile_lines, 1, tuning.depth < kMinHBDepth ? kMinHBDepth : tuning.depth,
                  problem.count};
    const uint64_t of_a_line = staging_bytes({tiling.blocks, 1, 1, tiling.depth, 0}, problem.world);
    const uint64_t most = of_a_line == 0 ? 0 : limits.staging_bytes / of_a_line;
    if (tiling.tile_lines > most) tiling.tile_lines = most == 0 ? 1 : static_cast<uint32_t>(most);
    return tiling;
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    const uint64_t bytes = units * problem.unit_bytes();
    if (units * problem.unit_elements() >> 32 != 0) {
      throw std::invalid_argument("a launch must have fewer than 2^32 elements");
    }
    if (tiling.launch_units < problem.units() && tiling.launch_units * problem.unit_bytes() % sizeof(Line) != 0) {
      throw std::invalid_argument("launches must be whole lines");
    }
    if (staging_bytes(tiling, problem.world) > limits.staging_bytes) {
      throw std::invalid_argument("chunks of " + std::to_string(tiling.tile_lines) + " lines in " +
                                  std::to_string(tiling.blocks) + " blocks do not fit into " +
                                  std::to_string(limits.staging_bytes) +
                                  " bytes of staging memory: lower blocks or depth, or raise workspace_bytes");
    }
    const uint64_t tiles = Algorithm::tiles(problem, tiling, units);
    const uint64_t blocks = tiling.blocks < tiles ? tiling.blocks : tiles;
    if ((divide_up(tiles, blocks) + 2 * tiling.depth) >> kMaxStepsLog2 != 0) {
      throw std::invalid_argument("a message of " + std::to_string(bytes) +
                                  " bytes takes too many steps: raise blocks or tile_lines");
    }
    const uint32_t workers = Algorithm::workers(problem, tiling);
    const uint32_t talkers = workers < HBSession::kFewestThreadsInWarps ? problem.world : kWarpThreads;
    return {static_cast<uint32_t>(blocks), talkers + workers, static_cast<uint32_t>(Algorithm::shared_bytes())};
  }

  // Compute threads of a block.
  static constexpr uint32_t workers(const Problem&, const Tiling& tiling) {
    return Algorithm::kTeams * team_threads(tiling.tile_lines);
  }

  // Two lines per thread, in whole warps. Chunks of a few lines, which only tests have, get a few threads.
  static constexpr uint32_t team_threads(uint32_t chunk_lines) {
    if (chunk_lines < kWarpThreads) return chunk_lines < 8 ? chunk_lines : 8;
    const uint32_t threads = chunk_lines / 2 / kWarpThreads * kWarpThreads;
    return threads < kWarpThreads ? kWarpThreads : threads < kMaxTeamThreads ? threads : kMaxTeamThreads;
  }

  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    std::vector<TuningParameters> found;
    if (problem.bytes() < 1 << 20) return found;
    const uint32_t sms = limits.multiprocessors();
    const auto add_those_that_fit = [&](std::initializer_list<uint32_t> sizes) {
      for (uint32_t blocks : up_to(Algorithm::kTunables.max("blocks"), {sms / 2, sms, 2 * sms})) {
        for (uint32_t tile_lines : sizes) {
          for (uint32_t depth : {2u, 3u, 4u}) {
            const Tiling tiling{blocks, tile_lines, 1, depth, 0};
            if (staging_bytes(tiling, problem.world) > limits.staging_bytes) continue;
            found.push_back({.blocks = blocks, .tile_lines = tile_lines, .depth = depth});
          }
        }
      }
    };
    add_those_that_fit({256, 512, 1024, 2048, 4096});
    // The senders share the staging memory: many of them may leave room for smaller chunks only.
    if (found.empty()) add_those_that_fit({64, 128});
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
