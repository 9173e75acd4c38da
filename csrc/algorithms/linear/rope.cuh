// Kernel of layers of q, k and v: product, norms of heads, rotary position embedding, and the write to the cache
// (rope.h).
//
// Shape. The layers have few tokens and few outputs. A thread block has 16 or 32 rows of the weight: as many of a part
// as of the part behind it. Two parts are the halves of what is rotated of a head, or of as many outputs that are not.
// Each block goes over all of K.
//
// Warps. Each warp fetches its own tiles of the weight to its own stages, and multiplies them with x, which its lanes
// load. So warps do not wait for each other. A stage has kStageBoxes neighbouring tiles: stage j of K is one of warp
// j % kWarps.
//
// Order of additions. A warp adds the left and the right halves of its tiles to two sums, in ascending order, and then
// adds these. The sums of the warps are added in ascending order. Only the number of columns decides this order. So a
// token's results have the same bits for every tiling, and beside any other tokens.
//
// Epilogue. A thread has one pair of outputs of one token. In each thread sums are rounded to D, as the results of a
// plain layer are, and so is what a norm returns. So the bits are those of separate kernels that compute in fp32 and
// round once each.
//
// Norms. The blocks of a head are a cluster. Eight neighbouring lanes add up the squares of their pairs and deliver the
// sum to every block of the head. The sums of a head are added in ascending order.
//
// Early start. The weight, the bias and the norms' weights are read before earlier grids of the stream have ended; what
// else is read is not. Whatever is written may be written then, because it depends on x.
#pragma once

#include "algorithms/linear/rope_args.h"
#include "llm_comm/reduce.cuh"
#include "llm_comm/tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Place of a thread block among the rows of the weight.
struct RopePlace {
  uint32_t first_part;
  uint32_t first_row;  // of both parts

  LLM_COMM_DEVICE explicit RopePlace(const RopeArgs& args)
      : first_part(block_index() / args.part_blocks * 2),
        first_row(block_index() % args.part_blocks * (args.block_rows / 2)) {}
};

// The stages of one warp. All its lanes call all methods.
class RopeStages {
 public:
  LLM_COMM_DEVICE RopeStages(const RopeArgs& args, const RopePlace& place, SharedAddress memory, uint32_t warp)
      : args_(args),
        place_(place),
        warp_(warp),
        barriers_(memory + warp * rope::kMaxStages * static_cast<uint32_t>(sizeof(uint64_t))),
        stages_(memory + (rope::kHeaderBytes + warp * args.stages * args.layout.stage_bytes)) {
    const uint32_t all = divide_up(args.row_bytes / kBoxRowBytes, rope::kStageBoxes);
    count_ = warp < all ? divide_up(all - warp, rope::kWarps) : 0;
  }

  // Stages of K that the warp has.
  LLM_COMM_DEVICE uint32_t count() const { return count_; }
  // First tile of stage n of the warp.
  LLM_COMM_DEVICE uint32_t first_box(uint32_t n) const { return (warp_ + n * rope::kWarps) * rope::kStageBoxes; }

  LLM_COMM_DEVICE void begin() const {
    const uint32_t first = count_ < args_.stages ? count_ : args_.stages;
    LLM_COMM_UNROLL(1)
    for (uint32_t n = 0; n < first; ++n) barrier_init(barrier(n), kFetchArrivals);
    barrier_init_fence();
    warp_sync();
    LLM_COMM_UNROLL(1)
    for (uint32_t n = 0; n < first; ++n) fetch(n, n);
  }

  // Waits for stage n, which is in `slot`, and returns where it is.
  LLM_COMM_DEVICE SharedAddress wait(uint32_t slot, uint32_t round) const {
    barrier_wait(barrier(slot), round % 2);
    return at(slot);
  }

  // Fetches a later stage to `slot`, which all lanes have read.
  LLM_COMM_DEVICE void reuse(uint32_t n, uint32_t slot) const {
    warp_sync();
    if (n + args_.stages < count_) fetch(n + args_.stages, slot);
  }

 private:
  LLM_COMM_DEVICE SharedAddress barrier(uint32_t slot) const {
    return barriers_ + slot * static_cast<uint32_t>(sizeof(uint64_t));
  }
  LLM_COMM_DEVICE SharedAddress at(uint32_t slot) const { return stages_ + slot * args_.layout.stage_bytes; }
  LLM_COMM_DEVICE void fetch(uint32_t n, uint32_t slot) const {
    fetch_begin(barrier(slot), args_.layout.stage_bytes);
    fetch_boxes<2>(at(slot), args_.weight, place_.first_row, first_box(n), args_.block_rows, rope::kStageBoxes,
                   barrier(slot), BoxUse::kOnce, place_.first_part);
    fetch_end(barrier(slot));
  }

