// Python bindings of NodeExchange.
#pragma once

#include <pybind11/pybind11.h>

namespace llm_comm::python {

void add_node_exchange(pybind11::module_& module);

}  // namespace llm_comm::python
