// Common check of the descriptors of algorithms that use SwitchChannel.
#pragma once

#include "algorithms/algorithm.h"

namespace llm_comm {

// Throws std::invalid_argument if the device has no multimem instructions.
inline void check_multimem(const Limits& limits) {
  if (limits.compute_capability == 0 || limits.compute_capability >= 90) return;
  throw std::invalid_argument("NVLink multicast needs compute capability 9.0; this device has " +
                              std::to_string(limits.compute_capability / 10) + "." +
                              std::to_string(limits.compute_capability % 10));
}

}  // namespace llm_comm
