// Time model of the linear layer kernel for up to kMaxTokens tokens. It ranks tilings where no table has a row.
#pragma once

#include <algorithm>
#include <cmath>

#include "algorithms/linear/problem.h"
#include "llm_comm/matrix_view.h"

namespace llm_comm::linear {

// Input of the model: a layer and its tiling.
struct Tiling {
  double blocks;
  double block_rows;  // weight rows of a thread block
  double token_rows;  // rows of a tile of x
  double boxes;       // tiles in a row of the weight
  double stage_boxes;
  double stages;
  double resident;  // thread blocks that fit on a multiprocessor at the same time
};

// Estimated microseconds of a layer on one H100 or H200, the sum of two cases: in a chain of equal layers, and after a
// short kernel. Time that is the same for all tilings is left out, so the value ranks tilings and is no prediction. The
// constants are fitted to the times of all tilings of the layers in tests/gpu/linear_shapes.py
// (docs/experiments/linear.md, "The kernel's own choice").
//
// Terms, which overlap in part:
//   stream    reading weights and x, at the rate of the memory or of the bytes that a multiprocessor has in flight
//   multiply  for each stage and each tile
//   end       epilogue of a block, and start of the next block on its multiprocessor
// The first round of the ring is fetched before the layer may begin (PDL), if its blocks fit on the multiprocessors
// beside those of the kernel ahead. This part of the stream costs no time.
inline double cost(const Tiling& tiling, double sm_count) {
  constexpr double kMemoryRate = 4.97e6;  // bytes/us, of the GPU; fitted for H100 and H200 together
  constexpr double kSmRate = 61.8e3;      // bytes/us, of one multiprocessor
  constexpr double kLatency = 1.15;       // us, of a fetch
  constexpr double kStage = 0.116, kBox = 0.0139, kEnd = 0.22, kNextRound = 1.0;  // us
  constexpr double kInRow = 0.19;         // us, added in a chain of equal layers that is not bound by memory
  constexpr double kShareOfTokens = 0.5;  // weight of the bytes of x, which come from the L2 cache
  constexpr double kStagesInUse = 2.14;   // stages not in flight: one is multiplied, one awaits its release
  constexpr double kSharpness = 1.7;      // exponent of the overlap: 1 adds the times, infinity takes the longer

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
