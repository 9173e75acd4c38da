#include "algorithms/linear/experts.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace llm_comm::experts {

namespace {

struct Layer {
  uint32_t inputs, outputs, parts;
};

Layer layer_of(const Problem& problem, bool is_gated) {
  if (is_gated) return {problem.hidden, problem.intermediate, 2};
  return {problem.intermediate, problem.hidden, 1};
}

uint32_t shared_bytes(const Problem& problem, bool is_gated, const Choice& choice) {
  // Instructions read 64 rows of a weight tile, even if it has fewer: room for this read after the last tile.
  const uint32_t beyond = (linear::kMaxBlockOutputs - choice.block_outputs) * kBoxRowBytes;
  return kBoxAlignment + stages_offset(problem, is_gated, choice) + choice.stages * stage_bytes(problem, choice) +
         beyond;
}

// Number of experts that the tokens have on average if all experts are equally likely.
double mean_active(const Problem& problem) {
  const double share = std::min(1.0, static_cast<double>(problem.top_k) / problem.experts);
  return problem.experts * (1.0 - std::pow(1.0 - share, problem.tokens));
}

// Weight rows of a unit of gate and up: those with which the multiprocessor that has the most units streams the least.
uint32_t gate_up_outputs(const Problem& problem, uint32_t sm_count) {
  constexpr double kRowsOfUnit = 8;  // what a unit costs besides its rows, in weight rows
  uint32_t best = 0;
  double best_cost = 0;
  constexpr uint32_t kStep = 2 * linear::kLineElements;
  for (uint32_t rows = linear::kMaxBlockOutputs; rows >= kStep; rows -= kStep) {
    const double units = mean_active(problem) * divide_up(problem.intermediate, rows / 2);
    const double cost = std::ceil(units / std::max(sm_count, 1u)) * (rows + kRowsOfUnit);
    if (best != 0 && cost >= best_cost) continue;
    best = rows;
    best_cost = cost;
  }
  return best;
}

}  // namespace

void check(const Problem& problem) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("experts: " + why); };
  const auto within = [&](uint32_t value, const char* name, uint32_t most) {
    if (value == 0 || value > most) {
      refuse(std::to_string(value) + " " + name + "; it takes 1 to " + std::to_string(most));
    }
  };
  if (!linear::serves(operands_of_type(problem.type), problem.type)) {
    refuse(std::string("it has no kernels for ") + data_type_name(problem.type));
  }
  within(problem.tokens, "tokens", kMaxTokens);
  within(problem.top_k, "experts of a token", kMaxTopK);
  within(problem.experts, "experts", kMaxExperts);
  for (const auto& [size, name] : {std::pair{problem.hidden, "hidden"}, {problem.intermediate, "intermediate"}}) {
    if (size > 0 && size % linear::kMultiple == 0 && size <= linear::kMaxFeatures) continue;
    refuse(std::to_string(size) + " columns of the " + name + " state; it takes multiples of " +
           std::to_string(linear::kMultiple) + " up to " + std::to_string(linear::kMaxFeatures));
  }
  if (weight_parts(problem.epilogue) != 2) refuse("it needs an activation of gate and up");
}

// The mean number of tokens of an expert decides, so that few experts have a second group.
uint32_t group_rows(const Problem& problem) {
  const double mean = problem.tokens * std::min(problem.top_k, problem.experts) / mean_active(problem);
  if (problem.tokens <= 8 || mean <= 4) return 8;
  return problem.tokens <= 16 || mean <= 10 ? 16 : 32;
}

uint32_t stage_bytes(const Problem& problem, const Choice& choice) {
  return choice.stage_boxes * (choice.block_outputs + group_rows(problem)) * kBoxRowBytes;
}

