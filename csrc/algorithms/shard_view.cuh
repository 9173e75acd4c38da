// ShardView: one rank's shard of a tensor of rows (shards.h) as 16-byte lines: whole lines where addresses are aligned,
// else element by element. Lines count from the start of the launch's range and continue across rows. Used by
// all operations on shards.
#pragma once

#include "algorithms/shards.h"
#include "algorithms/view_load.cuh"
#include "llm_comm/line.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Range of every shard that a launch processes, in elements.
struct Range {
  uint64_t first;
  uint64_t count;

  // Elements of the range that a shard of `length` elements has.
  LLM_COMM_DEVICE uint64_t within(uint64_t length) const {
    return length <= first ? 0 : (length - first < count ? length - first : count);
  }
};

// At least `least` lines of a shard are exchanged, so that every rank receives something from every other one even if
// shards are empty (R1 of operation.cuh).
LLM_COMM_DEVICE uint32_t at_least(uint32_t least, uint32_t lines) { return lines > least ? lines : least; }

// Lines to exchange for a shard that is sent and one that is received.
struct ExchangedLines {
  uint32_t sent;
  uint32_t received;

  LLM_COMM_DEVICE ExchangedLines(uint32_t of_source, uint32_t of_target, uint32_t greeting)
      : sent(at_least(greeting, of_source)), received(at_least(greeting, of_target)) {}

  LLM_COMM_DEVICE uint32_t most() const { return at_least(sent, received); }
};

template <DataType D>
class ShardView {
 public:
  using Storage = typename Element<D>::Storage;
  static constexpr uint32_t kPerLine = sizeof(Line) / sizeof(Storage);

  LLM_COMM_DEVICE ShardView() {}  // an empty view

  // `row_elements`: elements of a row of the tensor. 0: the shard is a contiguous tensor of its own.
  LLM_COMM_DEVICE ShardView(const void* tensor, const Shard& shard, uint64_t row_elements, const Range& range)
      : count_(range.within(shard.length)) {
    // A shard without gaps counts as one row.
    const bool has_gaps = row_elements != 0 && row_elements != shard.size && shard.length != shard.size;
    size_ = has_gaps ? static_cast<uint32_t>(shard.size) : 0;
    row_elements_ = row_elements;
    first_ = static_cast<const Storage*>(tensor) + (row_elements != 0 ? shard.first : 0) + (has_gaps ? 0 : range.first);
    begin_ = has_gaps ? static_cast<uint32_t>(range.first) : 0;
    const bool is_aligned = reinterpret_cast<uint64_t>(first_) % sizeof(Line) == 0 && size_ % kPerLine == 0 &&
                            begin_ % kPerLine == 0 && (!has_gaps || row_elements_ % kPerLine == 0);
    whole_lines_ = is_aligned ? static_cast<uint32_t>(count_ / kPerLine) : 0;
  }

  static LLM_COMM_DEVICE uint32_t lines_of(uint64_t elements) {
    return static_cast<uint32_t>((elements + kPerLine - 1) / kPerLine);
  }
  static LLM_COMM_DEVICE uint64_t bytes_of(uint64_t elements) { return elements * sizeof(Storage); }

  LLM_COMM_DEVICE uint32_t lines() const { return lines_of(count_); }

  // For a shard without gaps: address of a line, and bytes that exist of some lines.
  LLM_COMM_DEVICE const void* bytes_from(uint32_t line) const { return first_ + uint64_t{line} * kPerLine; }
  LLM_COMM_DEVICE uint64_t bytes_of_lines(uint32_t first, uint32_t lines) const {
    const uint64_t begin = uint64_t{first} * kPerLine;
    const uint64_t end = begin + uint64_t{lines} * kPerLine;
    return bytes_of((end < count_ ? end : count_) - begin);
  }

