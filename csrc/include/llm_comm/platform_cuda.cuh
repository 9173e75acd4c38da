// CUDA definitions of the platform contract (platform.cuh). All inline PTX of the project is in this file and in its
// neighbours for multicast (platform_cuda_multicast.cuh) and matrix tiles (platform_cuda_tiles.cuh).
#pragma once

#include "llm_comm/platform_types.h"

#define LLM_COMM_DEVICE __device__ __forceinline__
// For rare code: a call keeps its instructions out of the hot path.
#define LLM_COMM_DEVICE_CALL inline __device__ __noinline__
#define LLM_COMM_KERNEL(max_threads) __global__ void __launch_bounds__(max_threads, 1)
#define LLM_COMM_KERNEL_PARAM const __grid_constant__
#define LLM_COMM_PRAGMA(text) _Pragma(#text)
#define LLM_COMM_UNROLL(n) LLM_COMM_PRAGMA(unroll n)

namespace llm_comm::inline LLM_COMM_TARGET {

LLM_COMM_DEVICE uint32_t thread_index() { return threadIdx.x; }
LLM_COMM_DEVICE uint32_t block_index() { return blockIdx.x; }
LLM_COMM_DEVICE uint32_t block_threads() { return blockDim.x; }
LLM_COMM_DEVICE uint32_t block_count() { return gridDim.x; }

// Read from special registers: a division by the cluster size would be slow, because the size is no compile-time
// constant.
LLM_COMM_DEVICE uint32_t cluster_index() {
#if __CUDA_ARCH__ >= 900
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
#else
  return block_index();
#endif
}

LLM_COMM_DEVICE uint32_t cluster_block_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

LLM_COMM_DEVICE void block_sync() { __syncthreads(); }

// Global memory only. Without this barrier the compiler splits a sum of addresses and adds parts of it at each use.
// Without the assumption it would emit generic stores, which look up the state space of each address.
template <class T>
LLM_COMM_DEVICE T* opaque(T* address) {
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
  return address;
}

template <class T>
LLM_COMM_DEVICE T* shared_memory() {
  extern __shared__ __align__(16) unsigned char llm_comm_shared_memory[];
  return reinterpret_cast<T*>(llm_comm_shared_memory);
}

LLM_COMM_DEVICE void set_bits(uint32_t* word, uint32_t bits) { atomicOr_block(word, bits); }

LLM_COMM_DEVICE uint32_t count_bits(uint32_t bits) { return static_cast<uint32_t>(__popc(bits)); }

LLM_COMM_DEVICE float shuffle_xor(float value, uint32_t lane_mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, static_cast<int>(lane_mask));
}

LLM_COMM_DEVICE bool any_lane(bool holds) { return __any_sync(0xFFFFFFFFu, holds) != 0; }

// Software replacement of an mbarrier transaction count. Upper half: completed phases. Lower half: bytes to come, plus
// kDeliveryUnexpected until delivery_expect() is called.
inline constexpr uint64_t kDeliveryUnexpected = 1 << 20;

LLM_COMM_DEVICE void count_delivery(uint64_t* delivery, uint64_t change) {
  auto* const count = reinterpret_cast<unsigned long long*>(delivery);
  const uint64_t now = atomicAdd(count, change) + change;
  if (static_cast<uint32_t>(now) == 0) atomicAdd(count, (uint64_t{1} << 32) + kDeliveryUnexpected);
}

// Cluster barriers (sm_90 and later). Not the .aligned forms, because threads of a warp may leave their polls at
// different times. The arrival is relaxed: a release would be a GPU-scope fence in every thread. After cluster_wait()
// other blocks therefore see only that this block runs, and what delivery_init() set up, which has a release of its
// own.
LLM_COMM_DEVICE void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

LLM_COMM_DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

LLM_COMM_DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

LLM_COMM_DEVICE uint32_t of_first_in_cluster(uint32_t* address) {
  uint32_t value = *address;
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
  asm volatile("{ .reg .u32 a; mapa.shared::cluster.u32 a, %1, 0; ld.shared::cluster.u32 %0, [a]; }"
               : "=r"(value)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address)))
               : "memory");
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
#endif
  return value;
}

LLM_COMM_DEVICE float load_of_block(const float* address, uint32_t block) {
#if __CUDA_ARCH__ >= 900
  float value;
  asm volatile("{ .reg .u32 a; mapa.shared::cluster.u32 a, %1, %2; ld.shared::cluster.f32 %0, [a]; }"
               : "=f"(value)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(block)
               : "memory");
  return value;
#else
  return *address;
#endif
}

// mbarrier transactions (sm_90 and later). The cluster barrier would also work, but its release is a fence that waits
// for all stores of the thread, including those to other GPUs.
#if __CUDA_ARCH__ >= 900
LLM_COMM_DEVICE uint32_t shared_address(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}
#endif

LLM_COMM_DEVICE void delivery_init(uint64_t* delivery, uint32_t values, uint32_t blocks) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;" ::"r"(shared_address(delivery)),
      "r"(blocks == 1 ? values : 1)
      : "memory");
