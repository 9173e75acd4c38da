#include "algorithms/linear/layer.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/linear/cost.h"

namespace llm_comm::linear {

static_assert(kMaxBlockOutputs == kMaxBoxRows);

namespace {

// Candidate rings of layers with up to kMaxTokens tokens: stages, and tiles of a stage.
struct Ring {
  uint32_t stages, stage_boxes;
};
constexpr Ring kRings[] = {{8, 1},  {12, 1}, {16, 1}, {4, 2}, {5, 2}, {6, 2}, {8, 2}, {10, 2},
                           {12, 2}, {16, 2}, {3, 4},  {4, 4}, {5, 4}, {7, 4}, {3, 8}, {9, 4},
                           {12, 4}, {16, 4}, {5, 8},  {6, 8}, {7, 8}, {9, 8}};
// The time model was fitted to the first of them, and the kernel chooses among these. The others, which fit where a
// block has few outputs and tokens, keep more bytes in flight.
constexpr std::span<const Ring> kFittedRings = std::span(kRings).first<15>();
// Fewest thread blocks for each multiprocessor that candidate tilings may have. The time model was fitted to no fewer.
constexpr double kFewestBlocks = 0.4;
// Shared memory of a multiprocessor that the driver reserves for each resident block, from sm_80 on (CUDA C++
// Programming Guide, "Shared Memory" of each compute capability).
constexpr uint32_t kReservedBytes = 1024;

uint32_t weight_rows(const LinearProblem& problem) { return weight_parts(problem.epilogue) * problem.outputs; }

// Granularity of block_outputs. Results are stored in 16-byte lines; a line needs kLineElements rows of each part.
uint32_t rows_of_line(const LinearProblem& problem) { return weight_parts(problem.epilogue) * kLineElements; }

uint32_t boxes_of_row(const LinearProblem& problem) { return problem.inputs / inputs_multiple(problem.operands); }

uint32_t shared_bytes(const LinearProblem& problem, const LinearChoice& choice) {
  const uint32_t ring = choice.stages * stage_bytes(problem, choice);
  // Instructions read 64 rows of a weight tile, even if it has fewer: room for this read after the last tile.
  const uint32_t beyond = (kMaxBoxRows - choice.block_outputs) * kBoxRowBytes;
  // Block scales follow the ring, 4 bytes for each tile row. They are read for 64 rows of a weight tile, too. These
  // bytes may overlap `beyond`, of which no result depends on any byte.
  const uint32_t scales = has_block_scales(problem) ? (ring + beyond) / kBoxRowBytes * 4 : 0;
  const uint32_t sums = kTeams * token_rows(problem.tokens) * (choice.block_outputs + kSumsPadding) *
                        static_cast<uint32_t>(sizeof(float));
  return kBoxAlignment + kHeaderBytes + std::max(ring + std::max(beyond, scales), sums);
}

// A stage is released while the next one is multiplied, so a ring that is used more than once needs two.
uint32_t fewest_stages(const LinearProblem& problem, const LinearChoice& choice) {
  return boxes_of_row(problem) > choice.stage_boxes ? 2 : 1;
}

// Rows of the weight of a block if each multiprocessor has one block. At most kMaxBlockOutputs; then there are more
// blocks.
uint32_t balanced_outputs(const LinearProblem& problem, uint32_t sm_count) {
  const uint64_t all = uint64_t{weight_rows(problem)} * token_tiles(problem.tokens);
  const uint64_t share = divide_up(all, uint64_t{std::max(sm_count, 1u)});
  if (share >= kMaxBlockOutputs) return kMaxBlockOutputs;
  return divide_up(static_cast<uint32_t>(share), rows_of_line(problem)) * rows_of_line(problem);
}

// balanced_outputs(), or fewer if the tiles and sums would not fit into shared memory. 256 tokens reach that limit on
// sm_86, sm_89 and sm_120, where a block has 99 KiB.
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

double cost_of(const LinearProblem& problem, const LinearChoice& choice, uint32_t sm_count, uint32_t max_shared_bytes) {
  const uint32_t resident = (max_shared_bytes + kReservedBytes) / (shared_bytes(problem, choice) + kReservedBytes);
  return cost({.blocks = double(divide_up(weight_rows(problem), choice.block_outputs)),
               .block_rows = double(choice.block_outputs),
               .token_rows = double(token_rows(problem.tokens)),
               .boxes = double(boxes_of_row(problem)),
               .stage_boxes = double(choice.stage_boxes),
               .stages = double(choice.stages),
               .resident = double(resident)},
              sm_count);
}

// Candidate tilings with `rings` that fit into shared memory, with their costs in ascending order. `block_outputs`:
// only tilings with this value; 0: with any.
std::vector<std::pair<double, LinearChoice>> fitting(const LinearProblem& problem, std::span<const Ring> rings,
                                                     uint32_t block_outputs, uint32_t sm_count,
                                                     uint32_t max_shared_bytes) {
  std::vector<std::pair<double, LinearChoice>> found;
  const uint32_t step = rows_of_line(problem), boxes = boxes_of_row(problem);
  for (uint32_t outputs = step; outputs <= kMaxBlockOutputs; outputs += step) {
    if (block_outputs != 0 && outputs != block_outputs) continue;
    const bool leaves_idle = divide_up(weight_rows(problem), outputs) < kFewestBlocks * sm_count;
    if (block_outputs == 0 && outputs > step && leaves_idle) break;
    for (const Ring& ring : rings) {
      const uint32_t stage_boxes = std::min(ring.stage_boxes, boxes);
      const LinearChoice choice{outputs, std::min(ring.stages, divide_up(boxes, stage_boxes)), stage_boxes};
      const bool is_one_fetch = choice.stages == 1 && boxes > 1;
      if (is_one_fetch || shared_bytes(problem, choice) > max_shared_bytes) continue;
      // With few tiles in a row several rings become equal.
      if (std::any_of(found.begin(), found.end(), [&](const auto& other) { return other.second == choice; })) continue;
      found.emplace_back(cost_of(problem, choice, sm_count, max_shared_bytes), choice);
    }
  }
  // A stable sort: with equal costs all ranks must choose the same tiling, whatever their standard library is.
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return found;
}

void check_range(const char* name, uint32_t value, uint32_t most) {
  if (value == 0 || value > most) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be 1 to " +
                                std::to_string(most));
  }
}

}  // namespace

