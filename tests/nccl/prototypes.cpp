// Compiled against NCCL's own headers by newest_nccl.py: every function has the parameters and the result that functions.def says.
// With it nccl.h declares ncclResetDebugInit.
#define NCCL_OS_LINUX
#include <nccl.h>
#include <nccl_device.h>

// NCCL exports both, and its headers declare them for Windows alone.
using ncclGinOutboxHandle_t = struct ncclGinOutboxHandle;
using ncclGinInboxA2AHandle_t = struct ncclGinInboxA2AHandle;
extern "C" {
ncclResult_t ncclGinOutboxCreateRequirement(int, int, ncclGinOutboxHandle_t*, ncclDevResourceRequirements_t*);
ncclResult_t ncclGinInboxA2ACreateRequirement(ncclTeam_t, int, int, ncclGinInboxA2AHandle_t*,
                                              ncclDevResourceRequirements_t*);
}

// Some have overloads in C++: the cast takes that of the type, if there is one.
#define LLM_COMM_NCCL_OWN(type, name, parameters, arguments) \
  [[maybe_unused]] static type(*const of_##name) parameters = static_cast<type(*) parameters>(&nccl##name);
#define LLM_COMM_NCCL_FORWARDED LLM_COMM_NCCL_OWN
#include "nccl/functions.def"
