// A copy enqueued on a stream between the kernels of a call. Algorithms produce it, launchers execute it.
#pragma once

#include <cstdint>

namespace llm_comm::host {

struct Copy {
  char* to;
  const char* from;
  uint64_t bytes;
  bool is_stored;  // a kernel copies it, beside the copy engines, which do the others (StreamCopy)
};

}  // namespace llm_comm::host
