// Creates the port channels between GPUs of one machine: a request ring that the device maps and a proxy with copy
// engines.
#pragma once

#include <memory>

#include "host/ports.h"

namespace llm_comm::host {

std::unique_ptr<Ports> make_cuda_ports(int device);

}  // namespace llm_comm::host
