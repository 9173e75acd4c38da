// The header of a rank's own workspace, which outlives the workspace's memory where that is released and taken back.
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

// `Memory`: TargetMemory of target.h. Operations number themselves by the header's arrivals, so that those of all ranks agree
// again behind a release.
template <class Memory>
class OwnHeader {
 public:
  explicit OwnHeader(Memory& memory) : memory_(memory) {}

  // Gives the memory of all workspaces back. Between operations every line of the slots is armed (R2 of operation.cuh) and
  // nothing in the staging memory is of use any more: only the header is kept. By now no rank writes to it.
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

  // From now on the one in memory counts.
  void is_back() {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.clear();
  }

  // What a rank's device has counted, by the workspace of that rank. Nothing where it cannot be read soon, an operation ended
  // meanwhile, or a wait has been aborted: operations do not count themselves then.
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

  // Of this rank's operations. Nothing where the memory cannot be read soon.
  std::optional<uint64_t> operations_ended() {
    const std::lock_guard<std::mutex> lock(mutex_);
    constexpr size_t kArrivals = offsetof(CommState, arrivals);
    if (!kept_.empty()) {  // there is no memory to read
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
  std::mutex mutex_;  // the watchdog and statistics ask what has ended
  std::string kept_;  // while the workspace is released, else empty. Changed under the lock
};

}  // namespace llm_comm::host
