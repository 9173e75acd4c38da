// The ranks of one schedule: a core for each, the one of the product, over memory and streams of the emulated machine.
#pragma once

#include <memory>
#include <vector>

#include "channel_memory.cuh"
#include "emulator/deterministic/machine.h"
#include "gcn/code.h"
#include "host/core.h"
#include "host/order_of_operations.h"
#include "llm_comm/operation.cuh"

namespace drill {

using namespace llm_comm;  // NOLINT: a test of its kernels

inline constexpr uint64_t kSlotBytes = 32 * 1024;
// Behind the workspace: memory of the channels that message_passing.cuh drives.
inline constexpr uint64_t kMaxStagingBytes =
    2 * 1024 * kWarpThreads;  // chunks of quantized algorithms are warps of lines
// The buffers of 16 senders take more.
constexpr uint64_t staging_bytes_of(uint32_t ranks) {
  return ranks > kMaxExactWorld ? kMaxStagingBytes : kMaxStagingBytes / 2;
}
inline constexpr uint64_t kChannelOffset = kHeaderBytes + kSlots * kSlotBytes + kMaxStagingBytes;
inline constexpr uint64_t kRingOffset = kChannelOffset + 16 * 1024;  // the FIFO of port channels
// Behind that, the only window of the symmetric heap.
inline constexpr uint64_t kWindowOffset = kRingOffset + 16 * 1024;
inline constexpr uint64_t kWindowBytes = 16 * 1024;
inline constexpr uint64_t kBytesOfRank = kWindowOffset + kWindowBytes;
inline constexpr uint64_t kTimeoutNs = 4'000'000;

class World {
 public:
  // `first_operation`: where the operations' numbers start. `check_calls`: the ranks compare each call before it.
  // `machine_code`: kernels that run as machine code in place of the emulated ones; nullptr: none.
  World(emulator::Machine& machine, uint32_t ranks, uint64_t first_operation, bool check_calls,
        const gcn::MachineCode* machine_code);
  ~World();

  uint32_t ranks() const { return static_cast<uint32_t>(members_.size()); }
  host::Core& core(uint32_t rank);
  const DeviceComm& device_comm(uint32_t rank) const;
  emulator::Machine& machine() { return machine_; }
  // Enqueues a kernel of a test's own as the core enqueues its own.
  void launch(uint32_t rank, const emulator::LaunchConfig& config, std::function<void()> kernel);

  // Before a kernel of a test's own uses port channels.
  void start_ports(uint32_t rank);

  // By peer. Channels outlive the calls that use them.
  ChannelCounters* channel_counters(uint32_t rank);

  // Memory of the symmetric heap that nobody has yet, aligned to lines.
  char* take_symmetric(uint32_t rank, uint64_t bytes);

  // The word of the slots that differs from the sentinel, if any: "" or what is wrong.
  std::string not_reset(uint32_t rank);
  // How many operations the rank's state counts, from 0.
  uint64_t operations_counted(uint32_t rank);
  // As the host reads it once all have ended.
  host::OrderOnRank order(uint32_t rank);
  // How many operations of the schedule come before the one of this number.
  uint64_t operations_before(uint64_t sequence) const;

 private:
  struct Member;
  emulator::Machine& machine_;
  uint64_t first_operation_;
  std::vector<std::unique_ptr<Member>> members_;
};

}  // namespace drill
