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
  uint32_t tile_lines;       // that one peer's threads of a block handle at a time: a power of two
  uint32_t tile_lines_log2;  // given beside it because kernels would compute one from the other where it costs time
  uint32_t depth;            // tiles that a block sends ahead of the one it reduces
};

// Threads (k, c) of a block: thread (k, c) talks to peer k about line c of the block's tile. Sending to one
// peer and polling one line per thread keeps all links and all polls of a block in flight at once; a thread
// that serves all peers in turn was measured slower (docs/performance.md).
struct PeerParallel {
  uint32_t tile_lines;
  uint32_t peer;
  uint32_t column;

  LLM_COMM_DEVICE explicit PeerParallel(const AllReduceArgs& args)
      : tile_lines(args.tile_lines),
        peer(thread_index() >> args.tile_lines_log2),
        column(thread_index() & (args.tile_lines - 1)) {}
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

// A line that is not aligned, or of which only the first `count` elements are there, element by element; the rest is zeros.
template <DataType D>
LLM_COMM_DEVICE_CALL Line load_elements(const typename Element<D>::Storage* first, uint64_t count) {
  using Storage = typename Element<D>::Storage;
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(Storage);
  // All loads first: a loop that ends with the message would wait for each before the next.
  Storage element[kPerLine];
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < kPerLine; ++i) element[i] = i < count ? first[i] : 0;
  Line line{};
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < kPerLine; ++i) {
    line.word[i * sizeof(Storage) / 4] |= static_cast<uint32_t>(element[i]) << (i * sizeof(Storage) % 4 * 8);
  }
  return line;
}

// Stores the first `count` elements of a line, or all, where it is not aligned.
template <DataType D>
LLM_COMM_DEVICE_CALL void store_elements(typename Element<D>::Storage* first, uint64_t count, Line line) {
  using Storage = typename Element<D>::Storage;
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(Storage);
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < kPerLine; ++i) {
    if (i < count) first[i] = static_cast<Storage>(line.word[i * sizeof(Storage) / 4] >> (i * sizeof(Storage) % 4 * 8));
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

  // A load in two steps, for what else is to be loaded meanwhile. Construct it before grid_dependency_wait(). The first step
  // is made without a condition, of `spare` memory where no whole line is wanted: branches would come before it.
  class Load {
   public:
    LLM_COMM_DEVICE Load(const Message& message, uint32_t line, bool is_wanted, const void* spare)
        : message_(message),
          line_(line),
          is_later_(is_wanted && line >= message.input_whole_lines_),
          address_(is_wanted && !is_later_ ? message.input_ + static_cast<uint64_t>(line) * kPerLine : spare) {}

    LLM_COMM_DEVICE uint64_t fingerprint() const { return reinterpret_cast<uint64_t>(address_); }

    LLM_COMM_DEVICE void begin() { value_ = load_line(address_); }

    // The line, or whatever, if it is not wanted.
    LLM_COMM_DEVICE Line end() const { return is_later_ ? message_.load_by_elements(line_) : value_; }

   private:
    const Message& message_;
    uint32_t line_;
    bool is_later_;
    const void* address_;
    Line value_{};
  };

  LLM_COMM_DEVICE Line load(uint32_t line) const {
    return line < input_whole_lines_ ? load_line(input_ + static_cast<uint64_t>(line) * kPerLine)
                                     : load_by_elements(line);
  }

  LLM_COMM_DEVICE void store(uint32_t line, Line value) const {
    const uint64_t first = static_cast<uint64_t>(line) * kPerLine;
    if (line < output_whole_lines_) {
      store_line(output_ + first, value);
    } else {
      store_elements<D>(output_ + first, count_ - first, value);
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
  LLM_COMM_DEVICE Line load_by_elements(uint32_t line) const {
    const uint64_t first = static_cast<uint64_t>(line) * kPerLine;
    return load_elements<D>(input_ + first, count_ - first);
  }

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
