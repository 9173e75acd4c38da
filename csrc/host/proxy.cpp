#include "host/proxy.h"

#include <sched.h>

#include <cstring>
#include <stdexcept>

namespace llm_comm::host {

namespace {

// Maximum requests of a batch. A larger batch would delay its first requests.
constexpr uint32_t kMostOfBatch = 128;

std::string in_words(uint64_t where) {
  if ((where & kInHeap) == 0) return "offset " + std::to_string(where);
  const uint64_t symmetric_offset = where & ~kInHeap;
  return "offset " + std::to_string(symmetric_offset & (symmetric_offset_at(1, 0) - 1)) + " of window " +
         std::to_string(symmetric_offset >> kWindowOffsetBits);
}

}  // namespace

void ProxyPorts::start(const PortOwner& owner) {
  if (thread_ != nullptr) return;
  if (ring() == nullptr) throw std::runtime_error("there is no FIFO for port channels");
  owner_ = owner;
  std::promise<void> has_begun;
  thread_ = std::make_unique<std::thread>([&] { run(has_begun); });
  try {
    has_begun.get_future().get();
  } catch (...) {
    thread_->join();
    thread_.reset();
    throw;
  }
}

void ProxyPorts::stop() {
  if (thread_ == nullptr) return;
  if (!maker_.is_this()) {
    // A forked child has this object, but neither the thread nor access to the transport's device.
    static_cast<void>(thread_.release());
    static_cast<void>(transport_.release());
    return;
  }
  is_ending_ = true;
  thread_->join();
  thread_.reset();
}

bool ProxyPorts::settle(uint64_t requests, std::chrono::nanoseconds limit) {
  if (thread_ == nullptr) return true;
  const auto* const ring = reinterpret_cast<const PortRing*>(memory_->on_host());
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (__atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE) < requests) {
    if (std::chrono::steady_clock::now() >= deadline || has_error_) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  // The thread executes the requests it has read before it ends.
  stop();
  is_ending_ = false;
  return true;
}

std::optional<std::string> ProxyPorts::error() const {
  if (!has_error_.load(std::memory_order_acquire)) return std::nullopt;
  return error_;
}

void ProxyPorts::run(std::promise<void>& has_begun) {
  try {
    transport_->begin(owner_.world_size);
  } catch (...) {
    has_begun.set_exception(std::current_exception());
    return;
  }
  has_begun.set_value();
  try {
    serve();
  } catch (const std::exception& error) {
    error_ = error.what();
    has_error_.store(true, std::memory_order_release);
    owner_.fail();
  }
  transport_->finish();
}

void ProxyPorts::serve() {
  auto last_request = std::chrono::steady_clock::now();
  while (!is_ending_.load(std::memory_order_relaxed)) {
    const bool has_advanced = transport_->progress();
    if (take() == 0) {
      if (owner_.has_failed()) return;
      if (has_advanced) {
        last_request = std::chrono::steady_clock::now();
      } else {
        wait_for_requests(last_request);
      }
      continue;
    }
    // A failed communicator waits for nothing, and the tensors to send may have been freed.
    if (owner_.has_failed()) return;
    for (uint32_t peer = 0; peer < owner_.world_size; ++peer) carry_out(peer);
    last_request = std::chrono::steady_clock::now();
  }
}

// Reads the requests that are in the ring and frees their entries. Returns their number.
uint32_t ProxyPorts::take() {
  uint32_t taken = 0;
  auto last = std::chrono::steady_clock::time_point{};
  while (taken < kMostOfBatch) {
    if (take_one()) {
      ++taken;
      if (patience_.gathers.count() != 0) last = std::chrono::steady_clock::now();
    } else if (taken == 0 || std::chrono::steady_clock::now() - last >= patience_.gathers) {
      break;
    }
  }
  auto* const ring = reinterpret_cast<PortRing*>(memory_->on_host());
  if (taken != 0) __atomic_store_n(&ring->tail, position_, __ATOMIC_RELEASE);
  return taken;
}

bool ProxyPorts::take_one() {
  const uint32_t flag = port_flag(position_, kEntriesLog2);
  const auto* const entry =
      reinterpret_cast<const PortEntry*>(memory_->on_host() + port_entry_offset(position_, kEntriesLog2));
  uint32_t words[kWordsOfPortRequest];
  for (uint32_t i = 0; i < kWordsOfPortRequest; ++i) {
    const uint64_t half = __atomic_load_n(&entry->half[i], __ATOMIC_ACQUIRE);
    if (half >> 32 != flag) return false;
    words[i] = static_cast<uint32_t>(half);
  }
  ++position_;
  PortRequest request;
  std::memcpy(&request, words, sizeof(request));
  const auto is_there = [&](uint32_t rank, uint64_t where, uint64_t bytes) {
    return owner_.address(rank, where, bytes) != nullptr;
  };
  const bool has_word = (request.parts & (kPortSignal | kPortLocalCompletion)) != 0;
  const uint32_t rank_of_word = (request.parts & kPortLocalCompletion) != 0 ? owner_.rank : request.peer;
  if (request.peer >= owner_.world_size ||
      ((request.parts & kPortPut) != 0 && !is_there(request.peer, request.destination, request.bytes)) ||
      (has_word && !is_there(rank_of_word, request.word, sizeof(uint64_t)))) {
    throw std::runtime_error("a kernel asked for " + std::to_string(request.bytes) + " bytes to " +
                             in_words(request.destination) + ", or a signal to " + in_words(request.word) +
                             ", of rank " + std::to_string(request.peer) +
                             ", which is beyond its symmetric heap or its workspace of " +
                             std::to_string(owner_.workspace_bytes) + " bytes");
  }
  batches_[request.peer].add(request);
  return true;
}

void ProxyPorts::carry_out(uint32_t peer) {
  PortBatch& batch = batches_[peer];
  if (batch.is_empty()) return;
  for (const PortStep& step : batch.steps()) {
    const uint32_t rank = step.part == kPortLocalCompletion ? owner_.rank : peer;
    const uint64_t bytes = step.part == kPortPut ? step.bytes : step.count * sizeof(uint64_t);
    char* const to = owner_.address(rank, step.to, bytes);
    if (to == nullptr)
      throw std::runtime_error("memory that a kernel has asked to copy to is gone: " + in_words(step.to));
    if (step.part == kPortPut) {
      transport_->put(peer, to, reinterpret_cast<const char*>(step.from), step.bytes);
    } else if (step.part == kPortSignal) {
      transport_->signal(peer, reinterpret_cast<uint64_t*>(to), step.values, step.count);
    } else {
      transport_->notify_local_completion(peer, reinterpret_cast<uint64_t*>(to), step.values, step.count);
    }
  }
  batch.clear();
}

// Kernels do not announce themselves, in particular not those of a graph, so this thread has to poll. While operations
// follow each other it finds a request at once. Afterwards it yields between polls, for as long as the next operation
// of a running model may take. An unused proxy sleeps: it uses a few percent of a core and delays the first request by
// one nap.
void ProxyPorts::wait_for_requests(std::chrono::steady_clock::time_point last_request) const {
  const auto idle = std::chrono::steady_clock::now() - last_request;
  if (idle < patience_.spins) return;
  if (idle < patience_.yields) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(patience_.nap);
  }
}

}  // namespace llm_comm::host
