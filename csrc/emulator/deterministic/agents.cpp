// Memory accesses of actors that are no GPU threads, such as the proxy of a rank.
#include <cstring>

#include "emulator/deterministic/machine.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

void Machine::load(ThreadMemory& agent, const void* address, void* to, uint32_t bytes, uint32_t unit, Order order) {
  ++now_;
  if (!memory_.contains(address)) {
    std::memcpy(to, address, bytes);
    return;
  }
  memory_.load(agent, now_, address, to, bytes, unit, order, Alias::kOwn);
  uint32_t value;
  std::memcpy(&value, to, sizeof(value));
  record(agent, "loads", memory_.offset_of(address), value);
}

void Machine::store(ThreadMemory& agent, void* address, const void* from, uint32_t bytes, uint32_t unit, Order order) {
  ++now_;
  memory_.store(agent, now_, address, from, bytes, unit, order, Alias::kOwn);
  uint32_t value;
  std::memcpy(&value, from, sizeof(value));
  record(agent, order == Order::kRelease ? "releases" : "stores", memory_.offset_of(address), value);
  announce_arrivals();
}

void Machine::watch(const void* first, uint64_t bytes, std::function<void()> action) {
  const uint64_t offset = memory_.offset_of(first);
  watches_.push_back({offset / sizeof(Line), (offset + bytes - 1) / sizeof(Line), std::move(action)});
}

void Machine::record(const ThreadMemory& agent, const char* what, uint64_t offset, uint64_t value) {
  fingerprint_ = mix(fingerprint_ + now_) + mix(value + (offset << 20));
  if (trace_ == nullptr) return;
  const uint64_t of_rank = memory_.bytes_of_rank();
  std::fprintf(trace_, "%llu rank %u, its proxy: %s rank %u + %llu: %016llx\n", static_cast<unsigned long long>(now_),
               agent.rank, what, static_cast<unsigned>(offset / of_rank),
               static_cast<unsigned long long>(offset % of_rank), static_cast<unsigned long long>(value));
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
