// Tensors of a schedule: what they hold before, and how they differ from what they should hold after.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "emulator/deterministic/random.h"
#include "llm_comm/data_type.h"
#include "llm_comm/line.cuh"
#include "schedules/values.h"

namespace drill {

using namespace llm_comm;  // NOLINT: a test of its kernels
using emulator::Random;

using schedules::draw_number;
using schedules::draw_value;
using schedules::hex;

// What outputs hold at first.
constexpr char kUntouched = '\x5A';

// "" or where bytes are not as they were at first.
std::string touched_in(const char* first, size_t bytes);

// A rank's tensor, whose first element need not be aligned to a line.
class Tensor {
 public:
  Tensor(DataType type, uint64_t count, Random& random) : type_(type), count_(count) {
    const uint32_t per_line = static_cast<uint32_t>(sizeof(Line)) / bytes();
    offset_ = random.chance(64) ? random.below(per_line) * bytes() : 0;
    // To the byte: a sanitizer sees the first one behind it. The heap aligns to lines.
    bytes_ = std::vector<char>(offset_ + count * bytes(), kUntouched);
  }

  // It lies there from now on, with what it holds, and with a line behind it that is zero and that nobody writes. Aligned.
  void move_to(char* place) {
    std::memcpy(place, first(), count_ * bytes());
    place_ = place;
  }
  uint64_t bytes_in_all() const { return count_ * bytes(); }
  uint64_t bytes_with_guard() const { return count_ * bytes() + sizeof(Line); }

  uint64_t address() const { return reinterpret_cast<uint64_t>(first()); }
  uint32_t at(uint64_t i) const {
    uint32_t value = 0;
    std::memcpy(&value, first() + i * bytes(), bytes());
    return value;
  }
  void set(uint64_t i, uint32_t value) { std::memcpy(bytes_.data() + offset_ + i * bytes(), &value, bytes()); }

  // Draws all elements.
  void fill(Random& random) {
    for (uint64_t i = 0; i < count_; ++i) set(i, draw_value(type_, random));
    // Bytes hardly ever make up the words that algorithms treat in a way of their own.
    for (uint64_t i = 0; type_ == DataType::kByte && i + 4 <= count_; i += 4) {
      if (!random.chance(48)) continue;
      const uint32_t word = random.pick({kSentinel, kSentinel - 1});
      for (uint32_t byte = 0; byte < 4; ++byte) set(i + byte, word >> 8 * byte & 0xFF);
    }
  }

  void scribble() { std::fill(bytes_.begin(), bytes_.end(), kUntouched); }

  // "" or what is wrong.
  std::string differs_from(const std::vector<uint32_t>& expected) const {
    for (uint64_t i = 0; i < count_; ++i) {
      if (at(i) == expected[i]) continue;
      return "element " + std::to_string(i) + " of " + std::to_string(count_) + " is " + hex(at(i)) + ", not " +
             hex(expected[i]);
    }
    for (uint64_t i = count_ * bytes(); place_ != nullptr && i < bytes_with_guard(); ++i) {
      if (place_[i] != 0) return "byte " + std::to_string(i - count_ * bytes()) + " behind it has been written";
    }
    return "";
  }

  std::string touched() const {
    return place_ == nullptr ? touched_in(bytes_.data(), bytes_.size()) : touched_in(place_, count_ * bytes());
  }

 private:
  const char* first() const { return place_ == nullptr ? bytes_.data() + offset_ : place_; }

  uint32_t bytes() const { return element_bytes(type_); }

  DataType type_;
  uint64_t count_;
  std::vector<char> bytes_;
  size_t offset_;
  char* place_ = nullptr;
};

}  // namespace drill
