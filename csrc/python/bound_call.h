// Wraps a prepared call of the core as a Python function. Every eager call passes through it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "host/counted_call.h"
#include "host/planner.h"

namespace llm_comm::python {

// Returns run(address, ..., stream) -> bool, which keeps `core` alive. `buffers`: number of addresses. `optional`: bit
// i is set if buffer i may be 0.
pybind11::object as_function(pybind11::object core, host::CountedCall call, Py_ssize_t buffers, uint32_t optional);
// as_function() with the buffers of an operation.
pybind11::object as_function(pybind11::object core, host::CountedCall call, const OperationInfo& operation);

}  // namespace llm_comm::python
