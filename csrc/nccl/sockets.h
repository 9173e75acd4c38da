// Descriptors that are owned, deadlines, and random words.
#pragma once

#include <chrono>
#include <string>
#include <utility>

namespace llm_comm::nccl {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

class Deadline {
 public:
  explicit Deadline(double seconds)
      : at_(std::chrono::steady_clock::now() +
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds))) {}
  // For poll(): rounded up, at most a day; 0 when it is over.
  int milliseconds_left() const;
  bool is_over() const { return std::chrono::steady_clock::now() >= at_; }

 private:
  std::chrono::steady_clock::time_point at_;
};

// These throw Failure (ncclSystemError, or ncclRemoteError where the other side has closed or says nothing in time). The descriptors
// do not block.
void wait_until_ready(int fd, short events, const Deadline& deadline, const char* what);
void send_all(int fd, const void* data, size_t bytes, const Deadline& deadline, const char* what);
void receive_all(int fd, void* data, size_t bytes, const Deadline& deadline, const char* what);

[[noreturn]] void fail_with_errno(const std::string& what);

// Whether an errno says that descriptors or memory for another connection have run out.
bool has_no_room(int error);

// Of the kernel's generator.
void fill_randomly(void* data, size_t bytes);
// Takes as long whatever the bytes are.
bool are_equal(const void* a, const void* b, size_t bytes);

}  // namespace llm_comm::nccl
