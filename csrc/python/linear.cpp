#include "python/linear.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <tuple>

#include "host/core.h"  // rope::Problem
#include "python/data_type_at.h"

namespace py = pybind11;

namespace llm_comm::python {

namespace {

// Blocks of a cache, slots of a block, tokens with a slot, whether slots have 64 bits, and strides of keys and values in
// elements: between blocks, slots and heads.
using RopeCache = std::tuple<uint32_t, uint32_t, uint32_t, bool, std::array<uint64_t, 3>, std::array<uint64_t, 3>>;

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
  module.attr("rope_max_tokens") = rope::kMaxTokens;
  module.attr("rope_max_head_size") = rope::kMaxHeadSize;
  module.attr("rope_rotary_multiple") = rope::kTileRows;
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

  py::class_<rope::Problem>(module, "RopeProblem")
      .def(py::init([](uint32_t tokens, uint32_t inputs, uint32_t outputs, uint32_t data_type, uint32_t head_size,
                       uint32_t kv_heads, uint32_t rotary_size, bool is_interleaved, bool has_norms, float epsilon,
                       uint32_t positions, bool has_fp32_angles, bool has_64_bit_positions,
                       const std::optional<RopeCache>& cache) {
             rope::Problem problem{tokens,
                                   inputs,
                                   outputs,
                                   data_type_at(data_type),
                                   head_size,
                                   kv_heads,
                                   rotary_size,
                                   is_interleaved,
                                   has_norms,
                                   epsilon,
                                   positions,
                                   has_fp32_angles,
                                   has_64_bit_positions};
             if (cache) {
               const auto& [blocks, block_slots, slots, has_64_bit_slots, key, value] = *cache;
               problem.blocks = blocks;
               problem.block_slots = block_slots;
               problem.slots = slots;
               problem.has_64_bit_slots = has_64_bit_slots;
               problem.key = {key[0], key[1], key[2]};
               problem.value = {value[0], value[1], value[2]};
             }
             return problem;
           }),
           py::kw_only(), py::arg("tokens"), py::arg("inputs"), py::arg("outputs"), py::arg("data_type"),
           py::arg("head_size"), py::arg("kv_heads"), py::arg("rotary_size"), py::arg("is_interleaved"),
           py::arg("has_norms"), py::arg("epsilon"), py::arg("positions"), py::arg("has_fp32_angles"),
           py::arg("has_64_bit_positions"), py::arg("cache") = py::none());

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
