// The ranks of a program: for each a workspace, a segment of symmetric memory, channels and a proxy, in memory of the deterministic
// machine.
//
// Memory of a rank: [ workspace of the communicator, of which only the header is there | mailbox | FIFO of the proxy | segment ]. The
// segment has the program's workspace, the semaphores of its channels, and the caller's tensors.
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
  // How far tensors begin behind a whole line, at most.
  static constexpr uint64_t kMostShift = sizeof(Line);

  explicit ProgramWorld(const Program& program);

  emulator::Machine& machine() { return machine_; }
  // Begins a schedule: all memory as the host leaves it before the first call, which has this number.
  void reset(uint64_t seed, const emulator::Temper& temper, uint64_t first_call);

  // Where the rank's tensors lie, if they begin at a whole line.
  char* input(uint32_t rank) { return segment(rank) + input_offset_; }
  char* output(uint32_t rank) { return segment(rank) + output_offset_; }
  // What a launch gives to the kernel, as the core does (host/prepared_program.h).
  ProgramArgs arguments(uint32_t rank, char* input, char* output, uint64_t part_bytes) const;
  const HostMailbox& mailbox(uint32_t rank) { return *mailbox_at(rank); }
  // Set when a wait of the rank gives up.
  const uint32_t* aborted(uint32_t rank) const { return &reinterpret_cast<CommState*>(of_rank(rank))->aborted; }
  // 1 + whom the rank has waited for in vain, if it is the first one; 0: no wait has given up (suspicion.cuh).
  uint32_t note_of(uint32_t rank) const {
    return *reinterpret_cast<uint32_t*>(of_rank(rank) + kNotesOffset + rank * sizeof(Line));
  }
  // The program's workspace.
  const char* workspace(uint32_t rank) const { return segment(rank); }

  // Of all sizes the largest: bytes of the input, and of the output.
  static uint64_t input_bytes(const Program& program, uint64_t part_bytes);
  static uint64_t output_bytes(const Program& program, uint64_t part_bytes);

 private:
  char* of_rank(uint32_t rank) const { return machine_.memory().of_rank(rank); }
  char* segment(uint32_t rank) const { return of_rank(rank) + kSegmentOffset; }
  HostMailbox* mailbox_at(uint32_t rank) const { return reinterpret_cast<HostMailbox*>(of_rank(rank) + kHeaderBytes); }
  void write_workspace(uint32_t rank);
  void start_ports(uint32_t rank);

  static constexpr uint64_t kRingOffset = kHeaderBytes + 4096;
  static constexpr uint64_t kSegmentOffset = kRingOffset + 4096;
  static_assert(sizeof(HostMailbox) <= kRingOffset - kHeaderBytes);
  static_assert(port_ring_bytes(PortActor::kEntriesLog2) <= kSegmentOffset - kRingOffset);

  const Program& program_;
  uint64_t semaphores_offset_;  // these in the segment
  uint64_t input_offset_;
  uint64_t output_offset_;
  uint64_t segment_bytes_;
  mutable emulator::Machine machine_;
  std::vector<Channels> channels_;
  std::vector<std::unique_ptr<PortActor>> ports_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
