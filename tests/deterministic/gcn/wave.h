// A wave of 64 lanes: its registers, and its accesses to memory that are under way.
//
// Accesses complete later than they are issued, in the order of their issue: when s_waitcnt asks for them, or earlier at
// random. Until then the registers that they load are pending, and whoever reads or writes one of them fails, except a
// later load of the same order. Vector accesses and those by lgkmcnt have an order each. Scalar loads return in any
// order, so only lgkmcnt(0) waits for them.
//
// Memory order (LLVM guide, "Memory Model gfx942"). Accesses with sc0 and sc1 are the relaxed atomic ones of the
// emulator's memory model, others are its weak ones.
// - Release: buffer_wbl2 takes a snapshot of what the wave has seen and stored when it completes. Stores carry that
//   snapshot only behind an s_waitcnt that waits for it.
// - Acquire: buffer_inv joins what the relaxed loads carry that have completed when it is issued.
// - s_barrier joins the views of the waves, with the stores that have completed.
// - buffer_wbl2, a wait for it and buffer_inv are weaker here than a fence of PTX: there is no total order of them.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "code.h"
#include "emulator/deterministic/machine.h"

namespace gcn {

namespace emulator = llm_comm::emulator;

// A grid that runs as machine code.
struct Grid {
  emulator::Machine* machine;
  const Kernel* kernel;
  std::vector<uint64_t> arguments;  // the kernel-argument segment
  uint32_t shared_bytes;
  // Range of each rank's memory that is atomic in words of 4 bytes. All other memory is atomic in 8 bytes where that
  // many are loaded or stored by an access of system scope.
  uint64_t lines_begin;
  uint64_t lines_end;
  std::vector<std::unique_ptr<Wave>> waves;  // of this grid: those that run, and idle ones
  std::vector<Wave*> idle;
};

struct Access {
  const Instruction* in;
  uint64_t exec;
  uint64_t number;  // among the vector accesses of the wave
  std::array<uint64_t, kLanes> address;
  std::array<std::array<uint32_t, 4>, kLanes> data;  // stored ones, or the operands of a read-modify-write
};

class Wave {
 public:
  // Registers.
  std::array<uint32_t, 128> s;
  std::array<std::array<uint32_t, kLanes>, 256> v;
  bool scc;
  uint32_t next;  // number of the next instruction
  bool has_ended;

  uint64_t pair(uint32_t reg) const { return s[reg] | uint64_t{s[reg + 1]} << 32; }
  void set_pair(uint32_t reg, uint64_t value) {
    s[reg] = static_cast<uint32_t>(value);
    s[reg + 1] = static_cast<uint32_t>(value >> 32);
  }
  uint64_t exec() const { return pair(kExec); }

  // Runs the calling fiber's wave to its end.
  void run(const Grid& grid);
  void issue(const Instruction& in);
  void wait(uint32_t vector_count, uint32_t local_count);
  // Lets some accesses complete early.
  void complete_some();
  void acquire() { grid_->machine->acquire(); }
  // Ends the schedule.
  [[noreturn]] void fail(const std::string& what);

 private:
  using Queue = std::deque<Access>;
  void start(const Grid& grid);
  void check_pending(const Instruction& in);
  void count_pending(const Instruction& in, int change);
  uint64_t address_of(const Instruction& in, uint32_t lane) const;
  void complete_first(Queue& queue);
  void complete_down_to(Queue& queue, size_t count);
  void carry_out(Access& access);
  void carry_out_global(const Access& access, uint32_t lane);
  void carry_out_local(const Access& access, uint32_t lane);
  void carry_out_scalar(const Access& access);
  void deliver(const Instruction& in, uint32_t lane, const uint32_t* words);
  // Whether the address is in the slots, which hold lines.
  bool is_of_line(const void* address) const;

  const Grid* grid_;
  const Instruction* current_;
  Queue vector_accesses_;
  Queue local_accesses_;  // by lgkmcnt: local memory, scalar loads, and the clock
  uint64_t issued_;
  uint64_t write_back_number_;  // of the last buffer_wbl2 that has completed
  uint32_t write_back_snapshot_;
  // Loads under way into each register, by the queue of the load: vector_accesses_, local_accesses_.
  std::array<std::array<uint8_t, 256>, 2> pending_vectors_;
  std::array<uint8_t, 128> pending_scalars_;
  uint32_t pending_;  // loads under way
};

template <class Action>
void for_each_lane(uint64_t exec, Action action) {
  for (; exec != 0; exec &= exec - 1) action(static_cast<uint32_t>(std::countr_zero(exec)));
}

// The job of each fiber of a grid of `config`, one a wave (LaunchConfig::fiber_threads). `argument`: the object that the
// kernel takes.
std::function<void()> job_of(emulator::Machine& machine, const Kernel& kernel, const emulator::LaunchConfig& config,
                             const void* argument, uint32_t argument_bytes, uint64_t lines_begin, uint64_t lines_end);

}  // namespace gcn
