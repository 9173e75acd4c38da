// LaunchQueue: serializes and numbers the launches of a communicator. PreparedLaunches: a call of an algorithm that is
// ready to be launched. Used by CoreImpl.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "algorithms/check_call.cuh"
#include "host/core.h"
#include "host/heap_copies.h"
#include "host/order_of_operations.h"
#include "host/windows.h"

namespace llm_comm::host {

inline bool has_error(const HostMailbox& mailbox) {
  return __atomic_load_n(&mailbox.error.complete, __ATOMIC_ACQUIRE) != 0;
}

inline bool has_failed(const HostMailbox& mailbox) {
  return has_error(mailbox) || (__atomic_load_n(&mailbox.end_reasons, __ATOMIC_ACQUIRE) & kAbortRequest) != 0;
}

// Serializes the launches of a communicator, numbers them, and adds the kernels that compare calls between ranks.
template <class Launcher>
class LaunchQueue {
 public:
  LaunchQueue(Launcher& launcher, bool check_calls) : launcher_(launcher) {
    if (check_calls) check_.emplace(Check{launcher.function(&check_call), launcher.function(&release_call)});
  }

  // Lock held while a call is enqueued. The order of lock holders is the order of the launches.
  std::mutex& call_mutex() { return call_mutex_; }

  // While paused, calls are refused because the workspaces have no memory. Hold call_mutex().
  void pause(bool is_paused) { is_paused_ = is_paused; }
  bool is_paused() const { return is_paused_; }

  // Returns whether a graph captures the launch.
  template <class Args>
  bool launch(const typename Launcher::template Function<Args>& function, const Args& args, const Grid& grid,
              const CallSignature& call, uint64_t bytes, uint64_t stream) {
    const uint64_t number = launches() + 1;
    kind_.store(static_cast<uint64_t>(call.operation) << 32 | call.data_type << 16 | call.row,
                std::memory_order_relaxed);
    count_.store(call.count, std::memory_order_relaxed);
    launches_.store(number, std::memory_order_relaxed);
    if (!check_) return launcher_.launch(function, args, grid, stream);
    CheckCallArgs check{args.comm, call, bytes};
    check.call.number = static_cast<uint32_t>(number);
    const uint32_t ranks = args.comm.world_size;
    Grid of_ranks{1, ranks, static_cast<uint32_t>(ranks * sizeof(CheckedCall))};
    of_ranks.is_after_copies = grid.is_after_copies;
    launcher_.launch(check_->before, check, of_ranks, stream);
    launcher_.launch(function, args, grid, stream);
    return launcher_.launch(check_->after, check, Grid{1, 1, 0}, stream);
  }

  Launcher& launcher() { return launcher_; }

  // Launches to date, captured ones included. Thread-safe.
  uint64_t launches() const { return launches_.load(std::memory_order_relaxed); }

  // Last call, without buffers and parameters. Thread-safe; a call that is being enqueued may be half written.
  CallSignature last() const {
    const uint64_t kind = kind_.load(std::memory_order_relaxed);
    return {static_cast<uint32_t>(kind >> 32),
            static_cast<uint16_t>(kind >> 16),
            static_cast<uint16_t>(kind),
            count_.load(std::memory_order_relaxed),
            static_cast<uint32_t>(launches()),
            0,
            {}};
  }

 private:
  struct Check {
    typename Launcher::template Function<CheckCallArgs> before;
    typename Launcher::template Function<CheckCallArgs> after;
  };

  Launcher& launcher_;
  std::optional<Check> check_;
  std::mutex call_mutex_;
  bool is_paused_ = false;
  std::atomic<uint64_t> kind_ = 0;
  std::atomic<uint32_t> count_ = 0;
  std::atomic<uint64_t> launches_ = 0;
};

inline Outcome outcome(const HostMailbox& mailbox, bool is_captured) {
  if (has_failed(mailbox)) return Outcome::kFailed;
  return is_captured ? Outcome::kCaptured : Outcome::kEnqueued;
}

// A call of an algorithm whose kernels take Operation::Args. All launches but the last share a grid.
template <class Launcher, class Operation>
class PreparedLaunches final : public PreparedCall {
 public:
  using Args = typename Operation::Args;
  using Function = typename Launcher::template Function<Args>;

