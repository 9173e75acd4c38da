// OwnHeader: keeps the header of this rank's workspace while the workspace's memory is released. Used by CoreImpl.
#pragma once

#include <cstddef>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/core.h"
#include "host/order_of_operations.h"
#include "llm_comm/workspace_layout.h"

namespace llm_comm::host {

// `Memory`: TargetMemory (target.h). Keeping the header keeps the operation counter, so that all ranks still agree on
// the operation number after a release.
template <class Memory>
class OwnHeader {
 public:
  explicit OwnHeader(Memory& memory) : memory_(memory) {}

  // Releases the memory of all workspaces. Only the header is kept: between operations all slot lines hold the sentinel
  // (R2 of operation.cuh) and the staging memory holds nothing of use. No rank may write to the header from here on.
  void vacate() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.empty()) {
      std::string header(kHeaderBytes, '\0');
      memory_.read(header.data(), memory_.local(), header.size());
      kept_ = std::move(header);
    }
    memory_.vacate();
  }

  WorkspaceHandle refill(const WorkspaceLayout& layout) {
    if (kept_.empty()) throw std::runtime_error("restore_workspace: the workspace is not released");
    return memory_.refill(layout, kept_);
  }

  // Drops the kept copy; the header in memory is valid again.
  void is_back() {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.clear();
  }

  // Order counters of the rank that owns `workspace`. Empty in three cases: memory cannot be read soon, an operation
  // ended in between, or a wait was aborted and operations no longer count themselves.
  std::optional<OrderOnRank> order_of(const char* workspace) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!kept_.empty()) return std::nullopt;
    const auto before = memory_.read_soon(workspace + offsetof(CommState, arrivals));
    const auto order = memory_.read_soon(workspace + offsetof(CommState, order));
    const auto behind = memory_.read_soon(workspace + offsetof(CommState, arrivals));
    const auto aborted = memory_.read_soon(workspace + offsetof(CommState, aborted));
    if (!before || !order || !behind || !aborted || *aborted != 0) return std::nullopt;
    if (*before / kArrivalsPerOperation != *behind / kArrivalsPerOperation) return std::nullopt;
    return OrderOnRank{*before / kArrivalsPerOperation, *order};
  }

  // Operations that this rank has finished. Empty if memory cannot be read soon.
  std::optional<uint64_t> operations_ended() {
    const std::lock_guard<std::mutex> lock(mutex_);
    constexpr size_t kArrivals = offsetof(CommState, arrivals);
    if (!kept_.empty()) {  // the workspace has no memory to read
      uint64_t arrivals_before = 0;
      std::memcpy(&arrivals_before, kept_.data() + kArrivals, sizeof(arrivals_before));
      return arrivals_before / kArrivalsPerOperation;
    }
    const auto arrivals = memory_.read_soon(memory_.local() + kArrivals);
    if (!arrivals) return std::nullopt;
    return *arrivals / kArrivalsPerOperation;
  }

 private:
  Memory& memory_;
  std::mutex mutex_;  // the watchdog and statistics read from other threads
  std::string kept_;  // header while the workspace is released, else empty; guarded by mutex_
};

}  // namespace llm_comm::host
