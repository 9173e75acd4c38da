// TMA tensor maps of matrices, for the linear layers.
#pragma once

#include "llm_comm/matrix_view.h"

namespace llm_comm::host {

// Fills in `map` of a matrix of `parts` parts, for fetches of `boxes` tiles of `box_rows` rows (tiles.cuh). Throws
// std::runtime_error.
void encode_tensor_map(MatrixView& matrix, uint32_t parts, uint32_t box_rows, uint32_t boxes, BoxUse use);

}  // namespace llm_comm::host
