#include "python/linear.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "python/data_type_at.h"

namespace py = pybind11;

namespace llm_comm::python {

namespace {

ScaleOf scale_of(uint32_t number) {
  if (number > static_cast<uint32_t>(ScaleOf::kBlock)) {
    throw std::invalid_argument("there are no scales number " + std::to_string(number));
  }
  return static_cast<ScaleOf>(number);
}

LinearEpilogue epilogue_of_name(const std::string& name) {
  if (name == "none") return LinearEpilogue::kNone;
  if (name == "silu_and_mul") return LinearEpilogue::kSiluAndMul;
  if (name == "gelu_tanh_and_mul") return LinearEpilogue::kGeluTanhAndMul;
  throw std::invalid_argument("linear layer: epilogue is '" + name +
                              "'; it must be none, silu_and_mul or gelu_tanh_and_mul");
}

}  // namespace

LinearProblem linear_problem(uint32_t tokens, uint32_t inputs, uint32_t outputs, uint32_t data_type,
                             const std::string& epilogue, const LayerScales& scales,
                             const ScaleStrides& x_scale_strides) {
  const DataType type = data_type_at(data_type);
  LinearProblem problem{tokens, inputs, outputs, operands_of_type(type), type, epilogue_of_name(epilogue)};
  if (scales) {
    problem.operands = OperandType::kFloat8;
    problem.x_scale = scale_of(scales->first);
    problem.weight_scale = scale_of(scales->second);
  }
  if (has_block_scales(problem)) {
    const auto [token, block] = x_scale_strides.value_or(std::pair{std::max(inputs / kScaleBlock, 1u), 1u});
    problem.x_scale_token_stride = token;
    problem.x_scale_block_stride = block;
  }
  return problem;
}

void add_linear(py::module_& module) {
  module.attr("linear_max_tokens") = linear::kMaxTokens;
  module.attr("linear_max_many_tokens") = linear::kMaxManyTokens;
  module.attr("linear_multiple") = linear::kMultiple;
  module.attr("linear_fp8_multiple") = linear::inputs_multiple(OperandType::kFloat8);
  module.attr("linear_max_features") = linear::kMaxFeatures;
  module.attr("experts_max") = experts::kMaxExperts;
  module.attr("experts_max_top_k") = experts::kMaxTopK;
  module.attr("SCALE_OF_TENSOR") = static_cast<uint32_t>(ScaleOf::kTensor);
  module.attr("SCALE_OF_ROW") = static_cast<uint32_t>(ScaleOf::kRow);
  module.attr("SCALE_OF_BLOCK") = static_cast<uint32_t>(ScaleOf::kBlock);

  py::class_<LinearChoice>(module, "LinearChoice")
      .def(py::init([](uint32_t block_outputs, uint32_t stages, uint32_t stage_boxes) {
             return LinearChoice{block_outputs, stages, stage_boxes};
           }),
           py::kw_only(), py::arg("block_outputs") = 0, py::arg("stages") = 0, py::arg("stage_boxes") = 0)
      .def_readonly("block_outputs", &LinearChoice::block_outputs)
      .def_readonly("stages", &LinearChoice::stages)
      .def_readonly("stage_boxes", &LinearChoice::stage_boxes);

  module.def(
      "linear_choice",
      [](uint32_t tokens, uint32_t inputs, uint32_t outputs, uint32_t data_type, const std::string& epilogue,
         const LinearChoice& choice, const LayerScales& scales, uint32_t sm_count, uint32_t max_shared_bytes) {
        const LinearProblem problem = linear_problem(tokens, inputs, outputs, data_type, epilogue, scales);
        return linear::complete(problem, choice, sm_count, max_shared_bytes);
      },
      py::kw_only(), py::arg("tokens"), py::arg("inputs"), py::arg("outputs"), py::arg("data_type"),
      py::arg("epilogue"), py::arg("choice"), py::arg("scales") = py::none(), py::arg("sm_count"),
      py::arg("max_shared_bytes"));
}

}  // namespace llm_comm::python
