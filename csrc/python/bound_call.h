// A prepared call of the core as a function of Python, which every eager call goes through.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "host/counted_call.h"
#include "host/planner.h"

namespace llm_comm::python {

// run(address, ..., stream) -> bool, which keeps `core`. `buffers`: how many addresses; `optional`: bit i: buffer i may be 0.
pybind11::object as_function(pybind11::object core, host::CountedCall call, Py_ssize_t buffers, uint32_t optional);
// The same, with the buffers of an operation.
pybind11::object as_function(pybind11::object core, host::CountedCall call, const OperationInfo& operation);

}  // namespace llm_comm::python
