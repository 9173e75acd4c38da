// Scales of FP8 operands and the bias: loads, staging in shared memory, and their use on the sums.
#pragma once

#include "algorithms/linear/args.h"
#include "algorithms/linear/layer.h"
#include "llm_comm/reduce.cuh"
#include "llm_comm/tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Scales of tensors or rows, and the bias, of the rows and tokens of a thread block. bf16 and fp16 have no scales.
// Block scales are not here: they are fetched with the stages (BlockScaleFetch).
//
// Each thread of the teams loads at most one value before it multiplies, so that the epilogue does not wait for memory:
//   team 0, thread t:                     scale of token t, after grid_dependency_wait()
//   team 1, thread t:                     scale of row t of the block's weight tile
//   team 1, thread kMaxBlockOutputs + t:  bias of that row
// Scales of the weight and the bias are read before earlier grids have ended, as the weight is. Layout in shared
// memory, fp32: kMaxTokens scales of tokens, kMaxBlockOutputs scales of rows, kMaxBlockOutputs elements of the bias.
template <OperandType F, DataType D, bool BlockScales>
class LinearScales {
 public:
  LLM_COMM_DEVICE LinearScales(const LinearArgs& args, SharedAddress place) : args_(args), place_(place) {}

  // Called by all threads of the teams. Row r < `outputs` of the weight tile is output first_output + r of the first
  // part of the weight. Row outputs + r is the same output of the second part.
  LLM_COMM_DEVICE void load(uint32_t team, uint32_t first_output, uint32_t outputs) {
    if (!is_used()) return;
    const uint32_t t = thread_index() % kTeamThreads;
    if (team == 0) {
      if constexpr (kIsScaled) {
        grid_dependency_wait();  // the grid that quantized x may be the one ahead
        if (t < args_.x.rows) own_ = load_bits(args_.x_scale + (args_.x_scale_of == ScaleOf::kRow ? t : 0));
      }
      return;
    }
    const uint32_t r = t % linear::kMaxBlockOutputs;
    const uint32_t output = first_output + r % outputs;
    if (r >= args_.block_outputs || output >= args_.weight.rows) return;
    const uint64_t row = uint64_t{r / outputs} * args_.weight.rows + output;
    if (t >= linear::kMaxBlockOutputs) {
      if (has_bias()) own_ = static_cast<const uint16_t*>(args_.bias)[row];
    } else if constexpr (kIsScaled) {
      own_ = load_bits(args_.weight_scale + (args_.weight_scale_of == ScaleOf::kRow ? row : 0));
    }
  }

  // Stores the loaded value to shared memory. Called after the multiplications; a block_sync() must follow.
  LLM_COMM_DEVICE void share(uint32_t team) const {
    const uint32_t t = thread_index() % kTeamThreads;
    if (!is_used() || (team == 0 && t >= linear::kMaxTokens)) return;
    const bool is_bias = t >= linear::kMaxBlockOutputs;
    pointer_to<float>(place_)[team * linear::kMaxTokens + t] = is_bias ? Element<D>::value(own_) : bits_to_float(own_);
  }

  // Scales N sums of a token and adds the bias. The sums belong to rows `row` and following of the weight tile. The
  // order is that of vLLM's CUTLASS epilogues (ScaledEpilogue, ScaledEpilogueBias): the scale of the row first, then
  // one fused multiply-add with the scale of the token and the bias. Without a bias nothing is added, so -0.0 is kept.
  template <uint32_t N>
  LLM_COMM_DEVICE void apply(float (&sums)[N], uint32_t token, uint32_t row) const {
    const float of_token = kIsScaled ? pointer_to<float>(place_)[token] : 1.0f;
    const float* const of_rows = pointer_to<float>(place_) + linear::kMaxTokens + row;
    const float* const bias = of_rows + linear::kMaxBlockOutputs;
    if constexpr (kIsScaled) {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < N; ++i) sums[i] *= of_rows[i];
    }
    if (has_bias()) {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < N; ++i) sums[i] = multiply_add(of_token, sums[i], bias[i]);
    } else if constexpr (kIsScaled) {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < N; ++i) sums[i] *= of_token;
    }
  }

 private:
  static constexpr bool kIsScaled = F == OperandType::kFloat8 && !BlockScales;

  LLM_COMM_DEVICE bool has_bias() const { return args_.bias != nullptr; }
  LLM_COMM_DEVICE bool is_used() const { return kIsScaled || has_bias(); }
  static LLM_COMM_DEVICE uint32_t load_bits(const float* scale) { return float_to_bits(load_plain(scale)); }

  const LinearArgs& args_;
  SharedAddress place_;
  // Bits of a scale or of an element of the bias. share() converts them: a conversion here would wait for the load.
  uint32_t own_ = 0;
};