  // Depends on every address and bound that load() and store() use (for grid_dependency_wait_after).
  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(first_) + whole_lines_ + size_; }

  using Load = ViewLoad<ShardView>;

  LLM_COMM_DEVICE bool is_whole_input(uint32_t line) const { return line < whole_lines_; }
  LLM_COMM_DEVICE const void* input_from(uint32_t line) const { return address(uint64_t{line} * kPerLine); }

  // `Plain`: all lines of the launch are whole and contiguous (ShardsArgs::is_plain).
  template <bool Plain = false>
  LLM_COMM_DEVICE Line load(uint32_t line) const {
    if constexpr (Plain) {
      return load_line(plain_address(line));
    } else {
      return line < whole_lines_ ? load_line(address(uint64_t{line} * kPerLine)) : load_by_elements(line);
    }
  }

  // Missing elements are zeros.
  LLM_COMM_DEVICE Line load_by_elements(uint32_t line) const { return load_elements(elements_of(line)); }

  template <bool Plain = false>
  LLM_COMM_DEVICE void store(uint32_t line, Line value) const {
    if constexpr (Plain) {
      store_line(plain_address(line), value);
    } else if (line < whole_lines_) {
      store_line(address(uint64_t{line} * kPerLine), value);
    } else {
      store_elements(elements_of(line), value);
    }
  }

 private:
  // Location of the elements of one line.
  struct Elements {
    Storage* row;  // without gaps: the first element of the line
    uint64_t row_elements;
    uint32_t column;  // of the first element in its row
    uint32_t size;    // of a row of a shard with gaps, else 0
    uint32_t count;

    LLM_COMM_DEVICE Storage* operator[](uint32_t i) const {
      if (size == 0) return row + i;
      const uint32_t rows = (column + i) / size;
      return row + rows * row_elements + (column + i - rows * size);
    }
  };

  LLM_COMM_DEVICE Elements elements_of(uint32_t line) const {
    const uint64_t first = uint64_t{line} * kPerLine;
    const uint64_t left = first < count_ ? count_ - first : 0;
    const uint32_t count = left < kPerLine ? static_cast<uint32_t>(left) : kPerLine;
    auto* const tensor = const_cast<Storage*>(first_);
    if (size_ == 0) return {tensor + first, 0, 0, 0, count};
    return {tensor, row_elements_, begin_ + static_cast<uint32_t>(first), size_, count};
  }

  // Slow path for unaligned or partial lines. Not inlined, so that its instructions stay out of the hot path.
  static LLM_COMM_DEVICE_CALL Line load_elements(Elements elements) {
    Line loaded{};
    for (uint32_t i = 0; i < elements.count; ++i) {
      const uint32_t value = *elements[i];
      or_into_word(loaded, i * sizeof(Storage) / 4, value << (i * sizeof(Storage) % 4 * 8));
    }
    return loaded;
  }

  static LLM_COMM_DEVICE_CALL void store_elements(Elements elements, Line value) {
    for (uint32_t i = 0; i < elements.count; ++i) {
      *elements[i] = static_cast<Storage>(word_at(value, i * sizeof(Storage) / 4) >> (i * sizeof(Storage) % 4 * 8));
    }
  }

  LLM_COMM_DEVICE Storage* plain_address(uint32_t line) const {
    return const_cast<Storage*>(first_) + uint64_t{line} * kPerLine;
  }

  LLM_COMM_DEVICE Storage* address(uint64_t element) const {
    if (size_ == 0) return const_cast<Storage*>(first_) + element;
    const uint32_t place = begin_ + static_cast<uint32_t>(element);
    const uint32_t row = place / size_;
    return const_cast<Storage*>(first_) + row * row_elements_ + (place - row * size_);
  }

  const Storage* first_;   // first element of the shard; without gaps: of the launch's range
  uint64_t row_elements_;  // of the tensor
  uint64_t count_;
  uint32_t size_;         // of a row of a shard with gaps, else 0
  uint32_t begin_;        // with gaps: element of the shard where the launch begins
  uint32_t whole_lines_;  // lines that can be accessed whole
};

// Combined values of several shards.
template <DataType D, uint32_t N>
LLM_COMM_DEVICE uint64_t precomputed(const ShardView<D> (&shards)[N]) {
  uint64_t sum = 0;
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < N; ++i) sum += shards[i].precomputed();
  return sum;
}
template <DataType D, uint32_t N>
LLM_COMM_DEVICE uint32_t most_lines(const ShardView<D> (&shards)[N]) {
  uint32_t most = 0;
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < N; ++i) most = at_least(most, shards[i].lines());
  return most;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
