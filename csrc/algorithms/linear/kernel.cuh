// Kernel of linear layers: y = x W^T, with bias, scales and activation in the epilogue.
//
// Shape. The layers have few tokens, so the time is that of reading the weight once. Weight rows are therefore the
// 64-row operand (M) of the tensor-core instruction and tokens are its N. A thread block computes `block_outputs` rows
// of the weight, at most 64. It has all tokens up to 64 of them, else a tile of 128 or 256 tokens (LinearTile). Each
// block goes over all of K: there is no split-K between blocks.
//
// Warp roles. Two teams, which are warpgroups, multiply; one more warp fetches. All 288 threads run the epilogue.
//
// Ring. The fetching warp fills a ring of `stages` stages in shared memory. A stage holds `stage_boxes` TMA tiles
// ("boxes", tiles.cuh) of the weight and the tiles of x for the same columns. A tile has 128 bytes of K. Each stage has
// two mbarriers:
//   - `full` completes when all bytes of the stage have arrived.
//   - `empty` completes when the 8 warps of both teams have finished with the stage. wgmma is asynchronous. A team
//     commits the products of stage s, waits until those of stage s - 1 are complete, and then releases stage s - 1.
//     So a ring that is used more than once has at least two stages (fewest_stages in layer.cpp).
//
// Order of additions. Tile i of K belongs to team i % 2. A team adds its tiles in ascending order to fp32 accumulators.
// The epilogue adds the sum of the even tiles and that of the odd tiles. Only the number of columns decides this order.
// So a token's results have the same bits for every tiling, ring and grid, and beside any other tokens. For FP8 the
// tensor cores keep fewer bits of a sum than fp32 has (docs/reference/linear.md).
//
// Early start. The caller guarantees that no unfinished grid of the stream writes the weight, its scales or the bias.
// So the fetching warp requests the weight tiles of the whole first round of the ring before grid_dependency_wait().
// The scales of the weight and the bias are loaded before the wait too (scales.cuh). x and its scales are read after
// it. The weight stream thus starts while a preceding kernel that triggers early still runs
// (docs/experiments/linear.md). After its own wait the fetching warp triggers the next grid.
//
// Gate and up. With two weight parts (weight_parts) a weight tile holds rows of both: first block_outputs / 2 rows of
// gate, then the rows of up for the same outputs. The epilogue has both values of an output and applies the activation.
//
// Shared memory: `full` and `empty` of each stage, scales of tensors or rows, bias, the stages, block scales. In a
// stage the weight tiles come first, then those of x. The teams' sums overwrite the stages at the end. Instructions
// read 64 rows of a weight tile even if it has fewer. The surplus rows contain arbitrary data, and no result depends on
// them. shared_bytes() in layer.cpp makes room for this read after the last stage.
//
// Block scales (BlockScales, ScaleOf::kBlock): FP8 with a scale for 128 inputs. A tile has the inputs of one such
// block. The tensor cores sum the products of one tile from zero. The team then multiplies each by its scales in fp32
// and adds it to its sum (BlockPromotion). The order of tiles is the one above. The scales of a stage are fetched
// with it and count in `full`.
#pragma once

#include <type_traits>

#include "algorithms/linear/epilogue.cuh"
#include "algorithms/linear/kernels.h"
#include "algorithms/linear/layer.h"
#include "algorithms/linear/scales.cuh"
#include "llm_comm/tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Position in K and in the ring. The members are advanced by additions: computing them from the stage with
// multiplications is slower.
struct StageCursor {
  uint32_t first = 0;  // index in K of the stage's first tile
  uint32_t stage = 0;
  uint32_t offset = 0;  // of the stage in bytes, from the first stage
  uint32_t round = 0;   // completed rounds of the ring; its lowest bit is the parity of `full`

  LLM_COMM_DEVICE void advance(const LinearArgs& args) {
    first += args.stage_boxes;
    offset += args.stage_bytes;
    if (++stage < args.stages) return;
    stage = 0;
    offset = 0;
    ++round;
  }
};

// Layout of the block's dynamic shared memory, which begins at `start`.
struct LinearMemory {
  static constexpr uint32_t kBarrierBytes = sizeof(uint64_t);
  static_assert(linear::kBarrierBytes >= 2 * linear::kMaxStages * kBarrierBytes);

