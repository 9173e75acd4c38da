// How proxies of GPUs wait for requests, to copy engines and to networks alike.
#pragma once

#include "host/proxy.h"

namespace llm_comm::host {

// Blocks of a grid ask within a microsecond of each other, and every copy that they do not share costs several.
//
// A request is to be seen within a few microseconds where operations follow each other, some milliseconds apart at most; then a
// core is given up. Naps of 50 us are two or three percent of one, and what the first operation after a pause waits.
inline constexpr Patience kPatienceOfGpus{std::chrono::nanoseconds(500), std::chrono::microseconds(2'000),
                                          std::chrono::microseconds(50'000), std::chrono::microseconds(50)};

}  // namespace llm_comm::host
