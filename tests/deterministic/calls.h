// What a schedule consists of: calls that all ranks make in the same order. A new algorithm is a new Call, and a line in
// draw_call().
#pragma once

#include <memory>
#include <string>

#include "emulator/deterministic/random.h"
#include "world.h"

namespace drill {

using emulator::Random;

class Call {
 public:
  virtual ~Call() = default;
  // Enqueues the call on one rank's stream.
  virtual void enqueue(World& world, uint32_t rank) = 0;
  // After the schedule: "" or what is wrong with the rank's result.
  virtual std::string wrong(uint32_t rank) const = 0;
  // How many numbers of operations it takes.
  virtual uint64_t operations() const = 0;
  virtual std::string name() const = 0;
};

// What a schedule is mainly about; the other calls of its sequence are drawn.
struct Subject {
  enum class Kind : uint32_t { kAllReduce, kFused, kMessages, kBroadcast };
  Kind kind;
  uint32_t variant;  // AllReduceAlgorithm, or Form
  DataType type;
};

// The call number `index` of a schedule. `before`: the one made before it, or nullptr; an all-reduce may sum what that
// one returns.
std::unique_ptr<Call> draw_call(const Subject& subject, uint32_t index, uint32_t ranks, Random& random,
                                const Call* before);

}  // namespace drill
