// Detects overlapping or reordered operations of a communicator from two counters per rank. Core::check_order() uses
// it; no debug option is needed.
//
// The problem. Nothing orders a graph replay against eager calls or against another graph. Two operations may then get
// the same number, or different numbers on different ranks, and ranks add unrelated data.
//
// The method. Each device accumulates a checksum over its operations in CommState::order (Operation::arrive()). The
// host reads it afterwards:
//
//   low half    sum of the operation numbers. If no two operations had the same number, it follows from their count
//   high half   sum of number * call hash. Equal on ranks with equal counts if the same calls had the same numbers
//
// The host reads count and checksum while operations run. The checksum may therefore lack the last operation or include
// the next one; such a pair is not evaluated. Not detected: overlapping operations with distinct numbers that agree on
// all ranks, and identical calls in another order.
#pragma once

#include <cstdint>

#include "llm_comm/operation.cuh"
#include "llm_comm/wait.cuh"

namespace llm_comm::host {

// Counters of one rank. The checksum was read between two reads of the count that returned the same value.
struct OrderOnRank {
  uint64_t operations;
  uint64_t order;

  // Sum of the numbers 0 to n - 1.
  static constexpr uint32_t sum_of_numbers(uint64_t n) {
    return static_cast<uint32_t>(n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n);
  }
  // True if the checksum covers exactly `operations` operations with distinct numbers.
  constexpr bool is_settled() const { return static_cast<uint32_t>(order) == sum_of_numbers(operations); }
  // True if two operations had the same number, whether the checksum lacks the last operation or includes the next one.
  // If the very first two operations overlapped, the third reveals it.
  constexpr bool has_overlap() const {
    const auto sum = static_cast<uint32_t>(order);
    const bool lacks_last = operations != 0 && sum == sum_of_numbers(operations - 1);
    return !is_settled() && !lacks_last && sum != sum_of_numbers(operations + 1);
  }
  // True if both ranks have finished equally many operations, but not the same ones in the same order.
  constexpr bool differs_from(const OrderOnRank& other) const {
    return operations == other.operations && is_settled() && other.is_settled() && order != other.order;
  }
};

// Value of DeviceComm::call for a launch: a hash of everything that ranks must agree on, except the call number. An
// additional capture on one rank changes the call number.
inline uint32_t hash_of(const CallSignature& call) {
  uint64_t hash = 0xCBF29CE484222325u;
  const auto add = [&](uint64_t value) { hash = (hash ^ value ^ value >> 29) * 0x9E3779B97F4A7C15u; };
  add(uint64_t{call.operation} << 32 | call.count);
  add(uint64_t{call.data_type} << 16 | call.row);
  add(call.buffers);
  for (const uint64_t bits : call.parameter_bits) add(bits);
  return static_cast<uint32_t>(hash >> 32) | 1;
}

}  // namespace llm_comm::host
