#include "host/counted_call.h"

#include <utility>

namespace llm_comm::host {

namespace {

void add_to(std::atomic<uint64_t>& number, uint64_t more) { number.fetch_add(more, std::memory_order_relaxed); }

class CountedCall final : public PreparedCall {
 public:
  CountedCall(std::unique_ptr<PreparedCall> call, Counter counter)
      : call_(std::move(call)), counter_(std::move(counter)) {}

  Outcome run(const uint64_t* buffers, uint64_t stream) override {
    const Outcome outcome = call_->run(buffers, stream);
    counter_.add(outcome);
    return outcome;
  }
  bool takes(const uint64_t* buffers) const override { return call_->takes(buffers); }

 private:
  std::unique_ptr<PreparedCall> call_;
  Counter counter_;
};

}  // namespace

void Counter::add(Outcome outcome) const {
  if (outcome == Outcome::kFailed) return;
  const bool is_captured = outcome == Outcome::kCaptured;
  add_to(is_captured ? tally->captured_calls : tally->calls, 1);
  add_to(is_captured ? tally->captured_bytes : tally->bytes, bytes);
}

std::unique_ptr<PreparedCall> counted(std::unique_ptr<PreparedCall> call, std::optional<Counter> counter) {
  if (!counter) return call;
  return std::make_unique<CountedCall>(std::move(call), *std::move(counter));
}

}  // namespace llm_comm::host
