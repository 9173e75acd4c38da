// Message: the caller's tensors as 16-byte lines: whole lines where pointers are aligned, else element by element. Used
// by the all-reduce algorithms.
#pragma once

#include "algorithms/all_reduce/operation.cuh"
#include "algorithms/line_elements.cuh"
#include "algorithms/view_load.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Input and output of this rank. The last line may be partial and pointers may be only element-aligned. Both cases take
// the slow path, with zeros in place of missing elements.
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

  // Addresses of a line, and bytes that exist of some lines.
  LLM_COMM_DEVICE const void* input_from(uint32_t line) const { return input_ + uint64_t{line} * kPerLine; }
  LLM_COMM_DEVICE const void* output_from(uint32_t line) const { return output_ + uint64_t{line} * kPerLine; }
  LLM_COMM_DEVICE uint64_t bytes_of_lines(uint32_t first, uint32_t lines) const {
    const uint64_t begin = uint64_t{first} * kPerLine;
    const uint64_t end = begin + uint64_t{lines} * kPerLine;
    return ((end < count_ ? end : count_) - begin) * sizeof(Storage);
  }

  // Depends on every address and bound that load() and store() use (for grid_dependency_wait_after).
  LLM_COMM_DEVICE uint64_t precomputed() const {
    return reinterpret_cast<uint64_t>(input_) + reinterpret_cast<uint64_t>(output_) + input_whole_lines_ +
           output_whole_lines_;
  }

  using Load = ViewLoad<Message>;

  LLM_COMM_DEVICE bool is_whole_input(uint32_t line) const { return line < input_whole_lines_; }

  LLM_COMM_DEVICE Line load(uint32_t line) const {
    return line < input_whole_lines_ ? load_line(input_ + static_cast<uint64_t>(line) * kPerLine)
                                     : load_by_elements(line);
  }

  LLM_COMM_DEVICE Line load_by_elements(uint32_t line) const {
    const uint64_t first = static_cast<uint64_t>(line) * kPerLine;
    return load_elements<D>(input_ + first, count_ - first);
  }

  LLM_COMM_DEVICE void store(uint32_t line, Line value) const {
    const uint64_t first = static_cast<uint64_t>(line) * kPerLine;
    if (line < output_whole_lines_) {
      store_line(output_ + first, value);
    } else {
      store_elements<D>(output_ + first, count_ - first, value);
    }
  }

  // Stores the existing elements of the pack that starts at element `first`, a multiple of Width.
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
  // Lines that can be accessed whole.
  uint32_t input_whole_lines_;
  uint32_t output_whole_lines_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
