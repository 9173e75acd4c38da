#include <utility>

#include "host/core.h"

namespace llm_comm::host {

namespace {

class PreferredCall final : public PreparedCall {
 public:
  PreferredCall(std::unique_ptr<PreparedCall> direct, std::unique_ptr<PreparedCall> ordinary)
      : direct_(std::move(direct)), ordinary_(std::move(ordinary)) {}

  Outcome run(const uint64_t* buffers, uint64_t stream) override {
    return (direct_->takes(buffers) ? *direct_ : *ordinary_).run(buffers, stream);
  }
  bool takes(const uint64_t* buffers) const override { return direct_->takes(buffers) || ordinary_->takes(buffers); }

 private:
  std::unique_ptr<PreparedCall> direct_;
  std::unique_ptr<PreparedCall> ordinary_;
};

}  // namespace

std::unique_ptr<PreparedCall> prefer(std::unique_ptr<PreparedCall> direct, std::unique_ptr<PreparedCall> ordinary) {
  return std::make_unique<PreferredCall>(std::move(direct), std::move(ordinary));
}

}  // namespace llm_comm::host
