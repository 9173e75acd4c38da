// Segments: the registered windows of a rank's symmetric heap: own memory, mapped peer memory, and address look-up.
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
class Segments {
 public:
  using Addresses = std::array<char*, kMaxWorldSize>;  // by rank

  explicit Segments(int rank) : rank_(rank) {}

  // Lock-free, because every call asks.
  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  // Throws std::invalid_argument if the window cannot be added.
  void check_new(uint32_t number, uint64_t bytes) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (number >= kMaxSegments) {
      throw std::invalid_argument("segment " + std::to_string(number) + ": there are " + std::to_string(kMaxSegments));
    }
    if (segments_.count(number) != 0) throw std::invalid_argument("there is a segment " + std::to_string(number));
    if (bytes == 0) throw std::invalid_argument("a segment of 0 bytes");
  }

  void add(uint32_t number, uint64_t bytes, std::shared_ptr<char> own) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Segment& segment = segments_[number];
    segment.bytes = bytes;
    segment.memory[rank_] = std::move(own);
    count_.store(segments_.size(), std::memory_order_relaxed);
  }

  void set_peer(uint32_t number, int peer, std::shared_ptr<char> memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    at(number).memory[peer] = std::move(memory);
  }

  void drop_peers(uint32_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Segment& segment = at(number);
    for (int rank = 0; rank < kMaxWorldSize; ++rank) {
      if (rank != rank_) segment.memory[rank].reset();
    }
  }

  void remove(uint32_t number) {
    std::shared_ptr<char> own;  // freed after the lock is released: freeing memory may be slow
    const std::lock_guard<std::mutex> lock(mutex_);
    own = std::move(at(number).memory[rank_]);
    segments_.erase(number);
    count_.store(segments_.size(), std::memory_order_relaxed);
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
  std::optional<Place> find(uint64_t address, uint64_t bytes) const {
    if (empty()) return std::nullopt;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [number, segment] : segments_) {
      const auto first = reinterpret_cast<uint64_t>(segment.memory[rank_].get());
      const uint64_t offset = address - first;
      if (address >= first && offset < segment.bytes && bytes <= segment.bytes - offset) return Place{number, offset};
    }
    return std::nullopt;
  }

  // Address of `bytes` at a symmetric offset of a rank, as this rank maps it; nullptr if out of range or unmapped.
  char* address(uint32_t rank, uint64_t place, uint64_t bytes) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = segments_.find(static_cast<uint32_t>(place >> kPlaceOffsetBits));
    if (found == segments_.end() || rank >= kMaxWorldSize) return nullptr;
    const Segment& segment = found->second;
    const uint64_t offset = place & (place_at(1, 0) - 1);
    if (bytes > segment.bytes || offset > segment.bytes - bytes) return nullptr;
    char* const first = segment.memory[rank].get();
    return first == nullptr ? nullptr : first + offset;
  }

  // Leaks all windows: they stay mapped until the process ends.
  void leave_to_graphs() {
    const std::lock_guard<std::mutex> lock(mutex_);
    new std::map<uint32_t, Segment>(std::move(segments_));
    segments_.clear();
    count_.store(0, std::memory_order_relaxed);
  }

 private:
  struct Segment {
    uint64_t bytes = 0;
    std::shared_ptr<char> memory[kMaxWorldSize];
  };

  const Segment& at(uint32_t number) const {
    const auto found = segments_.find(number);
    if (found == segments_.end()) throw std::invalid_argument("there is no segment " + std::to_string(number));
    return found->second;
  }
  Segment& at(uint32_t number) { return const_cast<Segment&>(std::as_const(*this).at(number)); }

  int rank_;
  std::shared_ptr<const void> life_ = std::make_shared<int>();
  mutable std::mutex mutex_;
  std::map<uint32_t, Segment> segments_;
  std::atomic<size_t> count_ = 0;
};

}  // namespace llm_comm::host
