// Compiled against NCCL's own headers: every function has the parameters and the result that functions.def says.
#include <nccl.h>
#include <nccl_device.h>

// Some have overloads in C++: the cast takes that of the type, if there is one.
#define LLM_COMM_NCCL_OWN(type, name, parameters, arguments) \
  [[maybe_unused]] static type(*const of_##name) parameters = static_cast<type(*) parameters>(&nccl##name);
#define LLM_COMM_NCCL_FORWARDED LLM_COMM_NCCL_OWN
#include "nccl/functions.def"
