// What a core needs for port channels: the FIFO that its GPU's threads write to, and somebody who carries out what they ask for.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "llm_comm/port_ring.h"
#include "llm_comm/workspace_layout.h"

namespace llm_comm::host {

// The communicator that requests belong to.
struct PortOwner {
  char* workspace[kMaxWorldSize];  // every rank's, as this process reaches them
  uint64_t workspace_bytes;        // of each
  uint32_t rank;
  uint32_t world_size;
  std::function<bool()> has_failed;  // what is asked for then is not done
  std::function<void()> fail;        // a request could not be carried out: nothing waits for it any more
  // Where so many bytes at a place of the symmetric heap lie on a rank, as this process reaches them; nullptr: nowhere. Empty:
  // there is no heap.
  std::function<char*(uint32_t rank, uint64_t place, uint64_t bytes)> find_in_heap = {};

  // What a request means by `where` (port_ring.h); nullptr where a rank does not have so many bytes there.
  char* address(uint32_t rank_of, uint64_t where, uint64_t bytes) const {
    if ((where & kInHeap) != 0) return find_in_heap ? find_in_heap(rank_of, where & ~kInHeap, bytes) : nullptr;
    const bool is_within = bytes <= workspace_bytes && where <= workspace_bytes - bytes;
    return is_within ? workspace[rank_of] + where : nullptr;
  }
};

class Ports {
 public:
  virtual ~Ports() = default;

  // As the device maps it; nullptr where there is none.
  virtual PortRing* ring() const = 0;
  virtual uint32_t entries_log2() const = 0;

  // From now on requests are carried out; more than once is no error. Throws std::runtime_error where that cannot be.
  virtual void start(const PortOwner& owner) = 0;
  // Returns once nothing is carried out any more. More than once is no error, nor without start().
  virtual void stop() = 0;
  // Whether a thread may be at work: then settle() can be called. Who has none is at rest between operations.
  virtual bool is_running() const { return false; }
  // Ends as stop() does once the first `requests` have been carried out; start() may follow. False, and nothing has changed, where
  // they have not come within `limit`.
  virtual bool settle([[maybe_unused]] uint64_t requests, [[maybe_unused]] std::chrono::nanoseconds limit) {
    return true;
  }
  // Nothing is carried out any more, soon. From any thread.
  virtual void abandon() = 0;
  // What could not be carried out, and why.
  virtual std::optional<std::string> error() const = 0;
  // Keeps the FIFO for kernels that may still write to it. After stop().
  virtual void leave_to_graphs() = 0;
};

}  // namespace llm_comm::host
