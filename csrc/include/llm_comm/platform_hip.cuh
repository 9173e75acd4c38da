// AMD GPUs of the CDNA 3 and 4 architectures (gfx942, gfx950): definitions of the platform contract (platform.cuh) for
// clang's HIP. Needs no HIP header. No GPU of AMD has run it: docs/develop/amd.md says how each line was verified.
//
// Memory order follows the LLVM guide "User Guide for AMDGPU Backend", section "Memory Model gfx942". Bits sc0 and sc1 of
// an access give it system scope: it goes past the caches of its compute unit and its XCD. The compiler knows neither
// that stores in assembly are stores nor that they are in flight, so each release here waits for them itself.
#pragma once

#include "llm_comm/platform_types.h"

#define LLM_COMM_DEVICE inline __attribute__((device, always_inline))
// Inlined: a call would put arguments into scratch memory, on the hot path too.
#define LLM_COMM_DEVICE_CALL LLM_COMM_DEVICE
#define LLM_COMM_KERNEL(max_threads) __attribute__((global, launch_bounds(max_threads))) void
#define LLM_COMM_KERNEL_PARAM const
#define LLM_COMM_PRAGMA(text) _Pragma(#text)
#define LLM_COMM_UNROLL(n) LLM_COMM_PRAGMA(unroll n)

namespace llm_comm::inline LLM_COMM_TARGET {

namespace amdgcn {

// Global memory. Accesses to generic addresses would look up the address space of each. The compiler's pass for the host
// checks the same functions, but assigns no classes in other address spaces.
#if defined(__HIP_DEVICE_COMPILE__)
template <class T>
using Global = __attribute__((address_space(1))) T;
#else
template <class T>
using Global = T;
#endif

template <class T>
LLM_COMM_DEVICE Global<T>* global(T* address) {
  return (Global<T>*)address;  // NOLINT: no named cast changes address spaces
}

using Words4 = uint32_t __attribute__((ext_vector_type(4)));
using Words2 = uint32_t __attribute__((ext_vector_type(2)));

// Counts of the dispatch that the runtime writes behind the kernel's own arguments (code object version 5 and later).
struct ImplicitArguments {
  uint32_t block_count[3];
  uint16_t block_threads[3];
};

LLM_COMM_DEVICE const __attribute__((address_space(4))) ImplicitArguments* implicit_arguments() {
  return (const __attribute__((address_space(4))) ImplicitArguments*)__builtin_amdgcn_implicitarg_ptr();  // NOLINT
}

LLM_COMM_DEVICE uint32_t lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }

}  // namespace amdgcn

LLM_COMM_DEVICE uint32_t thread_index() { return __builtin_amdgcn_workitem_id_x(); }
LLM_COMM_DEVICE uint32_t block_index() { return __builtin_amdgcn_workgroup_id_x(); }
LLM_COMM_DEVICE uint32_t block_threads() { return amdgcn::implicit_arguments()->block_threads[0]; }
LLM_COMM_DEVICE uint32_t block_count() { return amdgcn::implicit_arguments()->block_count[0]; }

// There are no clusters.
LLM_COMM_DEVICE uint32_t cluster_index() { return block_index(); }
LLM_COMM_DEVICE uint32_t cluster_block_rank() { return 0; }
LLM_COMM_DEVICE void cluster_arrive_relaxed() {}
LLM_COMM_DEVICE void cluster_arrive() {}
LLM_COMM_DEVICE float load_of_block(const float* address, uint32_t) { return *address; }
LLM_COMM_DEVICE void cluster_wait() {}
LLM_COMM_DEVICE uint32_t of_first_in_cluster(uint32_t* address) { return *address; }

