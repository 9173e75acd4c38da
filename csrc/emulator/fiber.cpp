#include "emulator/fiber.h"

#include <cstdint>
#include <stdexcept>
#include <utility>

namespace llm_comm::inline emulated::emulator {

// makecontext builds the stack; from then on _setjmp/_longjmp switch, because swapcontext makes a system call
// to save the signal mask at every switch.

Fiber::Fiber() : stack_(new char[kStackBytes]) {}

void Fiber::assign(std::function<void()> job) {
  if (!done_) throw std::logic_error("emulator: a fiber was given a job while it still has one");
  job_ = std::move(job);
  done_ = false;
}

bool Fiber::resume() {
  if (_setjmp(scheduler_) == 0) {
    if (started_) _longjmp(fiber_, 1);
    started_ = true;
    if (getcontext(&start_) != 0) throw std::runtime_error("emulator: getcontext failed");
    start_.uc_stack.ss_sp = stack_.get();
    start_.uc_stack.ss_size = kStackBytes;
    start_.uc_link = nullptr;
    const auto address = reinterpret_cast<uintptr_t>(this);  // makecontext passes only ints
    makecontext(&start_, reinterpret_cast<void (*)()>(&Fiber::entry), 2, static_cast<unsigned>(address),
                static_cast<unsigned>(static_cast<uint64_t>(address) >> 32));
    setcontext(&start_);
  }
  return done_;
}

void Fiber::suspend() {
  if (_setjmp(fiber_) == 0) _longjmp(scheduler_, 1);
}

void Fiber::entry(unsigned low, unsigned high) {
  const auto address = static_cast<uint64_t>(high) << 32 | low;
  reinterpret_cast<Fiber*>(static_cast<uintptr_t>(address))->run_jobs();
}

void Fiber::run_jobs() {
  for (;;) {
    job_();
    done_ = true;
    suspend();
  }
}

}  // namespace llm_comm::inline emulated::emulator
