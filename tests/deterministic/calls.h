// What a schedule consists of: calls that all ranks make in the same order. They follow from the registry: a new algorithm
// needs nothing here, and a new operation neither, if it says what it computes (Operation::expect, algorithm.h).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/all_reduce_add_rms_norm/operation.cuh"
#include "algorithms/linear/problem.h"
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
  // Where the rank's operations had ended before this call began: "" or what it has written nevertheless.
  virtual std::string touched(uint32_t) const { return ""; }
  // Whether its arguments are wrong in a way that the rank has to find out: it ends with an error "sizes".
  virtual bool must_fail(uint32_t) const { return false; }
  // How many numbers of operations it takes.
  virtual uint64_t operations() const = 0;
  virtual std::string name() const = 0;
};

// Kernels of a mixture of experts in which no other rank takes part.
enum class FewTokensKernel { kFusedExperts, kRoute, kRope };

// Subject of a schedule: an algorithm of the registry, a form of message passing, linear layers, or a kernel
// of a mixture of experts. The other calls of its sequence are all-reduces.
struct Subject {
  uint32_t algorithm;
  std::optional<Form> form;
  DataType type;
  Quantization quantization;  // of a fused operation
  bool is_linear = false;     // a linear layer, of `type`
  LinearEpilogue epilogue = LinearEpilogue::kNone;
  bool is_fp8 = false;                                       // the layer's x and weight are
  std::optional<FewTokensKernel> few_tokens = std::nullopt;  // of `type`
};

struct NamedSubject {
  std::string
      name;  // "all_reduce/one_shot", "all_reduce_add_rms_norm/one_shot+static", "put" or "linear_silu_and_mul+fp8"
  Subject subject;
};

// Each algorithm with each of its data types, then the fused ones with FP8, then the forms of message passing, then
// linear layers, then experts, their router, and layers of q, k and v.
const std::vector<NamedSubject>& subjects();

// The call number `index` of a schedule. `alone`: about its subject, as all of them. `before`: the one made before it, or
// nullptr; an all-reduce may sum what that one returns.
std::unique_ptr<Call> draw_call(const Subject& subject, bool alone, uint32_t index, uint32_t ranks, Random& random,
                                const Call* before);

}  // namespace drill
