// Ports: interface between a core and the port channels: the request ring of its GPU and the proxy that executes the
// requests.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "llm_comm/port_ring.h"
#include "llm_comm/workspace_layout.h"

namespace llm_comm::host {

// Properties of the communicator that requests belong to.
struct PortOwner {
  char* workspace[kMaxWorldSize];  // by rank, as this process maps them
  uint64_t workspace_bytes;        // of each workspace
  uint32_t rank;
  uint32_t world_size;
  std::function<bool()> has_failed;  // requests of a failed communicator are not executed
  std::function<void()> fail;        // called when a request could not be executed; ends all waits
  // Address of `bytes` at a symmetric offset of a rank, as this process maps it; nullptr if out of range. Empty
  // function: no symmetric heap.
  std::function<char*(uint32_t rank, uint64_t symmetric_offset, uint64_t bytes)> find_in_heap = {};

  // Translates a request's offset `where` (port_ring.h). nullptr if the rank does not have `bytes` there.
  char* address(uint32_t rank_of, uint64_t where, uint64_t bytes) const {
    if ((where & kInHeap) != 0) return find_in_heap ? find_in_heap(rank_of, where & ~kInHeap, bytes) : nullptr;
    const bool is_within = bytes <= workspace_bytes && where <= workspace_bytes - bytes;
    return is_within ? workspace[rank_of] + where : nullptr;
  }
};

class Ports {
 public:
  virtual ~Ports() = default;

  // Device address of the ring; nullptr if there is none.
  virtual PortRing* ring() const = 0;
  virtual uint32_t entries_log2() const = 0;

  // Starts to execute requests. May be called repeatedly. Throws std::runtime_error if it cannot.
  virtual void start(const PortOwner& owner) = 0;
  // Stops; returns when no request is being executed. May be called repeatedly, also without start().
  virtual void stop() = 0;
  // True if a proxy thread may be running, so that settle() can be called. Implementations without a thread are idle
  // between operations.
  virtual bool is_running() const { return false; }
  // Waits until the first `requests` requests are executed, then stops as stop() does; start() may follow. Returns
  // false and changes nothing if they do not arrive within `limit`.
  virtual bool settle([[maybe_unused]] uint64_t requests, [[maybe_unused]] std::chrono::nanoseconds limit) {
    return true;
  }
  // Stops executing requests soon. Thread-safe.
  virtual void abandon() = 0;
  // Request that could not be executed, and why.
  virtual std::optional<std::string> error() const = 0;
  // Leaks the ring, because kernels in graphs may still write to it. Call after stop().
  virtual void leave_to_graphs() = 0;
};

}  // namespace llm_comm::host
