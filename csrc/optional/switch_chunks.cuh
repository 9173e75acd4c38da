// The transport of step_pipeline.cuh by the NVLink switch, without LL lines: buffers at the same place of every rank's staging memory,
// and how launches are shaped.
//
// A rank stages what it has, plainly, in its own memory, or stores to the memory of all; peers do the same in the step
// (hb_session.cuh). Behind the signals for the step, what all ranks have staged can be summed by the switch, and what was stored to
// all can be loaded.
//
// Aliases (switch_channel.cuh): the threads that signal a step fence before the release. The block has met in between, so the one
// fence lies between all that the block has done in the step, by whichever address, and all that follows the signal anywhere; by the
// block's next barrier, on this rank too. A first hop that stores to all fences once more when it has begun: what was there before may
// have been stored by the addresses of the ranks' workspaces.
//
// H1 and H2 of hb_session.cuh hold for what is stored to all ranks as for other stores to peers. What is staged in this rank's own
// memory is read by the peers: H1 means there that a rank ends an operation only after every peer has summed what any rank had staged
// for it, so that all ranks may stage anew. Its steps see to it: sums are made `depth` steps after what they are made of has been
// staged, and a rank waits for the end of that step on every peer.
#pragma once

#include <vector>

#include "algorithms/step_pipeline.cuh"
#include "llm_comm/switch_channel.cuh"
#include "optional/by_switch.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// 2 depth in turn, in one half of the staging memory: [turn][block][part][line]. Of `Parts`, each rank has one; with a single part all
// have it.
template <int Parts>
class SwitchBuffers {
 public:
  LLM_COMM_DEVICE SwitchBuffers(const DeviceComm& comm, uint32_t block, uint32_t chunk_lines, uint32_t depth)
      : comm_(comm), channel_(comm), block_(block), chunk_lines_(chunk_lines), turns_(2 * depth) {}

  LLM_COMM_DEVICE const Line* from(uint32_t hop, uint32_t t, uint32_t part) const { return of(hop, t, part); }

  // In this rank's memory, of all parts.
  template <class Visit>
  LLM_COMM_DEVICE void for_each_staged(uint32_t t, Visit visit) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t part = 0; part < Parts; ++part) visit(part, of(kFirstHop, t, part));
  }

  template <DataType D, class Own, class Store>
  LLM_COMM_DEVICE void sum(const Team& team, uint32_t lines, uint32_t t, Own, Store store) const {
    const Line* const staged = of(kFirstHop, t, own_part());
    move_lines(team, lines, [&](uint32_t k) { return channel_.load_reduce<D>(channel_.at(staged + k)); }, store);
  }

  // To all ranks, this one too.
  class ToOthers {
   public:
    LLM_COMM_DEVICE ToOthers(const SwitchBuffers& buffers, uint32_t hop, uint32_t t)
        : channel_(buffers.channel_), first_(buffers.of(hop, t, buffers.own_part())) {}
    LLM_COMM_DEVICE void store(uint32_t k, Line line) const { channel_.store(channel_.at(first_ + k), line); }

   private:
    const SwitchChannel& channel_;
    const Line* first_;
  };

  LLM_COMM_DEVICE static void fence() { fence_aliases(); }

 private:
  LLM_COMM_DEVICE uint32_t own_part() const { return Parts == 1 ? 0 : comm_.rank; }

  // Chunk t of a part, in this rank's memory.
  LLM_COMM_DEVICE Line* of(uint32_t hop, uint32_t t, uint32_t part) const {
    const uint64_t place = (uint64_t{t % turns_} * block_count() + block_) * Parts + part;
    return staging_of(comm_, comm_.rank, hop) + place * chunk_lines_;
  }

  const DeviceComm& comm_;
  SwitchChannel channel_;
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
