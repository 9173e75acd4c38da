// Reduction of a tile by the threads of a block, for LL algorithms with one thread per line and peer.
#pragma once

#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Elements that a thread adds together: as many as give every thread of a block one pack of its tile. Measured: whole
// lines leave most threads idle; single elements make small worlds loop.
template <DataType D, int World>
inline constexpr uint32_t kSumWidth = [] {
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(typename Element<D>::Storage);
  uint32_t width = 1;
  while (width * 2 * World <= kPerLine) width *= 2;
  return width;
}();

// Calls step(i) for each of the `packs` packs of a tile that belongs to this thread. Avoids a loop where no thread has
// more than one pack. A kernel of many worlds has more ranks than a line has packs.
template <DataType D, int World, class Step>
LLM_COMM_DEVICE void for_each_pack(uint32_t packs, Step step) {
  constexpr uint32_t kPacksPerLine = sizeof(Line) / sizeof(Pack<D, kSumWidth<D, World>>);
  if constexpr (kPacksPerLine <= World) {
    if (thread_index() < packs) step(thread_index());
  } else {
    for (uint32_t i = thread_index(); i < packs; i += block_threads()) step(i);
  }
}

// Reduces a tile of `tile_lines` lines into `sums`. `contributions`: the tile of each rank, one after the other.
// Collective over the block.
template <DataType D, int World>
LLM_COMM_DEVICE void sum_tile(const Line* contributions, uint32_t tile_lines, Line* sums, Ranks<World> ranks) {
  constexpr uint32_t kWidth = kSumWidth<D, World>;
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(typename Element<D>::Storage);
  using SumPack = Pack<D, kWidth>;
  const uint32_t tile_packs = tile_lines * kPerLine / kWidth;
  const auto* const packs = reinterpret_cast<const SumPack*>(contributions);
  for_each_pack<D, World>(tile_packs, [&](uint32_t i) {
    reinterpret_cast<SumPack*>(sums)[i] = sum_in_rank_order<D, World>(packs + i, tile_packs, ranks);
  });
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
