// A copy that stands in a stream, between the grids of a call.
#pragma once

#include <cstdint>

namespace llm_comm::host {

struct Copy {
  char* to;
  const char* from;
  uint64_t bytes;
  bool is_stored;  // by a kernel, beside the copy engines, which do the others (StreamCopy)
};

}  // namespace llm_comm::host
