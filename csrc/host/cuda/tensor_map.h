// What the TMA unit of a GPU reads of a matrix.
#pragma once

#include "llm_comm/matrix_view.h"

namespace llm_comm::host {

// Fills in `map` of a matrix of so many parts, for fetches of so many boxes of so many rows (tiles.cuh). Throws std::runtime_error.
void encode_tensor_map(MatrixView& matrix, uint32_t parts, uint32_t box_rows, uint32_t boxes, BoxUse use);

}  // namespace llm_comm::host