  SharedAddress start;

  LLM_COMM_DEVICE SharedAddress full(uint32_t stage) const { return start + 2 * stage * kBarrierBytes; }
  LLM_COMM_DEVICE SharedAddress empty(uint32_t stage) const { return full(stage) + kBarrierBytes; }
  LLM_COMM_DEVICE SharedAddress scales() const { return start + linear::kBarrierBytes; }
  LLM_COMM_DEVICE SharedAddress stage_at(uint32_t offset) const { return start + (linear::kHeaderBytes + offset); }
  // Block scales of the tiles at `offset` in the ring: 4 bytes for each tile row of 128 bytes.
  LLM_COMM_DEVICE SharedAddress block_scales(const LinearArgs& args, uint32_t offset) const {
    return stage_at(args.stages * args.stage_bytes + offset / kBoxBytesOfScale);
  }
};

// First output and first token of a block. Consecutive blocks have the same outputs and consecutive token tiles. They
// run at about the same time, so a weight tile is read from device memory once and then from the L2 cache.
template <uint32_t Tokens>
struct LinearTile {
  static constexpr bool kIsOne = Tokens <= linear::kMaxTokens;  // one tile holds all tokens

  uint32_t first_output;
  uint32_t first_token;

  LLM_COMM_DEVICE LinearTile(const LinearArgs& args, uint32_t outputs)
      : first_output((kIsOne ? block_index() : block_index() / args.token_tiles) * outputs),
        first_token(kIsOne ? 0 : block_index() % args.token_tiles * Tokens) {}

  LLM_COMM_DEVICE uint32_t tokens(const LinearArgs& args) const {
    const uint32_t left = args.x.rows - first_token;
    return kIsOne || left < Tokens ? left : Tokens;
  }
};

// The fetching warp. All its lanes call all methods.
template <uint32_t Tokens, uint32_t WeightParts, bool BlockScales>
class LinearFetch {
 public:
  LLM_COMM_DEVICE LinearFetch(const LinearArgs& args, const LinearMemory& memory, const LinearTile<Tokens>& tile)
      : args_(args),
        memory_(memory),
        boxes_(args.x.row_bytes / kBoxRowBytes),
        tile_(tile),
        x_offset_(args.stage_boxes * args.block_outputs * kBoxRowBytes),
        scales_(args, tile.first_output, args.block_outputs / WeightParts) {}

  // Initialises the barriers and requests the weight tiles of the first round. A block_sync() must follow before other
  // warps use the barriers.
  LLM_COMM_DEVICE void begin() const {
    StageCursor at;
    LLM_COMM_UNROLL(1)
    for (; at.first < boxes_ && at.round == 0; at.advance(args_)) {
      barrier_init(memory_.full(at.stage), BlockScales ? kFetchArrivals + kNumberArrivals : kFetchArrivals);
      barrier_init(memory_.empty(at.stage), linear::kTeams * kTeamThreads / kWarpThreads);
      barrier_init_fence();
      fetch_weights(at);
    }
  }

  LLM_COMM_DEVICE void run() const {
    grid_dependency_wait();
    grid_dependency_trigger();
    StageCursor at;
    LLM_COMM_UNROLL(1)
    for (; at.first < boxes_ && at.round == 0; at.advance(args_)) fetch_tokens(at);
    LLM_COMM_UNROLL(1)
    for (; at.first < boxes_; at.advance(args_)) {
      barrier_wait(memory_.empty(at.stage), (at.round - 1) % 2);
      // Keeps the lanes in one round. For a lane that lags by a round the next phase may be complete, too. Its parity
      // test would then wait for the phase after that.
      warp_sync();
      fetch_weights(at);
      fetch_tokens(at);
    }
  }

