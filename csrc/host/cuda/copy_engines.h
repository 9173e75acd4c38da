// Port channels between GPUs of one machine: a FIFO that the device maps, and copy engines that move what is asked for.
#pragma once

#include <memory>

#include "host/ports.h"

namespace llm_comm::host {

std::unique_ptr<Ports> make_cuda_ports(int device);

}  // namespace llm_comm::host
