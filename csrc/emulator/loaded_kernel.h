// Exports a kernel from a shared library. Its parameters are passed as addresses, as for cuLaunchKernel. Python's
// llm_comm.emulated compiles such libraries; host/loaded_kernel.h loads them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <utility>

#include "llm_comm/emulator/executor.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

// Writes the sizes of a kernel's parameters, at most `most` of them. Returns the number of parameters.
template <class... Parameters>
uint32_t parameters_of(void (*)(Parameters...), uint32_t* bytes, uint32_t most) {
  uint32_t count = 0;
  ((count < most ? static_cast<void>(bytes[count] = sizeof(Parameters)) : static_cast<void>(0), ++count), ...);
  return count;
}

// Runs a grid on an emulated GPU of the calling thread and returns when it has ended. Returns false, with the reason in
// `error`, for an invalid grid.
template <class... Parameters>
bool launch_loaded(void (*kernel)(Parameters...), const LaunchConfig& config,
                   [[maybe_unused]] const void* const* values, char* error, size_t error_bytes) {
  thread_local Executor executor;
  try {
    [&]<size_t... i>(std::index_sequence<i...>) {
      executor.run(config, [&] { kernel(*static_cast<const Parameters*>(values[i])...); });
    }(std::index_sequence_for<Parameters...>());
    return true;
  } catch (const std::exception& exception) {
    std::snprintf(error, error_bytes, "%s", exception.what());
    return false;
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator

// Functions that a library with one kernel exports.
#define LLM_COMM_LOADED_KERNEL(name)                                                                                   \
  extern "C" uint32_t llm_comm_parameters(uint32_t* bytes, uint32_t most) {                                            \
    return llm_comm::emulator::parameters_of(&name, bytes, most);                                                      \
  }                                                                                                                    \
  extern "C" bool llm_comm_launch(uint32_t blocks, uint32_t threads, uint64_t shared_bytes, const void* const* values, \
                                  char* error, uint64_t error_bytes) {                                                 \
    return llm_comm::emulator::launch_loaded(&name, {blocks, threads, shared_bytes}, values, error, error_bytes);      \
  }
