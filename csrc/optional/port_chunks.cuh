// Base of algorithms over port channels: where chunks lie in the staging memory, the exchange of chunks in one hop, and
// the launch shape. Blocks divide the lines as in HB algorithms (Chunks).
//
// A copy engine takes some microseconds for each copy, however small it is. A block's chunk is small, so that many
// blocks can process chunks at once. The chunks of all blocks of a step are adjacent, in the tensor and in the staging
// memory, so the proxy merges those that are requested together into one copy.
#pragma once

#include "algorithms/chunked.cuh"
#include "llm_comm/port_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMaxPortThreads = 512;

// Staging buffers for the chunks of all blocks, used round-robin: [stage][sender][block][line]. The stages fill the
// first half of the staging memory, then the second.
class PortBuffers {
 public:
  // `stages_of_half`: stages in one half.
  LLM_COMM_DEVICE PortBuffers(const DeviceComm& comm, uint32_t block, uint32_t chunk_lines, uint32_t stages_of_half)
      : comm_(comm), block_(block), chunk_lines_(chunk_lines), stages_of_half_(stages_of_half) {}

  // Offset in the receiver's workspace of the chunk that `sender` sends in a stage.
  LLM_COMM_DEVICE uint64_t offset(uint32_t receiver, uint32_t sender, uint32_t stage) const {
    const uint32_t half = stage / stages_of_half_;
    const uint32_t senders = comm_.world_size - 1;
    const uint64_t buffer =
        (uint64_t{stage - half * stages_of_half_} * senders + among_others(sender, receiver)) * block_count() + block_;
    const uint64_t half_lines = comm_.staging_bytes / (2 * sizeof(Line));
    return staging_offset(comm_) + (half * half_lines + buffer * chunk_lines_) * sizeof(Line);
  }

  // Address of that chunk on this rank.
  LLM_COMM_DEVICE const Line* received(uint32_t sender, uint32_t stage) const {
    return reinterpret_cast<const Line*>(comm_.workspace[comm_.rank] + offset(comm_.rank, sender, stage));
  }

 private:
  const DeviceComm& comm_;
  uint32_t block_;
  uint32_t chunk_lines_;
  uint32_t stages_of_half_;
};

// Number of buffers: the chunks sent ahead of the one that is waited for, and that one.
LLM_COMM_DEVICE uint32_t stages_of(uint32_t depth) { return depth + 1; }

// One hop: every rank sends `chunks` chunks to each peer and processes as many from each.
//
//   send(peer, t)     one thread per peer: puts chunk t into the buffer of stage t % stages
//   await(peer, t)    one thread per peer: waits for the peer's chunk t, and for anything else that take(t) needs
//   take(t)           all threads: processes chunk t of all peers
//
// Signals: a block signals step 0 when it has begun, and step t + 1 when it has processed chunk t of all peers.
//
// Why a buffer may be reused:
//   - Chunk t overwrites chunk t - stages, and is sent only after the peer has processed that one.
//   - H1: chunks sent before the first wait go to the first half. A block ends when every peer has processed the last
//     chunk of all ranks.
//   - H2: the other chunks of the first round wait for step 0.
// When a block ends, all chunks that it has sent have been processed, so they have left their source.
//
// R1 of operation.cuh: a block waits for each peer. R2: no slot is used. P1: it waits for blocks of its own number
// only, and for earlier requests in the ring, which wait for nothing.
template <class Send, class Await, class Take>
LLM_COMM_DEVICE void exchange_chunks(PortSession& session, uint32_t chunks, uint32_t stages, uint32_t stages_of_half,
                                     Send send, Await await, Take take) {
  const bool has_begun = session.for_each_peer([&](uint32_t peer) {
    session.signal(peer, 0);
    for (uint32_t t = 0; t < stages && t < chunks; ++t) {
      if (t == stages_of_half && !session.wait_for_step(peer, 0, 0)) return false;
      if (!send(peer, t)) return false;
    }
    return true;
  });
  if (!has_begun) return;
  for (uint32_t t = 0; t < chunks; ++t) {
    if (!session.for_each_peer([&](uint32_t peer) { return await(peer, t); })) return;
    take(t);
    block_sync();
    const bool goes_on = session.for_each_peer([&](uint32_t peer) {
      session.signal(peer, t + 1);
      if (t + stages >= chunks) return true;
      return session.wait_for_step(peer, t + 1, 0) && send(peer, t + stages);
    });
    if (!goes_on) return;
  }
  session.for_each_peer([&](uint32_t peer) { return session.wait_for_step(peer, chunks, 0); });
}

