// OwnProcess: tells whether an object is used in the process that created it. A forked child has copies of all objects,
// but no threads and no access to the GPU, and it shares the memory of the ranks: a call there would disturb its
// parent's.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace llm_comm::host {

class OwnProcess {
 public:
  // One load. pthread_atfork counts forks because getpid() is a system call.
  bool is_this() const { return forks_ == forks.load(std::memory_order_relaxed); }

 private:
  static inline std::atomic<uint32_t> forks = 0;  // forks between the process that loaded the library and this one
  static void count_fork() { forks.fetch_add(1, std::memory_order_relaxed); }
  [[maybe_unused]] static inline const int counts = pthread_atfork(nullptr, nullptr, count_fork);

  uint32_t forks_ = forks.load(std::memory_order_relaxed);
};

}  // namespace llm_comm::host
