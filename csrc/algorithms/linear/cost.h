// What a linear layer of a few tokens costs by one tiling or another: a model of the kernel, by which it chooses its own.
#pragma once

#include <algorithm>
#include <cmath>

#include "algorithms/linear/problem.h"
#include "llm_comm/matrix_view.h"

namespace llm_comm::linear {

// A layer that is cut into blocks.
struct Tiling {
  double blocks;
  double block_rows;  // of the weight
  double token_rows;  // of a box of x
  double boxes;       // of a row
  double stage_boxes;
  double stages;
  double resident;  // blocks that a multiprocessor has room for
};

// About the microseconds on one H100 or H200 that a layer takes in a row of its kind, and those behind a short kernel, added up: what
// all tilings take alike is left out. The constants are fitted to the times of all tilings of the layers in
// tests/gpu/linear_shapes.py (docs/experiments/linear.md, "The kernel's own choice").
//
// Three things take time, and hide each other in part: to stream the weights, at the rate of the memory or of what a multiprocessor
// has under way; to multiply, stage by stage and box by box; and to end a block. What the rings hold of the weights has come before the
// layer may begin, where its blocks find room beside those of the kernel before.
inline double cost(const Tiling& tiling, double sm_count) {
  constexpr double kMemoryRate = 4.97e6;  // bytes a microsecond
  constexpr double kSmRate = 61.8e3;      // of one multiprocessor
  constexpr double kLatency = 1.15;       // of a fetch
  constexpr double kStage = 0.116, kBox = 0.0139, kEnd = 0.22, kNextRound = 1.0;
  constexpr double kInRow = 0.19;         // by which a row is slower where memory is not what it waits for
  constexpr double kShareOfTokens = 0.5;  // of x, which comes from the L2 cache
  constexpr double kStagesInUse = 2.14;   // one is multiplied, the products of another are awaited
  constexpr double kSharpness = 1.7;      // 1: times add up; more: the longer one counts

  const double row_bytes = tiling.boxes * kBoxRowBytes;
  const double block_bytes = row_bytes * (tiling.block_rows + kShareOfTokens * tiling.token_rows);
  const double stage_bytes = tiling.stage_boxes * (tiling.block_rows + tiling.token_rows) * kBoxRowBytes;
  const double stages_of_row = std::ceil(tiling.boxes / tiling.stage_boxes);
  const double places = sm_count * tiling.resident;
  const double rounds = std::ceil(tiling.blocks / places);
  const double blocks_of_sm = std::ceil(tiling.blocks / sm_count);

  const double under_way =
      std::min(tiling.resident, blocks_of_sm) * std::max(tiling.stages - kStagesInUse, 0.3) * stage_bytes;
  const double of_sm = blocks_of_sm * block_bytes * (1 / kSmRate + kLatency / under_way);
  const double of_memory = tiling.blocks * block_bytes / kMemoryRate;
  const double stream = std::max(of_sm, of_memory);
  const double multiply = rounds * (stages_of_row * kStage + tiling.boxes * kBox);
  const double end = rounds * kEnd + (rounds - 1) * kNextRound;

  const double ring_share = std::min(tiling.stages, stages_of_row) * stage_bytes /
                            (tiling.blocks * row_bytes * (tiling.block_rows + tiling.token_rows));
  const auto behind = [&](double blocks_ahead) {
    const double left = stream * std::max(0.0, 1 - blocks_ahead * ring_share);
    return std::pow(std::pow(left, kSharpness) + std::pow(multiply, kSharpness), 1 / kSharpness) + end;
  };
  const double at_once = std::min(tiling.blocks, places);
  const double beside_its_kind = std::min(tiling.blocks, places - at_once);
  return std::max(of_memory, kInRow + behind(beside_its_kind)) + behind(at_once);
}

}  // namespace llm_comm::linear
