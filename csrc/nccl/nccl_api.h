// Prototypes of NCCL's C API for programs without an nccl.h. C and C++.
#pragma once

#include "nccl/nccl_types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LLM_COMM_NCCL_OWN(type, name, parameters, arguments) \
  type nccl##name parameters;                                \
  type pnccl##name parameters;
#define LLM_COMM_NCCL_FORWARDED LLM_COMM_NCCL_OWN
#include "nccl/functions.def"
#undef LLM_COMM_NCCL_OWN
#undef LLM_COMM_NCCL_FORWARDED

const char* ncclGetErrorString(ncclResult_t result);
const char* pncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);
const char* pncclGetLastError(ncclComm_t comm);
void ncclResetDebugInitInternal(void);

#ifdef __cplusplus
}
#endif
