// TMA tensor maps of the operands of linear layers. The launcher makes them for each call (cuda_core.cu, map_matrix()).
#pragma once

#include "llm_comm/matrix_view.h"

namespace llm_comm::host {

// Writes to `matrix.map` the descriptor by which fetch_boxes() (tiles.cuh) copies `boxes` neighbouring tiles of
// `box_rows` rows at once. The kernel's fetches must have the same numbers.
//
// `parts`: matrices of matrix.rows rows each, one after the other in memory, such as the weights of gate and up. A tile
// has box_rows / box_parts rows of each of `box_parts` neighbours among them. With box_parts 0 the matrix is plain: the
// map is for fetch_boxes<1>. `use`: how many bytes a miss brings into the L2 cache. The 128-byte swizzle is that of
// platform_cuda_tiles.cuh. Throws std::runtime_error if the driver refuses the matrix.
void encode_tensor_map(MatrixView& matrix, uint32_t parts, uint32_t box_parts, uint32_t box_rows, uint32_t boxes,
                       BoxUse use);

}  // namespace llm_comm::host
