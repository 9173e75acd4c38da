// Tile contract: asynchronous copies of matrix tiles to shared memory and tensor-core products of them. The linear
// layers use it. Instructions depend on the GPU (TMA or cp.async, wgmma or mma.sync); these names hide them.
//
// A tile ("box") has up to 64 rows, or up to 256 where the rows are tokens, and always a multiple of 8. A tile row has
// kBoxRowBytes bytes: 64 columns of 2-byte elements or 128 columns of FP8. Tiles start at multiples of kBoxRowBytes in
// a matrix row. In shared memory a tile starts at a multiple of kBoxAlignment and takes kBoxRowBytes per row. The order
// of the bytes inside a tile depends on the target.
//
// Shared memory   SharedAddress: an address in shared memory, to which bytes can be added. pointer_to<T>(place).
//                 tile_memory(): dynamic shared memory of the block, rounded up to a multiple of kBoxAlignment.
// Barriers        mbarriers of the block, 8 bytes of shared memory each.
//                 barrier_init(b, n): all lanes of one warp; then barrier_init_fence() and, for other warps,
//                 block_sync().
//                 barrier_arrive(b): n arrivals complete a phase.
//                 barrier_wait(b, parity): waits until the phase of that parity is complete and what was done before
//                 its arrivals is visible. The first phase has parity 0.
// Fetching        By all lanes of one warp, into a stage whose barrier `full` expects kFetchArrivals arrivals.
//                 fetch_begin(full, bytes): bytes of all tiles of the stage. Then fetch_boxes() for each matrix, then
//                 fetch_end(full). The phase of `full` completes when all tiles have arrived.
//                 fetch_boxes<parts>(to, matrix, row, box, rows, boxes, full, use): copies `boxes` tiles of `rows`
//                 rows. The tiles are neighbours along the columns, starting at tile `box`, and lie one after the other
//                 at `to`. Rows and columns beyond the matrix are filled with zeros. `use`: L2 eviction hint.
//                 With parts > 1 a tile has rows / parts rows of each part of the matrix, a multiple of 8, from row
//                 `row` of the part on; the rows of the first part come first. fetch_boxes<parts, true>(..., part): the
//                 matrix has more parts, and these are `part` and those after it.
//                 fetch_number(to, from): each lane copies four bytes to the stage. `full` then expects kFetchArrivals +
//                 kNumberArrivals arrivals, and fetch_end<true>(full) ends the stage.
// Multiplying     By kTeamThreads threads (a warpgroup) whose first index is a multiple of kTeamThreads: a tile of
//                 outputs times a tile of tokens, accumulated in fp32. Each thread holds tokens / 2 values in `sums`;
//                 fragment.cuh says which. Outputs beyond the rows of the tile have undefined values.
//                 Box: box_at(place). moved(box, bytes): cheaper than another box_at().
//                 For FP8, GPUs accumulate with fewer bits than fp32 has (docs/reference/linear.md).
//                 multiply_boxes<type>(sums, outputs, output_rows, tokens): adds to the sums. multiply_end(): ends a
//                 group.
//                 multiply_wait<n>(sums): waits until all groups but the last n are complete; their tiles may then be
//                 overwritten. The sums may be read after multiply_wait<0>(sums). The order in which a value is
//                 accumulated depends only on the columns and on the order of the tiles.
// Few tokens      By one warp: 16 rows of a tile times N times 8 tokens of 2-byte elements, which the lanes load
//                 themselves, so tokens may lie anywhere. Weights are of the type of the tokens, or FP8, whose values
//                 that type holds exactly.
//                 TokenPieces<weights>: what a lane needs of a token for one tile. It holds those of tokens
//                 token_column(lane, c), c < kTokenColumns, of each 8. load_pieces<weights>(lane, from): `from` is
//                 where the tile's columns begin in the token's row.
//                 multiply_rows<type>(sums, place, pieces): adds to N times two times four sums of a lane, of the left
//                 and of the right half of the tile's columns. `place`: that of the tile in shared memory, or a multiple
//                 of 8 of its rows further. Sum i is of row row_of_sum(lane, i) and of token token_of(lane, i)
//                 (fragment.cuh). Lanes whose index differs by kLanesToNextRow have rows 2 r and 2 r + 1. The columns of
//                 a row are added in an order that is always the same.
//                 RowPieces: what a lane needs of 16 rows for one tile, if it loads them itself: load_row_pieces(lane,
//                 from, row_bytes, rows). `from`: where the tile begins in the first of `rows` rows, the last of which
//                 stands for those that are missing. multiply_rows<type>(sums, rows, pieces) takes them, for
//                 8 tokens and weights of their type.
// Warp            same_in_warp(x): x, which must be the same in all lanes; tells the compiler so. warp_sync(): warp
//                 barrier. largest_of_lanes(x): the largest x of all lanes.
#pragma once

#include "llm_comm/fragment.cuh"
#include "llm_comm/matrix_view.h"
#include "llm_comm/platform.cuh"

#if defined(LLM_COMM_EMULATOR)
#include "llm_comm/platform_emulator_tiles.h"
#else
#include "llm_comm/platform_cuda_tiles.cuh"
#endif
