// NVLink multicast on CUDA GPUs (platform.cuh). All multimem instructions of the project are in this file. They need
// sm_90. The functions trap in code compiled for older GPUs, where grid() of the descriptors never chooses such
// kernels.
//
// PTX ISA, "multimem.ld_reduce, multimem.st, multimem.red": only these instructions may access a multimem address, and
// each accesses all memories that the address maps to. Stores use .v4.f32 for every type: they copy the bits unchanged.
// Each vector element is a separate access (PTX ISA, "Vector Data-types"), so only 4-byte words are atomic.
//
// SASS shows only ld_reduce (LDGMC). A multimem store appears as STG and a red as REDG, like accesses to one memory.
// tools/check_multicast.py therefore counts the others in PTX.
#pragma once

#include "llm_comm/platform_cuda.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

LLM_COMM_DEVICE char* multicast_address(const MulticastAddress& address) { return address.all + address.offset; }

// .acc::f32 requests fp32 accumulation inside the switch. Without it the precision may be that of the element type.
LLM_COMM_DEVICE Line multicast_load_reduce_bf16(const MulticastAddress& address) {
  Line v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(multicast_address(address))
               : "memory");
#else
  __trap();
#endif
  return v;
}

LLM_COMM_DEVICE Line multicast_load_reduce_fp16(const MulticastAddress& address) {
  Line v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(multicast_address(address))
               : "memory");
#else
  __trap();
#endif
  return v;
}

LLM_COMM_DEVICE Line multicast_load_reduce_fp32(const MulticastAddress& address) {
  Line v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(multicast_address(address))
               : "memory");
#else
  __trap();
#endif
  return v;
}

LLM_COMM_DEVICE void multicast_store_line(const MulticastAddress& address, Line v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(multicast_address(address)),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
#else
  __trap();
#endif
}

LLM_COMM_DEVICE void multicast_add_relaxed(const MulticastAddress& address, uint32_t n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(multicast_address(address)), "r"(n)
               : "memory");
#else
  __trap();
#endif
}

LLM_COMM_DEVICE void multicast_add_relaxed(const MulticastAddress& address, uint64_t n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(multicast_address(address)), "l"(n)
               : "memory");
#else
  __trap();
#endif
}

LLM_COMM_DEVICE void multicast_add_release(const MulticastAddress& address, uint32_t n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.red.release.sys.global.add.u32 [%0], %1;" ::"l"(multicast_address(address)), "r"(n)
               : "memory");
#else
  __trap();
#endif
}

LLM_COMM_DEVICE void multicast_add_release(const MulticastAddress& address, uint64_t n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.red.release.sys.global.add.u64 [%0], %1;" ::"l"(multicast_address(address)), "l"(n)
               : "memory");
#else
  __trap();
#endif
}

// Orders accesses through different mappings of the same memory. It is also a fence, of GPU or system scope as the
// driver decides, and invalidates the L1.
LLM_COMM_DEVICE void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

}  // namespace llm_comm::inline LLM_COMM_TARGET
