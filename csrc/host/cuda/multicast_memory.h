// MulticastMemory: a rank's part of the multicast object of a communicator. The object is one address range that
// reaches the workspaces of all ranks. Used by CudaMemory. Only multicast_memory.cpp calls the driver's multicast
// functions.
#pragma once

#include <cuda.h>

#include <functional>

#include "host/core.h"

namespace llm_comm::host {

// Look-up of driver functions and environment variables for multicast_memory.cpp. Tests substitute their own.
struct MulticastDriver {
  std::function<void*(const char* name)> load;                // throws std::runtime_error if the driver lacks it
  std::function<const char*(const char* name)> get_variable;  // of an environment variable; nullptr if unset
};

// Every step throws std::runtime_error on failure. A rank calls a step once every rank has finished the previous step.
// If a step fails on one rank, all ranks drop the object.
class MulticastMemory {
 public:
  struct Functions;

  // Looks up the multicast functions. Throws if the device has no multicast, or if the environment forbids it; in that
  // case no function is looked up.
  MulticastMemory(const MulticastDriver& driver, int device, int world_size);
  MulticastMemory(const MulticastMemory&) = delete;
  MulticastMemory& operator=(const MulticastMemory&) = delete;
  ~MulticastMemory();

  // Granularity of the workspace size, for workspaces of at least `bytes`.
  uint64_t granularity(uint64_t bytes) const;

  WorkspaceHandle create(uint64_t bytes);                    // on one rank; `bytes`: size of each workspace
  void join(uint64_t bytes, const WorkspaceHandle& handle);  // on the other ranks; does not keep the descriptor
  void add_device();
  // Binds the whole workspace and returns the address of the mapped object.
  char* bind(CUmemGenericAllocationHandle workspace, uint64_t bytes);
  // Undoes the completed steps in reverse order. Ignores errors, so that as much as possible is undone.
  void drop() noexcept;

 private:
  const Functions& functions() const { return *functions_; }
  void check(CUresult error, const char* what) const;
  CUmulticastObjectProp properties(uint64_t bytes) const;

  std::unique_ptr<Functions> functions_;
  int ordinal_;
  CUdevice device_ = 0;
  unsigned world_size_;
  CUmemGenericAllocationHandle object_ = 0;
  bool has_object_ = false;
  bool is_bound_ = false;
  bool is_mapped_ = false;
  CUdeviceptr address_ = 0;  // reserved range, or 0
  uint64_t bytes_ = 0;
};

}  // namespace llm_comm::host
