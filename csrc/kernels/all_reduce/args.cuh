// Parameters of every all-reduce kernel, and the caller's message seen as 16-byte lines.
//
// A grid has World << tile_lines_log2 threads a block, and no more blocks than there are tiles: a block arrives
// (Operation::arrive) in its first tile.
#pragma once

#include "llm_comm/device_comm.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMaxBlockThreads = 1024;

struct AllReduceArgs {
  DeviceComm comm;
  const void* input;         // element-aligned
  void* output;              // element-aligned; may be `input`, must not overlap it otherwise
  uint64_t count;            // elements, at least 1 and below 2^32, the same on all ranks
  uint32_t tile_lines_log2;  // lines that one peer's threads of a block handle at a time
  uint32_t depth;            // tiles that a block sends ahead of the one it reduces
};

// Threads (k, c) of a block: thread (k, c) talks to peer k about line c of the block's tile. Sending to one
// peer and polling one line per thread keeps all links and all polls of a block in flight at once; a thread
// that serves all peers in turn was measured slower (docs/performance.md).
struct PeerParallel {
  uint32_t tile_lines;
  uint32_t peer;
  uint32_t column;

  LLM_COMM_DEVICE explicit PeerParallel(uint32_t tile_lines_log2)
      : tile_lines(1u << tile_lines_log2),
        peer(thread_index() >> tile_lines_log2),
        column(thread_index() & (tile_lines - 1)) {}
};

// Elements that a thread sums together: as many as give every thread of a block one pack of its tile. Measured: sums by
// whole lines leave most threads idle, sums by elements make few ranks loop.
template <DataType D, int World>
inline constexpr uint32_t kSumWidth = [] {
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(typename Element<D>::Storage);
  uint32_t width = 1;
  while (width * 2 * World <= kPerLine) width *= 2;
  return width;
}();

// Runs step(i) for each of the `packs` packs of a tile that falls to this thread. Where no thread has more than one, a
// loop would only cost time.
template <DataType D, int World, class Step>
LLM_COMM_DEVICE void for_each_pack(uint32_t packs, Step step) {
  constexpr uint32_t kPacksPerLine = sizeof(Line) / sizeof(Pack<D, kSumWidth<D, World>>);
  if constexpr (kPacksPerLine <= World) {
    if (thread_index() < packs) step(thread_index());
  } else {
    for (uint32_t i = thread_index(); i < packs; i += block_threads()) step(i);
  }
}

// Input and output of this rank. The last line may be partial and pointers only element-aligned: both go the
// slow way, element by element, with zeros sent in place of what is not there.
template <DataType D>
class Message {
 public:
  using Storage = typename Element<D>::Storage;
  static constexpr uint32_t kPerLine = sizeof(Line) / sizeof(Storage);

  LLM_COMM_DEVICE explicit Message(const AllReduceArgs& args)
      : input_(static_cast<const Storage*>(args.input)),
        output_(static_cast<Storage*>(args.output)),
        count_(args.count),
        input_whole_lines_(is_aligned(input_) ? static_cast<uint32_t>(count_ / kPerLine) : 0),
        output_whole_lines_(is_aligned(output_) ? static_cast<uint32_t>(count_ / kPerLine) : 0) {}

  LLM_COMM_DEVICE uint64_t bytes() const { return count_ * sizeof(Storage); }
  LLM_COMM_DEVICE uint32_t lines() const { return static_cast<uint32_t>((count_ + kPerLine - 1) / kPerLine); }

  // Changes with every address and bound that load() and store() use (for grid_dependency_wait_after).
  LLM_COMM_DEVICE uint64_t fingerprint() const {
    return reinterpret_cast<uint64_t>(input_) + reinterpret_cast<uint64_t>(output_) + input_whole_lines_ +
           output_whole_lines_;
  }

  LLM_COMM_DEVICE Line load(uint32_t line) const {
    const uint64_t first = static_cast<uint64_t>(line) * kPerLine;
    if (line < input_whole_lines_) return load_line(input_ + first);
    // All loads first: a loop that ends with the message would wait for each before the next.
    const uint64_t left = count_ - first;
    Storage element[kPerLine];
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < kPerLine; ++i) element[i] = i < left ? input_[first + i] : 0;
    Line value{};
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < kPerLine; ++i) {
      value.word[i * sizeof(Storage) / 4] |= static_cast<uint32_t>(element[i]) << (i * sizeof(Storage) % 4 * 8);
    }
    return value;
  }

  LLM_COMM_DEVICE void store(uint32_t line, Line value) const {
    const uint64_t first = static_cast<uint64_t>(line) * kPerLine;
    if (line < output_whole_lines_) {
      store_line(output_ + first, value);
      return;
    }
    for (uint32_t i = 0; i < kPerLine && first + i < count_; ++i) {
      output_[first + i] = static_cast<Storage>(value.word[i * sizeof(Storage) / 4] >> (i * sizeof(Storage) % 4 * 8));
    }
  }

  // Stores the pack whose first element is `first`, a multiple of Width, as far as it exists.
  template <uint32_t Width>
  LLM_COMM_DEVICE void store_pack(uint32_t first, Pack<D, Width> pack) const {
    if (Width > 1 && first + Width <= output_whole_lines_ * kPerLine) {
      *reinterpret_cast<Pack<D, Width>*>(output_ + first) = pack;
      return;
    }
    for (uint32_t i = 0; i < Width; ++i) {
      if (first + i < static_cast<uint32_t>(count_)) output_[first + i] = pack.element[i];
    }
  }

 private:
  static LLM_COMM_DEVICE bool is_aligned(const void* pointer) {
    return reinterpret_cast<uint64_t>(pointer) % sizeof(Line) == 0;
  }

  const Storage* input_;
  Storage* output_;
  uint64_t count_;
  // How many can be accessed whole.
  uint32_t input_whole_lines_;
  uint32_t output_whole_lines_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
