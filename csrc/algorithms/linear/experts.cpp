#include "algorithms/linear/experts.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace llm_comm::experts {

namespace {

// Tiles of a weight row.
uint32_t boxes_of(const Problem& problem, bool is_gated) {
  const uint32_t inputs = is_gated ? problem.hidden : problem.intermediate;
  return inputs / linear::inputs_multiple(problem.weights);
}

// rings: of the block, each of `choice.stages` stages.
uint32_t shared_bytes(const Problem& problem, bool is_gated, const Choice& choice, uint32_t rings) {
  const uint32_t tile_bytes = unit_rows(is_gated, choice) * kBoxRowBytes;
  // Instructions read 16 rows of a weight tile, even if it has fewer: room for this read after the last tile.
  const uint32_t beyond = kUnitRows * kBoxRowBytes - tile_bytes;
  return kBoxAlignment + layout(problem, is_gated, choice).stages +
         rings * choice.stages * choice.stage_boxes * tile_bytes + beyond;
}

// Bytes of shared memory for a block, so that a multiprocessor has room for one of gate and up beside one of the
// down-projection, which begins early, and not for two of gate and up. The driver takes 1 KiB for each. With many places
// the down-projection needs more, and begins later. With groups of 32 tokens it does so too: both need more registers
// than there are.
uint32_t share_of_shared(bool is_gated, uint32_t max_shared_bytes) {
  return is_gated ? max_shared_bytes / 2 : max_shared_bytes / 2 - 1024;
}

// Share of the tokens that an expert has on average if all experts are equally likely.
double mean_share(const Problem& problem) {
  return std::min(1.0, static_cast<double>(problem.top_k) / std::max(problem.experts, problem.all_experts));
}

// Number of experts that the tokens have on average.
double mean_active(const Problem& problem) {
  return problem.experts * (1.0 - std::pow(1.0 - mean_share(problem), problem.tokens));
}

}  // namespace

void check(const Problem& problem) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("experts: " + why); };
  const auto within = [&](uint32_t value, const char* name, uint32_t most) {
    if (value == 0 || value > most) {
      refuse(std::to_string(value) + " " + name + "; it takes 1 to " + std::to_string(most));
    }
  };
  if (!linear::serves(problem.weights, problem.type)) {
    refuse(std::string("it has no kernels for ") + data_type_name(problem.type) + " with weights of " +
           operand_type_name(problem.weights));
  }
  within(problem.tokens, "tokens", kMaxTokens);
  within(problem.top_k, "experts of a token", kMaxTopK);
  within(problem.experts, "experts", kMaxExperts);
  for (const auto& [size, name] : {std::pair{problem.hidden, "hidden"}, {problem.intermediate, "intermediate"}}) {
    const std::string of = std::string("columns of the ") + name + " state";
    const std::string why = linear::why_not_features(size, of, linear::inputs_multiple(problem.weights));
    if (!why.empty()) refuse(why);
  }
  if (weight_parts(problem.epilogue) != 2) refuse("it needs an activation of gate and up");
}

// The mean number of tokens of an expert decides, so that few experts have a second group.
uint32_t group_rows(const Problem& problem) {
  const double mean = problem.tokens * problem.experts * mean_share(problem) / mean_active(problem);
  if (problem.tokens <= 8 || mean <= 6) return 8;
  return problem.tokens <= 16 || mean <= 12 ? 16 : 32;
}

// With few weights the block is small enough to begin early, beside one of gate and up. With more, twice as many warps
// are faster (docs/experiments/experts.md), if their rings fit.
uint32_t down_warps(const Problem& problem, const Choice& choice, uint32_t max_shared_bytes) {
  const double bytes = mean_active(problem) * problem.hidden * problem.intermediate * operand_bytes(problem.weights);
  const bool may_have_all = bytes > 32e6 && shared_bytes(problem, false, choice, kMaxDownWarps) <= max_shared_bytes;
  return may_have_all ? kMaxDownWarps : kMinDownWarps;
}

uint32_t unit_rows(bool is_gated, const Choice& choice) {
  return is_gated || choice.block_outputs % kUnitRows == 0 ? kUnitRows : kUnitRows / 2;
}

Layout layout(const Problem& problem, bool is_gated, const Choice& choice) {
  const uint32_t places = problem.tokens * problem.top_k;
  const uint32_t rows = group_rows(problem);
  const uint32_t groups = std::min(places, problem.experts) + places / rows;  // those of an expert have fewer rows once
  uint32_t end = kBarrierBytes;
  const auto take = [&](uint32_t count, uint32_t size) {
    const uint32_t begin = end;
    end += divide_up(count * size, static_cast<uint32_t>(sizeof(Line))) * static_cast<uint32_t>(sizeof(Line));
    return begin;
  };
  Layout found{};
  found.tokens = take(2 * problem.experts, sizeof(uint32_t));
  found.warp_groups = take(kWarps, sizeof(uint32_t));
  found.groups = take(groups, sizeof(uint32_t));
  found.first_groups = take(problem.experts, sizeof(uint16_t));
  found.places = take(groups * rows, sizeof(uint16_t));
  found.ids = take(places, sizeof(uint16_t));
  if (is_gated) {
    found.sums = take(kWarps * kSumsBuffers * kUnitRows * rows, sizeof(float));
  } else {
    found.stands = take(places, sizeof(uint8_t));
    found.factors = take(places, sizeof(float));
    found.products = take(places * (choice.block_outputs + linear::kSumsPadding), sizeof(float));
  }
  found.stages = divide_up(end, kBoxAlignment) * kBoxAlignment;
  return found;
}

