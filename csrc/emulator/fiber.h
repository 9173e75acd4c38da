// Fiber: the stack of a GPU thread of the emulator, switched without a system call.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#include <cstddef>
#include <functional>
#include <memory>

#include "llm_comm/platform_types.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

// Notifies the sanitizers of stack switches; does nothing in other builds.
class SanitizedFiber {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
 public:
  void before_resume(const void* stack, size_t bytes);
  void after_resume();
  void before_suspend();
  void after_suspend();

 private:
#else
 public:
  void before_resume(const void*, size_t) {}
  void after_resume() {}
  void before_suspend() {}
  void after_suspend() {}
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* outer_frames_ = nullptr;
  void* own_frames_ = nullptr;
  const void* outer_stack_ = nullptr;
  size_t outer_bytes_ = 0;
#elif defined(__SANITIZE_THREAD__)
 public:
  SanitizedFiber();
  ~SanitizedFiber();

 private:
  void* own_;
  void* outer_ = nullptr;
#endif
};

// Runs one job at a time and can be reused, so that stacks are allocated once.
class Fiber {
 public:
  static constexpr size_t kStackBytes = 64 * 1024;

  Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Assigns a job to an idle fiber.
  void assign(std::function<void()> job);
  // Runs the job until it suspends or ends. Returns true when it has ended.
  bool resume();
  // Called by the job: returns to resume().
  void suspend();

 private:
  static void entry(unsigned low, unsigned high);
  void run_jobs();

  std::unique_ptr<char[]> stack_;
  std::function<void()> job_;
  jmp_buf scheduler_;
  jmp_buf fiber_;
  ucontext_t start_;
  SanitizedFiber sanitized_;
  bool started_ = false;
  bool done_ = true;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
