// What algorithms share that exchange chunks (chunked.cuh) through the NVLink switch, without LL lines: buffers at the same place of
// every rank's staging memory, and how their launches are shaped.
//
// Such an algorithm stages what this rank has, plainly, in its own memory, or stores to the memory of all; peers do the same in
// the step (hb_session.cuh). Behind the signals for the step, what all ranks have staged can be summed by the switch, and what was
// stored to all can be loaded.
//
// Aliases (switch_channel.cuh): the threads that signal a step fence before the release. The block has met in between, so the one
// fence lies between all that the block has done in the step, by whichever address, and all that follows the signal anywhere; by the
// block's next barrier, on this rank too.
//
// H1 and H2 of hb_session.cuh hold for what is stored to all ranks as for other stores to peers. What is staged in this rank's own
// memory is read by the peers: H1 means there that a rank ends an operation only after every peer has summed what any rank had staged
// for it, so that all ranks may stage anew. Its steps see to it: sums are made `depth` steps after what they are made of has been
// staged, and a rank waits for the end of that step on every peer.
#pragma once

#include <vector>

#include "algorithms/chunked.cuh"
#include "llm_comm/switch_channel.cuh"
#include "optional/by_switch.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// For HBSession::run().
struct FenceAliases {
  LLM_COMM_DEVICE void operator()(uint32_t) const { fence_aliases(); }
};

// 2 depth in turn, in one half of the staging memory: [turn][block][part][line].
class SwitchBuffers {
 public:
  LLM_COMM_DEVICE SwitchBuffers(const DeviceComm& comm, uint32_t parts, uint32_t block, uint32_t chunk_lines,
                                uint32_t depth)
      : comm_(comm), channel_(comm), parts_(parts), block_(block), chunk_lines_(chunk_lines), turns_(2 * depth) {}

  // Chunk t of a part, in this rank's memory.
  LLM_COMM_DEVICE Line* of(uint32_t half, uint32_t t, uint32_t part) const {
    const uint64_t place = (uint64_t{t % turns_} * block_count() + block_) * parts_ + part;
    return staging_of(comm_, comm_.rank, half) + place * chunk_lines_;
  }

  // Of all ranks, where this one has `line`: their sum, and a store.
  template <DataType D>
  LLM_COMM_DEVICE Line sum(const Line* line) const {
    return channel_.load_reduce<D>(channel_.at(line));
  }
  LLM_COMM_DEVICE void store(const Line* line, Line value) const { channel_.store(channel_.at(line), value); }

 private:
  const DeviceComm& comm_;
  SwitchChannel channel_;
  uint32_t parts_;
  uint32_t block_;
  uint32_t chunk_lines_;
  uint32_t turns_;
};

template <class Algorithm>
struct ChunkedBySwitch : Chunked<Algorithm> {
  // A rank has a buffer for its own chunk as well.
  static constexpr uint64_t senders(uint64_t world) { return world; }

  // Of algorithms whose parts are as long as a launch.
  static constexpr uint64_t part_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    check_switch(limits);
    return Chunked<Algorithm>::grid(problem, tiling, units, limits);
  }

  // Engines change to such algorithms from 0.5 MiB on; below 1 MiB, where HB is not tried, with small chunks.
  static std::vector<Choice> candidates(const Problem& problem, const Limits& limits) {
    constexpr uint64_t kFewestBytes = 64 << 10;
    std::vector<Choice> found = Chunked<Algorithm>::candidates(problem, limits);
    if (!found.empty() || problem.bytes() < kFewestBytes) return found;
    const uint32_t sms = limits.multiprocessors();
    for (uint32_t blocks : up_to(Algorithm::kTunables.max("blocks"), {sms / 2, sms})) {
      for (uint32_t tile_lines : {32u, 64u, 128u, 256u}) {
        const Tiling tiling{blocks, tile_lines, 1, kMinHBDepth, 0};
        if (Chunked<Algorithm>::staging_bytes(tiling, problem.world) > limits.staging_bytes) continue;
        found.push_back({.blocks = blocks, .tile_lines = tile_lines, .depth = kMinHBDepth});
      }
    }
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
