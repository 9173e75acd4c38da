// The registry for Python: data types, operations and algorithms, and how an algorithm is cut into launches.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "host/planner.h"

namespace llm_comm::python {

// Throws std::invalid_argument for a number that is none's.
const host::Algorithm& algorithm_at(uint32_t number);

void add_registry(pybind11::module_& module);
// YAML and tuning tables: what host/yaml.h, tables.h and table_choice.h read and find, as tuples.
void add_tables(pybind11::module_& module);

}  // namespace llm_comm::python
