// NodeExchange on an emulated GPU, whose memory is host memory.
#include "emulator/executor.h"
#include "host/memory_transport.h"
#include "host/node_exchange_impl.h"

namespace llm_comm::host {

namespace {

constexpr uint32_t kThreads = 16;  // per block; at least one for each partner
static_assert(kThreads >= kMaxWorldSize);

class EmulatedExchangeDevice {
 public:
  explicit EmulatedExchangeDevice(uint32_t rank) : executor_(std::make_unique<emulator::Executor>(rank)) {}

  std::unique_ptr<RingMemory> memory(uint64_t bytes) const { return std::make_unique<AnonymousMemory>(bytes); }
  Patience patience() const { return emulated_patience(); }
  bool launch(const NodeExchangeArgs& args, uint32_t blocks, uint64_t) {
    executor_->run({blocks, kThreads, sizeof(Line)}, [&] { node_exchange(args); });
    return false;
  }
  void wait() const {}

 private:
  std::unique_ptr<emulator::Executor> executor_;
};

}  // namespace

std::unique_ptr<NodeExchange> make_emulated_node_exchange(const NodeExchangeOptions& options) {
  check_options(options);
  return std::make_unique<NodeExchangeImpl<EmulatedExchangeDevice>>(options, EmulatedExchangeDevice(options.rank));
}

}  // namespace llm_comm::host
