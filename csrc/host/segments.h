// The segments of a rank's symmetric heap: what it owns, what it maps of its peers, and where an address lies in them.
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

// This rank's memory, and what a peer needs to map it.
struct SharedMemory {
  std::shared_ptr<char> memory;
  WorkspaceHandle handle;
};

// Any thread may ask where an address lies; one at a time changes them.
class Segments {
 public:
  using Addresses = std::array<char*, kMaxWorldSize>;  // by rank

  explicit Segments(int rank) : rank_(rank) {}

  // Without a lock: calls ask it each time.
  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  // Throws std::invalid_argument for what cannot be added.
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
    std::shared_ptr<char> own;  // goes when the lock is released: to free memory may take long
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

  // Expires with this.
  std::weak_ptr<const void> life() const { return life_; }

  // nullptr where a rank's memory is not mapped.
  Addresses addresses(uint32_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Addresses found{};
    for (int rank = 0; rank < kMaxWorldSize; ++rank) found[rank] = at(number).memory[rank].get();
    return found;
  }

  // Where so many bytes lie, if in one segment.
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

  // Where so many bytes at a place lie on a rank, as this one maps it; nullptr: nowhere.
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

  // All of it stays mapped until the process ends.
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