#else
  *delivery = kDeliveryUnexpected;
#endif
}

LLM_COMM_DEVICE void delivery_expect(uint64_t* delivery, uint32_t values, uint32_t blocks) {
  const uint32_t bytes = values * static_cast<uint32_t>(sizeof(float));
#if __CUDA_ARCH__ >= 900
  if (blocks == 1) return;  // the arrivals per phase are fixed by delivery_init()
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(delivery)), "r"(bytes)
               : "memory");
#else
  count_delivery(delivery, uint64_t{bytes} - kDeliveryUnexpected);
#endif
}

// st.async is undefined in a cluster of one block (an illegal instruction on sm_90, even to the block itself). There a
// value is a plain store and an mbarrier arrival with block-scope release.
LLM_COMM_DEVICE void deliver(float* address, uint32_t block, float value, uint64_t* delivery, uint32_t blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks == 1) {
    asm volatile("st.shared::cta.f32 [%0], %1; mbarrier.arrive.release.cta.shared::cta.b64 _, [%2];" ::"r"(
                     shared_address(address)),
                 "f"(value), "r"(shared_address(delivery))
                 : "memory");
    return;
  }
  asm volatile(
      "{ .reg .u32 a, d; mapa.shared::cluster.u32 a, %0, %1; mapa.shared::cluster.u32 d, %2, %1;"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], %3, [d]; }" ::"r"(shared_address(address)),
      "r"(block), "r"(shared_address(delivery)), "f"(value)
      : "memory");
#else
  *address = value;
  __threadfence_block();
  count_delivery(delivery, -uint64_t{sizeof(float)});
#endif
}

// Only for clusters of several blocks.
LLM_COMM_DEVICE void deliver_four(float* address, uint32_t block, const float (&values)[4], uint64_t* delivery) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .u32 a, d; mapa.shared::cluster.u32 a, %0, %1; mapa.shared::cluster.u32 d, %2, %1;"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [a], {%3,%4,%5,%6}, [d]; }" ::"r"(
          shared_address(address)),
      "r"(block), "r"(shared_address(delivery)), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
      : "memory");
#else
  for (uint32_t i = 0; i < 4; ++i) deliver(address + i, block, values[i], delivery, 1);
#endif
}

LLM_COMM_DEVICE void delivery_wait(uint64_t* delivery, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t is_over = 0;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(is_over)
        : "r"(shared_address(delivery)), "r"(parity)
        : "memory");
  } while (is_over == 0);
#else
  while ((*static_cast<volatile uint64_t*>(delivery) >> 32 & 1) == parity) {
  }
  __threadfence_block();
#endif
}

// Programmatic dependent launch (sm_90 and later). On older GPUs the grids of a stream never overlap and both are
// no-ops.
LLM_COMM_DEVICE void grid_dependency_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

LLM_COMM_DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The predicate is always true. Without it ptxas moves address arithmetic below the wait: out of the time in which the
// block is idle anyway, and onto the critical path.
LLM_COMM_DEVICE void grid_dependency_wait_after(uint64_t nonzero) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; setp.ne.u64 p, %0, 0; @p griddepcontrol.wait; }" ::"l"(nonzero) : "memory");
#endif
}

// In PTX because the compiler splits a struct load when it can use one member early, which costs two round trips.
LLM_COMM_DEVICE Line load_line(const void* address) {
  Line v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address)
               : "memory");
  return v;
}

// In PTX so that the words stay packed until their first use. The compiler would unpack the elements at once, and the
// thread would wait for this load before it issues the next one.
LLM_COMM_DEVICE void load_words(const void* address, uint32_t (&word)[1]) {
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word[0]) : "l"(address) : "memory");
}

LLM_COMM_DEVICE void load_words(const void* address, uint32_t (&word)[2]) {
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(address) : "memory");
}

LLM_COMM_DEVICE void load_words(const void* address, uint32_t (&word)[4]) {
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "l"(address)
               : "memory");
}

LLM_COMM_DEVICE void store_line(void* address, Line line) {
  *static_cast<uint4*>(address) = make_uint4(line.word[0], line.word[1], line.word[2], line.word[3]);
}

template <class T>
LLM_COMM_DEVICE T load_plain(const T* address) {
  return *address;
}

template <class T>
LLM_COMM_DEVICE void store_plain(T* address, T value) {
  *address = value;
}

LLM_COMM_DEVICE uint32_t word_at(const Line& line, uint32_t i) { return line.word[i]; }
LLM_COMM_DEVICE void or_into_word(Line& line, uint32_t i, uint32_t bits) { line.word[i] |= bits; }

LLM_COMM_DEVICE Line load_line_relaxed(const void* address) {
  Line v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address)
               : "memory");
  return v;
}

