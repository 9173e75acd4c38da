// NVLink multicast of emulated GPUs (platform.cuh). Each access loops over the memories of all ranks in a random order,
// because a real switch guarantees no order: neither of its additions, nor of the arrival of what it forwards. Sums are
// accumulated in fp32 and rounded once.
//
// Under the driver "processes" other threads and ranks may run between the stores to two memories. Under the
// deterministic driver each store is delayed and torn separately, and every access uses the multicast alias
// (weak_memory.h).
#pragma once

#include "llm_comm/platform_emulator.h"

namespace llm_comm::inline LLM_COMM_TARGET {

namespace emulator {

// Random number below `bound`, from the seed of the schedule or of the rank's executor. Called by a GPU thread.
uint32_t draw_below(uint32_t bound);

// The ranks in a random order.
struct DrawnRanks {
  static constexpr uint32_t kMost = 16;
  uint32_t rank[kMost];

  explicit DrawnRanks(uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t at = draw_below(i + 1);
      rank[i] = rank[at];
      rank[at] = i;
    }
  }
};

// Accesses to one of the memories through the multicast alias.
#if defined(LLM_COMM_DETERMINISTIC)
inline Line load_by_switch(const char* address) {
  Line line;
  load(address, &line, sizeof(Line), 4, Order::kRelaxed, Alias::kMulticast);
  return line;
}
inline void store_by_switch(char* address, Line line) {
  store(address, &line, sizeof(Line), 4, Order::kRelaxed, Alias::kMulticast);
}
template <class T>
void add_by_switch(char* address, T n) {
  modify(
      address, sizeof(T), [](uint64_t found, const void* summand) { return found + *static_cast<const T*>(summand); },
      &n, Alias::kMulticast);
}
#else
inline Line load_by_switch(const char* address) { return load_line_relaxed(address); }
inline void store_by_switch(char* address, Line line) {
  store_line_relaxed(address, line);
  if (draw_below(8) == 0) yield();
}
template <class T>
void add_by_switch(char* address, T n) {
  __atomic_fetch_add(reinterpret_cast<T*>(address), n, __ATOMIC_RELAXED);
  if (draw_below(8) == 0) yield();
}
#endif

inline char* of_rank(const MulticastAddress& address, uint32_t rank) { return address.each[rank] + address.offset; }

template <class Storage, class Value, class Round>
Line load_reduce(const MulticastAddress& address, Value value, Round round) {
  constexpr uint32_t kElements = sizeof(Line) / sizeof(Storage);
  const DrawnRanks order(address.count);
  float sum[kElements];
  for (uint32_t i = 0; i < address.count; ++i) {
    const auto found = std::bit_cast<std::array<Storage, kElements>>(load_by_switch(of_rank(address, order.rank[i])));
    for (uint32_t e = 0; e < kElements; ++e) sum[e] = i == 0 ? value(found[e]) : sum[e] + value(found[e]);
  }
  std::array<Storage, kElements> rounded;
  for (uint32_t e = 0; e < kElements; ++e) rounded[e] = round(sum[e]);
  return std::bit_cast<Line>(rounded);
}

template <class T>
void add_everywhere(const MulticastAddress& address, T n) {
  const DrawnRanks order(address.count);
  for (uint32_t i = 0; i < address.count; ++i) add_by_switch(of_rank(address, order.rank[i]), n);
}

}  // namespace emulator

LLM_COMM_DEVICE Line multicast_load_reduce_bf16(const MulticastAddress& address) {
  return emulator::load_reduce<uint16_t>(
      address, [](uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }, &float_to_bf16);
}
LLM_COMM_DEVICE Line multicast_load_reduce_fp16(const MulticastAddress& address) {
  return emulator::load_reduce<uint16_t>(address, &fp16_to_float, &float_to_fp16);
}
LLM_COMM_DEVICE Line multicast_load_reduce_fp32(const MulticastAddress& address) {
  return emulator::load_reduce<uint32_t>(address, &bits_to_float, &float_to_bits);
}

LLM_COMM_DEVICE void multicast_store_line(const MulticastAddress& address, Line line) {
  const emulator::DrawnRanks order(address.count);
  for (uint32_t i = 0; i < address.count; ++i)
    emulator::store_by_switch(emulator::of_rank(address, order.rank[i]), line);
}

LLM_COMM_DEVICE void multicast_add_relaxed(const MulticastAddress& address, uint32_t n) {
  emulator::add_everywhere(address, n);
}
LLM_COMM_DEVICE void multicast_add_relaxed(const MulticastAddress& address, uint64_t n) {
  emulator::add_everywhere(address, n);
}

// A release is a fence followed by the access (PTX ISA, "Release and Acquire Patterns"). fence_system() is stronger
// than needed.
LLM_COMM_DEVICE void multicast_add_release(const MulticastAddress& address, uint32_t n) {
  fence_system();
  emulator::add_everywhere(address, n);
}
LLM_COMM_DEVICE void multicast_add_release(const MulticastAddress& address, uint64_t n) {
  fence_system();
  emulator::add_everywhere(address, n);
}

#if defined(LLM_COMM_DETERMINISTIC)
LLM_COMM_DEVICE void fence_aliases() { emulator::alias_fence(); }
#else
LLM_COMM_DEVICE void fence_aliases() { fence_system(); }
#endif

}  // namespace llm_comm::inline LLM_COMM_TARGET
