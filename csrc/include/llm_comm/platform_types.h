// Basic types and macros of all platform headers. Host and device code include it.
#pragma once

// A binary may hold the same kernel for a GPU and for the emulator. The inline namespace gives them different symbols.
#if defined(LLM_COMM_DETERMINISTIC)
#define LLM_COMM_TARGET deterministic  // the emulator's second driver; LLM_COMM_EMULATOR is defined too
#elif defined(LLM_COMM_EMULATOR)
#define LLM_COMM_TARGET emulated
#elif defined(__HIP__)
#define LLM_COMM_TARGET hip
#else
#define LLM_COMM_TARGET cuda
#endif

// Prefix of a function that host and kernels share.
#if defined(__CUDACC__)
#define LLM_COMM_HOST_DEVICE __host__ __device__
#elif defined(__HIP__)
#define LLM_COMM_HOST_DEVICE __attribute__((host, device))
#else
#define LLM_COMM_HOST_DEVICE
#endif

#if defined(__CUDACC_RTC__)
// NVRTC has no standard headers, and the location of CUDA's own headers depends on the toolkit.
#if !defined(offsetof)
#define offsetof(type, member) reinterpret_cast<unsigned long>(&static_cast<type*>(nullptr)->member)
#endif
#define LLM_COMM_HOST __device__
namespace llm_comm {
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
static_assert(sizeof(uint64_t) == 8, "the types of Linux");
}  // namespace llm_comm
#else
#include <cstddef>
#include <cstdint>
#define LLM_COMM_HOST  // prefix of a host function in a header for kernels; NVRTC accepts device functions only
namespace llm_comm {
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
}  // namespace llm_comm
#endif

namespace llm_comm::inline LLM_COMM_TARGET {

// Whether the target's FP8 formats are FNUZ (fp8.cuh). For kernels: a compiler that compiles host code too does not know
// the target there.
#if defined(__gfx942__)
inline constexpr bool kHasFnuz = true;
#else
inline constexpr bool kHasFnuz = false;
#endif

// True if the target has tiles (tiles.cuh), and with them the kernels of linear layers and experts.
#if defined(__HIP__)
inline constexpr bool kHasTiles = false;
#else
inline constexpr bool kHasTiles = true;
#endif

// Threads of a warp, and whether a GPU has a link of its own to each peer in place of one to a switch. GPUs of AMD, or an
// emulator with their shapes: waves of 64, and Infinity Fabric.
#if defined(__HIP__) || defined(LLM_COMM_LIKE_AMD)
inline constexpr uint32_t kWarpThreads = 64;
inline constexpr bool kLinkForEachPeer = true;
#else
inline constexpr uint32_t kWarpThreads = 32;
inline constexpr bool kLinkForEachPeer = false;
#endif

// Unit of traffic: the widest access of a GPU thread.
struct alignas(16) Line {
  uint32_t word[4];
};

// A range that exists in several memories and that NVLink multicast reaches by one address.
struct MulticastAddress {
  char* all;          // base of the multicast mapping; with an emulated switch only non-null
  char* const* each;  // base of each memory, as this GPU maps it; used by the emulated switch
  uint32_t count;     // number of memories
  uint64_t offset;    // offset of the range in each memory
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
