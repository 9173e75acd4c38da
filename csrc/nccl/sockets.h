// Deadline, socket transfers with deadlines, and random bytes.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "host/descriptor.h"

namespace llm_comm::nccl {

using host::Descriptor;

class Deadline {
 public:
  explicit Deadline(double seconds)
      : at_(std::chrono::steady_clock::now() +
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds))) {}
  // For poll(): rounded up, at most a day; 0 after the deadline.
  int milliseconds_left() const;
  bool is_over() const { return std::chrono::steady_clock::now() >= at_; }

 private:
  std::chrono::steady_clock::time_point at_;
};

// These throw Failure: ncclRemoteError if the other side has closed or is late, else ncclSystemError. The descriptors
// must be non-blocking.
void wait_until_ready(int fd, short events, const Deadline& deadline, const char* what);
void send_all(int fd, const void* data, size_t bytes, const Deadline& deadline, const char* what);
void receive_all(int fd, void* data, size_t bytes, const Deadline& deadline, const char* what);

[[noreturn]] void fail_with_errno(const std::string& what);

// True if an errno means that file descriptors or memory for another connection are exhausted.
bool is_out_of_resources(int error);

// Fills with bytes from the kernel's random generator.
void fill_randomly(void* data, size_t bytes);
// Comparison in constant time.
bool are_equal(const void* a, const void* b, size_t bytes);

}  // namespace llm_comm::nccl
