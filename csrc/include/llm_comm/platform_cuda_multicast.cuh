// NVLink multicast on CUDA GPUs (platform.cuh): all multimem instructions of the project. Needs sm_90; a kernel that is compiled for
// less traps where it comes to one, and is never chosen there (the descriptors' grid()).
//
// PTX ISA, "multimem.ld_reduce, multimem.st, multimem.red": a multimem address may be accessed by these instructions only, and each
// is an access to all the memories behind it. Vectors are of .f32: a store moves the bits as they are. As of other vectors, each
// element is an access of its own (PTX ISA, "Vector Data-types"), so units have 4 bytes.
//
// In SASS only ld_reduce can be told (LDGMC): a store is STG and a red is REDG, as those to one memory are. tools/check_multicast.py
// counts the others in PTX.
#pragma once

#include "llm_comm/platform_cuda.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

LLM_COMM_DEVICE char* multicast_address(const MulticastPlace& place) { return place.all + place.offset; }

// .acc::f32 is the least precision of what lies between; without it that of the type.
LLM_COMM_DEVICE Line multicast_load_reduce_bf16(const MulticastPlace& place) {
  Line v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(multicast_address(place))
               : "memory");
#else
  __trap();
#endif
  return v;
}

LLM_COMM_DEVICE Line multicast_load_reduce_fp16(const MulticastPlace& place) {
  Line v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(multicast_address(place))
               : "memory");
#else
  __trap();
#endif
  return v;
}

LLM_COMM_DEVICE Line multicast_load_reduce_fp32(const MulticastPlace& place) {
  Line v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(multicast_address(place))
               : "memory");
#else
  __trap();
#endif
  return v;
}

LLM_COMM_DEVICE void multicast_store_line(const MulticastPlace& place, Line v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(multicast_address(place)),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
#else
  __trap();
#endif
}

LLM_COMM_DEVICE void multicast_add_relaxed(const MulticastPlace& place, uint32_t n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(multicast_address(place)), "r"(n) : "memory");
#else
  __trap();
#endif
}

LLM_COMM_DEVICE void multicast_add_relaxed(const MulticastPlace& place, uint64_t n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(multicast_address(place)), "l"(n) : "memory");
#else
  __trap();
#endif
}

LLM_COMM_DEVICE void multicast_add_release(const MulticastPlace& place, uint32_t n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.red.release.sys.global.add.u32 [%0], %1;" ::"l"(multicast_address(place)), "r"(n) : "memory");
#else
  __trap();
#endif
}

LLM_COMM_DEVICE void multicast_add_release(const MulticastPlace& place, uint64_t n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.red.release.sys.global.add.u64 [%0], %1;" ::"l"(multicast_address(place)), "l"(n) : "memory");
#else
  __trap();
#endif
}

// A barrier of the GPU or the system, whichever the driver asks for, which also empties the L1.
LLM_COMM_DEVICE void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

}  // namespace llm_comm::inline LLM_COMM_TARGET
