// A rank's part in the multicast object of a communicator: one address by which the workspaces of all ranks are reached
// together. The only file that knows the driver's functions of multicast is multicast_memory.cpp.
#pragma once

#include <cuda.h>

#include <functional>

#include "host/core.h"

namespace llm_comm::host {

// What multicast_memory.cpp calls, by the names of the driver, and how it finds them. A test puts others in their place.
struct MulticastDriver {
  std::function<void*(const char* name)> load;                // throws std::runtime_error where there is none
  std::function<const char*(const char* name)> get_variable;  // of the environment, or nullptr
};

// Each step throws std::runtime_error where it fails. The caller takes a step only after all ranks have done the one before,
// and drops the object on all ranks where one has failed.
class MulticastMemory {
 public:
  struct Functions;

  // Looks up the functions of multicast, unless the environment forbids it: then nothing is looked up, and it throws. It also
  // throws where the device has no multicast.
  MulticastMemory(const MulticastDriver& driver, int device, int world_size);
  MulticastMemory(const MulticastMemory&) = delete;
  MulticastMemory& operator=(const MulticastMemory&) = delete;
  ~MulticastMemory();

  // Of what the size of each workspace has to be a multiple, for workspaces of at least `bytes`.
  uint64_t granularity(uint64_t bytes) const;

  WorkspaceHandle create(uint64_t bytes);                    // of one rank; `bytes` of each workspace
  void join(uint64_t bytes, const WorkspaceHandle& handle);  // of the others; takes the descriptor only for the call
  void add_device();
  // Binds the whole workspace and returns where the object is mapped.
  char* bind(CUmemGenericAllocationHandle workspace, uint64_t bytes);
  // Undoes what has been done, the last first. Errors are passed over: what can be undone is.
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
  CUdeviceptr address_ = 0;  // reserved, or 0
  uint64_t bytes_ = 0;
};

}  // namespace llm_comm::host
