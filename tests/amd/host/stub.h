// Control of the stub of the HIP runtime (stub.cpp): which call fails, what was called, and what lives.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace stub {

inline constexpr int kDevices = 2;
inline constexpr int kMultiprocessors = 304;
inline constexpr int kSharedBytes = 64 * 1024;
inline constexpr int kBlocksOfMultiprocessor = 2;
inline constexpr const char* kErrorText = "the stub was told to fail";

struct Launch {
  std::string kernel;  // its mangled name
  uint32_t blocks;
  uint32_t threads;
  uint64_t shared_bytes;
  hipStream_t stream;
  int device;
  std::string arguments;  // bytes of the kernel's parameter, for kernels that State::noted names
};

// State of the stub. Tests change what is above `calls`.
struct State {
  std::string architecture = "gfx942:sramecc+:xnack-";
  int version = HIP_VERSION;
  std::string noted;             // part of the names of kernels whose parameter is noted
  uint64_t parameter_bytes = 0;  // of these kernels
  std::function<void(const Launch&, const void* arguments)> run_kernel;  // empty: kernels do nothing
  uint64_t failing_call = 0;                                             // index in `calls`, from 1; 0: none

  std::vector<std::string> calls;  // names of all functions, except those that only report errors
  std::vector<Launch> launches;    // captured ones included
  std::vector<std::string> misuse;
};
State& state();

// Objects that exist, by kind: "streams 2, host memory 1". Empty if there are none.
std::string what_lives();

}  // namespace stub