 private:
  LLM_COMM_DEVICE void fetch_weights(const StageCursor& at) const {
    const SharedAddress full = memory_.full(at.stage);
    fetch_begin(full, args_.stage_bytes);
    fetch_boxes<WeightParts>(memory_.stage_at(at.offset), args_.weight, tile_.first_output, at.first,
                             args_.block_outputs, args_.stage_boxes, full,
                             LinearTile<Tokens>::kIsOne ? BoxUse::kOnce : BoxUse::kShared);
    if constexpr (BlockScales) scales_.fetch_of_rows(memory_.block_scales(args_, at.offset), at.first, boxes_at(at));
  }
  LLM_COMM_DEVICE void fetch_tokens(const StageCursor& at) const {
    const SharedAddress full = memory_.full(at.stage);
    fetch_boxes<1>(memory_.stage_at(at.offset) + x_offset_, args_.x, tile_.first_token, at.first, Tokens,
                   args_.stage_boxes, full, BoxUse::kShared);
    if constexpr (BlockScales) {
      scales_.fetch_of_tokens(memory_.block_scales(args_, at.offset + x_offset_), at.first, boxes_at(at));
    }
    fetch_end<BlockScales>(full);
  }
  LLM_COMM_DEVICE uint32_t boxes_at(const StageCursor& at) const {
    return boxes_ - at.first < args_.stage_boxes ? boxes_ - at.first : args_.stage_boxes;
  }

  const LinearArgs& args_;
  const LinearMemory& memory_;
  uint32_t boxes_;
  LinearTile<Tokens> tile_;
  uint32_t x_offset_;
  std::conditional_t<BlockScales, BlockScaleFetch<Tokens>, NoBlockScales> scales_;
};

// Adds the products of the team's tiles to `sums`. Called by all threads of the team.
template <OperandType F, bool BlockScales, uint32_t Tokens>
LLM_COMM_DEVICE void multiply_for_linear(const LinearArgs& args, const LinearMemory& memory, uint32_t team,
                                         float (&sums)[Tokens / 2]) {
  static_assert(linear::kTeams == 2, "the boxes of a team: every second one");
  const uint32_t all = args.x.row_bytes / kBoxRowBytes;
  const uint32_t weight_bytes = args.block_outputs * kBoxRowBytes;
  constexpr uint32_t kTokenBytes = Tokens * kBoxRowBytes;
  const Box weights = box_at(memory.stage_at(0));
  const Box tokens = box_at(memory.stage_at(args.stage_boxes * weight_bytes));
  uint32_t stage_before = 0;
  LLM_COMM_UNROLL(1)
  for (StageCursor at; at.first < all; at.advance(args)) {
    const uint32_t boxes = all - at.first < args.stage_boxes ? all - at.first : args.stage_boxes;
    barrier_wait(memory.full(at.stage), at.round % 2);
    LLM_COMM_UNROLL(1)
    for (uint32_t i = (at.first + team) % 2; i < boxes; i += 2) {
      const Box of_weight = moved(weights, at.offset + i * weight_bytes);
      const Box of_x = moved(tokens, at.offset + i * kTokenBytes);
      if constexpr (BlockScales) {
        float products[Tokens / 2] = {};
        multiply_boxes<F>(products, of_weight, args.block_outputs, of_x);
        multiply_end();
        const uint32_t x_offset = args.stage_boxes * weight_bytes + i * kTokenBytes;
        const BlockPromotion<Tokens / 2> promotion(memory.block_scales(args, at.offset + i * weight_bytes),
                                                   memory.block_scales(args, at.offset + x_offset));
        multiply_wait<0>(products);
        promotion.add(sums, products);
      } else {
        multiply_boxes<F>(sums, of_weight, args.block_outputs, of_x);
      }
    }
    multiply_end();
    if (at.first > 0) {
      multiply_wait<1>(sums);
      warp_sync();  // all lanes of the warp have read the stage
      if (thread_index() % kWarpThreads == 0) barrier_arrive(memory.empty(stage_before));
    }
    stage_before = at.stage;
  }
  multiply_wait<0>(sums);
}

