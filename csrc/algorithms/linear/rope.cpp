#include "algorithms/linear/rope.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "algorithms/linear/layer.h"

namespace llm_comm::rope {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("layer of q, k and v: " + why); }

std::string text(uint64_t number) { return std::to_string(number); }

// Stages that a warp needs for all of its tiles.
uint32_t all_stages(const Problem& problem) {
  const uint32_t boxes = problem.inputs / linear::inputs_multiple(operands_of_type(problem.type));
  return divide_up(boxes, kStageBoxes * kWarps);
}

bool fits(const Problem& problem, uint32_t block_rows) {
  return problem.rotary_size % block_rows == 0 && block_rows * token_rows(problem.tokens) <= kMaxBlockTokenRows &&
         (!problem.has_norms || problem.head_size / block_rows <= kMaxHeadBlocks);
}

uint32_t shared_bytes(const Problem& problem, const Choice& choice) {
  return kBoxAlignment + kHeaderBytes + layout(problem, choice).bytes;
}

void check_cache(const Problem& problem) {
  // Slots are counted in a word, of which one value stands for no slot.
  if (problem.block_slots == 0 || uint64_t{problem.blocks} * problem.block_slots >= ~0u) {
    refuse(text(problem.blocks) + " blocks of " + text(problem.block_slots) + " slots");
  }
  if (problem.slots > problem.tokens) refuse(text(problem.slots) + " slots of " + text(problem.tokens) + " tokens");
  for (const CacheStrides& strides : {problem.key, problem.value}) {
    if ((strides.block | strides.slot | strides.head) % linear::kLineElements != 0) {
      refuse("strides of the cache are no multiples of " + text(linear::kLineElements) + " elements");
    }
  }
}

}  // namespace

void check(const Problem& problem) {
  if (!linear::serves(operands_of_type(problem.type), problem.type)) {
    refuse(std::string("it has no kernels for ") + data_type_name(problem.type));
  }
  if (problem.tokens == 0 || problem.tokens > kMaxTokens) {
    refuse(text(problem.tokens) + " tokens; it takes 1 to " + text(kMaxTokens));
  }
  for (const auto& [features, name] : {std::pair{problem.inputs, "inputs"}, {problem.outputs, "outputs"}}) {
    const std::string why = linear::why_not_features(features, name);
    if (!why.empty()) refuse(why);
  }
  if (problem.head_size == 0 || problem.head_size > kMaxHeadSize || problem.outputs % problem.head_size != 0) {
    refuse("heads of " + text(problem.head_size) + " outputs, of " + text(problem.outputs) + "; a head has up to " +
           text(kMaxHeadSize) + ", and all are whole");
  }
  const uint32_t heads = problem.outputs / problem.head_size;
  if (problem.kv_heads == 0 || uint64_t{2} * problem.kv_heads >= heads) {
    refuse(text(problem.kv_heads) + " heads of k and as many of v, of " + text(heads) + " heads");
  }
  if (problem.rotary_size == 0 || problem.rotary_size % kTileRows != 0 ||
      problem.head_size % problem.rotary_size != 0) {
    refuse("it rotates " + text(problem.rotary_size) + " of " + text(problem.head_size) +
           " outputs of a head; they must be a multiple of " + text(kTileRows) + " that divides a head");
  }
  if (problem.positions == 0 || problem.positions == ~0u) refuse(text(problem.positions) + " rows of angles");
  if (problem.blocks != 0) check_cache(problem);
}

Choice choose(const Problem& problem, const Choice& wanted, uint32_t sm_count, uint32_t max_shared_bytes) {
  check(problem);
  Choice choice = wanted;
  if (choice.block_rows == 0) {
    // The fewest rows with which each multiprocessor has at most one block.
    for (uint32_t rows = kTileRows; rows <= kMaxBlockRows; rows += kTileRows) {
      if (!fits(problem, rows) || shared_bytes(problem, {rows, 1}) > max_shared_bytes) continue;
      choice.block_rows = rows;
      if (problem.outputs / rows <= sm_count) break;
    }
    if (choice.block_rows == 0) {
      refuse((problem.has_norms ? "norms of heads of " : "heads of ") + text(problem.head_size) +
             " outputs, of which " + text(problem.rotary_size) + " rotate, are for fewer than " + text(problem.tokens) +
             " tokens, or this device has too little memory for a block: " + text(max_shared_bytes) + " bytes");
    }
  }
  if (choice.block_rows > kMaxBlockRows || choice.block_rows % kTileRows != 0 || !fits(problem, choice.block_rows)) {
    refuse("blocks of " + text(choice.block_rows) + " rows, with heads of " + text(problem.head_size) + " of which " +
           text(problem.rotary_size) + " rotate" + (problem.has_norms ? ", norms" : "") + " and " +
           text(problem.tokens) + " tokens");
  }
  if (choice.stages == 0) {
    // With more than eight tokens deeper rings took longer: what they take of shared memory, the L1 cache lacks.
    const uint32_t most = std::min(all_stages(problem), problem.tokens > 8 ? kFewStages : kMaxStages);
    for (choice.stages = most; choice.stages > 1; --choice.stages) {
      if (shared_bytes(problem, choice) <= max_shared_bytes) break;
    }
  }
  if (choice.stages > kMaxStages || shared_bytes(problem, choice) > max_shared_bytes) {
    refuse(text(choice.stages) + " stages of " + text(choice.block_rows) + " rows take " +
           text(shared_bytes(problem, choice)) + " bytes of shared memory; it takes 1 to " + text(kMaxStages) +
           " stages, and this device has " + text(max_shared_bytes) + " for a block");
  }
  return choice;
}

Layout layout(const Problem& problem, const Choice& choice) {
  const auto float_bytes = static_cast<uint32_t>(sizeof(float));
  const uint32_t tokens = token_rows(problem.tokens);
  const uint32_t stage = kStageBoxes * choice.block_rows * kBoxRowBytes;
  const uint32_t sums = kWarps * tokens * (choice.block_rows + kSumsPadding) * float_bytes;
  const uint32_t squares = std::max(kWarps * choice.stages * stage, sums);
  const uint32_t lines = problem.has_norms ? problem.head_size / (2 * kLinePairs) : 0;
  return {stage, squares, squares + lines * tokens * float_bytes};
}

Grid grid(const Problem& problem, const Choice& choice) {
  const uint32_t cluster = problem.has_norms ? head_blocks(problem, choice) : 1;
  return {problem.outputs / choice.block_rows, kThreads, shared_bytes(problem, choice), cluster};
}

uint32_t head_blocks(const Problem& problem, const Choice& choice) { return problem.head_size / choice.block_rows; }

uint32_t part_blocks(const Problem& problem, const Choice& choice) { return problem.rotary_size / choice.block_rows; }

}  // namespace llm_comm::rope
