// Sums that a switch makes: in any order, accumulated in fp32, rounded once. What they may be, and whether ranks agree on them.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "llm_comm/reduce.cuh"
#include "operands.h"

namespace drill {

inline float value_of(DataType type, uint32_t bits) {
  switch (type) {
    case DataType::kBFloat16:
      return Element<DataType::kBFloat16>::value(static_cast<uint16_t>(bits));
    case DataType::kFloat16:
      return Element<DataType::kFloat16>::value(static_cast<uint16_t>(bits));
    default:
      return bits_to_float(bits);
  }
}

inline float rounded_to(DataType type, float value) {
  switch (type) {
    case DataType::kBFloat16:
      return value_of(type, float_to_bf16(value));
    case DataType::kFloat16:
      return value_of(type, float_to_fp16(value));
    default:
      return value;
  }
}

// What a sum of such values may be, by numbers: of zeros any, of NaNs any.
class AnyOrder {
 public:
  AnyOrder(DataType type, const std::vector<uint32_t>& values) : type_(type) {
    double sum = 0;
    double magnitude = 0;
    for (const uint32_t bits : values) {
      const double value = value_of(type, bits);
      sum += value;
      magnitude += std::abs(value);
    }
    is_nan_ = std::isnan(sum);
    // Where fp32 overflows in one order and not in another, anything may come.
    is_any_ = !is_nan_ && std::isfinite(sum) && magnitude >= 0.99 * std::numeric_limits<float>::max();
    if (is_nan_ || !std::isfinite(sum)) {
      low_ = high_ = static_cast<float>(sum);
      return;
    }
    // Each of n - 1 additions is off by half a unit in the last place of at most `magnitude`.
    const double error = magnitude * static_cast<double>(values.size()) * 0x1p-24;
    const float infinity = std::numeric_limits<float>::infinity();
    low_ = rounded_to(type, std::nextafter(static_cast<float>(sum - error), -infinity));
    high_ = rounded_to(type, std::nextafter(static_cast<float>(sum + error), infinity));
  }

  bool holds(uint32_t bits) const {
    const float value = value_of(type_, bits);
    if (is_nan_) return std::isnan(value);
    return is_any_ || (low_ <= value && value <= high_);
  }
  std::string text() const {
    return is_nan_ ? "NaN" : "between " + std::to_string(low_) + " and " + std::to_string(high_);
  }

 private:
  DataType type_;
  bool is_nan_;
  bool is_any_;
  float low_;
  float high_;
};

// What the elements of a result may be, and what the first rank has got that was looked at.
class SwitchSums {
 public:
  void expect(DataType type, const std::vector<uint32_t>& values) { expected_.emplace_back(type, values); }

  // "" or what is wrong with the result of a rank. `is_shared`: all ranks get the same bits.
  std::string wrong(const Tensor& result, bool is_shared) const {
    std::vector<uint32_t> found;
    for (uint64_t i = 0; i < expected_.size(); ++i) {
      found.push_back(result.at(i));
      if (expected_[i].holds(found.back())) continue;
      return "element " + std::to_string(i) + " is " + hex(found.back()) + ", not " + expected_[i].text();
    }
    if (is_shared && !agreed_) agreed_ = found;
    return result.differs_from(is_shared ? *agreed_ : found);
  }

 private:
  std::vector<AnyOrder> expected_;
  mutable std::optional<std::vector<uint32_t>> agreed_;
};

}  // namespace drill
