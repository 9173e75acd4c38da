#include "nccl/real_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "nccl/device.h"
#include "nccl/log.h"

// Marker by which this library recognizes itself under another name.
extern "C" __attribute__((visibility("default"))) const char llm_comm_nccl_library[] = "llm_comm";

namespace llm_comm::nccl {

thread_local int InRealLibrary::depth_ = 0;

RealLibrary::RealLibrary() {
  const char* const named = std::getenv("LLM_COMM_NCCL_LIBRARY");
  if (named != nullptr && std::string(named) == "none") {
    why_not_ = "LLM_COMM_NCCL_LIBRARY is none; it may name one";
  } else if (named != nullptr && *named != '\0') {
    load(named);
  } else if (kHasRealNccl) {
    load("libnccl.so.2");
    if (!is_there_) why_not_ += "; LLM_COMM_NCCL_LIBRARY may name one";
  } else {
    why_not_ = "an emulated build looks for none; LLM_COMM_NCCL_LIBRARY may name one";
  }
  inform(is_there_ ? "what is not served goes to " + path_ + ", version " + std::to_string(version())
                   : "no NCCL library behind this one: " + why_not_);
}

void RealLibrary::load(const char* name) {
  path_ = name;
  void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const error = dlerror();
    why_not_ = error != nullptr ? error : "dlopen failed";
    return;
  }
  if (dlsym(handle, "llm_comm_nccl_library") != nullptr) {
    why_not_ = path_ + " is llm_comm's own library, which has to have NCCL's behind it";
    return;
  }
#define LLM_COMM_NCCL_OWN(type, name, parameters, arguments) \
  functions_.name = reinterpret_cast<decltype(functions_.name)>(dlsym(handle, "nccl" #name));
#define LLM_COMM_NCCL_FORWARDED LLM_COMM_NCCL_OWN
#include "nccl/functions.def"
#undef LLM_COMM_NCCL_OWN
#undef LLM_COMM_NCCL_FORWARDED
  functions_.GetErrorString =
      reinterpret_cast<decltype(functions_.GetErrorString)>(dlsym(handle, "ncclGetErrorString"));
  functions_.GetLastError = reinterpret_cast<decltype(functions_.GetLastError)>(dlsym(handle, "ncclGetLastError"));
  if (functions_.GetUniqueId == nullptr || functions_.CommInitRank == nullptr || functions_.GetVersion == nullptr) {
    why_not_ = path_ + " has no ncclGetUniqueId, ncclCommInitRank or ncclGetVersion: it is no NCCL library";
    return;
  }
  is_there_ = true;
}

int RealLibrary::version() const {
  int version = 0;
  const InRealLibrary inside;
  return is_there_ && functions_.GetVersion(&version) == ncclSuccess ? version : 0;
}

// Never destroyed: other threads and exit handlers may still call it.
const RealLibrary& RealLibrary::get() {
  static const RealLibrary* const library = new RealLibrary;
  return *library;
}

}  // namespace llm_comm::nccl
