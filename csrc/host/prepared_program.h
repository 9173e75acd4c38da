// PreparedProgram: a DSL kernel (llm_comm.dsl) that is ready to be launched as an operation of its communicator. Used
// by CoreImpl.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "host/launch_queue.h"
#include "llm_comm/program.cuh"

namespace llm_comm::host {

// First OperationKind of DSL kernels. They are numbered in the order in which a core loads them, the same on all ranks.
inline constexpr uint32_t kFirstProgramKind = 0x10000;

template <class Launcher>
class PreparedProgram final : public PreparedCall {
 public:
  using Function = typename Launcher::template Function<ProgramArgs>;

  // `comm` holds the addresses of the ranks' workspaces. Throws std::invalid_argument if `launch` does not fit the heap
  // or the device.
  PreparedProgram(LaunchQueue<Launcher>& queue, Launcher& launcher, const Windows& windows, const DeviceComm& comm,
                  Function function, const ProgramLaunch& launch)
      : queue_(queue), windows_(windows), launch_(launch), function_(function) {
    if (launch.blocks == 0 || launch.blocks >= kArrivalsPerOperation) {
      throw std::invalid_argument("blocks is " + std::to_string(launch.blocks) + "; it must be 1 to 65535");
    }
    static_cast<Channels&>(args_) = {
        comm, symmetric_offset_at(launch.memory.window, launch.memory.offset), launch.memory_bytes,
        symmetric_offset_at(launch.semaphore_words.window, launch.semaphore_words.offset), launch.semaphores};
    for (uint32_t i = 0; i < comm.world_size; ++i) {
      args_.at[i] = windows.address((comm.rank + i) % comm.world_size, args_.memory, launch.memory_bytes);
      if (args_.at[i] == nullptr)
        throw std::invalid_argument("the workspace of a program is not in the symmetric heap");
    }
    args_.part_bytes = launch.part_bytes;
    args_.bytes = std::max(launch.input_bytes, launch.output_bytes);
    args_.kind = static_cast<OperationKind>(kFirstProgramKind + launch.kernel);
    grid_ = {launch.blocks, launch.threads, std::max<uint32_t>(launch.shared_bytes, sizeof(Line))};
    const uint64_t resident = launcher.resident_blocks(function, grid_);
    if (resident < launch.groups) {
      throw std::invalid_argument("the device runs " + std::to_string(resident) + " blocks of " +
                                  std::to_string(launch.threads) + " threads at once, and the program has " +
                                  std::to_string(launch.groups) + " groups that wait for each other: lower threads");
    }
    grid_.takes_tickets = resident < grid_.blocks;
    args_.comm.takes_tickets = grid_.takes_tickets;
  }

  Outcome run(const uint64_t* buffers, uint64_t stream) override {
    const std::lock_guard<std::mutex> lock(queue_.call_mutex());
    const HostMailbox& mailbox = *args_.comm.mailbox;
    if (queue_.is_paused() || has_failed(mailbox)) return Outcome::kFailed;
    args_.input = reinterpret_cast<char*>(buffers[0]);
    args_.output = reinterpret_cast<char*>(buffers[1]);
    if ((launch_.symmetric & 1) != 0)
      args_.input_symmetric_offset = symmetric_offset_of(buffers[0], launch_.input_bytes);
    if ((launch_.symmetric & 2) != 0)
      args_.output_symmetric_offset = symmetric_offset_of(buffers[1], launch_.output_bytes);
    const CallSignature call{static_cast<uint32_t>(args_.kind),
                             static_cast<uint16_t>(launch_.type),
                             0,
                             static_cast<uint32_t>(launch_.input_bytes / element_bytes(launch_.type)),
                             0,
                             0,
                             {}};
    args_.comm.call = hash_of(call);
    const bool is_captured = queue_.launch(function_, args_, grid_, call, args_.bytes, stream);
    return outcome(mailbox, is_captured);
  }

 private:
  uint64_t symmetric_offset_of(uint64_t address, uint64_t bytes) const {
    const std::optional<SymmetricOffset> symmetric_offset = windows_.find(address, bytes);
    if (!symmetric_offset)
      throw std::invalid_argument("a tensor that peers of the program use is not in symmetric memory");
    return symmetric_offset_at(symmetric_offset->window, symmetric_offset->offset);
  }

  LaunchQueue<Launcher>& queue_;
  const Windows& windows_;
  ProgramLaunch launch_;
  Function function_;
  Grid grid_{};
  ProgramArgs args_{};
};

}  // namespace llm_comm::host
