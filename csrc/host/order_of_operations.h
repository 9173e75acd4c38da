// The order of a communicator's operations, as the host sees it without debug: on this rank, and beside that of a peer.
//
// Nothing orders a graph that is replayed beside eager calls, or beside another graph. Operations of both may get one number, or other
// numbers on other ranks. Then ranks add up what does not belong together.
//
// The device of a rank adds up two values over its operations, in CommState::order (Operation::arrive()). The host reads the sum and
// finds either case, behind the fact:
//
//   low half    the sum of the numbers that operations had. It follows from the count of operations, if no two had the same number
//   high half   the sum of number times call. Ranks that have ended as many operations agree, if like calls had like numbers
//
// The host reads the count and the sum while operations run, so the sum may lack the last operation or have the next one. Such a sum
// proves nothing. Not found: operations that overlap and have numbers of their own, the same on all ranks; like calls in another order.
#pragma once

#include <cstdint>

#include "llm_comm/operation.cuh"
#include "llm_comm/wait.cuh"

namespace llm_comm::host {

// The words of one rank: the sum, read between two looks at the count of operations, which was the same both times.
struct OrderOnRank {
  uint64_t operations;
  uint64_t order;

  // The sum of the numbers 0 to n - 1.
  static constexpr uint32_t sum_of_numbers(uint64_t n) {
    return static_cast<uint32_t>(n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n);
  }
  // The sum holds the operations that the count says, each with a number of its own.
  constexpr bool is_settled() const { return static_cast<uint32_t>(order) == sum_of_numbers(operations); }
  // Some operations had one number, whether or not the last one is in the sum, or the next one. Where these were the first two of
  // all, that shows with the third.
  constexpr bool has_overlap() const {
    const auto sum = static_cast<uint32_t>(order);
    const bool lacks_last = operations != 0 && sum == sum_of_numbers(operations - 1);
    return !is_settled() && !lacks_last && sum != sum_of_numbers(operations + 1);
  }
  // Both ranks have ended as many operations, and they were not the same ones in the same order.
  constexpr bool differs_from(const OrderOnRank& other) const {
    return operations == other.operations && is_settled() && other.is_settled() && order != other.order;
  }
};

// DeviceComm::call of a launch: of what the ranks have to agree on anyway, but not of its number, which one more capture on one
// rank would change.
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
