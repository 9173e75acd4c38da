// Prepared calls with statistics. The Python bindings run their calls through CountedCall.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "host/core.h"

namespace llm_comm::host {

// Number of calls of one kind, and bytes of their messages. Thread-safe.
struct CallStatistics {
  std::atomic<uint64_t> calls = 0;
  std::atomic<uint64_t> bytes = 0;
  // Calls captured by graphs, counted once each, however often the graph is launched.
  std::atomic<uint64_t> captured_calls = 0;
  std::atomic<uint64_t> captured_bytes = 0;
};

// Counts calls whose messages have `bytes` bytes.
struct Counter {
  std::shared_ptr<CallStatistics> statistics;
  uint64_t bytes;

  // Does not count failed calls.
  void add(Outcome outcome) const {
    if (outcome == Outcome::kFailed) return;
    const bool is_captured = outcome == Outcome::kCaptured;
    (is_captured ? statistics->captured_calls : statistics->calls).fetch_add(1, std::memory_order_relaxed);
    (is_captured ? statistics->captured_bytes : statistics->bytes).fetch_add(bytes, std::memory_order_relaxed);
  }
};

// A prepared call whose runs are counted if there is a counter.
struct CountedCall {
  std::unique_ptr<PreparedCall> call;
  std::optional<Counter> counter = std::nullopt;
  // Alternative without a copy to the workspace. Runs instead of `call` if it accepts the buffers; counts its own runs.
  std::unique_ptr<CountedCall> direct = nullptr;

  // As PreparedCall::run(), with statistics.
  Outcome run(const uint64_t* buffers, uint64_t stream) const {
    if (direct != nullptr && direct->call->takes(buffers)) return direct->run(buffers, stream);
    const Outcome outcome = call->run(buffers, stream);
    if (counter) counter->add(outcome);
    return outcome;
  }
};

}  // namespace llm_comm::host