  const RopeArgs& args_;
  const RopePlace& place_;
  uint32_t warp_;
  SharedAddress barriers_;
  SharedAddress stages_;
  uint32_t count_;
};

// Sums of a warp: of 16 rows each, of 8 tokens each, of the halves of the tiles.
template <uint32_t Tokens>
struct RopeSums {
  static constexpr uint32_t kGroups = Tokens / 8;
  static constexpr uint32_t kTiles = rope::kMaxBlockTokenRows / Tokens < rope::kMaxBlockRows ? 1 : 2;

  float of[kTiles][kGroups][2][4] = {};
};

// Adds the products of the warp's tiles to `sums`.
template <OperandType F, uint32_t Tokens>
LLM_COMM_DEVICE void multiply_for_rope(const RopeArgs& args, const RopeStages& stages, RopeSums<Tokens>& sums) {
  constexpr uint32_t kGroups = Tokens / 8;
  // Tiles of x that a lane loads ahead, in as many registers for any number of tokens.
  constexpr uint32_t kAhead = 8 / kGroups;
  static_assert(kAhead % rope::kStageBoxes == 0);
  const uint32_t lane = thread_index() % kWarpThreads;
  const uint32_t boxes = args.row_bytes / kBoxRowBytes;
  TokenPieces<F> pieces[kAhead][kGroups][kTokenColumns];
  // Loads tile i of the warp. Tiles that are not there have any contents.
  const auto load = [&](uint32_t i, TokenPieces<F>(&to)[kGroups][kTokenColumns]) {
    const uint32_t box = stages.first_box(i / rope::kStageBoxes) + i % rope::kStageBoxes;
    if (i / rope::kStageBoxes >= stages.count() || box >= boxes) return;
    LLM_COMM_UNROLL(4)
    for (uint32_t group = 0; group < kGroups; ++group) {
      LLM_COMM_UNROLL(2)
      for (uint32_t c = 0; c < kTokenColumns; ++c) {
        // Sums of tokens that are not there are dropped. They are those of the last token.
        const uint32_t wanted = 8 * group + token_column(lane, c);
        const uint32_t token = wanted < args.tokens ? wanted : args.tokens - 1;
        to[group][c] = load_pieces<F>(lane, args.x + uint64_t{token} * args.row_bytes + box * kBoxRowBytes);
      }
    }
  };
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < kAhead; ++i) load(i, pieces[i]);
  uint32_t slot = 0, round = 0;
  LLM_COMM_UNROLL(1)
  for (uint32_t begin = 0; begin < stages.count(); begin += kAhead / rope::kStageBoxes) {
    LLM_COMM_UNROLL(4)
    for (uint32_t k = 0; k < kAhead / rope::kStageBoxes; ++k) {
      const uint32_t n = begin + k;
      if (n >= stages.count()) break;
      const SharedAddress weights = stages.wait(slot, round);
      LLM_COMM_UNROLL(2)
      for (uint32_t i = 0; i < rope::kStageBoxes; ++i) {
        if (stages.first_box(n) + i >= boxes) continue;
        auto& x = pieces[k * rope::kStageBoxes + i];
        LLM_COMM_UNROLL(2)
        for (uint32_t tile = 0; tile < RopeSums<Tokens>::kTiles; ++tile) {
          if (tile * rope::kTileRows >= args.block_rows) continue;
          const uint32_t row = i * args.block_rows + tile * rope::kTileRows;
          multiply_rows<F>(sums.of[tile], weights + row * kBoxRowBytes, x);
        }
        load(n * rope::kStageBoxes + i + kAhead, x);
      }
      stages.reuse(n, slot);
      if (++slot == args.stages) {
        slot = 0;
        ++round;
      }
    }
  }
}

// The pair of outputs of a token that a thread finishes.
template <DataType D>
class RopePair {
  using E = Element<D>;

 public:
  LLM_COMM_DEVICE RopePair(const RopeArgs& args, const RopePlace& place)
      : args_(args), token_(thread_index() / (args.block_rows / 2)) {
    const uint32_t half = args.block_rows / 2, pair = thread_index() % half;
    head_ = place.first_part / args.head_parts;
    const uint32_t part = place.first_part % args.head_parts;
    is_rotated_ = part == 0 && head_ < args.q_heads + args.kv_heads;
    // Neighbours are in one half of the block's rows, halves in both. Eight pairs are of the same eight rows of each half
    // either way.
    constexpr uint32_t kLine = rope::kLinePairs;
    const uint32_t of_half = args.is_interleaved ? pair / kLine * kLine + pair % (kLine / 2) * 2 : pair;
    const uint32_t first_half = args.is_interleaved ? pair % kLine / (kLine / 2) : 0;
    row_[0] = first_half * half + of_half;
    row_[1] = args.is_interleaved ? row_[0] + 1 : half + pair;
    output_[0] = (part + first_half) * args.weight.rows + place.first_row + of_half;
    output_[1] = args.is_interleaved ? output_[0] + 1 : output_[0] + args.weight.rows;
    angle_ = args.is_interleaved ? output_[0] / 2 : output_[0];
  }

