// Products of matrices out of shared memory: a second door to the target, for kernels that fetch boxes of a matrix ahead of their use
// and multiply them. GPUs have instructions for both, and which depends on the GPU: all of it is behind these names.
//
// A box is up to 64 rows, or 256 where they are tokens, and always a multiple of 8. A row of a box is kBoxRowBytes: 64 columns of
// 2-byte elements, or 128 of FP8. Its place in a row of the matrix is a multiple of that. In shared memory a box begins at a multiple of
// kBoxAlignment and takes kBoxRowBytes for each row. How it lies there is the target's.
//
// Shared memory      SharedPlace, to which bytes can be added; tile_memory(): where the dynamic shared memory of the block begins, at a
//                    multiple of kBoxAlignment, for which up to kBoxAlignment are left out; pointer_to<T>(place)
// Barriers           of threads of a block, in 8 bytes of shared memory: barrier_init(b, n) by all lanes of one warp, behind which
//                    barrier_init_fence() and, for other warps, a block_sync() stand; barrier_arrive(b): n of these end a phase;
//                    barrier_wait(b, parity): until the phase of that parity (the first has 0) is over and what was done before its
//                    arrivals can be read
// Fetching           by all lanes of one warp, into a stage: the barrier `full` of it counts kFetchArrivals. fetch_begin(full, bytes),
//                    with the bytes of all boxes of the stage; then fetch_boxes() for each matrix; then fetch_end(full). The phase is
//                    over when all have come. What is beyond the rows or the columns of the matrix comes as zeros.
//                    fetch_boxes<parts>(to, matrix, row, box, rows, boxes, full, use): so many boxes of so many rows, neighbours in
//                    their columns, of which `box` is the first: one behind the other; `use` says whether others will fetch them too.
//                    A box has as many rows of each part of the matrix, a multiple of 8, from `row` of the part on: first those of
//                    the first part
//                    fetch_number(to, from): four bytes more of the stage, by each lane for itself. `full` then counts
//                    kFetchArrivals + kNumberArrivals, and fetch_end<true>(full) stands behind the numbers
// Multiplying        by a team of kTeamThreads threads, the first one a multiple of them: sums of a box of outputs times a box of
//                    tokens, in fp32. `sums` has tokens / 2 values in each thread: which, fragment.cuh says. Outputs that the box
//                    does not have get any value.
//                    Box: box_at(place), and moved(box, bytes), which takes less time than another box_at().
//                    Of FP8, GPUs add with fewer bits than fp32 has (docs/linear.md).
//                    multiply_boxes<type>(sums, outputs, rows of it, tokens) adds to the sums; multiply_end() stands behind a group of
//                    those. After multiply_wait<n>(sums) all groups but the last n are done, and their boxes may be overwritten; the
//                    sums may be read after multiply_wait<0>(sums). The order of additions of a value depends on nothing but the
//                    columns, and the order of the boxes.
// Warp               same_in_warp(x): x, which is the same in all lanes of this warp, as the compiler is told by it; warp_sync():
//                    a barrier of the lanes
#pragma once

#include "llm_comm/fragment.cuh"
#include "llm_comm/matrix_view.h"
#include "llm_comm/platform.cuh"

#if defined(LLM_COMM_EMULATOR)
#include "llm_comm/platform_emulator_tiles.h"
#else
#include "llm_comm/platform_cuda_tiles.cuh"
#endif
