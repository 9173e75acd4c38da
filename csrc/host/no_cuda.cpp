// Replaces host/cuda in builds without nvcc: every function throws.
#include <stdexcept>

#include "host/core.h"
#include "host/node_exchange.h"

namespace llm_comm::host {

namespace {
constexpr const char* kNoCuda =
    "llm_comm was built without CUDA (no nvcc was found); rebuild where nvcc is on the PATH";
}  // namespace

std::unique_ptr<Core> make_cuda_core(const CoreOptions&, int) { throw std::runtime_error(kNoCuda); }
std::unique_ptr<NodeExchange> make_cuda_node_exchange(const NodeExchangeOptions&, int) {
  throw std::runtime_error(kNoCuda);
}
DeviceReport cuda_device_report(int) { throw std::runtime_error(kNoCuda); }

}  // namespace llm_comm::host
