// _FORTIFY_SOURCE, a default of some distributions, makes glibc's longjmp abort on a jump to another stack. A
// command-line option cannot reliably turn it off, because Ubuntu's gcc defines it internally.
#undef _FORTIFY_SOURCE

#include "emulator/fiber.h"

#include <cstdint>
#include <stdexcept>
#include <utility>

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

// makecontext creates the stack; afterwards _setjmp/_longjmp switch. swapcontext would make a system call at every
// switch to save the signal mask.
//
// The sanitizers are notified of every switch: AddressSanitizer of the stacks, ThreadSanitizer of the fiber. Each
// treats a fiber as a thread.

#if defined(__SANITIZE_ADDRESS__)

void SanitizedFiber::before_resume(const void* stack, size_t bytes) {
  __sanitizer_start_switch_fiber(&outer_frames_, stack, bytes);
}
void SanitizedFiber::after_resume() { __sanitizer_finish_switch_fiber(outer_frames_, nullptr, nullptr); }
void SanitizedFiber::before_suspend() { __sanitizer_start_switch_fiber(&own_frames_, outer_stack_, outer_bytes_); }
void SanitizedFiber::after_suspend() { __sanitizer_finish_switch_fiber(own_frames_, &outer_stack_, &outer_bytes_); }

#elif defined(__SANITIZE_THREAD__)

SanitizedFiber::SanitizedFiber() : own_(__tsan_create_fiber(0)) {}
SanitizedFiber::~SanitizedFiber() { __tsan_destroy_fiber(own_); }
void SanitizedFiber::before_resume(const void*, size_t) {
  outer_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(own_, 0);
}
void SanitizedFiber::after_resume() {}
void SanitizedFiber::before_suspend() { __tsan_switch_to_fiber(outer_, 0); }
void SanitizedFiber::after_suspend() {}

#endif

Fiber::Fiber() : stack_(new char[kStackBytes]) {}

void Fiber::assign(std::function<void()> job) {
  if (!done_) throw std::logic_error("emulator: a fiber was given a job while it still has one");
  job_ = std::move(job);
  done_ = false;
}

bool Fiber::resume() {
  if (_setjmp(scheduler_) == 0) {
    sanitized_.before_resume(stack_.get(), kStackBytes);
    if (started_) _longjmp(fiber_, 1);
    started_ = true;
    if (getcontext(&start_) != 0) throw std::runtime_error("emulator: getcontext failed");
    start_.uc_stack.ss_sp = stack_.get();
    start_.uc_stack.ss_size = kStackBytes;
    start_.uc_link = nullptr;
    const auto address = reinterpret_cast<uintptr_t>(this);  // makecontext passes ints only
    makecontext(&start_, reinterpret_cast<void (*)()>(&Fiber::entry), 2, static_cast<unsigned>(address),
                static_cast<unsigned>(static_cast<uint64_t>(address) >> 32));
    setcontext(&start_);
  }
  sanitized_.after_resume();
  return done_;
}

void Fiber::suspend() {
  if (_setjmp(fiber_) == 0) {
    sanitized_.before_suspend();
    _longjmp(scheduler_, 1);
  }
  sanitized_.after_suspend();
}

void Fiber::entry(unsigned low, unsigned high) {
  const auto address = static_cast<uint64_t>(high) << 32 | low;
  reinterpret_cast<Fiber*>(static_cast<uintptr_t>(address))->run_jobs();
}

void Fiber::run_jobs() {
  sanitized_.after_suspend();
  for (;;) {
    job_();
    done_ = true;
    suspend();
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
