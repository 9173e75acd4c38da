// Transport of step_pipeline.cuh through the NVLink switch, without LL lines: staging buffers at the same offset on
// every rank, and the launch shape.
//
// In a step (hb_session.cuh) a rank stages its contribution by plain stores to its own memory, or stores to the memory
// of all ranks, and so do its peers. After the signals of the step the switch can reduce what all ranks have staged,
// and what was stored to all ranks can be loaded.
//
// Alias fences (switch_channel.cuh): the threads that signal a step fence before the release. A block barrier lies in
// between, so one fence covers everything that the block did in the step, through either address. It precedes
// everything that follows the signal on any rank and, after the block's next barrier, on this rank. A first hop that
// stores to all ranks has an additional fence after the operation has begun, because earlier content may have been
// stored through the workspace addresses.
//
// H1 and H2 of hb_session.cuh hold for stores to all ranks as for other stores to peers. Peers also read what a rank
// stages in its own memory. For that, H1 means: a rank ends an operation only after every peer has reduced what any
// rank had staged for it, so that all ranks may stage again. The steps ensure it: sums are made `depth` steps after
// their contributions are staged, and a rank waits for the end of that step on every peer.
#pragma once

#include <vector>

#include "algorithms/step_pipeline.cuh"
#include "llm_comm/switch_channel.cuh"
#include "optional/multimem.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// Buffers in one half of the staging memory, 2 * depth stages, used round-robin: [stage][block][part][line]. With
// several `Parts` (shards) each rank owns one; a single part belongs to all ranks.
template <int Parts>
class SwitchBuffers {
 public:
  static constexpr bool kGoThroughSwitch = true;

  LLM_COMM_DEVICE SwitchBuffers(const DeviceComm& comm, uint32_t block, uint32_t chunk_lines, uint32_t depth)
      : comm_(comm),
        parts_(comm.world_size),
        channel_(comm),
        block_(block),
        chunk_lines_(chunk_lines),
        stages_(2 * depth) {}

  LLM_COMM_DEVICE const Line* from(uint32_t hop, uint32_t t, uint32_t part) const { return of(hop, t, part); }

  // Calls visit(part, buffer) for the buffers of all parts in this rank's memory.
  template <class Visit>
  LLM_COMM_DEVICE void for_each_staged(uint32_t t, Visit visit) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t part = 0; part < parts_.count(); ++part) visit(part, of(kFirstHop, t, part));
  }

  template <DataType D, class Own, class Store>
  LLM_COMM_DEVICE void sum(const Team& team, uint32_t lines, uint32_t t, Own, Store store) const {
    const Line* const staged = of(kFirstHop, t, own_part());
    move_lines(team, lines, [&](uint32_t k) { return channel_.load_reduce<D>(channel_.at(staged + k)); }, store);
  }

  // Stores to all ranks, this one included.
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

  // Buffer for chunk t of a part in this rank's memory.
  LLM_COMM_DEVICE Line* of(uint32_t hop, uint32_t t, uint32_t part) const {
    const uint64_t buffer = (uint64_t{t % stages_} * block_count() + block_) * parts_.count() + part;
    return staging_of(comm_, comm_.rank, hop) + buffer * chunk_lines_;
  }

  const DeviceComm& comm_;
  Ranks<Parts> parts_;
  SwitchChannel channel_;
  uint32_t block_;
  uint32_t chunk_lines_;
  uint32_t stages_;
};

template <class Algorithm>
struct ChunkedBySwitch : Chunked<Algorithm> {
  // A rank has a buffer for its own chunk as well.
  static constexpr uint64_t senders(uint64_t world) { return world; }

  // Default for algorithms whose shards have the size of a launch.
  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    check_multimem(limits);
    return Chunked<Algorithm>::grid(problem, tiling, units, limits);
  }

  // Engines change to such algorithms from 0.5 MiB on. Below 1 MiB, where no HB algorithm is a candidate, chunks are
  // small.
  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    constexpr uint64_t kFewestBytes = 64 << 10;
    std::vector<TuningParameters> found = Chunked<Algorithm>::candidates(problem, limits);
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
