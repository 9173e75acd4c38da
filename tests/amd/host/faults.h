// Faults of the HIP runtime (faults.cpp).
#pragma once

#include "host/core.h"

namespace hip_test {

// Each call fails once. Every failure must be reported by its name and text, and leak nothing.
void check_faults(llm_comm::host::Sharing sharing);

}  // namespace hip_test