  LLM_COMM_DEVICE bool exists() const { return token_ < args_.tokens; }
  LLM_COMM_DEVICE uint32_t token() const { return token_; }

  // Loads the bias and the weights of norms.
  LLM_COMM_DEVICE void load_early() {
    if (!exists()) return;
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < 2; ++i) {
      if (args_.bias != nullptr) bias_[i] = args_.bias[head_ * head_size() + output_[i]];
      if (is_normed()) norm_weight_[i] = args_.norm_weights[head_ < args_.q_heads ? 0 : 1][output_[i]];
    }
  }

  // Loads position, slot and angles. They arrive while the warp multiplies.
  LLM_COMM_DEVICE void load() {
    if (!exists()) return;
    if (args_.slots != nullptr && head_ >= args_.q_heads && token_ < args_.slot_count) {
      slot_ = number(args_.slots, token_, args_.has_64_bit_slots);
    }
    if (!is_rotated_) return;
    const uint64_t position = number(args_.positions, token_, args_.has_64_bit_positions);
    if (position >= args_.angle_rows) return;
    const uint64_t first = position * 2 * args_.weight.rows + angle_;
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < 2; ++i) {
      const uint64_t at = first + i * args_.weight.rows;
      if (args_.has_fp32_angles) {
        angles_[i] = load_plain(static_cast<const float*>(args_.angles) + at);
      } else {
        angles_[i] = E::value(static_cast<const uint16_t*>(args_.angles)[at]);
      }
    }
  }

  // Adds up the sums of the warps, [warp][token][row].
  LLM_COMM_DEVICE void add(const float* sums, uint32_t tokens) {
    const uint32_t stride = args_.block_rows + rope::kSumsPadding;
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < 2; ++i) {
      const float* const of_warps = sums + token_ * stride + row_[i];
      float sum = of_warps[0];
      LLM_COMM_UNROLL(16)
      for (uint32_t warp = 1; warp < rope::kWarps; ++warp) sum += of_warps[warp * tokens * stride];
      if (args_.bias != nullptr) sum += E::value(bias_[i]);
      value_[i] = E::value(E::round(sum));
    }
  }

  // Sum of the squares of eight neighbouring lanes. All lanes of the warp call it.
  LLM_COMM_DEVICE float squares_of_line() const {
    float sum = multiply_add(value_[0], value_[0], value_[1] * value_[1]);
    LLM_COMM_UNROLL(3)
    for (uint32_t mask = 1; mask < rope::kLinePairs; mask *= 2) sum += shuffle_xor(sum, mask);
    return sum;
  }

  // `squares`: sum of a head.
  LLM_COMM_DEVICE void normalize(float squares) {
    if (!is_normed()) return;
    const float factor = reciprocal_sqrt(multiply_add(squares, args_.reciprocal_head_size, args_.epsilon));
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < 2; ++i) value_[i] = E::value(E::round(value_[i] * factor * E::value(norm_weight_[i])));
  }

  LLM_COMM_DEVICE void rotate() {
    if (!is_rotated_) return;
    const float x = value_[0], y = value_[1];
    value_[0] = multiply_add(x, angles_[0], -(y * angles_[1]));
    value_[1] = multiply_add(y, angles_[0], x * angles_[1]);
  }

  LLM_COMM_DEVICE void store() const {
    uint16_t* const out = args_.out + uint64_t{token_} * args_.outputs + head_ * head_size();
    uint16_t* cached = nullptr;
    if (slot_ < args_.cache_slots) {
      const bool is_key = head_ < args_.q_heads + args_.kv_heads;
      const CacheView& to = is_key ? args_.key : args_.value;
      const auto slot = static_cast<uint32_t>(slot_);
      cached = to.data + slot / args_.block_slots * to.strides.block + slot % args_.block_slots * to.strides.slot +
               (head_ - args_.q_heads - (is_key ? 0 : args_.kv_heads)) * to.strides.head;
    }
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < 2; ++i) {
      const uint16_t bits = E::round(value_[i]);
      out[output_[i]] = bits;
      if (cached != nullptr) cached[output_[i]] = bits;
    }
  }

 private:
  LLM_COMM_DEVICE uint32_t head_size() const { return args_.head_parts * args_.weight.rows; }
  LLM_COMM_DEVICE bool is_normed() const {
    return args_.norm_weights[0] != nullptr && head_ < args_.q_heads + args_.kv_heads;
  }

  // A negative number is larger than every limit.
  static LLM_COMM_DEVICE uint64_t number(const void* numbers, uint32_t i, bool has_64_bits) {
    if (has_64_bits) return load_plain(static_cast<const uint64_t*>(numbers) + i);
    return load_plain(static_cast<const uint32_t*>(numbers) + i);
  }

  const RopeArgs& args_;
  uint32_t token_;
  uint32_t head_;       // counted over q, k and v
  uint32_t row_[2];     // among those of the block
  uint32_t output_[2];  // of the head
  uint32_t angle_;      // the cosine, in a row of the table
  bool is_rotated_;
  uint16_t bias_[2] = {};
  uint16_t norm_weight_[2] = {};
  uint64_t slot_ = ~uint64_t{0};
  // Cosine and sine. A position that is not in the table gives NaN.
  float angles_[2] = {bits_to_float(0x7FC00000), bits_to_float(0x7FC00000)};
  float value_[2] = {};
};

