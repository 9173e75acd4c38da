// Calls that are counted as they are enqueued.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "host/core.h"

namespace llm_comm::host {

// How many calls of one kind there were, and the bytes of their messages. Any thread adds and reads.
struct Tally {
  std::atomic<uint64_t> calls = 0;
  std::atomic<uint64_t> bytes = 0;
  // That graphs have captured, however often they are launched.
  std::atomic<uint64_t> captured_calls = 0;
  std::atomic<uint64_t> captured_bytes = 0;
};

// Counts calls of messages of so many bytes.
struct Counter {
  std::shared_ptr<Tally> tally;
  uint64_t bytes;

  // Nothing that has failed.
  void add(Outcome outcome) const {
    if (outcome == Outcome::kFailed) return;
    const bool is_captured = outcome == Outcome::kCaptured;
    (is_captured ? tally->captured_calls : tally->calls).fetch_add(1, std::memory_order_relaxed);
    (is_captured ? tally->captured_bytes : tally->bytes).fetch_add(bytes, std::memory_order_relaxed);
  }
};

// A prepared call whose runs are counted where there is a counter.
struct CountedCall {
  std::unique_ptr<PreparedCall> call;
  std::optional<Counter> counter = std::nullopt;
  // Runs in place of `call` where it takes the buffers, and counts its own runs.
  std::unique_ptr<CountedCall> direct = nullptr;

  // As PreparedCall::run().
  Outcome run(const uint64_t* buffers, uint64_t stream) const {
    if (direct != nullptr && direct->call->takes(buffers)) return direct->run(buffers, stream);
    const Outcome outcome = call->run(buffers, stream);
    if (counter) counter->add(outcome);
    return outcome;
  }
};

}  // namespace llm_comm::host
