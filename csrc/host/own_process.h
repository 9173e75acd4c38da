// Whether an object is used in the process that made it. A forked child has a copy of everything, but none of the threads, no use of
// the GPU, and the memory that ranks share: a call from there would take its parent's turn.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace llm_comm::host {

class OwnProcess {
 public:
  // One load: pthread_atfork keeps count, since getpid() is a system call.
  bool is_this() const { return forks_ == forks.load(std::memory_order_relaxed); }

 private:
  static inline std::atomic<uint32_t> forks = 0;  // that lie between the process that loaded the library and this one
  static void count_fork() { forks.fetch_add(1, std::memory_order_relaxed); }
  [[maybe_unused]] static inline const int counts = pthread_atfork(nullptr, nullptr, count_fork);

  uint32_t forks_ = forks.load(std::memory_order_relaxed);
};

}  // namespace llm_comm::host
