// A stack of its own for each GPU thread of the emulator, switched without a system call.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace llm_comm::inline emulated::emulator {

// Runs one job at a time; when a job ends the fiber can take the next, so stacks are made once.
class Fiber {
 public:
  static constexpr size_t kStackBytes = 64 * 1024;

  Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Gives the fiber a job. It must not have one.
  void assign(std::function<void()> job);
  // Runs the job until it suspends or ends. Returns true when it has ended.
  bool resume();
  // Called by the job: goes back to resume().
  void suspend();

 private:
  static void entry(unsigned low, unsigned high);
  void run_jobs();

  std::unique_ptr<char[]> stack_;
  std::function<void()> job_;
  jmp_buf scheduler_;
  jmp_buf fiber_;
  ucontext_t start_;
  bool started_ = false;
  bool done_ = true;
};

}  // namespace llm_comm::inline emulated::emulator
