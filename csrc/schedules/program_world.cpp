#include "schedules/program_world.h"

#include <algorithm>
#include <cstring>

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

namespace {

constexpr uint64_t kAlignment = 128;
// Any kind except that of user kernels, which the channels have.
constexpr auto kKind = static_cast<OperationKind>(1);

uint64_t up(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

uint64_t largest_part(const Program& program) {
  uint64_t most = 0;
  for (uint32_t i = 0; i < program.size_count; ++i) most = std::max(most, program.sizes[i].part_bytes);
  return most;
}

}  // namespace

uint64_t ProgramWorld::input_bytes(const Program& program, uint64_t part_bytes) {
  return part_bytes * (program.has_parted_input ? program.world : 1);
}

uint64_t ProgramWorld::output_bytes(const Program& program, uint64_t part_bytes) {
  return part_bytes * (program.has_parted_output ? program.world : 1);
}

ProgramWorld::ProgramWorld(const Program& program)
    : program_(program),
      semaphores_offset_(up(program.workspace_bytes)),
      input_offset_(up(semaphores_offset_ + Channels::bytes_of_semaphores(program.world, program.semaphores))),
      output_offset_(up(input_offset_ + kMostShift + input_bytes(program, largest_part(program)))),
      window_bytes_(up(output_offset_ + kMostShift + output_bytes(program, largest_part(program)))),
      machine_(program.world, kWindowOffset + window_bytes_, kTimeoutNs / 256) {
  DeviceComm comm{};
  for (uint32_t rank = 0; rank < program.world; ++rank) comm.workspace[rank] = of_rank(rank);
  comm.timeout_ns = kTimeoutNs;
  comm.world_size = program.world;
  comm.port_entries_log2 = PortActor::kEntriesLog2;
  for (uint32_t rank = 0; rank < program.world; ++rank) {
    comm.rank = rank;
    comm.mailbox = mailbox_at(rank);
    comm.ports = reinterpret_cast<PortRing*>(of_rank(rank) + kRingOffset);
    channels_.push_back({comm, symmetric_offset_at(0, 0), program.workspace_bytes,
                         symmetric_offset_at(0, semaphores_offset_), program.semaphores});
  }
}

void ProgramWorld::reset(uint64_t seed, const emulator::ScheduleParameters& parameters, uint64_t first_call) {
  for (uint32_t rank = 0; rank < program_.world; ++rank) {
    write_workspace(rank);
    CommState state{};
    state.arrivals = first_call * kArrivalsPerOperation;
    std::memcpy(of_rank(rank), &state, sizeof(state));
    for (uint32_t i = 0; i < program_.sentinel_range_count; ++i) {
      const SentinelRange& range = program_.sentinel_ranges[i];
      std::memset(window(rank) + range.begin, 0xFF, range.end - range.begin);
    }
  }
  machine_.reset(seed, program_.world, parameters);
  ports_.clear();
  for (uint32_t rank = 0; rank < program_.world; ++rank) start_ports(rank);
}

void ProgramWorld::write_workspace(uint32_t rank) {
  std::memset(of_rank(rank), 0, machine_.memory().bytes_of_rank());
  for (const Region& region : WorkspaceLayout(0).regions().region) {
    std::memset(of_rank(rank) + region.offset, region.initial_byte, region.bytes);
  }
  char* windows[kMaxWorldSize] = {};
  for (uint32_t other = 0; other < program_.world; ++other) windows[other] = window(other);
  std::memcpy(of_rank(rank) + kHeapOffset, windows, sizeof(windows));
}

void ProgramWorld::start_ports(uint32_t rank) {
  host::PortOwner owner{};
  std::copy_n(channels_[rank].comm.workspace, kMaxWorldSize, owner.workspace);
  owner.rank = rank;
  owner.world_size = program_.world;
  owner.has_failed = [this, rank] { return mailbox(rank).error.complete != 0; };
  owner.fail = [] {};  // the actor throws instead
  owner.find_in_heap = [this](uint32_t of, uint64_t symmetric_offset, uint64_t bytes) -> char* {
    return bytes <= window_bytes_ && symmetric_offset <= window_bytes_ - bytes ? window(of) + symmetric_offset
                                                                               : nullptr;
  };
  ports_.push_back(std::make_unique<PortActor>(machine_, rank, of_rank(rank) + kRingOffset));
  ports_.back()->start(owner);
}

ProgramArgs ProgramWorld::arguments(uint32_t rank, char* input, char* output, uint64_t part_bytes) const {
  ProgramArgs args{};
  static_cast<Channels&>(args) = channels_[rank];
  for (uint32_t i = 0; i < program_.world; ++i) args.at[i] = window((rank + i) % program_.world);
  args.input = input;
  args.output = output;
  args.part_bytes = part_bytes;
  args.bytes = std::max(input_bytes(program_, part_bytes), output_bytes(program_, part_bytes));
  args.input_symmetric_offset = symmetric_offset_at(0, static_cast<uint64_t>(input - window(rank)));
  args.output_symmetric_offset = symmetric_offset_at(0, static_cast<uint64_t>(output - window(rank)));
  args.kind = kKind;
  return args;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
