// Emulator definitions of the platform contract (platform.cuh). A GPU thread is a fiber of the executor. Peer memory is
// memory that other emulated GPUs map too. Every access to memory that threads share passes through this file. Under
// the driver "processes" it is an access of the CPU. Under the deterministic driver (LLM_COMM_DETERMINISTIC) it is an
// access to a model of weak memory, which delays, reorders and tears it.
#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <cmath>

#include "llm_comm/platform_types.h"

#define LLM_COMM_DEVICE inline
#define LLM_COMM_DEVICE_CALL inline
#define LLM_COMM_KERNEL(max_threads) void
#define LLM_COMM_KERNEL_PARAM const
#define LLM_COMM_UNROLL(n)

namespace llm_comm::inline LLM_COMM_TARGET {

namespace emulator {

// Identity of a running fiber. The executor sets it before it resumes the fiber.
struct ThreadContext {
  uint32_t thread_index;
  uint32_t block_index;
  uint32_t block_threads;
  uint32_t block_count;
  uint32_t cluster_blocks;
  void* shared_memory;
  void* const* cluster_shared_memory;  // one pointer per block of the cluster
};

const ThreadContext& self();
// Suspends this fiber until every unfinished fiber of its block has called block_barrier().
void block_barrier();
// Suspends this fiber until every unfinished fiber of its warp has called warp_exchange(). Returns the value of fiber
// `lane`.
float warp_exchange(float value, uint32_t lane);
// Two halves of a cluster barrier: arrive counts this fiber; wait suspends it until every unfinished fiber of its
// cluster has arrived.
void cluster_barrier_arrive();
void cluster_barrier_wait();
// Suspends this fiber after a failed poll; the executor runs others first.
void yield();

}  // namespace emulator

LLM_COMM_DEVICE uint32_t thread_index() { return emulator::self().thread_index; }
LLM_COMM_DEVICE uint32_t block_index() { return emulator::self().block_index; }
LLM_COMM_DEVICE uint32_t block_threads() { return emulator::self().block_threads; }
LLM_COMM_DEVICE uint32_t block_count() { return emulator::self().block_count; }
LLM_COMM_DEVICE uint32_t cluster_index() { return block_index() / emulator::self().cluster_blocks; }
LLM_COMM_DEVICE uint32_t cluster_block_rank() { return block_index() % emulator::self().cluster_blocks; }

LLM_COMM_DEVICE void block_sync() { emulator::block_barrier(); }

template <class T>
LLM_COMM_DEVICE T* opaque(T* address) {
  return address;
}

template <class T>
LLM_COMM_DEVICE T* shared_memory() {
  return static_cast<T*>(emulator::self().shared_memory);
}

// The fibers of a block belong to one thread of the operating system.
LLM_COMM_DEVICE void set_bits(uint32_t* word, uint32_t bits) { *word |= bits; }

LLM_COMM_DEVICE uint32_t count_bits(uint32_t bits) { return static_cast<uint32_t>(std::popcount(bits)); }

LLM_COMM_DEVICE float shuffle_xor(float value, uint32_t lane_mask) {
  return emulator::warp_exchange(value, thread_index() % kWarpThreads ^ lane_mask);
}

LLM_COMM_DEVICE bool any_lane(bool holds) {
  float any = holds ? 1.0f : 0.0f;
  for (uint32_t mask = 1; mask < kWarpThreads; mask *= 2) any = std::fmax(any, shuffle_xor(any, mask));
  return any != 0.0f;
}

LLM_COMM_DEVICE void cluster_arrive_relaxed() { emulator::cluster_barrier_arrive(); }
LLM_COMM_DEVICE void cluster_arrive() { emulator::cluster_barrier_arrive(); }
LLM_COMM_DEVICE void cluster_wait() { emulator::cluster_barrier_wait(); }

// Address in block `block` of the cluster that corresponds to `address` in this block's shared memory.
template <class T>
LLM_COMM_DEVICE T* in_block(T* address, uint32_t block) {
  const auto& thread = emulator::self();
  const auto offset = reinterpret_cast<char*>(address) - static_cast<char*>(thread.shared_memory);
  return reinterpret_cast<T*>(static_cast<char*>(thread.cluster_shared_memory[block]) + offset);
}

LLM_COMM_DEVICE float load_of_block(const float* address, uint32_t block) {
  return *in_block(const_cast<float*>(address), block);
}

LLM_COMM_DEVICE uint32_t of_first_in_cluster(uint32_t* address) {
  cluster_arrive_relaxed();
  cluster_wait();
  const uint32_t value = *in_block(address, 0);
  cluster_arrive_relaxed();
  cluster_wait();
  return value;
}

// Layout of a delivery word: upper half, completed phases; lower half, bytes to come, plus kDeliveryUnexpected until
// delivery_expect() is called. Plain accesses suffice because the threads of a cluster are fibers of one OS thread.
inline constexpr uint64_t kDeliveryUnexpected = 1 << 20;

LLM_COMM_DEVICE void count_delivery(uint64_t* delivery, uint64_t change) {
  *delivery += change;
  if (static_cast<uint32_t>(*delivery) == 0) *delivery += (uint64_t{1} << 32) + kDeliveryUnexpected;
}

LLM_COMM_DEVICE void delivery_init(uint64_t* delivery, uint32_t /*values*/, uint32_t /*blocks*/) {
  *delivery = kDeliveryUnexpected;
}

LLM_COMM_DEVICE void delivery_expect(uint64_t* delivery, uint32_t values, uint32_t /*blocks*/) {
  count_delivery(delivery, uint64_t{values} * sizeof(float) - kDeliveryUnexpected);
}

LLM_COMM_DEVICE void deliver(float* address, uint32_t block, float value, uint64_t* delivery, uint32_t /*blocks*/) {
  *in_block(address, block) = value;
  count_delivery(in_block(delivery, block), -uint64_t{sizeof(float)});
}

LLM_COMM_DEVICE void deliver_four(float* address, uint32_t block, const float (&values)[4], uint64_t* delivery) {
  for (uint32_t i = 0; i < 4; ++i) in_block(address, block)[i] = values[i];
  count_delivery(in_block(delivery, block), -uint64_t{sizeof(values)});
}

LLM_COMM_DEVICE void delivery_wait(uint64_t* delivery, uint32_t parity) {
  while ((*delivery >> 32 & 1) == parity) emulator::yield();
}

LLM_COMM_DEVICE uint32_t word_at(const Line& line, uint32_t i) { return line.word[i]; }
LLM_COMM_DEVICE void or_into_word(Line& line, uint32_t i, uint32_t bits) { line.word[i] |= bits; }

#if defined(LLM_COMM_DETERMINISTIC)

namespace emulator {

enum class Order { kWeak, kRelaxed, kAcquire, kRelease };
// Address through which memory is accessed: the owner's mapping, or the multicast mapping of all ranks.
enum class Alias { kOwn, kMulticast };

// Accesses of the running fiber; defined in accesses.cpp. `unit`: bytes that are read or written atomically, 4 or 8.
void load(const void* address, void* to, uint32_t bytes, uint32_t unit, Order order, Alias alias = Alias::kOwn);
void store(void* address, const void* from, uint32_t bytes, uint32_t unit, Order order, Alias alias = Alias::kOwn);
// Read-modify-write of 4 or 8 bytes. Returns the old value and stores update(old value).
uint64_t modify(void* address, uint32_t bytes, uint64_t (*update)(uint64_t found, const void* arguments),
                const void* arguments, Alias alias = Alias::kOwn);
void fence();
void alias_fence();
void trigger_dependents();
void wait_for_prerequisites();
uint64_t virtual_clock_ns();

template <class T>
T load_as(const void* address, uint32_t unit, Order order) {
  static_assert(sizeof(T) % 4 == 0, "the model of memory knows words of 4 bytes");
  T value;
  load(address, &value, sizeof(T), unit, order);
  return value;
}

}  // namespace emulator

LLM_COMM_DEVICE void grid_dependency_trigger() { emulator::trigger_dependents(); }
LLM_COMM_DEVICE void grid_dependency_wait() { emulator::wait_for_prerequisites(); }
LLM_COMM_DEVICE void grid_dependency_wait_after(uint64_t) { emulator::wait_for_prerequisites(); }

template <class T>
LLM_COMM_DEVICE T load_plain(const T* address) {
  return emulator::load_as<T>(address, 4, emulator::Order::kWeak);
}

template <class T>
LLM_COMM_DEVICE void store_plain(T* address, T value) {
  static_assert(sizeof(T) % 4 == 0, "the model of memory knows words of 4 bytes");
  emulator::store(address, &value, sizeof(T), 4, emulator::Order::kWeak);
}

LLM_COMM_DEVICE Line load_line(const void* address) { return load_plain(static_cast<const Line*>(address)); }
LLM_COMM_DEVICE void store_line(void* address, Line line) { store_plain(static_cast<Line*>(address), line); }

template <class T>
LLM_COMM_DEVICE T load_relaxed(const T* address) {
  return emulator::load_as<T>(address, sizeof(T), emulator::Order::kRelaxed);
}

template <class T>
LLM_COMM_DEVICE T load_acquire(const T* address) {
  return emulator::load_as<T>(address, sizeof(T), emulator::Order::kAcquire);
}

template <class T>
LLM_COMM_DEVICE void store_relaxed(T* address, T value) {
  emulator::store(address, &value, sizeof(T), sizeof(T), emulator::Order::kRelaxed);
}

template <class T>
LLM_COMM_DEVICE void store_release(T* address, T value) {
  emulator::store(address, &value, sizeof(T), sizeof(T), emulator::Order::kRelease);
}

LLM_COMM_DEVICE Line load_line_relaxed(const void* address) {
  return emulator::load_as<Line>(address, 4, emulator::Order::kRelaxed);
}

LLM_COMM_DEVICE void store_line_relaxed(void* address, Line line) {
  emulator::store(address, &line, sizeof(Line), 4, emulator::Order::kRelaxed);
}

LLM_COMM_DEVICE Line load_packet_relaxed(const void* address) {
  return emulator::load_as<Line>(address, 8, emulator::Order::kRelaxed);
}

LLM_COMM_DEVICE void store_packet_relaxed(void* address, Line line) {
  emulator::store(address, &line, sizeof(Line), 8, emulator::Order::kRelaxed);
}

template <uint32_t Packets>
void store_packets_release(void* address, const Line (&packets)[Packets]) {
  emulator::store(address, packets, sizeof(packets), 8, emulator::Order::kRelease);
}

LLM_COMM_DEVICE void fence_system() { emulator::fence(); }

LLM_COMM_DEVICE uint64_t fetch_add(uint64_t* address, uint64_t n) {
  return emulator::modify(
      address, sizeof(uint64_t),
      [](uint64_t found, const void* summand) { return found + *static_cast<const uint64_t*>(summand); }, &n);
}
LLM_COMM_DEVICE void add_relaxed(uint64_t* address, uint64_t n) { fetch_add(address, n); }

LLM_COMM_DEVICE uint32_t compare_and_swap(uint32_t* address, uint32_t expected, uint32_t desired) {
  const uint32_t arguments[] = {expected, desired};
  const auto update = [](uint64_t found, const void* pair) -> uint64_t {
    const auto* const words = static_cast<const uint32_t*>(pair);
    return found == words[0] ? words[1] : found;
  };
  return static_cast<uint32_t>(emulator::modify(address, sizeof(uint32_t), update, arguments));
}

LLM_COMM_DEVICE uint32_t count_up(uint32_t* address, uint32_t last) {
  const auto update = [](uint64_t found, const void* most) -> uint64_t {
    return found >= *static_cast<const uint32_t*>(most) ? 0 : found + 1;
  };
  return static_cast<uint32_t>(emulator::modify(address, sizeof(uint32_t), update, &last));
}

LLM_COMM_DEVICE uint64_t clock_ns() { return emulator::virtual_clock_ns(); }

#else  // the driver "processes"

// Launches of an emulated GPU never overlap.
LLM_COMM_DEVICE void grid_dependency_trigger() {}
LLM_COMM_DEVICE void grid_dependency_wait() {}
LLM_COMM_DEVICE void grid_dependency_wait_after(uint64_t) {}

LLM_COMM_DEVICE Line load_line(const void* address) { return *static_cast<const Line*>(address); }
LLM_COMM_DEVICE void store_line(void* address, Line line) { *static_cast<Line*>(address) = line; }

template <class T>
LLM_COMM_DEVICE T load_relaxed(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

template <class T>
LLM_COMM_DEVICE T load_acquire(const T* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

template <class T>
LLM_COMM_DEVICE void store_relaxed(T* address, T value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

template <class T>
LLM_COMM_DEVICE void store_release(T* address, T value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

template <class T>
LLM_COMM_DEVICE T load_plain(const T* address) {
  return *address;
}

template <class T>
LLM_COMM_DEVICE void store_plain(T* address, T value) {
  *address = value;
}

LLM_COMM_DEVICE Line load_line_relaxed(const void* address) {
  const uint32_t* words = static_cast<const uint32_t*>(address);
  return {{load_relaxed(words), load_relaxed(words + 1), load_relaxed(words + 2), load_relaxed(words + 3)}};
}

LLM_COMM_DEVICE void store_line_relaxed(void* address, Line line) {
  uint32_t* words = static_cast<uint32_t*>(address);
  for (int i = 0; i < 4; ++i) store_relaxed(words + i, line.word[i]);
}

LLM_COMM_DEVICE Line load_packet_relaxed(const void* address) {
  const uint64_t* halves = static_cast<const uint64_t*>(address);
  return std::bit_cast<Line>(std::array<uint64_t, 2>{load_relaxed(halves), load_relaxed(halves + 1)});
}

LLM_COMM_DEVICE void store_packet_relaxed(void* address, Line line) {
  uint64_t* halves = static_cast<uint64_t*>(address);
  const auto values = std::bit_cast<std::array<uint64_t, 2>>(line);
  for (int i = 0; i < 2; ++i) store_relaxed(halves + i, values[i]);
}

template <uint32_t Packets>
void store_packets_release(void* address, const Line (&packets)[Packets]) {
  uint64_t* halves = static_cast<uint64_t*>(address);
  for (const Line& packet : packets) {
    for (const uint64_t half : std::bit_cast<std::array<uint64_t, 2>>(packet)) store_release(halves++, half);
  }
}

// ThreadSanitizer does not support fences. Leaving the fence out hides no race: it orders blocks of a rank, which are
// fibers of one OS thread.
LLM_COMM_DEVICE void fence_system() {
#ifdef __SANITIZE_THREAD__
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

LLM_COMM_DEVICE uint64_t fetch_add(uint64_t* address, uint64_t n) {
  return __atomic_fetch_add(address, n, __ATOMIC_RELAXED);
}
LLM_COMM_DEVICE void add_relaxed(uint64_t* address, uint64_t n) { __atomic_fetch_add(address, n, __ATOMIC_RELAXED); }

LLM_COMM_DEVICE uint32_t compare_and_swap(uint32_t* address, uint32_t expected, uint32_t desired) {
  __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

LLM_COMM_DEVICE uint32_t count_up(uint32_t* address, uint32_t last) {
  uint32_t found = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &found, found >= last ? 0 : found + 1, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return found;
}

LLM_COMM_DEVICE uint64_t clock_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

#endif  // LLM_COMM_DETERMINISTIC

// As load_acquire.
template <class T, class HasCome>
LLM_COMM_DEVICE bool poll_acquire(const T* address, HasCome has_come) {
  return has_come(load_acquire(address));
}

template <uint32_t Words>
void load_words(const void* address, uint32_t (&word)[Words]) {
  for (uint32_t i = 0; i < Words; ++i) word[i] = load_plain(static_cast<const uint32_t*>(address) + i);
}

LLM_COMM_DEVICE void load_line_relaxed_if(bool is_wanted, const void* address, Line& line) {
  if (is_wanted) line = load_line_relaxed(address);
}

// Small, because a failed poll yields to other ranks, which may take a scheduler tick.
inline constexpr uint32_t kPollsPerCheck = 4;

LLM_COMM_DEVICE void spin_hint() { emulator::yield(); }

LLM_COMM_DEVICE float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }

// Converts every NaN to 0x7FFFFFFF, as GPU arithmetic does. A CPU would pass the payload on, and all targets must agree
// on the bits.
LLM_COMM_DEVICE uint32_t float_to_bits(float value) {
  return std::isnan(value) ? 0x7FFFFFFFu : std::bit_cast<uint32_t>(value);
}

// In integer arithmetic: GCC 11 has no fp16 type in C++20.
LLM_COMM_DEVICE float fp16_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t rest = bits & 0x7FFFu;
  uint32_t magnitude = (rest << 13) + 0x38000000u;              // exponents begin at -14, not -126
  if (rest >= 0x7C00u) magnitude = (rest << 13) | 0x7F800000u;  // infinity, NaN
  if (rest < 0x0400u) magnitude = std::bit_cast<uint32_t>(static_cast<float>(rest) * 0x1p-24f);  // subnormal
  return std::bit_cast<float>(sign | magnitude);
}

LLM_COMM_DEVICE uint16_t float_to_fp16(float value) {  // rounds to nearest, ties to even
  if (std::isnan(value)) return 0x7FFF;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rest = bits & 0x7FFFFFFFu;
  uint32_t magnitude = 0x7C00u;  // infinity, from 65536 on
  if (rest < 0x38800000u) {      // subnormal: beside 0.5, a unit in the last place is 2^-24
    magnitude = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3F000000u;
  } else if (rest < 0x47800000u) {
    magnitude = (rest - 0x38000000u + 0xFFFu + ((rest >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | magnitude);
}

LLM_COMM_DEVICE uint16_t float_to_bf16(float value) {
  if (std::isnan(value)) return 0x7FFF;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);  // round to nearest, ties to even
}

LLM_COMM_DEVICE uint32_t floats_to_bf16(float low, float high) {
  return float_to_bf16(low) | uint32_t{float_to_bf16(high)} << 16;
}

LLM_COMM_DEVICE uint32_t floats_to_fp16(float low, float high) {
  return float_to_fp16(low) | uint32_t{float_to_fp16(high)} << 16;
}

LLM_COMM_DEVICE float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
LLM_COMM_DEVICE float reciprocal_sqrt(float value) { return 1.0f / std::sqrt(value); }
LLM_COMM_DEVICE float exponential(float value) { return std::exp(value); }
LLM_COMM_DEVICE float larger(float a, float b) { return std::fmax(a, b); }
LLM_COMM_DEVICE bool convert_to_e4m3(float, float, uint16_t&) { return false; }
LLM_COMM_DEVICE bool convert_from_e4m3(uint16_t, float&, float&) { return false; }

}  // namespace llm_comm::inline LLM_COMM_TARGET
