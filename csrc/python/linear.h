// What Python knows of linear layers beside Core.prepare_linear().
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "host/planner.h"  // LinearProblem, and what layers are served

namespace llm_comm::python {

// Of FP8: whether each token has a scale of its own, and each row of the weight.
using RowScales = std::optional<std::pair<bool, bool>>;

// Throws std::invalid_argument for a data type or an epilogue that there is not.
LinearProblem linear_problem(uint32_t tokens, uint32_t inputs, uint32_t outputs, uint32_t data_type,
                             const std::string& epilogue, const RowScales& scales);

// Their limits, LinearChoice, and what a device makes of one.
void add_linear(pybind11::module_& module);

}  // namespace llm_comm::python
