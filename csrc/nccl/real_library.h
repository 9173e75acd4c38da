// RealLibrary: the real NCCL library, loaded at run time. It has a communicator beside each of ours and serves the
// calls that llm_comm does not.
#pragma once

#include <string>

#include "nccl/failure.h"

namespace llm_comm::nccl {

// Its functions; nullptr for those it lacks.
struct RealFunctions {
#define LLM_COMM_NCCL_OWN(type, name, parameters, arguments) type(*name) parameters;
#define LLM_COMM_NCCL_FORWARDED LLM_COMM_NCCL_OWN
#include "nccl/functions.def"
#undef LLM_COMM_NCCL_OWN
#undef LLM_COMM_NCCL_FORWARDED
  const char* (*GetErrorString)(ncclResult_t);
  const char* (*GetLastError)(ncclComm_t);
};

class RealLibrary {
 public:
  // Loads the library at the first call. LLM_COMM_NCCL_LIBRARY names it ("none": use none). Default for GPUs:
  // libnccl.so.2 as the process has loaded it or the loader finds it. Stays loaded until the process ends.
  static const RealLibrary& get();

  bool is_there() const { return is_there_; }
  const std::string& path() const { return path_; }  // or the name given to the loader
  const std::string& why_not() const { return why_not_; }
  int version() const;
  const RealFunctions& functions() const { return functions_; }

  // Throws Failure if the library or the function is missing.
  template <class Function>
  Function require(Function RealFunctions::* function, const char* name) const {
    if (!is_there_) {
      throw Failure(ncclInvalidUsage,
                    std::string("nccl") + name +
                        " is not served by llm_comm here, and there is no NCCL library for it: " + why_not_);
    }
    if (functions_.*function == nullptr) {
      throw Failure(ncclInvalidUsage, "the NCCL library " + path_ + ", version " + std::to_string(version()) +
                                          ", has no nccl" + name + ": LLM_COMM_NCCL_LIBRARY may name a newer one");
    }
    return functions_.*function;
  }

 private:
  RealLibrary();
  void load(const char* name);

  bool is_there_ = false;
  std::string path_;
  std::string why_not_;
  RealFunctions functions_{};
};

// Marks that this thread is inside a call of the real library. If this library is preloaded, calls that the real
// library makes to its own API arrive here and are forwarded to it.
class InRealLibrary {
 public:
  InRealLibrary() { ++depth_; }
  ~InRealLibrary() { --depth_; }
  InRealLibrary(const InRealLibrary&) = delete;
  InRealLibrary& operator=(const InRealLibrary&) = delete;
  static bool is_so() { return depth_ > 0; }

 private:
  static thread_local int depth_;
};

// Calls a function of the real library. Throws Failure if it is missing.
template <class Result, class... Parameters, class... Arguments>
Result call_real(Result (*RealFunctions::*function)(Parameters...), const char* name, Arguments... arguments) {
  const auto address = RealLibrary::get().require(function, name);
  const InRealLibrary inside;
  return address(arguments...);
}

}  // namespace llm_comm::nccl
