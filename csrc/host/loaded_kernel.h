// A kernel of an emulated GPU in its own shared library (emulator/loaded_kernel.h): how emulated cores run DSL kernels.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace llm_comm::host {

class LoadedKernel {
 public:
  // Never closes the library: fibers of an aborted grid may still be suspended in its code. Throws std::runtime_error
  // if `library` is not a shared library, or its kernel does not take one parameter of `parameter_bytes` bytes.
  LoadedKernel(const std::string& library, const std::string& kernel, uint32_t parameter_bytes) {
    void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw std::runtime_error("kernel " + kernel + ": " + dlerror());
    const auto parameters = reinterpret_cast<uint32_t (*)(uint32_t*, uint32_t)>(dlsym(handle, "llm_comm_parameters"));
    launch_ = reinterpret_cast<Launch>(dlsym(handle, "llm_comm_launch"));
    uint32_t bytes = 0;
    if (parameters == nullptr || launch_ == nullptr || parameters(&bytes, 1) != 1 || bytes != parameter_bytes) {
      throw std::runtime_error("kernel " + kernel + ": " + library + " was compiled for another version of llm_comm");
    }
  }

  void run(uint32_t blocks, uint32_t threads, uint64_t shared_bytes, const void* parameter) const {
    char error[512] = {};
    if (!launch_(blocks, threads, shared_bytes, &parameter, error, sizeof(error))) throw std::invalid_argument(error);
  }

 private:
  using Launch = bool (*)(uint32_t, uint32_t, uint64_t, const void* const*, char*, uint64_t);
  Launch launch_;
};

}  // namespace llm_comm::host
