// The name under which kernels outside of this tree include operation.cuh.
#pragma once

#include "llm_comm/operation.cuh"
