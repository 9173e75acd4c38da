// Exported functions: NCCL's C API, and its aliases for profilers (pnccl...). No exception leaves this file.
#include "nccl/nccl_api.h"

#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "nccl/communicators.h"
#include "nccl/failure.h"
#include "nccl/group.h"
#include "nccl/log.h"
#include "nccl/own.h"
#include "nccl/real_library.h"

#define LLM_COMM_NCCL_EXPORT extern "C" __attribute__((visibility("default")))

namespace llm_comm::nccl {

namespace {

ncclResult_t failed(ncclResult_t result, const char* text) noexcept {
  try {
    set_last_error(text);
    note_failure(result);
    warn(text);
  } catch (...) {
    // Out of memory: the error cannot be reported.
  }
  return result;
}

template <class Step>
ncclResult_t guarded(Step step) noexcept {
  try {
    return step();
  } catch (const Failure& failure) {
    return failed(failure.result(), failure.what());
  } catch (const std::bad_alloc&) {
    return failed(ncclSystemError, "there is no memory");
  } catch (const std::exception& error) {
    return failed(ncclUnhandledCudaError, error.what());
  } catch (...) {
    return failed(ncclInternalError, "an unknown exception");
  }
}

// Throws if `comm` is a communicator of ours without a real NCCL communicator: the real library must not get its
// handle.
void check_is_real(ncclComm_t comm, const char* name) {
  const auto communicator = find(comm);
  if (communicator == nullptr || communicator->uses_real_library()) return;
  throw Failure(ncclInvalidUsage,
                std::string("nccl") + name +
                    " is not served by llm_comm, and this communicator has no NCCL library behind it: " +
                    (RealLibrary::get().is_there() ? "the process that made its id has found none"
                                                   : RealLibrary::get().why_not()));
}
template <class Other>
void check_is_real(const Other&, const char*) {}

template <class Result, class... Parameters, class... Arguments>
Result forward(Result (*RealFunctions::*function)(Parameters...), const char* name, Arguments... arguments) {
  if (!InRealLibrary::is_so()) {
    (check_is_real(arguments, name), ...);
    join_group_of_real_library();
  }
  if constexpr (!std::is_same_v<Result, ncclResult_t>) {
    return call_real(function, name, arguments...);
  } else {
    const Result result = call_real(function, name, arguments...);
    // The real library's own last error applies, not an older one of this library.
    if (result != ncclSuccess && result != ncclInProgress) set_last_error("");
    return result;
  }
}

// `forward` for arguments in parentheses, as functions.def writes them.
template <class Function>
struct Forwarding {
  Function function;
  const char* name;
  template <class... Arguments>
  auto operator()(Arguments... arguments) const {
    return forward(function, name, arguments...);
  }
};

// A function that does not return ncclResult_t cannot report a failure. It returns zeros and a warning is logged.
template <class Value>
Value forwarded(Value (*)(), auto step) noexcept {
  if constexpr (std::is_same_v<Value, ncclResult_t>) {
    return guarded(step);
  } else if constexpr (std::is_void_v<Value>) {
    guarded([&] { return step(), ncclSuccess; });
  } else {
    Value value{};
    guarded([&] { return value = step(), ncclSuccess; });
    return value;
  }
}

const char* error_string(ncclResult_t result) noexcept {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (LLM_COMM_NCCL_DEBUG=INFO and NCCL_DEBUG=INFO tell more)";
    case ncclSystemError:
      return "unhandled system error (LLM_COMM_NCCL_DEBUG=INFO and NCCL_DEBUG=INFO tell more)";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "operation in progress";
    case ncclTimeout:
      return "operation timed out";
    default:
      return "unknown result code";
  }
}

const char* last_error_of(ncclComm_t comm) noexcept {
  try {
    std::string text;
    if (const auto communicator = find(comm);
        communicator != nullptr && communicator->async_error(text) != ncclSuccess) {
      set_last_error(text);
    }
    const RealLibrary& real = RealLibrary::get();
    if (*last_error() == '\0' && real.is_there() && real.functions().GetLastError != nullptr) {
      const InRealLibrary inside;
      return real.functions().GetLastError(comm);
    }
  } catch (...) {
    // Keeps the last error of this thread.
  }
  return last_error();
}

}  // namespace

}  // namespace llm_comm::nccl

using namespace llm_comm::nccl;  // NOLINT: the C API has no namespace

#define LLM_COMM_NCCL_ALIAS(type, name, parameters) \
  LLM_COMM_NCCL_EXPORT type pnccl##name parameters __attribute__((alias("nccl" #name), nothrow));

#define LLM_COMM_NCCL_OWN(type, name, parameters, arguments)                                                \
  LLM_COMM_NCCL_EXPORT type nccl##name parameters {                                                         \
    return guarded([&] {                                                                                    \
      if (InRealLibrary::is_so()) return RealLibrary::get().require(&RealFunctions::name, #name) arguments; \
      return own::name arguments;                                                                           \
    });                                                                                                     \
  }                                                                                                         \
  LLM_COMM_NCCL_ALIAS(type, name, parameters)

#define LLM_COMM_NCCL_FORWARDED(type, name, parameters, arguments)                       \
  LLM_COMM_NCCL_EXPORT type nccl##name parameters {                                      \
    return forwarded(static_cast<type (*)()>(nullptr),                                   \
                     [&] { return Forwarding{&RealFunctions::name, #name} arguments; }); \
  }                                                                                      \
  LLM_COMM_NCCL_ALIAS(type, name, parameters)

#include "nccl/functions.def"

LLM_COMM_NCCL_EXPORT const char* ncclGetErrorString(ncclResult_t result) { return error_string(result); }
LLM_COMM_NCCL_ALIAS(const char*, GetErrorString, (ncclResult_t result))

LLM_COMM_NCCL_EXPORT const char* ncclGetLastError(ncclComm_t comm) { return last_error_of(comm); }
LLM_COMM_NCCL_ALIAS(const char*, GetLastError, (ncclComm_t comm))

// NCCL 2.28 to 2.32 exports it beside ncclResetDebugInit, without a prototype in nccl.h.
LLM_COMM_NCCL_EXPORT void ncclResetDebugInitInternal() { ncclResetDebugInit(); }
