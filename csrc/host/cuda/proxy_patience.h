// Polling policy of the proxies of GPUs, for copy engines and networks.
#pragma once

#include "host/proxy.h"

namespace llm_comm::host {

// Gather for 0.5 us: the blocks of a grid make their requests within a microsecond, and every copy that they do not
// share costs several.
//
// Spin for 2 ms, yield until 50 ms: a request must be seen within a few microseconds while operations follow each
// other. Then sleep 50 us at a time: the thread uses two or three percent of a core, and the first operation after a
// pause waits one nap.
inline constexpr Patience kPatienceOfGpus{std::chrono::nanoseconds(500), std::chrono::microseconds(2'000),
                                          std::chrono::microseconds(50'000), std::chrono::microseconds(50)};

}  // namespace llm_comm::host