// Bytes of a tile in the ring for each byte of its block scales. The scales of a stage have the layout of the stage:
// for each weight tile the scales of its rows, then for each tile of x the scales of its tokens. A tile row of
// kBoxRowBytes bytes has one fp32 scale.
inline constexpr uint32_t kBoxBytesOfScale = kBoxRowBytes / sizeof(float);
static_assert(kBoxRowBytes == kScaleBlock, "a box has the inputs of one block");

// Fetches block scales, by the lanes of the fetching warp. Each lane serves up to two rows of the weight tile and up to
// two tokens.
template <uint32_t Tokens>
class BlockScaleFetch {
  static_assert(Tokens <= 2 * kWarpThreads && linear::kMaxBlockOutputs <= 2 * kWarpThreads);

 public:
  // Row r of the weight tile as in LinearScales::load(). Rows and tokens beyond the matrix get the scale of the last
  // one, so that no address is out of bounds. Their results are not stored.
  LLM_COMM_DEVICE BlockScaleFetch(const LinearArgs& args, uint32_t first_output, uint32_t outputs)
      : lane_(thread_index() % kWarpThreads), rows_(args.block_outputs), step_(args.x_scale_block_stride) {
    const uint32_t blocks = args.x.row_bytes / kScaleBlock;
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t r = lane_ + i * kWarpThreads;
      const uint32_t output = smaller(first_output + r % outputs, args.weight.rows - 1);
      const uint32_t row = (r < outputs ? 0 : args.weight.rows) + output;
      of_rows_[i] = args.weight_scale + uint64_t{row / kScaleBlock} * blocks;
      of_tokens_[i] = args.x_scale + uint64_t{smaller(r, args.x.rows - 1)} * args.x_scale_token_stride;
    }
  }

  LLM_COMM_DEVICE void fetch_of_rows(SharedAddress to, uint32_t first, uint32_t boxes) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t b = 0; b < boxes; ++b, to = to + rows_ * kScaleBytes) fetch(to, rows_, of_rows_, first + b);
  }
  LLM_COMM_DEVICE void fetch_of_tokens(SharedAddress to, uint32_t first, uint32_t boxes) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t b = 0; b < boxes; ++b, to = to + Tokens * kScaleBytes) {
      fetch(to, Tokens, of_tokens_, uint64_t{first + b} * step_);
    }
  }

 private:
  static constexpr uint32_t kScaleBytes = sizeof(float);

  static LLM_COMM_DEVICE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

  LLM_COMM_DEVICE void fetch(SharedAddress to, uint32_t count, const float* const (&from)[2], uint64_t offset) const {
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t r = lane_ + i * kWarpThreads;
      if (r < count) fetch_number(to + r * kScaleBytes, from[i] + offset);
    }
  }

  uint32_t lane_;
  uint32_t rows_;
  uint32_t step_;
  const float* of_rows_[2];
  const float* of_tokens_[2];
};

// Takes the place of BlockScaleFetch in kernels without block scales: unused members of a class cost instructions.
struct NoBlockScales {
  LLM_COMM_DEVICE NoBlockScales(const LinearArgs&, uint32_t, uint32_t) {}
};

// Promotion of one tile's products to the fp32 sums (DeepSeek-V3, arXiv 2412.19437, section 3.3.2):
// sum + (x_scale * weight_scale) * products. The tensor cores have summed the products of the tile. The product of the
// scales is rounded; the rest is one fused multiply-add.
template <uint32_t N>
class BlockPromotion {
 public:
  // Loads the scales of the rows and tokens of this thread's values while the tensor cores multiply the tile.
  LLM_COMM_DEVICE BlockPromotion(SharedAddress of_rows, SharedAddress of_tokens) {
    const uint32_t thread = thread_index() % kTeamThreads;
    LLM_COMM_UNROLL(128)
    for (uint32_t i = 0; i < N; ++i) {
      of_rows_[row(i)] = pointer_to<const float>(of_rows)[output_of(thread, i)];
      of_tokens_[token(i)] = pointer_to<const float>(of_tokens)[token_of(thread, i)];
    }
  }

  LLM_COMM_DEVICE void add(float (&sums)[N], const float (&products)[N]) const {
    LLM_COMM_UNROLL(128)
    for (uint32_t i = 0; i < N; ++i) {
      sums[i] = multiply_add(of_tokens_[token(i)] * of_rows_[row(i)], products[i], sums[i]);
    }
  }

 private:
  // Index of value i's scale among the thread's scales. Values of one output share a row scale, values of one token a
  // token scale (fragment.cuh).
  static LLM_COMM_DEVICE uint32_t row(uint32_t i) { return i / 2 % 2; }
  static LLM_COMM_DEVICE uint32_t token(uint32_t i) { return i / 4 * 2 + i % 2; }

  float of_rows_[2];
  float of_tokens_[N / 2];
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