template <OperandType F, DataType D, uint32_t Tokens>
LLM_COMM_KERNEL(rope::kThreads)
linear_rope(LLM_COMM_KERNEL_PARAM RopeArgs args) {
  const SharedAddress memory = tile_memory();
  const uint32_t warp = same_in_warp(thread_index() / kWarpThreads);
  const uint32_t lane = thread_index() % kWarpThreads;
  const bool has_norms = args.norm_weights[0] != nullptr;
  const RopePlace place(args);
  const RopeStages stages(args, place, memory, warp);
  stages.begin();
  auto* const delivery = pointer_to<uint64_t>(memory + rope::kDeliveryOffset);
  auto* const squares = pointer_to<float>(memory + (rope::kHeaderBytes + args.layout.squares));  // [line][token]
  const uint32_t lines = args.block_rows / (2 * rope::kLinePairs), head_lines = args.head_blocks * lines;
  if (has_norms) {
    if (thread_index() == 0) {
      delivery_init(delivery, args.tokens * head_lines, args.head_blocks);
      delivery_expect(delivery, args.tokens * head_lines, args.head_blocks);
    }
    cluster_arrive_relaxed();
  }
  RopePair<D> pair(args, place);
  pair.load_early();
  grid_dependency_wait();
  grid_dependency_trigger();
  pair.load();
  RopeSums<Tokens> sums;
  multiply_for_rope<F, Tokens>(args, stages, sums);
  block_sync();  // all stages have been read: the sums may overwrite them

  auto* const partial = pointer_to<float>(memory + rope::kHeaderBytes);  // [warp][token][row]
  const uint32_t stride = args.block_rows + rope::kSumsPadding;
  LLM_COMM_UNROLL(2)
  for (uint32_t tile = 0; tile < RopeSums<Tokens>::kTiles; ++tile) {
    if (tile * rope::kTileRows >= args.block_rows) continue;
    LLM_COMM_UNROLL(4)
    for (uint32_t group = 0; group < Tokens / 8; ++group) {
      LLM_COMM_UNROLL(4)
      for (uint32_t i = 0; i < 4; ++i) {
        const auto& of = sums.of[tile][group];
        const uint32_t token = 8 * group + token_of(lane, i), row = tile * rope::kTileRows + row_of_sum(lane, i);
        partial[(warp * Tokens + token) * stride + row] = of[0][i] + of[1][i];
      }
    }
  }
  block_sync();
  if (pair.exists()) pair.add(partial, Tokens);
  if (has_norms) {
    const float sum = pair.squares_of_line();
    cluster_wait();
    const uint32_t block = lane % rope::kLinePairs;  // the lanes of a line deliver to one block each
    const uint32_t line = cluster_block_rank() * lines + thread_index() / rope::kLinePairs % lines;
    if (pair.exists() && block < args.head_blocks) {
      deliver(squares + line * Tokens + pair.token(), block, sum, delivery, args.head_blocks);
    }
    delivery_wait(delivery, 0);  // all threads wait, because a block must stay while others deliver to it
    float of_head = 0.0f;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < head_lines; ++i) of_head += squares[i * Tokens + (pair.exists() ? pair.token() : 0)];
    pair.normalize(of_head);
  }
  if (!pair.exists()) return;
  pair.rotate();
  pair.store();
}

template <OperandType F, DataType D>
RopeKernel RopeKernels<F, D>::find(uint32_t token_rows) {
  switch (token_rows) {
    case 8:
      return &linear_rope<F, D, 8>;
    case 16:
      return &linear_rope<F, D, 16>;
    default:
      return &linear_rope<F, D, 32>;
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