template <OperandType F, DataType D, uint32_t kParts, bool BlockScales, uint32_t Tokens>
LLM_COMM_KERNEL(linear::kThreads)
linear_layer(LLM_COMM_KERNEL_PARAM LinearArgs args) {
  const LinearMemory memory{tile_memory()};
  const uint32_t team = same_in_warp(thread_index() / kTeamThreads);
  const bool fetches = team == linear::kTeams;
  // Results of each part that a thread computes at once. With two parts more than one would take more registers, and
  // fewer blocks would fit on a multiprocessor.
  constexpr uint32_t kAtOnce = kParts == 1 ? linear::kLineElements : 1;
  const uint32_t outputs = args.block_outputs / kParts;
  const LinearTile<Tokens> tile(args, outputs);
  const uint32_t first = tile.first_output;
  const LinearFetch<Tokens, kParts, BlockScales> fetch(args, memory, tile);
  LinearScales<F, D, BlockScales> scales(args, memory.scales());
  if (fetches) fetch.begin();
  block_sync();
  float sums[Tokens / 2] = {};
  if (fetches) {
    fetch.run();
  } else {
    scales.load(team, first, outputs);
    multiply_for_linear<F, BlockScales, Tokens>(args, memory, team, sums);
    scales.share(team);
  }
  block_sync();  // all stages have been read: the sums may overwrite them

  // Partial sums, [team][token][output]. The padding avoids bank conflicts between the threads of a warp.
  auto* const partial = pointer_to<float>(memory.stage_at(0));
  const uint32_t stride = args.block_outputs + linear::kSumsPadding;
  if (!fetches) {
    const uint32_t thread = thread_index() % kTeamThreads;
    LLM_COMM_UNROLL(128)
    for (uint32_t i = 0; i < Tokens / 2; ++i) {
      const uint32_t output = output_of(thread, i);
      if (output < args.block_outputs) partial[(team * Tokens + token_of(thread, i)) * stride + output] = sums[i];
    }
  }
  block_sync();
  // `out` may be written without another grid_dependency_wait(). The sums depend on x, which was fetched after the
  // wait, so all earlier grids that read this memory have ended.
  const uint32_t lines = outputs / linear::kLineElements;
  LLM_COMM_UNROLL(1)
  for (uint32_t i = thread_index(); i < tile.tokens(args) * lines; i += block_threads()) {
    const uint32_t token = i / lines;
    const uint32_t output = i % lines * linear::kLineElements;
    if (first + output >= args.weight.rows) continue;
    const float* const of_even = partial + token * stride + output;
    const float* const of_odd = of_even + Tokens * stride;
    Line line{};
    LLM_COMM_UNROLL(8)
    for (uint32_t j = 0; j < linear::kLineElements; j += kAtOnce) {
      float results[kParts][kAtOnce];
      LLM_COMM_UNROLL(2)
      for (uint32_t part = 0; part < kParts; ++part) {
        const uint32_t row = part * outputs + j;
        LLM_COMM_UNROLL(8)
        for (uint32_t k = 0; k < kAtOnce; ++k) results[part][k] = of_even[row + k] + of_odd[row + k];
        scales.apply(results[part], token, output + row);
      }
      LLM_COMM_UNROLL(8)
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        uint16_t bits = Element<D>::round(results[0][k]);
        if constexpr (kParts == 2) {
          bits = activate_and_mul<D>(args.epilogue, bits, Element<D>::round(results[1][k]));
        }
        line.word[(j + k) / 2] |= static_cast<uint32_t>(bits) << 16 * ((j + k) % 2);
      }
    }
    const uint64_t row = tile.first_token + token;
    store_line(static_cast<uint16_t*>(args.out) + row * args.weight.rows + first + output, line);
  }
}

template <OperandType F, DataType D, uint32_t Parts, bool BlockScales>
LinearKernel LinearKernels<F, D, Parts, BlockScales>::find(uint32_t token_rows) {
  switch (token_rows) {
    case 8:
      return &linear_layer<F, D, Parts, BlockScales, 8>;
    case 16:
      return &linear_layer<F, D, Parts, BlockScales, 16>;
    case 32:
      return &linear_layer<F, D, Parts, BlockScales, 32>;
    case 64:
      return &linear_layer<F, D, Parts, BlockScales, 64>;
    default:
      break;
  }
  if constexpr (linear::serves_many(F, Parts)) {
    if (token_rows == 128) return &linear_layer<F, D, Parts, BlockScales, 128>;
    if (token_rows == 256) return &linear_layer<F, D, Parts, BlockScales, 256>;
  }
  return nullptr;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
