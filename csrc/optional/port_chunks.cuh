// What algorithms over port channels share: where chunks lie in the staging memory, the exchange of chunks in one hop, and how
// launches are shaped. How blocks share out lines is that of HB algorithms (Chunks).
//
// A copy engine takes some microseconds for each copy, however small it is. So a block's chunk is small, to be taken by many blocks
// at once, but those of all blocks of a step lie side by side, in the tensor and in the staging memory, and travel as one copy
// where they are asked for together.
#pragma once

#include "algorithms/chunked.cuh"
#include "llm_comm/port_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMaxPortThreads = 512;

// Buffers in turn for the chunks of all blocks, in each rank's staging memory: [turn][sender][block][line]. Turns fill the first
// half, then the second one.
class PortBuffers {
 public:
  // `turns_of_half`: that one half holds.
  LLM_COMM_DEVICE PortBuffers(const DeviceComm& comm, uint32_t block, uint32_t chunk_lines, uint32_t turns_of_half)
      : comm_(comm), block_(block), chunk_lines_(chunk_lines), turns_of_half_(turns_of_half) {}

  // Offset in the receiver's workspace of what `sender` sends to it in a turn.
  LLM_COMM_DEVICE uint64_t offset(uint32_t receiver, uint32_t sender, uint32_t turn) const {
    const uint32_t half = turn / turns_of_half_;
    const uint32_t senders = comm_.world_size - 1;
    const uint64_t place =
        (uint64_t{turn - half * turns_of_half_} * senders + among_others(sender, receiver)) * block_count() + block_;
    const uint64_t half_lines = comm_.staging_bytes / (2 * sizeof(Line));
    return staging_offset(comm_) + (half * half_lines + place * chunk_lines_) * sizeof(Line);
  }

  // Where this rank finds it.
  LLM_COMM_DEVICE const Line* received(uint32_t sender, uint32_t turn) const {
    return reinterpret_cast<const Line*>(comm_.workspace[comm_.rank] + offset(comm_.rank, sender, turn));
  }

 private:
  const DeviceComm& comm_;
  uint32_t block_;
  uint32_t chunk_lines_;
  uint32_t turns_of_half_;
};

// Chunks that are sent ahead of the one that is waited for, and that one.
LLM_COMM_DEVICE uint32_t turns_of(uint32_t depth) { return depth + 1; }

// One hop: every rank sends `chunks` chunks to each peer, and takes as many from each.
//
//   send(peer, t)     by a thread for each peer: puts chunk t into the buffer of turn t % turns
//   await(peer, t)    by a thread for each peer: waits for chunk t of the peer, and for what else must be before it is taken
//   take(t)           by all threads: takes chunk t of all peers
//
// A block says in step 0 that it has begun, and in step t + 1 that it has taken chunk t from all. Chunk t overwrites chunk
// t - turns, so it is sent when the peer has taken that one. H1: those that are sent before anything is waited for go to the first
// half, and a block ends when every peer has taken the last chunk, from all. H2: the others of the first round wait for step 0.
//
// R1 of operation.cuh: a block waits for each peer. R2: it uses no slot. P1: it waits for blocks of its own number only, and for
// requests in the FIFO before its own, which wait for nothing.
//
// When it ends, what it has sent has been taken, so it has left its source.
template <class Send, class Await, class Take>
LLM_COMM_DEVICE void exchange_chunks(PortSession& session, uint32_t chunks, uint32_t turns, uint32_t turns_of_half,
                                     Send send, Await await, Take take) {
  const bool has_begun = session.for_each_peer([&](uint32_t peer) {
    session.signal(peer, 0);
    for (uint32_t t = 0; t < turns && t < chunks; ++t) {
      if (t == turns_of_half && !session.wait_for_step(peer, 0, 0)) return false;
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
      if (t + turns >= chunks) return true;
      return session.wait_for_step(peer, t + 1, 0) && send(peer, t + turns);
    });
    if (!goes_on) return;
  }
  session.for_each_peer([&](uint32_t peer) { return session.wait_for_step(peer, chunks, 0); });
}

// Algorithm says
//   hops(world)                    1 or 2
//   turns_of_half(turns, world)    of each sender, how many turns one half of the staging memory has to hold
//   part_lines(problem, units)     the lines of the largest part of a launch of so many units
template <class Algorithm>
struct InPortChunks {
  static constexpr uint32_t kMaxDepth = 7;
  static constexpr Tunables kTunables{
      {{"blocks", 1, kPortWords}, {"tile_lines", 1, 1u << 20}, {"depth", 1, kMaxDepth}}};
  static constexpr uint32_t kVariants = 1;
  static constexpr bool kUsesPorts = true;

  static constexpr uint32_t most_blocks(uint32_t world) { return kPortWords / Algorithm::hops(world); }
  static constexpr uint64_t bytes_of_half(const Tiling& tiling, uint64_t world) {
    return Algorithm::turns_of_half(tiling.depth + 1, world) * (world - 1) * tiling.blocks * tiling.tile_lines *
           sizeof(Line);
  }
  static constexpr uint64_t half_bytes(const Limits& limits) {
    return limits.staging_bytes / (2 * sizeof(Line)) * sizeof(Line);
  }

  // Blocks keep their number, and their chunks shrink, where the staging memory is too small for both.
  static Tiling tile(const Problem& problem, const Choice& choice, const Limits& limits) {
    Tiling tiling{choice.blocks, choice.tile_lines, 1, choice.depth == 0 ? 1 : choice.depth, problem.count};
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
    const uint64_t tiles = divide_up(Algorithm::part_lines(problem, units), uint64_t{tiling.tile_lines});
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

  // The chunks of all blocks together are what one copy carries: those of at least a MiB.
  static std::vector<Choice> candidates(const Problem& problem, const Limits& limits) {
    constexpr uint64_t kLeastBytes = 4 << 20;
    constexpr uint64_t kLeastCopy = 1 << 20;
    std::vector<Choice> found;
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