Choice choose(const Problem& problem, bool is_gated, Choice choice, uint32_t sm_count, uint32_t max_shared_bytes) {
  check(problem);
  const uint32_t together = tiles_together(problem.weights);
  const auto bytes = [&](uint32_t stages, uint32_t stage_boxes) {
    const Choice tried{choice.block_outputs, stages, stage_boxes};
    return shared_bytes(problem, is_gated, tried, is_gated ? 1 : down_warps(problem, tried, max_shared_bytes));
  };
  if (choice.block_outputs == 0 && is_gated) choice.block_outputs = kUnitRows;
  if (choice.block_outputs == 0) {
    // Outputs of a block if each multiprocessor has one block.
    const uint32_t share = divide_up(problem.hidden, std::max(sm_count, 1u));
    const uint32_t multiple = share > linear::kLineElements ? kUnitRows : linear::kLineElements;
    choice.block_outputs = std::min(divide_up(share, multiple) * multiple, linear::kMaxBlockOutputs);
    // Fewer if the products of all places do not fit.
    while (choice.block_outputs > linear::kLineElements &&
           bytes(choice.stages == 0 ? 2 : choice.stages, choice.stage_boxes == 0 ? together : choice.stage_boxes) >
               max_shared_bytes) {
      choice.block_outputs -= choice.block_outputs > kUnitRows ? kUnitRows : linear::kLineElements;
    }
  }
  const uint32_t share = share_of_shared(is_gated, max_shared_bytes);
  if (choice.stage_boxes == 0) {
    choice.stage_boxes = kWarps;
    const uint32_t boxes = divide_up(boxes_of(problem, is_gated), together) * together;
    while (!is_gated && choice.stage_boxes > together &&
           (choice.stage_boxes > boxes || bytes(2, choice.stage_boxes) > share)) {
      choice.stage_boxes -= together;
    }
  }
  if (choice.stages == 0) {
    // More stages of gate and up were slower.
    choice.stages = is_gated ? 4 : kMaxStages;
    while (choice.stages > 2 && bytes(choice.stages, choice.stage_boxes) > share) --choice.stages;
  }
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("experts: " + why); };
  if (is_gated && choice.block_outputs != kUnitRows) {
    refuse("block_outputs of gate and up is " + std::to_string(choice.block_outputs) + "; it must be " +
           std::to_string(kUnitRows));
  }
  if (choice.block_outputs > linear::kMaxBlockOutputs || choice.block_outputs % linear::kLineElements != 0) {
    refuse("block_outputs is " + std::to_string(choice.block_outputs) + "; it must be a multiple of " +
           std::to_string(linear::kLineElements) + " up to " + std::to_string(linear::kMaxBlockOutputs));
  }
  const uint32_t step = is_gated ? kWarps : together;
  if (choice.stage_boxes % step != 0 || choice.stage_boxes > kWarps) {
    refuse("stage_boxes is " + std::to_string(choice.stage_boxes) + "; it must be a multiple of " +
           std::to_string(step) + " up to " + std::to_string(kWarps));
  }
  if (choice.stages < 2 || choice.stages > kMaxStages) {
    refuse("stages is " + std::to_string(choice.stages) + "; it must be 2 to " + std::to_string(kMaxStages));
  }
  if (const uint32_t all = bytes(choice.stages, choice.stage_boxes); all > max_shared_bytes) {
    refuse("they take " + std::to_string(all) + " bytes of shared memory, this device has " +
           std::to_string(max_shared_bytes) + " for a block");
  }
  return choice;
}

Grid grid(const Problem& problem, bool is_gated, const Choice& choice, uint32_t sm_count, uint32_t max_shared_bytes) {
  const uint32_t units = problem.intermediate / (kUnitRows / 2) * problem.tokens * problem.top_k;
  const uint32_t blocks =
      is_gated ? std::min(std::max(sm_count, 1u), units) : divide_up(problem.hidden, choice.block_outputs);
  const uint32_t rings = is_gated ? 1 : down_warps(problem, choice, max_shared_bytes);
  const uint32_t shared = shared_bytes(problem, is_gated, choice, rings);
  return {blocks, is_gated ? kGateUpThreads : rings * kWarpThreads,
          is_gated ? std::max(shared, share_of_shared(is_gated, max_shared_bytes)) : shared};
}

}  // namespace llm_comm::experts
