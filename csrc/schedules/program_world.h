// ProgramWorld: the ranks of a DSL kernel in memory of the deterministic machine. Each has a workspace, a registered
// window of symmetric memory, channels and a proxy.
//
// Memory of a rank: [ communicator workspace, header only | mailbox | request ring | window ]. The window holds the DSL
// kernel's workspace, the semaphores of its channels, and the caller's tensors.
#pragma once

#include <memory>
#include <vector>

#include "emulator/deterministic/machine.h"
#include "schedules/explored_kernel.h"
#include "schedules/port_actor.h"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

class ProgramWorld {
 public:
  static constexpr uint64_t kTimeoutNs = 4'000'000;
  // Maximum distance of a tensor from a line boundary.
  static constexpr uint64_t kMostShift = sizeof(Line);

  explicit ProgramWorld(const Program& program);

  emulator::Machine& machine() { return machine_; }
  // Begins a schedule: all memory is as the host leaves it before call number `first_call`.
  void reset(uint64_t seed, const emulator::ScheduleParameters& parameters, uint64_t first_call);

  // Addresses of the rank's tensors if they begin at a line boundary.
  char* input(uint32_t rank) { return window(rank) + input_offset_; }
  char* output(uint32_t rank) { return window(rank) + output_offset_; }
  // Kernel arguments of a launch, as the core passes them (host/prepared_program.h).
  ProgramArgs arguments(uint32_t rank, char* input, char* output, uint64_t part_bytes) const;
  const HostMailbox& mailbox(uint32_t rank) { return *mailbox_at(rank); }
  // Set when a wait of the rank is aborted.
  const uint32_t* aborted(uint32_t rank) const { return &reinterpret_cast<CommState*>(of_rank(rank))->aborted; }
  // 1 + the rank that the rank's first aborted wait was for; 0: no wait was aborted (fault_reports.cuh).
  uint32_t note_of(uint32_t rank) const {
    return *reinterpret_cast<uint32_t*>(of_rank(rank) + kFaultReportsOffset + rank * sizeof(Line));
  }
  // The DSL kernel's workspace.
  const char* workspace(uint32_t rank) const { return window(rank); }

  // Bytes of the input and of the output, for shards of `part_bytes` bytes.
  static uint64_t input_bytes(const Program& program, uint64_t part_bytes);
  static uint64_t output_bytes(const Program& program, uint64_t part_bytes);

 private:
  char* of_rank(uint32_t rank) const { return machine_.memory().of_rank(rank); }
  char* window(uint32_t rank) const { return of_rank(rank) + kWindowOffset; }
  HostMailbox* mailbox_at(uint32_t rank) const { return reinterpret_cast<HostMailbox*>(of_rank(rank) + kHeaderBytes); }
  void write_workspace(uint32_t rank);
  void start_ports(uint32_t rank);

  static constexpr uint64_t kRingOffset = kHeaderBytes + 4096;
  static constexpr uint64_t kWindowOffset = kRingOffset + 4096;
  static_assert(sizeof(HostMailbox) <= kRingOffset - kHeaderBytes);
  static_assert(port_ring_bytes(PortActor::kEntriesLog2) <= kWindowOffset - kRingOffset);

  const Program& program_;
  uint64_t semaphores_offset_;  // offsets in the window
  uint64_t input_offset_;
  uint64_t output_offset_;
  uint64_t window_bytes_;
  mutable emulator::Machine machine_;
  std::vector<Channels> channels_;
  std::vector<std::unique_ptr<PortActor>> ports_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
