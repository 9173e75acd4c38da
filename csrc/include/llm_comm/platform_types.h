// Types that every platform header shares.
#pragma once

// A binary may hold a kernel for a GPU and for the emulator. The namespace keeps the linker from taking one
// for the other.
#if defined(LLM_COMM_DETERMINISTIC)
#define LLM_COMM_TARGET deterministic  // the emulator's second driver; LLM_COMM_EMULATOR is defined too
#elif defined(LLM_COMM_EMULATOR)
#define LLM_COMM_TARGET emulated
#else
#define LLM_COMM_TARGET cuda
#endif

// Before a function that host and kernels share.
#if defined(__CUDACC__)
#define LLM_COMM_HOST_DEVICE __host__ __device__
#else
#define LLM_COMM_HOST_DEVICE
#endif

#if defined(__CUDACC_RTC__)
// NVRTC has no standard headers, and where those of CUDA lie depends on the toolkit.
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
#define LLM_COMM_HOST  // before a function of the host in a header for kernels: NVRTC takes no other than those of the device
namespace llm_comm {
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
}  // namespace llm_comm
#endif

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kWarpThreads = 32;

// The unit of traffic: the widest access of a GPU thread.
struct alignas(16) Line {
  uint32_t word[4];
};

// A place that several memories have, and that NVLink multicast reaches in all of them by one address.
struct MulticastPlace {
  char* all;          // where the mapping of all memories as one begins; where the switch is emulated only a flag
  char* const* each;  // where each begins, as this GPU maps it: what an emulated switch goes by
  uint32_t count;     // memories
  uint64_t offset;    // of the place, in all of them
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