// Waits for the wave's own stores first: a thread of another wave may release them (hb_session.cuh), and waits for its
// own wave's alone.
LLM_COMM_DEVICE void block_sync() {
  asm volatile("s_waitcnt vmcnt(0) lgkmcnt(0)" ::: "memory");
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

template <class T>
LLM_COMM_DEVICE T* opaque(T* address) {
  return (T*)amdgcn::global(address);  // NOLINT
}

template <class T>
LLM_COMM_DEVICE T* shared_memory() {
  extern __attribute__((shared, aligned(16))) unsigned char llm_comm_shared_memory[];
  return reinterpret_cast<T*>(llm_comm_shared_memory);
}

LLM_COMM_DEVICE void set_bits(uint32_t* word, uint32_t bits) {
  __hip_atomic_fetch_or(word, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

LLM_COMM_DEVICE uint32_t count_bits(uint32_t bits) { return static_cast<uint32_t>(__builtin_popcount(bits)); }

LLM_COMM_DEVICE float shuffle_xor(float value, uint32_t lane_mask) {
  const auto from = static_cast<int>((amdgcn::lane() ^ lane_mask) * sizeof(float));
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(from, __builtin_bit_cast(int, value)));
}

LLM_COMM_DEVICE bool any_lane(bool holds) { return __builtin_amdgcn_ballot_w64(holds) != 0; }

// Software replacement of an mbarrier transaction count, as on GPUs of NVIDIA before sm_90. Upper half: completed
// phases. Lower half: bytes to come, plus kDeliveryUnexpected until delivery_expect() is called.
inline constexpr uint64_t kDeliveryUnexpected = 1 << 20;

LLM_COMM_DEVICE void count_delivery(uint64_t* delivery, uint64_t change) {
  const auto add = [&](uint64_t n) {
    return __hip_atomic_fetch_add(delivery, n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  };
  if (static_cast<uint32_t>(add(change) + change) == 0) add((uint64_t{1} << 32) + kDeliveryUnexpected);
}

LLM_COMM_DEVICE void delivery_init(uint64_t* delivery, uint32_t /*values*/, uint32_t /*blocks*/) {
  *delivery = kDeliveryUnexpected;
}

LLM_COMM_DEVICE void delivery_expect(uint64_t* delivery, uint32_t values, uint32_t /*blocks*/) {
  count_delivery(delivery, uint64_t{values} * sizeof(float) - kDeliveryUnexpected);
}

LLM_COMM_DEVICE void deliver(float* address, uint32_t /*block*/, float value, uint64_t* delivery, uint32_t /*blocks*/) {
  *address = value;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  count_delivery(delivery, -uint64_t{sizeof(float)});
}

LLM_COMM_DEVICE void deliver_four(float* address, uint32_t block, const float (&values)[4], uint64_t* delivery) {
  for (uint32_t i = 0; i < 4; ++i) deliver(address + i, block, values[i], delivery, 1);
}

LLM_COMM_DEVICE void delivery_wait(uint64_t* delivery, uint32_t parity) {
  const auto load = [&] { return __hip_atomic_load(delivery, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); };
  while ((load() >> 32 & 1) == parity) {
  }
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Grids of a stream never overlap.
LLM_COMM_DEVICE void grid_dependency_trigger() {}
LLM_COMM_DEVICE void grid_dependency_wait() {}
LLM_COMM_DEVICE void grid_dependency_wait_after(uint64_t) {}

template <class T>
LLM_COMM_DEVICE T load_plain(const T* address) {
  return *amdgcn::global(address);
}

template <class T>
LLM_COMM_DEVICE void store_plain(T* address, T value) {
  *amdgcn::global(address) = value;
}

LLM_COMM_DEVICE Line load_line(const void* address) {
  return __builtin_bit_cast(Line, load_plain(static_cast<const amdgcn::Words4*>(address)));
}

LLM_COMM_DEVICE void store_line(void* address, Line line) {
  store_plain(static_cast<amdgcn::Words4*>(address), __builtin_bit_cast(amdgcn::Words4, line));
}

LLM_COMM_DEVICE void load_words(const void* address, uint32_t (&word)[1]) {
  word[0] = load_plain(static_cast<const uint32_t*>(address));
}

LLM_COMM_DEVICE void load_words(const void* address, uint32_t (&word)[2]) {
  const amdgcn::Words2 words = load_plain(static_cast<const amdgcn::Words2*>(address));
  for (int i = 0; i < 2; ++i) word[i] = words[i];
}

LLM_COMM_DEVICE void load_words(const void* address, uint32_t (&word)[4]) {
  const Line line = load_line(address);
  for (int i = 0; i < 4; ++i) word[i] = line.word[i];
}

// By selection: registers have no index at run time, and the line would lie in scratch memory.
LLM_COMM_DEVICE uint32_t word_at(const Line& line, uint32_t i) {
  const uint32_t low = i == 0 ? line.word[0] : line.word[1];
  const uint32_t high = i == 2 ? line.word[2] : line.word[3];
  return i < 2 ? low : high;
}

LLM_COMM_DEVICE void or_into_word(Line& line, uint32_t i, uint32_t bits) {
  LLM_COMM_UNROLL(4)
  for (uint32_t word = 0; word < 4; ++word) line.word[word] |= word == i ? bits : 0;
}

template <class T>
LLM_COMM_DEVICE T load_relaxed(const T* address) {
  return __hip_atomic_load(amdgcn::global(address), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

template <class T>
LLM_COMM_DEVICE void store_relaxed(T* address, T value) {
  __hip_atomic_store(amdgcn::global(address), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

// The two loads are the compiler's, which knows them to be in flight. After a load in assembly a thread would have to wait
// before it asks for the next line.
LLM_COMM_DEVICE Line load_packet_relaxed(const void* address) {
  const auto* const halves = static_cast<const uint64_t*>(address);
  const uint64_t low = load_relaxed(halves);
  const uint64_t high = load_relaxed(halves + 1);
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
           static_cast<uint32_t>(high >> 32)}};
}

// The s_nop keeps a hazard away that the compiler cannot see here: the store reads its data a cycle after its issue.
LLM_COMM_DEVICE void store_packet_relaxed(void* address, Line line) {
  asm volatile("global_store_dwordx4 %0, %1, off sc0 sc1\n\ts_nop 0" ::"v"(address),
               "v"(__builtin_bit_cast(amdgcn::Words4, line))
               : "memory");
}

LLM_COMM_DEVICE Line load_line_relaxed(const void* address) { return load_packet_relaxed(address); }
LLM_COMM_DEVICE void store_line_relaxed(void* address, Line line) { store_packet_relaxed(address, line); }

LLM_COMM_DEVICE void load_line_relaxed_if(bool is_wanted, const void* address, Line& line) {
  if (is_wanted) line = load_line_relaxed(address);
}

// Writes back what the XCD's cache holds, and waits until that and all stores of the wave are complete.
LLM_COMM_DEVICE void complete_stores() {
  asm volatile("buffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0) lgkmcnt(0)" ::: "memory");
}

// Drops what the caches hold of others' memory. Call it after the loads that it follows have returned.
LLM_COMM_DEVICE void drop_caches() { asm volatile("s_waitcnt vmcnt(0)\n\tbuffer_inv sc0 sc1" ::: "memory"); }

template <class T>
LLM_COMM_DEVICE T load_acquire(const T* address) {
  const T value = load_relaxed(address);
  drop_caches();
  return value;
}

// Relaxed until the value has come: dropping the caches in each poll would slow down the rest of the GPU.
template <class T, class HasCome>
LLM_COMM_DEVICE bool poll_acquire(const T* address, HasCome has_come) {
  const bool found = has_come(load_relaxed(address));
  if (found) drop_caches();
  return found;
}

template <class T>
LLM_COMM_DEVICE void store_release(T* address, T value) {
  complete_stores();
  store_relaxed(address, value);
}

template <uint32_t Packets>
LLM_COMM_DEVICE void store_packets_release(void* address, const Line (&packets)[Packets]) {
  complete_stores();
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < Packets; ++i) store_packet_relaxed(static_cast<Line*>(address) + i, packets[i]);
}

LLM_COMM_DEVICE void fence_system() {
  complete_stores();
  drop_caches();
}

LLM_COMM_DEVICE uint64_t fetch_add(uint64_t* address, uint64_t n) {
  return __hip_atomic_fetch_add(amdgcn::global(address), n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

LLM_COMM_DEVICE void add_relaxed(uint64_t* address, uint64_t n) { fetch_add(address, n); }

LLM_COMM_DEVICE uint32_t compare_and_swap(uint32_t* address, uint32_t expected, uint32_t desired) {
  __hip_atomic_compare_exchange_strong(amdgcn::global(address), &expected, desired, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                       __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}

LLM_COMM_DEVICE uint32_t count_up(uint32_t* address, uint32_t last) {
  return __builtin_amdgcn_atomic_inc32(amdgcn::global(address), last, __ATOMIC_RELAXED, "agent");
}

// About one millisecond of polls. Bounds how much longer than its time-out a wait may last. Schedules of tests, whose
// polls are few and slow, compile their own number.
#if defined(LLM_COMM_POLLS_PER_CHECK)
inline constexpr uint32_t kPollsPerCheck = LLM_COMM_POLLS_PER_CHECK;
#else
inline constexpr uint32_t kPollsPerCheck = 1024;
#endif

// A counter of 100 MHz on all GPUs of these architectures.
LLM_COMM_DEVICE uint64_t clock_ns() { return __builtin_readsteadycounter() * 10; }

// Leaves the compute unit to other waves for some 64 cycles.
LLM_COMM_DEVICE void spin_hint() { __builtin_amdgcn_s_sleep(1); }

LLM_COMM_DEVICE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Arithmetic passes the payloads of NaN on; all targets must agree on the bits.
LLM_COMM_DEVICE uint32_t float_to_bits(float value) {
  return value != value ? 0x7FFFFFFFu : __builtin_bit_cast(uint32_t, value);
}

LLM_COMM_DEVICE float fp16_to_float(uint16_t bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }

LLM_COMM_DEVICE uint16_t float_to_fp16(float value) {
  return value != value ? uint16_t{0x7FFF} : __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
}

LLM_COMM_DEVICE uint16_t float_to_bf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;  // round to nearest, ties to even
  return value != value ? uint16_t{0x7FFF} : static_cast<uint16_t>(rounded);
}

LLM_COMM_DEVICE uint32_t floats_to_bf16(float low, float high) {
  return float_to_bf16(low) | uint32_t{float_to_bf16(high)} << 16;
}

LLM_COMM_DEVICE uint32_t floats_to_fp16(float low, float high) {
  return float_to_fp16(low) | uint32_t{float_to_fp16(high)} << 16;
}

LLM_COMM_DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The instruction takes subnormal values for 0: they are scaled by 2^48 before it, and its result by 2^24 after it.
LLM_COMM_DEVICE float reciprocal_sqrt(float value) {
  const bool is_small = value < 0x1p-96f;
  const float root = __builtin_amdgcn_rsqf(is_small ? value * 0x1p48f : value);
  return is_small ? root * 0x1p24f : root;
}

LLM_COMM_DEVICE float exponential(float value) { return __builtin_expf(value); }
LLM_COMM_DEVICE float larger(float a, float b) { return __builtin_fmaxf(a, b); }

// gfx942 has other FP8 formats (FNUZ), and no instruction saturates as fp8.cuh wants.
LLM_COMM_DEVICE bool convert_to_e4m3(float, float, uint16_t&) { return false; }
LLM_COMM_DEVICE bool convert_from_e4m3(uint16_t, float&, float&) { return false; }

// There is no NVLink multicast: the host never sets DeviceComm::multicast, so no kernel gets here.
LLM_COMM_DEVICE Line multicast_load_reduce_bf16(const MulticastAddress&) { __builtin_trap(); }
LLM_COMM_DEVICE Line multicast_load_reduce_fp16(const MulticastAddress&) { __builtin_trap(); }
LLM_COMM_DEVICE Line multicast_load_reduce_fp32(const MulticastAddress&) { __builtin_trap(); }
LLM_COMM_DEVICE void multicast_store_line(const MulticastAddress&, Line) { __builtin_trap(); }
template <class T>
LLM_COMM_DEVICE void multicast_add_relaxed(const MulticastAddress&, T) {
  __builtin_trap();
}
template <class T>
LLM_COMM_DEVICE void multicast_add_release(const MulticastAddress&, T) {
  __builtin_trap();
}
LLM_COMM_DEVICE void fence_aliases() { __builtin_trap(); }

}  // namespace llm_comm::inline LLM_COMM_TARGET
