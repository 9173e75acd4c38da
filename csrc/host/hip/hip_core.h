// Core of an AMD GPU. Not part of the package: no AMD GPU has run it.
#pragma once

#include <memory>

#include "host/core.h"

namespace llm_comm::host {

// Throws std::runtime_error if the device is none of gfx942 and gfx950, or this build has no kernels for it.
std::unique_ptr<Core> make_hip_core(const CoreOptions& options, int device);

}  // namespace llm_comm::host
