// A linear layer of a few tokens: y = x W^T, as torch.nn.functional.linear without a bias. No rank takes part but this one.
#pragma once

#include <cstdint>

#include "llm_comm/data_type.h"

namespace llm_comm {

struct LinearProblem {
  uint32_t tokens;   // rows of x and y
  uint32_t inputs;   // columns of x and of the weight
  uint32_t outputs;  // rows of the weight, columns of y
  DataType type;     // of all three
};

// 0: as the layer finds best.
struct LinearChoice {
  uint32_t block_outputs = 0;  // that a block computes
  uint32_t stages = 0;         // of the ring of boxes in shared memory
  uint32_t stage_boxes = 0;    // boxes of the weight in a stage, and as many of x
};

}  // namespace llm_comm
