// Numbers of kernels in words, for errors and for the watchdog.
#pragma once

#include <string>

#include "algorithms/registry.h"
#include "host/core.h"

namespace llm_comm::host {

inline std::string operation_title(uint32_t kind) {
  std::string title = "user kernel";
  Registry::for_each([&]<class Algorithm>() {
    if (static_cast<uint32_t>(Algorithm::kKind) == kind) title = Algorithm::kInfo.title;
  });
  return title;
}

inline std::string cause_name(uint32_t cause) {
  switch (static_cast<ErrorCause>(cause)) {
    case ErrorCause::kMismatch:
      return "mismatch";
    case ErrorCause::kConcurrentUse:
      return "concurrent use";
    case ErrorCause::kPeerExited:
      return "peer exited";
    case ErrorCause::kTimeout:
      break;
  }
  return "timeout";
}

inline Call describe(const CallSignature& call) {
  return {operation_title(call.operation), data_type_name(static_cast<DataType>(call.data_type)), call.row, call.count,
          call.number};
}

}  // namespace llm_comm::host