LLM_COMM_DEVICE void load_line_relaxed_if(bool is_wanted, const void* address, Line& line) {
  // Uses a predicate: the compiler would emit a branch for an `if`, and a poll with a branch is slower
  // (docs/experiments/dsl.md).
  asm volatile(
      "{\n"
      ".reg .pred is_wanted;\n"
      "setp.ne.u32 is_wanted, %5, 0;\n"
      "@is_wanted ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];\n"
      "}"
      : "+r"(line.word[0]), "+r"(line.word[1]), "+r"(line.word[2]), "+r"(line.word[3])
      : "l"(address), "r"(static_cast<uint32_t>(is_wanted))
      : "memory");
}

LLM_COMM_DEVICE void store_line_relaxed(void* address, Line v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// As for a line, but with two 64-bit elements. PTX treats each vector element as an access of its own and promises no
// atomicity for the vector as a whole.
LLM_COMM_DEVICE Line load_packet_relaxed(const void* address) {
  uint64_t low, high;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(low), "=l"(high) : "l"(address) : "memory");
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
           static_cast<uint32_t>(high >> 32)}};
}

LLM_COMM_DEVICE void store_packet_relaxed(void* address, Line v) {
  const uint64_t low = static_cast<uint64_t>(v.word[1]) << 32 | v.word[0];
  const uint64_t high = static_cast<uint64_t>(v.word[3]) << 32 | v.word[2];
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(address), "l"(low), "l"(high) : "memory");
}

// One fence for all packets: the fence is what makes a release expensive.
template <uint32_t Packets>
LLM_COMM_DEVICE void store_packets_release(void* address, const Line (&packets)[Packets]) {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < Packets; ++i) store_packet_relaxed(static_cast<Line*>(address) + i, packets[i]);
}

LLM_COMM_DEVICE uint32_t load_relaxed(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

LLM_COMM_DEVICE uint64_t load_relaxed(const uint64_t* address) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

LLM_COMM_DEVICE uint32_t load_acquire(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

LLM_COMM_DEVICE uint64_t load_acquire(const uint64_t* address) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

// As load_acquire, which costs a poll nothing more than a relaxed load.
template <class T, class HasCome>
LLM_COMM_DEVICE bool poll_acquire(const T* address, HasCome has_come) {
  return has_come(load_acquire(address));
}

LLM_COMM_DEVICE void store_relaxed(uint32_t* address, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

LLM_COMM_DEVICE void store_relaxed(uint64_t* address, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

LLM_COMM_DEVICE void store_release(uint32_t* address, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

LLM_COMM_DEVICE void store_release(uint64_t* address, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

LLM_COMM_DEVICE void fence_system() { __threadfence_system(); }

LLM_COMM_DEVICE void add_relaxed(uint64_t* address, uint64_t n) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(n) : "memory");
}

LLM_COMM_DEVICE uint64_t fetch_add(uint64_t* address, uint64_t n) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(n));
}

LLM_COMM_DEVICE uint32_t compare_and_swap(uint32_t* address, uint32_t expected, uint32_t desired) {
  return atomicCAS(address, expected, desired);
}

LLM_COMM_DEVICE uint32_t count_up(uint32_t* address, uint32_t last) { return atomicInc(address, last); }

// About one millisecond of polls. Bounds how much longer than its time-out a wait may last.
inline constexpr uint32_t kPollsPerCheck = 2048;

LLM_COMM_DEVICE uint64_t clock_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// No-op: the GPU's warp scheduler switches by itself.
LLM_COMM_DEVICE void spin_hint() {}

LLM_COMM_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
LLM_COMM_DEVICE uint32_t float_to_bits(float value) { return __float_as_uint(value); }

LLM_COMM_DEVICE float fp16_to_float(uint16_t bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}

LLM_COMM_DEVICE uint16_t float_to_fp16(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

LLM_COMM_DEVICE uint32_t floats_to_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// As a pair: the single-value form of the instruction needs sm_90.
LLM_COMM_DEVICE uint16_t float_to_bf16(float value) { return static_cast<uint16_t>(floats_to_bf16(value, 0.0f)); }

LLM_COMM_DEVICE uint32_t floats_to_fp16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

LLM_COMM_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LLM_COMM_DEVICE float reciprocal_sqrt(float value) { return rsqrtf(value); }
LLM_COMM_DEVICE float exponential(float value) { return expf(value); }
LLM_COMM_DEVICE float larger(float a, float b) { return fmaxf(a, b); }

LLM_COMM_DEVICE bool convert_to_e4m3(float low, float high, uint16_t& bits) {
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return true;
#else
  return false;
#endif
}

#if __CUDA_ARCH__ >= 890
// Two values, exactly.
LLM_COMM_DEVICE uint32_t e4m3_to_fp16(uint16_t bits) {
  uint32_t packed;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(packed) : "h"(bits));
  return packed;
}
#endif

LLM_COMM_DEVICE bool convert_from_e4m3(uint16_t bits, float& low, float& high) {
#if __CUDA_ARCH__ >= 890
  const uint32_t halves = e4m3_to_fp16(bits);
  low = fp16_to_float(static_cast<uint16_t>(halves));
  high = fp16_to_float(static_cast<uint16_t>(halves >> 16));
  return true;
#else
  return false;
#endif
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
