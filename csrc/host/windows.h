// Windows: the registered windows of a rank's symmetric heap: own memory, mapped peer memory, and address look-up.
// Used by cores and prepared calls.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/core.h"

namespace llm_comm::host {

// Memory of this rank with the handle by which peers map it.
struct SharedMemory {
  std::shared_ptr<char> memory;
  WorkspaceHandle handle;
};

// Look-ups are thread-safe; one thread at a time changes the windows.
class Windows {
 public:
  using Addresses = std::array<char*, kMaxWorldSize>;  // by rank

  explicit Windows(int rank) : rank_(rank) {}

  // Lock-free, because every call asks.
  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  // Throws std::invalid_argument if the window cannot be added.
  void check_new(uint32_t number, uint64_t bytes) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (number >= kMaxWindows) {
      throw std::invalid_argument("window " + std::to_string(number) + ": there are " + std::to_string(kMaxWindows));
    }
    if (windows_.count(number) != 0) throw std::invalid_argument("there is a window " + std::to_string(number));
    if (bytes == 0) throw std::invalid_argument("a window of 0 bytes");
  }

  void add(uint32_t number, uint64_t bytes, std::shared_ptr<char> own) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Window& window = windows_[number];
    window.bytes = bytes;
    window.memory[rank_] = std::move(own);
    count_.store(windows_.size(), std::memory_order_relaxed);
  }

  void set_peer(uint32_t number, int peer, std::shared_ptr<char> memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    at(number).memory[peer] = std::move(memory);
  }

  void drop_peers(uint32_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Window& window = at(number);
    for (int rank = 0; rank < kMaxWorldSize; ++rank) {
      if (rank != rank_) window.memory[rank].reset();
    }
  }

  void remove(uint32_t number) {
    std::shared_ptr<char> own;  // freed after the lock is released: freeing memory may be slow
    const std::lock_guard<std::mutex> lock(mutex_);
    own = std::move(at(number).memory[rank_]);
    windows_.erase(number);
    count_.store(windows_.size(), std::memory_order_relaxed);
  }

  uint64_t bytes(uint32_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return at(number).bytes;
  }

  std::shared_ptr<char> own(uint32_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return at(number).memory[rank_];
  }

  // Expires with this object.
  std::weak_ptr<const void> life() const { return life_; }

  // By rank; nullptr where a rank's memory is not mapped.
  Addresses addresses(uint32_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Addresses found{};
    for (int rank = 0; rank < kMaxWorldSize; ++rank) found[rank] = at(number).memory[rank].get();
    return found;
  }

  // Symmetric offset of `bytes` at `address`, if one window contains them.
  std::optional<SymmetricOffset> find(uint64_t address, uint64_t bytes) const {
    if (empty()) return std::nullopt;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [number, window] : windows_) {
      const auto first = reinterpret_cast<uint64_t>(window.memory[rank_].get());
      const uint64_t offset = address - first;
      if (address >= first && offset < window.bytes && bytes <= window.bytes - offset)
        return SymmetricOffset{number, offset};
    }
    return std::nullopt;
  }

  // Address of `bytes` at a symmetric offset of a rank, as this rank maps it; nullptr if out of range or unmapped.
  char* address(uint32_t rank, uint64_t symmetric_offset, uint64_t bytes) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = windows_.find(static_cast<uint32_t>(symmetric_offset >> kWindowOffsetBits));
    if (found == windows_.end() || rank >= kMaxWorldSize) return nullptr;
    const Window& window = found->second;
    const uint64_t offset = symmetric_offset & (symmetric_offset_at(1, 0) - 1);
    if (bytes > window.bytes || offset > window.bytes - bytes) return nullptr;
    char* const first = window.memory[rank].get();
    return first == nullptr ? nullptr : first + offset;
  }

  // Leaks all windows: they stay mapped until the process ends.
  void leave_to_graphs() {
    const std::lock_guard<std::mutex> lock(mutex_);
    new std::map<uint32_t, Window>(std::move(windows_));
    windows_.clear();
    count_.store(0, std::memory_order_relaxed);
  }

 private:
  struct Window {
    uint64_t bytes = 0;
    std::shared_ptr<char> memory[kMaxWorldSize];
  };

  const Window& at(uint32_t number) const {
    const auto found = windows_.find(number);
    if (found == windows_.end()) throw std::invalid_argument("there is no window " + std::to_string(number));
    return found->second;
  }
  Window& at(uint32_t number) { return const_cast<Window&>(std::as_const(*this).at(number)); }

  int rank_;
  std::shared_ptr<const void> life_ = std::make_shared<int>();
  mutable std::mutex mutex_;
  std::map<uint32_t, Window> windows_;
  std::atomic<size_t> count_ = 0;
};

}  // namespace llm_comm::host