// Launch shape of algorithms over port channels. Algorithm defines
//   hops(world)                    1 or 2
//   stages_of_half(stages, world)    stages of each sender that one half of the staging memory must hold
//   shard_lines(problem, units)     lines of the largest shard of a launch of `units` units
template <class Algorithm>
struct InPortChunks {
  static constexpr uint32_t kMaxDepth = 7;
  static constexpr Tunables kTunables{
      {{"blocks", 1, kPortWords}, {"tile_lines", 1, 1u << 20}, {"depth", 1, kMaxDepth}}};
  static constexpr uint32_t kVariants = 1;
  static constexpr bool kUsesPorts = true;

  static constexpr uint32_t most_blocks(uint32_t world) { return kPortWords / Algorithm::hops(world); }
  static constexpr uint64_t bytes_of_half(const Tiling& tiling, uint64_t world) {
    return Algorithm::stages_of_half(tiling.depth + 1, world) * (world - 1) * tiling.blocks * tiling.tile_lines *
           sizeof(Line);
  }
  static constexpr uint64_t half_bytes(const Limits& limits) {
    return limits.staging_bytes / (2 * sizeof(Line)) * sizeof(Line);
  }

  // If the staging memory is too small, chunks shrink and the number of blocks stays.
  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    Tiling tiling{tuning.blocks, tuning.tile_lines, 1, tuning.depth == 0 ? 1 : tuning.depth, problem.count};
    if (tiling.blocks > most_blocks(problem.world)) tiling.blocks = most_blocks(problem.world);
    const uint64_t of_a_line = bytes_of_half({tiling.blocks, 1, 1, tiling.depth, 0}, problem.world);
    const uint64_t most = of_a_line == 0 ? 0 : half_bytes(limits) / of_a_line;
    if (tiling.tile_lines > most) tiling.tile_lines = most == 0 ? 1 : static_cast<uint32_t>(most);
    return tiling;
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    const uint64_t bytes = units * element_bytes(problem.type);
    if (units >> 32 != 0) throw std::invalid_argument("a launch must have fewer than 2^32 elements");
    if (tiling.blocks > most_blocks(problem.world)) {
      throw std::invalid_argument("blocks is " + std::to_string(tiling.blocks) + "; among " +
                                  std::to_string(problem.world) + " ranks there are words of ports for " +
                                  std::to_string(most_blocks(problem.world)));
    }
    if (tiling.launch_units < problem.count && tiling.launch_units * element_bytes(problem.type) % sizeof(Line) != 0) {
      throw std::invalid_argument("launches must be whole lines");
    }
    if (bytes_of_half(tiling, problem.world) > half_bytes(limits)) {
      throw std::invalid_argument("chunks of " + std::to_string(tiling.tile_lines) + " lines in " +
                                  std::to_string(tiling.blocks) + " blocks do not fit into " +
                                  std::to_string(limits.staging_bytes) +
                                  " bytes of staging memory: lower blocks or depth, or raise workspace_bytes");
    }
    const uint64_t tiles = divide_up(Algorithm::shard_lines(problem, units), uint64_t{tiling.tile_lines});
    const uint64_t blocks = tiling.blocks < tiles ? tiling.blocks : tiles;
    if ((divide_up(tiles, blocks) + 2) >> kMaxStepsLog2 != 0) {
      throw std::invalid_argument("a message of " + std::to_string(bytes) +
                                  " bytes takes too many steps: raise blocks or tile_lines");
    }
    const uint64_t threads = uint64_t{tiling.tile_lines} * (problem.world - 1);
    return {static_cast<uint32_t>(blocks),
            static_cast<uint32_t>(threads < problem.world     ? problem.world
                                  : threads > kMaxPortThreads ? kMaxPortThreads
                                                              : threads),
            static_cast<uint32_t>(sizeof(Line))};
  }

  // One copy carries the chunks of all blocks; only choices with copies of at least 1 MiB are worth measuring.
  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    constexpr uint64_t kLeastBytes = 4 << 20;
    constexpr uint64_t kLeastCopy = 1 << 20;
    std::vector<TuningParameters> found;
    if (problem.bytes() < kLeastBytes) return found;
    for (uint32_t blocks : {8u, 16u, 32u, 64u}) {
      if (blocks > most_blocks(problem.world)) continue;
      for (uint32_t depth : {1u, 3u}) {
        const uint64_t of_a_line = bytes_of_half({blocks, 1, 1, depth, 0}, problem.world);
        const uint64_t fits = std::min<uint64_t>(half_bytes(limits) / of_a_line, kTunables.max("tile_lines"));
        const uint32_t most = floor_power_of_two(static_cast<uint32_t>(fits) | 1);
        for (const uint32_t tile_lines : {most, most / 2, most / 4}) {
          if (uint64_t{tile_lines} * blocks * sizeof(Line) < kLeastCopy) continue;
          found.push_back({.blocks = blocks, .tile_lines = tile_lines, .depth = depth});
        }
      }
    }
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