std::string why_not_features(uint32_t features, const std::string& name, uint32_t multiple) {
  if (features > 0 && features % multiple == 0 && features <= kMaxFeatures) return "";
  return std::to_string(features) + " " + name + "; it takes multiples of " + std::to_string(multiple) + " up to " +
         std::to_string(kMaxFeatures);
}

void check(const LinearProblem& problem) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("linear layer: " + why); };
  if (!serves(problem.operands, problem.type)) {
    refuse(std::string("it has no kernels for ") + operand_type_name(problem.operands) + " with results of " +
           data_type_name(problem.type));
  }
  const uint32_t most = serves_many(problem.operands, weight_parts(problem.epilogue)) ? kMaxManyTokens : kMaxTokens;
  if (problem.tokens == 0 || problem.tokens > most) {
    refuse(std::to_string(problem.tokens) + " tokens; it takes 1 to " + std::to_string(most));
  }
  for (const std::string& why : {why_not_features(problem.inputs, "inputs", inputs_multiple(problem.operands)),
                                 why_not_features(problem.outputs, "outputs")}) {
    if (!why.empty()) refuse(why);
  }
  if (!has_block_scales(problem) && problem.weight_scale != ScaleOf::kBlock) return;
  if (problem.operands != OperandType::kFloat8) refuse("scales of blocks are for FP8");
  if (problem.x_scale != problem.weight_scale) refuse("both operands have scales of blocks, or neither has");
  if (problem.x_scale_token_stride == 0 || problem.x_scale_block_stride == 0) {
    refuse("scales of blocks of x need strides of tokens and of blocks");
  }
}

uint32_t stage_bytes(const LinearProblem& problem, const LinearChoice& choice) {
  return choice.stage_boxes * (choice.block_outputs + token_rows(problem.tokens)) * kBoxRowBytes;
}

std::vector<LinearChoice> choices(const LinearProblem& problem, uint32_t sm_count, uint32_t max_shared_bytes) {
  check(problem);
  if (problem.tokens > kMaxTokens) return {complete(problem, {}, sm_count, max_shared_bytes)};
  std::vector<LinearChoice> found{complete(problem, {}, sm_count, max_shared_bytes)};
  for (const auto& [cost, choice] : fitting(problem, kRings, 0, sm_count, max_shared_bytes)) {
    if (choice != found.front()) found.push_back(choice);
  }
  return found;
}

LinearChoice complete(const LinearProblem& problem, const LinearChoice& choice, uint32_t sm_count,
                      uint32_t max_shared_bytes) {
  check(problem);
  LinearChoice all = choice;
  if (problem.tokens <= kMaxTokens && all.stages == 0 && all.stage_boxes == 0) {
    const auto found = fitting(problem, kFittedRings, all.block_outputs, sm_count, max_shared_bytes);
    if (!found.empty()) all = found.front().second;
  }
  // Tiles of 128 or 256 tokens are large. More stages of one tile each hide more latency than fewer stages of two.
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
    const uint32_t wanted = std::min(divide_up(boxes, all.stage_boxes), kMaxStages);
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
