// YAML and tuning tables for Python: what host/yaml.h, tables.h and table_choice.h read and find, as tuples.
#pragma once

#include <pybind11/pybind11.h>

namespace llm_comm::python {

void add_tables(pybind11::module_& module);

}  // namespace llm_comm::python
