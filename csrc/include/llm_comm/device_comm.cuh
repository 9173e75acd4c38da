// Name under which kernels outside this tree include operation.cuh.
#pragma once

#include "llm_comm/operation.cuh"
