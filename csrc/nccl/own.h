// Functions of the API that llm_comm implements itself, by their names without prefix (functions.def). They may throw.
#pragma once

#include "nccl/nccl_types.h"

namespace llm_comm::nccl::own {

#define LLM_COMM_NCCL_OWN(type, name, parameters, arguments) type name parameters;
#define LLM_COMM_NCCL_FORWARDED(type, name, parameters, arguments)
#include "nccl/functions.def"
#undef LLM_COMM_NCCL_OWN
#undef LLM_COMM_NCCL_FORWARDED

}  // namespace llm_comm::nccl::own
