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
  void add(Outcome outcome) const;
};

// The same call, counted; without a counter, what was given.
std::unique_ptr<PreparedCall> counted(std::unique_ptr<PreparedCall> call, std::optional<Counter> counter);

}  // namespace llm_comm::host