uint32_t stages_offset(const Problem& problem, bool is_gated, const Choice& choice) {
  const uint32_t sums = linear::kTeams * (is_gated ? group_rows(problem) : problem.tokens) *
                        (choice.block_outputs + linear::kSumsPadding) * static_cast<uint32_t>(sizeof(float));
  return divide_up(kHeaderBytes + sums, kBoxAlignment) * kBoxAlignment;
}

Choice choose(const Problem& problem, bool is_gated, Choice choice, uint32_t sm_count, uint32_t max_shared_bytes) {
  check(problem);
  const auto [inputs, outputs, parts] = layer_of(problem, is_gated);
  const uint32_t step = parts * linear::kLineElements;
  const uint32_t boxes = inputs / linear::inputs_multiple(operands_of_type(problem.type));
  if (choice.block_outputs == 0 && is_gated) choice.block_outputs = gate_up_outputs(problem, sm_count);
  if (choice.block_outputs == 0) {
    // Rows of the weight of a block if each multiprocessor has one block.
    const uint32_t share = divide_up(divide_up(outputs, std::max(sm_count, 1u)), step) * step;
    choice.block_outputs = std::min(share, linear::kMaxBlockOutputs);
  }
  // Half of the shared memory: blocks of the down-projection fetch beside those of gate and up.
  const uint32_t half = max_shared_bytes / 2 - 1024;
  if (choice.stage_boxes == 0) {
    choice.stage_boxes = 1;
    for (uint32_t stage_boxes = linear::kMaxStageBoxes; stage_boxes > 1; --stage_boxes) {
      Choice some = choice;
      some.stage_boxes = stage_boxes;
      if (some.stages == 0) some.stages = stage_boxes > 2 ? 4 : 2;
      // Few tiles in the last stage of an expert would waste its place.
      const bool is_wasteful = divide_up(boxes, stage_boxes) * stage_boxes * 10 > boxes * 12;
      if (stage_boxes > boxes || is_wasteful || shared_bytes(problem, is_gated, some) > half) continue;
      choice.stage_boxes = stage_boxes;
      break;
    }
  }
  if (choice.stages == 0) {
    choice.stages = std::clamp(most_active(problem) * divide_up(boxes, choice.stage_boxes), 2u, linear::kMaxStages);
    while (choice.stages > 2 && shared_bytes(problem, is_gated, choice) > half) --choice.stages;
  }
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("experts: " + why); };
  if (choice.block_outputs > linear::kMaxBlockOutputs || choice.block_outputs % step != 0) {
    refuse("block_outputs is " + std::to_string(choice.block_outputs) + "; it must be a multiple of " +
           std::to_string(step) + " up to " + std::to_string(linear::kMaxBlockOutputs));
  }
  if (choice.stage_boxes > linear::kMaxStageBoxes) {
    refuse("stage_boxes is " + std::to_string(choice.stage_boxes) + "; it must be 1 to " +
           std::to_string(linear::kMaxStageBoxes));
  }
  if (choice.stages < 2 || choice.stages > linear::kMaxStages) {
    refuse("stages is " + std::to_string(choice.stages) + "; it must be 2 to " + std::to_string(linear::kMaxStages));
  }
  if (shared_bytes(problem, is_gated, choice) > max_shared_bytes) {
    refuse("they take " + std::to_string(shared_bytes(problem, is_gated, choice)) +
           " bytes of shared memory, this device has " + std::to_string(max_shared_bytes) + " for a block");
  }
  return choice;
}

Grid grid(const Problem& problem, bool is_gated, const Choice& choice, uint32_t sm_count) {
  const auto [inputs, outputs, parts] = layer_of(problem, is_gated);
  const uint32_t tiles = divide_up(outputs, choice.block_outputs / parts);
  // With more blocks than multiprocessors, those of gate and up would compute one unit after the other anyway.
  const uint32_t blocks = is_gated ? std::min(std::max(sm_count, 1u), tiles * problem.tokens * problem.top_k) : tiles;
  return {blocks, linear::kThreads, shared_bytes(problem, is_gated, choice)};
}

}  // namespace llm_comm::experts
