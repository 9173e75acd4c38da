// What Python knows of linear layers beside Core.prepare_linear().
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "host/planner.h"  // LinearProblem, and what layers are served

namespace llm_comm::python {

// Of FP8: ScaleOf of x and of the weight.
using LayerScales = std::optional<std::pair<uint32_t, uint32_t>>;
// Strides of the scales of blocks of x: of tokens, and of blocks. None: contiguous rows.
using ScaleStrides = std::optional<std::pair<uint32_t, uint32_t>>;

// Throws std::invalid_argument for a data type or an epilogue that there is not, or such scales.
LinearProblem linear_problem(uint32_t tokens, uint32_t inputs, uint32_t outputs, uint32_t data_type,
                             const std::string& epilogue, const LayerScales& scales,
                             const ScaleStrides& x_scale_strides = {});

// Their limits, LinearChoice, and what a device makes of one.
void add_linear(pybind11::module_& module);

}  // namespace llm_comm::python
