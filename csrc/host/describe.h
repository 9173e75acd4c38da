// Text for the numbers that kernels report: operations, causes, call signatures. Used for errors and by the watchdog.
#pragma once

#include <charconv>
#include <cstring>
#include <string>

#include "algorithms/registry.h"
#include "host/core.h"

namespace llm_comm::host {

inline std::string operation_title(uint32_t kind) {
  std::string title = "user kernel";
  Registry::for_each([&]<class Algorithm>() {
    if (static_cast<uint32_t>(kKindOf<Algorithm>) == kind) title = Algorithm::kInfo.title;
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
    case ErrorCause::kNotSymmetric:
      return "not symmetric";
    case ErrorCause::kOtherSymmetricOffset:
      return "other symmetric offset";
    case ErrorCause::kNoChannel:
      return "no channel";
    case ErrorCause::kSizes:
      return "sizes";
    case ErrorCause::kTimeout:
      break;
  }
  return "timeout";
}

inline std::string fault_name(SizesFault fault) {
  switch (fault) {
    case SizesFault::kDisagree:
      return "disagree";
    case SizesFault::kSendsTooMany:
      return "sends too many";
    case SizesFault::kExpectsTooMany:
      return "expects too many";
    case SizesFault::kInputTooShort:
      return "input too short";
    case SizesFault::kOutputTooShort:
      return "output too short";
    case SizesFault::kOtherCall:
      return "other call";
    case SizesFault::kNone:
      break;
  }
  return "none";
}

inline Call describe(const CallSignature& call) {
  return {operation_title(call.operation),
          data_type_name(static_cast<DataType>(call.data_type)),
          call.row,
          call.count,
          call.number,
          {}};
}

// 1e-05 as "1e-05", 2.0 as "2", 1e6 as "1000000"; a value with a name as that name.
inline std::string parameter_in_words(const ParameterInfo& parameter, double value) {
  for (int i = 0; i < kMaxNamedValues; ++i) {
    if (parameter.value_names[i] != nullptr && value == i) return parameter.value_names[i];
  }
  // Whole numbers are counts, so they are printed without an exponent.
  constexpr double kMost = static_cast<double>(uint64_t{1} << 53);
  if (value >= 0 && value < kMost && value == static_cast<double>(static_cast<uint64_t>(value))) {
    return std::to_string(static_cast<uint64_t>(value));
  }
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof(digits), value).ptr};
}

// Includes parameters and optional buffers, so that an error can say in what calls differ.
inline Call describe_in_full(const CallSignature& call) {
  Call described = describe(call);
  Registry::for_each([&]<class Algorithm>() {
    if (static_cast<uint32_t>(kKindOf<Algorithm>) != call.operation) return;
    constexpr const OperationInfo& info = Algorithm::Operation::kInfo;
    for (int i = 0; i < kMaxParameters && info.parameters[i].name != nullptr; ++i) {
      double value;
      std::memcpy(&value, &call.parameter_bits[i], sizeof(value));
      const std::string name = info.parameters[i].name;
      described.details.emplace_back(name, name + " " + parameter_in_words(info.parameters[i], value));
    }
    for (int i = 0; i < kMaxBuffers && info.buffers[i].name != nullptr; ++i) {
      if (!info.buffers[i].is_optional) continue;
      const std::string name = info.buffers[i].name;
      described.details.emplace_back(name, ((call.buffers >> i & 1) != 0 ? "with " : "without ") + name);
    }
  });
  return described;
}

}  // namespace llm_comm::host
