#include "host/ucx/ucp_api.h"

#include <dlfcn.h>

#include <stdexcept>

namespace llm_comm::host::ucp {

namespace {

constexpr const char* kLibrary = "libucp.so.0";
constexpr unsigned kMajor = 1;
constexpr unsigned kFirstMinor = 14;  // older versions have not been checked

std::string last_error() {
  const char* const error = dlerror();
  return error == nullptr ? "an unknown error" : error;
}

template <class Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) {
    throw std::runtime_error(std::string(kLibrary) + " has no " + name + ": UCX 1.14 or newer is needed");
  }
}

// Loads the library and never unloads it, because it has threads and exit handlers.
Functions load() {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error("UCX cannot be loaded (" + last_error() +
                             "): pip install libucx-cu13, or put an installed UCX into LD_LIBRARY_PATH");
  }
  Functions found{};
#define LLM_COMM_UCP_FIND(name, returned, taken) find(library, "ucp_" #name, found.name);
  LLM_COMM_UCP_FUNCTIONS(LLM_COMM_UCP_FIND)
#undef LLM_COMM_UCP_FIND
  find(library, "ucs_status_string", found.status_string);
  unsigned major = 0, minor = 0, release = 0;
  found.get_version(&major, &minor, &release);
  if (major != kMajor || minor < kFirstMinor) {
    throw std::runtime_error("UCX is of version " + std::to_string(major) + "." + std::to_string(minor) +
                             "; 1.14 or newer is needed");
  }
  return found;
}

}  // namespace

const Functions& functions() {
  static const Functions loaded = load();
  return loaded;
}

std::string version() {
  unsigned part[3] = {};
  functions().get_version(part, part + 1, part + 2);
  return std::to_string(part[0]) + "." + std::to_string(part[1]) + "." + std::to_string(part[2]);
}

}  // namespace llm_comm::host::ucp
