#include "schedules/port_actor.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

using emulator::Order;
using emulator::Stall;

void PortActor::start(const host::PortOwner& owner) {
  if (has_started_) return;
  has_started_ = true;
  owner_ = owner;
  owner_.workspace_bytes =
      machine_.memory().bytes_of_rank();  // more: channels of no algorithm write beyond the workspace
  delay_ = machine_.random().pick({0u, 8u, 64u, 512u});
  most_of_batch_ = machine_.random().pick({1u, 2u, 8u});
  view_ = machine_.memory().new_view();
  memory_ = machine_.agent_of(rank_, view_);
  for (Lane& lane : lanes_) lane.memory = machine_.agent_of(rank_, view_);
  machine_.watch(ring_ + sizeof(PortRing), port_ring_bytes(kEntriesLog2) - sizeof(PortRing), [this] { look(); });
}

void PortActor::later(void (PortActor::*action)(uint32_t), uint32_t peer) {
  const uint64_t scale = machine_.random().chance(16) ? 8 * uint64_t{delay_} : delay_;
  machine_.at(machine_.now() + 1 + machine_.random().below(scale + 1), [this, action, peer] { (this->*action)(peer); });
}

// A stalled rank's host is stalled too.
bool PortActor::may_act(void (PortActor::*action)(uint32_t), uint32_t peer) {
  const uint64_t until = machine_.frozen_until(rank_);
  if (until <= machine_.now()) return !owner_.has_failed();
  if (until != Stall::kForever) machine_.at(until, [this, action, peer] { (this->*action)(peer); });
  return false;
}

// ---- Reading requests
// ------------------------------------------------------------------------------------------------

void PortActor::look() {
  if (is_looking_) return;
  is_looking_ = true;
  later(&PortActor::take, 0);
}

void PortActor::take(uint32_t) {
  if (!may_act(&PortActor::take, 0)) return;
  is_looking_ = false;
  machine_.memory().set_fresh(true);
  while (take_one()) {
  }
  machine_.memory().set_fresh(false);
  machine_.memory().join_into_view(memory_.thread, view_);
  for (uint32_t peer = 0; peer < owner_.world_size; ++peer) begin_batch(peer);
}

bool PortActor::take_one() {
  const uint32_t flag = port_flag(position_, kEntriesLog2);
  const char* const entry = ring_ + port_entry_offset(position_, kEntriesLog2);
  uint32_t words[kWordsOfPortRequest];
  for (uint32_t i = 0; i < kWordsOfPortRequest; ++i) {
    uint64_t half;
    machine_.load(memory_, entry + i * sizeof(half), &half, sizeof(half), sizeof(half), Order::kAcquire);
    if (half >> 32 != flag) return false;
    words[i] = static_cast<uint32_t>(half);
  }
  ++position_;
  machine_.store(memory_, ring_, &position_, sizeof(position_), sizeof(position_), Order::kRelease);
  PortRequest request;
  std::memcpy(&request, words, sizeof(request));
  lanes_[request.peer].requests.push_back(request);
  return true;
}

// ---- Executing requests
// ----------------------------------------------------------------------------------------------

void PortActor::begin_batch(uint32_t peer) {
  Lane& lane = lanes_[peer];
  if (lane.is_busy || lane.requests.empty()) return;
  lane.is_busy = true;
  lane.batch.clear();
  const uint32_t most = std::min(most_of_batch_, static_cast<uint32_t>(lane.requests.size()));
  for (uint32_t i = machine_.random().between(1, most); i > 0; --i) {
    lane.batch.add(lane.requests.front());
    lane.requests.pop_front();
  }
  lane.steps = lane.batch.steps();
  later(&PortActor::go_on, peer);
}

// Executes a piece of the first remaining step.
void PortActor::go_on(uint32_t peer) {
  if (!may_act(&PortActor::go_on, peer)) return;
  Lane& lane = lanes_[peer];
  if (!lane.steps.empty()) {
    const host::PortStep step = lane.steps.front();
    const uint64_t bytes = step.part == kPortPut ? step.bytes : step.count * sizeof(uint64_t);
    char* const to = owner_.address(step.part == kPortLocalCompletion ? rank_ : peer, step.to, bytes);
    if (to == nullptr) throw std::logic_error("a request to the proxy names no memory of rank " + std::to_string(peer));
    if (step.part == kPortPut) {
      if (lane.pieces.empty()) {
        const uint64_t first = machine_.random().below(step.bytes / sizeof(Line) + 1) * sizeof(Line);
        if (first != 0) lane.pieces.push_back({0, first});
        if (first != step.bytes) lane.pieces.push_back({first, step.bytes - first});
      }
      const auto drawn = lane.pieces.begin() + machine_.random().below(lane.pieces.size());
      const Piece piece = *drawn;
      lane.pieces.erase(drawn);
      copy(lane, to + piece.offset, reinterpret_cast<const char*>(step.from) + piece.offset, piece.bytes);
    } else {
      store_words(lane, to, step);
    }
    if (lane.pieces.empty()) lane.steps.erase(lane.steps.begin());
  }
  if (lane.steps.empty()) {
    lane.is_busy = false;
    begin_batch(peer);
  } else {
    later(&PortActor::go_on, peer);
  }
}

void PortActor::copy(Lane& lane, char* to, const char* from, uint64_t bytes) {
  for (uint64_t done = 0; done < bytes; done += sizeof(uint32_t)) {
    uint32_t word;
    if (machine_.memory().contains(from)) {
      machine_.load(lane.memory, from + done, &word, sizeof(word), sizeof(word), Order::kWeak);
    } else {
      std::memcpy(&word, to + done, sizeof(word));  // keeps the bytes beyond the last one
      std::memcpy(&word, from + done, std::min(bytes - done, uint64_t{sizeof(word)}));
    }
    machine_.store(lane.memory, to + done, &word, sizeof(word), sizeof(word), Order::kWeak);
  }
}

// Stores the words in random order.
void PortActor::store_words(Lane& lane, char* to, const host::PortStep& step) {
  std::vector<uint32_t> order(step.count);
  for (uint32_t i = 0; i < step.count; ++i) {
    order[i] = i;
    std::swap(order[i], order[machine_.random().below(i + 1)]);
  }
  for (const uint32_t i : order) {
    machine_.store(lane.memory, to + i * sizeof(uint64_t), &step.values[i], sizeof(uint64_t), sizeof(uint64_t),
                   Order::kRelease);
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
