// Python bindings of linear layers, except for Core.prepare_linear(): limits, LinearChoice, linear_choice().
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "host/planner.h"  // LinearProblem, linear::complete()

namespace llm_comm::python {

// ScaleOf of x and of the weight, as numbers. None: operands are not FP8.
using LayerScales = std::optional<std::pair<uint32_t, uint32_t>>;
// Strides of the block scales of x in elements, of tokens and of blocks. None: the scales are contiguous.
using ScaleStrides = std::optional<std::pair<uint32_t, uint32_t>>;

// Builds a problem from Python's arguments. `data_type`: number of the result's type. `epilogue`: "none",
// "silu_and_mul" or "gelu_tanh_and_mul". Throws std::invalid_argument for an unknown data type, epilogue or scale
// granularity.
LinearProblem linear_problem(uint32_t tokens, uint32_t inputs, uint32_t outputs, uint32_t data_type,
                             const std::string& epilogue, const LayerScales& scales,
                             const ScaleStrides& x_scale_strides = {});

// Adds the limits of layers, the class LinearChoice, and linear_choice(), which completes a tiling for a device.
void add_linear(pybind11::module_& module);

}  // namespace llm_comm::python
