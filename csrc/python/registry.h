// Python bindings of the registry: data types, operations, algorithms, and the shape of a call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "host/planner.h"

namespace llm_comm::python {

// Throws std::invalid_argument for an unknown number.
const host::Algorithm& algorithm_at(uint32_t number);

void add_registry(pybind11::module_& module);
// YAML and tuning tables (host/yaml.h, tables.h, table_choice.h), as tuples.
void add_tables(pybind11::module_& module);

}  // namespace llm_comm::python