  // `call`: complete except for count, number and buffers. `symmetric`: AlgorithmInfo::symmetric.
  PreparedLaunches(LaunchQueue<Launcher>& queue, const Windows& windows, const Args& args, const CallSignature& call,
                   const Problem& problem, const Shape& shape, Function whole, Function last, uint32_t symmetric)
      : queue_(queue),
        windows_(windows),
        args_(args),
        call_(call),
        problem_(problem),
        shape_(shape),
        whole_(whole),
        last_(last),
        symmetric_(symmetric) {}

  bool takes(const uint64_t* buffers) const override {
    if (symmetric_ == 0) return true;
    if (windows_.empty()) return false;
    for (uint32_t i = 0; i < kMaxBuffers; ++i) {
      if ((symmetric_ >> i & 1) != 0 && symmetric_offset_of(i, buffers) == kNoSymmetricOffset) return false;
    }
    return true;
  }

  Outcome run(const uint64_t* buffers, uint64_t stream) override {
    const std::lock_guard<std::mutex> lock(queue_.call_mutex());
    const HostMailbox& mailbox = *args_.comm.mailbox;
    if (queue_.is_paused() || has_failed(mailbox)) return Outcome::kFailed;
    call_.buffers = 0;
    for (int i = 0; i < kMaxBuffers; ++i) {
      if (Operation::kInfo.buffers[i].is_optional && buffers[i] != 0) call_.buffers |= uint64_t{1} << i;
    }
    if constexpr (requires { Operation::check_buffers(problem_, buffers); })
      Operation::check_buffers(problem_, buffers);
    bool is_captured = false;
    const uint64_t units = problem_.units();
    const uint64_t launch_units = shape_.tiling.launch_units;
    for (uint64_t done = 0; done < units; done += launch_units) {
      const bool is_last = units - done <= launch_units;
      const uint64_t taken = is_last ? units - done : launch_units;
      const Grid& grid = is_last ? shape_.last : shape_.whole;
      Operation::set_launch(args_, problem_, buffers, done, taken);
      if constexpr (requires { args_.symmetric_offsets; }) {
        for (uint32_t i = 0, next = 0; i < kMaxBuffers; ++i) {
          if ((symmetric_ >> i & 1) != 0) args_.symmetric_offsets[next++] = symmetric_offset_of(i, buffers);
        }
      }
      call_.count = static_cast<uint32_t>(taken * problem_.unit_elements());
      args_.comm.call = hash_of(call_);
      const auto launch = [&](const Grid& of) {
        args_.comm.takes_tickets = of.takes_tickets;
        is_captured = queue_.launch(is_last ? last_ : whole_, args_, of, call_, taken * problem_.unit_bytes(), stream);
      };
      if constexpr (requires { Operation::grids(problem_, shape_.tiling); }) {  // several grids and copies
        HeapCopies<Launcher> copies(queue_.launcher(), windows_, args_.symmetric_offsets[0], buffers, stream);
        Operation::enqueue(args_, problem_, shape_.tiling, grid, launch, copies);
      } else {
        launch(grid);
      }
    }
    return outcome(mailbox, is_captured);
  }

 private:
  static constexpr bool kIsOutOfPlace = requires { Operation::kIsOutOfPlace; };

  // Symmetric offset of a buffer that peers access in whole lines. kNoSymmetricOffset for an in-place call of an
  // operation that must be out of place.
  uint64_t symmetric_offset_of([[maybe_unused]] uint32_t buffer, [[maybe_unused]] const uint64_t* buffers) const {
    if constexpr (requires { Operation::buffer_bytes(problem_, buffer); }) {
      if (kIsOutOfPlace && buffers[0] == buffers[1]) return kNoSymmetricOffset;
      const std::optional<SymmetricOffset> symmetric_offset =
          windows_.find(buffers[buffer], Operation::buffer_bytes(problem_, buffer));
      if (symmetric_offset && symmetric_offset->offset % sizeof(Line) == 0)
        return symmetric_offset_at(symmetric_offset->window, symmetric_offset->offset);
    }
    return kNoSymmetricOffset;
  }

  LaunchQueue<Launcher>& queue_;
  const Windows& windows_;
  Args args_;
  CallSignature call_;
  Problem problem_;
  Shape shape_;
  Function whole_;
  Function last_;
  uint32_t symmetric_;
};

}  // namespace llm_comm::host
