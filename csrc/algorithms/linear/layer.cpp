#include "algorithms/linear/layer.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace llm_comm::linear {

static_assert(kMaxBlockOutputs == kMaxBoxRows);

namespace {

// Of weights and x that a block reads. Up to there a deeper ring than kStagesOfShort keeps the blocks of the next layer from coming,
// and fetching, while those of this one work; beyond it the depth is worth more (docs/experiments/linear.md).
constexpr uint32_t kShortStream = 226 * 1024;
constexpr uint32_t kStagesOfShort = 6;

uint32_t weight_rows(const LinearProblem& problem) { return weight_parts(problem.epilogue) * problem.outputs; }

// Results are stored in lines, and a line needs as many rows of each part.
uint32_t rows_of_line(const LinearProblem& problem) { return weight_parts(problem.epilogue) * kLineElements; }

uint32_t boxes_of_row(const LinearProblem& problem) { return problem.inputs / inputs_multiple(problem.factors); }

uint32_t shared_bytes(const LinearProblem& problem, const LinearChoice& choice) {
  const uint32_t ring = choice.stages * stage_bytes(problem, choice);
  // Instructions take 64 rows of a box of the weight, also where the last box has fewer.
  const uint32_t beyond = (kMaxBoxRows - choice.block_outputs) * kBoxRowBytes;
  const uint32_t sums = kTeams * token_rows(problem.tokens) * (choice.block_outputs + kSumsPadding) *
                        static_cast<uint32_t>(sizeof(float));
  return kBoxAlignment + kHeaderBytes + std::max(ring + beyond, sums);
}

// A stage is given back when the next one is being multiplied.
uint32_t fewest_stages(const LinearProblem& problem, const LinearChoice& choice) {
  return boxes_of_row(problem) > choice.stage_boxes ? 2 : 1;
}

// One block for each multiprocessor, as far as that goes.
uint32_t balanced_outputs(const LinearProblem& problem, uint32_t sm_count) {
  const uint64_t all = uint64_t{weight_rows(problem)} * token_tiles(problem.tokens);
  const uint64_t share = divide_up(all, uint64_t{std::max(sm_count, 1u)});
  if (share >= kMaxBlockOutputs) return kMaxBlockOutputs;
  return divide_up(static_cast<uint32_t>(share), rows_of_line(problem)) * rows_of_line(problem);
}

// As many as are balanced, or fewer, where 256 tokens and their sums would fill the shared memory of a block: that of sm_86, sm_89 and
// sm_120 is 99 KiB.
uint32_t fitting_outputs(const LinearProblem& problem, LinearChoice choice, uint32_t sm_count,
                         uint32_t max_shared_bytes) {
  choice.block_outputs = balanced_outputs(problem, sm_count);
  if (choice.stages == 0) choice.stages = fewest_stages(problem, choice);
  const uint32_t least = rows_of_line(problem);
  while (choice.block_outputs > least && shared_bytes(problem, choice) > max_shared_bytes) {
    choice.block_outputs -= least;
  }
  return choice.block_outputs;
}

void check_range(const char* name, uint32_t value, uint32_t most) {
  if (value == 0 || value > most) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be 1 to " +
                                std::to_string(most));
  }
}

}  // namespace

void check(const LinearProblem& problem) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("linear layer: " + why); };
  if (!serves(problem.factors, problem.type)) {
    refuse(std::string("it has no kernels for ") + factor_type_name(problem.factors) + " with results of " +
           data_type_name(problem.type));
  }
  const uint32_t most = serves_many(problem.factors, problem.epilogue) ? kMaxManyTokens : kMaxTokens;
  if (problem.tokens == 0 || problem.tokens > most) {
    refuse(std::to_string(problem.tokens) + " tokens; it takes 1 to " + std::to_string(most));
  }
  const auto check_features = [&](uint32_t features, const char* name, uint32_t multiple) {
    if (features > 0 && features % multiple == 0 && features <= kMaxFeatures) return;
    refuse(std::to_string(features) + " " + name + "; it takes multiples of " + std::to_string(multiple) + " up to " +
           std::to_string(kMaxFeatures));
  };
  check_features(problem.inputs, "inputs", inputs_multiple(problem.factors));
  check_features(problem.outputs, "outputs", kMultiple);
}

uint32_t stage_bytes(const LinearProblem& problem, const LinearChoice& choice) {
  return choice.stage_boxes * (choice.block_outputs + token_rows(problem.tokens)) * kBoxRowBytes;
}

LinearChoice complete(const LinearProblem& problem, const LinearChoice& choice, uint32_t sm_count,
                      uint32_t max_shared_bytes) {
  check(problem);
  LinearChoice all = choice;
  // Boxes of many tokens are large: more stages of one box each hide more latency than few stages of two.
  const uint32_t boxes = boxes_of_row(problem);
  if (all.stage_boxes == 0) all.stage_boxes = problem.tokens > kMaxTokens ? 1 : std::min(boxes, 2u);
  check_range("stage_boxes", all.stage_boxes, kMaxStageBoxes);
  if (all.block_outputs == 0) all.block_outputs = fitting_outputs(problem, all, sm_count, max_shared_bytes);
  check_range("block_outputs", all.block_outputs, kMaxBlockOutputs);
  if (all.block_outputs % rows_of_line(problem) != 0) {
    throw std::invalid_argument("block_outputs is " + std::to_string(all.block_outputs) +
                                "; it must be a multiple of " + std::to_string(rows_of_line(problem)));
  }
  if (all.stages == 0) {
    const uint32_t stream = boxes * (stage_bytes(problem, all) / all.stage_boxes);
    const uint32_t wanted =
        std::min(divide_up(boxes, all.stage_boxes), stream <= kShortStream ? kStagesOfShort : kMaxStages);
    all.stages = fewest_stages(problem, all);
    while (all.stages < wanted) {
      LinearChoice more = all;
      ++more.stages;
      if (shared_bytes(problem, more) > max_shared_bytes) break;
      all = more;
    }
  }
  check_range("stages", all.stages, kMaxStages);
  if (all.stages < fewest_stages(problem, all)) {
    throw std::invalid_argument("stages is 1 for " + std::to_string(boxes) + " boxes, of which a stage holds " +
                                std::to_string(all.stage_boxes) + ": it must be 2 or more");
  }
  if (shared_bytes(problem, all) > max_shared_bytes) {
    throw std::invalid_argument(std::to_string(all.stages) + " stages of " + std::to_string(all.stage_boxes) +
                                " boxes of " + std::to_string(all.block_outputs) + " outputs take " +
                                std::to_string(shared_bytes(problem, all)) +
                                " bytes of shared memory, this device has " + std::to_string(max_shared_bytes) +
                                " for a block: lower stages or stage_boxes");
  }
  return all;
}

Grid grid(const LinearProblem& problem, const LinearChoice& choice) {
  return {divide_up(weight_rows(problem), choice.block_outputs) * token_tiles(problem.tokens), kThreads,
          shared_bytes(problem, choice)};
}

}  // namespace llm_comm::linear
