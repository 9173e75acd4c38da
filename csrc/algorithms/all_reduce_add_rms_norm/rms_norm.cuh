// RmsNorm: what follows the reduction of a row: residual add, RMS norm over the cluster that holds the row, and the
// outputs. Used by the fused one-shot and two-shot kernels.
//
// The sum of squares is exchanged through the shared memory of every block of the cluster. A warp delivers the partial
// sums of its chunks to all blocks, and a warp that has seen all of them arrive adds them up. No thread waits for a
// cluster barrier, whose release would wait for the stores to other GPUs.
//
// Two sets of partial sums are used alternately. Why a set may be reused:
//   1. A warp delivers to the set of row r + 2 only after it has seen the partial sums of row r + 1.
//   2. These include some from every warp that reads the sets.
//   3. A warp delivers for row r + 1 only after it has read the partial sums of row r.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/block_formats.cuh"
#include "algorithms/all_reduce_add_rms_norm/elements.cuh"
#include "llm_comm/fp8.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Partial values at the start of a block's shared memory: two sets of sums, then two sets of largest magnitudes.
inline constexpr uint32_t kPartialSets = 4;
inline constexpr uint64_t kPartialBytes = kPartialSets * (kMaxChunks * sizeof(float) + sizeof(uint64_t));
static_assert(kPartialBytes % sizeof(Line) == 0);
// Gives a row of zeros a scale, as vLLM's rms_norm_dynamic_per_token_quant does.
inline constexpr float kSmallestScale = 1.0f / (kLargestE4m3 * 512.0f);
// Gives a group of zeros a scale: eps of vLLM's and SGLang's per_token_group_quant_fp8. vLLM's kernel also uses this
// number as the minimum of a scale before it rounds it up to a power of two; SGLang's has no minimum.
inline constexpr float kLeastGroupMagnitude = 1e-10f;
inline constexpr float kLeastUe8m0Scale = 1e-10f;

// `SingleRow`: the block processes one row. `Rows`: formats of normed rows that the kernel stores. Each value has a
// kernel of its own, because code that a kernel does not run slows down the code it runs
// (docs/experiments/cold_code.md). `Tensor`: access to the caller's tensors.
template <DataType D, uint32_t Width, bool SingleRow, Output Rows, template <DataType> class Tensor = Elements>
class RmsNorm {
 public:
  using Values = Pack<D, Width>;

  // Values that a thread holds: elements of a row from `index` on.
  struct Position {
    uint32_t index;
    bool exists;
  };

  // Every thread of the block constructs one, before grid_dependency_wait(). `partials`: start of shared memory. A
  // row consists of spans of `span` lines. Tiles begin at multiples of tile_lines in each span. `leader`: a thread that
  // norms every row.
  LLM_COMM_DEVICE RmsNorm(const AddRmsNormArgs& args, float* partials, uint32_t span, uint32_t leader = 0)
      : args_(args),
        leader_(leader),
        residual_(args, args.residual),
        weight_(args, args.weight),
        normed_(args, args.normed),
        new_residual_(args, args.new_residual),
        partials_(partials),
        deliveries_(reinterpret_cast<uint64_t*>(partials + kPartialSets * kMaxChunks)),
        chunks_((args.row_lines + kChunkLines - 1) / kChunkLines),
        fills_warps_(((args.tile_lines | span | args.row_lines) % kWarpThreads) == 0) {
    // combine_partials() reads beyond the last chunk, so those entries must be zero. Only they may be written here:
    // nothing orders a block's own stores against deliveries from other blocks.
    const bool has_magnitudes = kHasFP8 && args.quantization == Quantization::kDynamic;
    for (uint32_t i = chunks_ + thread_index(); i < kMaxChunks; i += block_threads()) {
      for_each_set(has_magnitudes, [&](uint32_t set) { partials_[set * kMaxChunks + i] = 0.0f; });
    }
    if (leads()) {
      for_each_set(has_magnitudes, [&](uint32_t set) {
        delivery_init(deliveries_ + set, chunks_, args_.cluster_blocks);
        expect(set);
      });
    }
    if (args_.cluster_blocks > 1) cluster_arrive_relaxed();
  }

  // Waits until every block of the cluster has constructed its RmsNorm. All threads call it, before the first add(),
  // with a block_sync() in between.
  LLM_COMM_DEVICE void wait_for_cluster() const {
    if (args_.cluster_blocks > 1) cluster_wait();
  }

  // A thread whose operation may not begin still delivers what others wait for, but stores nothing.
  LLM_COMM_DEVICE void set_begun(bool begun) { stores_ = begun; }

  // Returns whether all tensors are aligned. Then run_aligned() may be used.
  LLM_COMM_DEVICE bool is_aligned() const {
    return residual_.is_aligned() && weight_.is_aligned() && normed_.is_aligned() && new_residual_.is_aligned();
  }
  // Calls run(norm) with a copy of this object that has code for aligned tensors only.
  template <class Run>
  LLM_COMM_DEVICE void run_aligned(Run run) {
    RmsNorm copy = *this;
    for (Tensor<D>* tensor : {&copy.residual_, &copy.weight_, &copy.normed_, &copy.new_residual_})
      tensor->assume_aligned();
    run(copy);
    rows_ = copy.rows_;
  }

  // Sum of addresses. Passing it to the grid wait makes the compiler compute them before the wait.
  LLM_COMM_DEVICE uint64_t precomputed() const { return normed_.precomputed() + new_residual_.precomputed(); }

  LLM_COMM_DEVICE auto residual_load(uint32_t row, Position at) const {
    return residual_.template load_of<Width>(at.exists && args_.residual != nullptr, element(row, at));
  }
  LLM_COMM_DEVICE auto weight_load(Position at) const { return weight_.template load_of<Width>(at.exists, at.index); }
  LLM_COMM_DEVICE Values load_residual(uint32_t row, Position at) const {
    auto load = residual_load(row, at);
    load.begin();
    return load.end();
  }
  LLM_COMM_DEVICE Values load_weight(Position at) const {
    auto load = weight_load(at);
    load.begin();
    return load.end();
  }
  // Scale that the caller gives: of a static quantization, or the global scale of NVFP4.
  LLM_COMM_DEVICE float load_scale() const {
    if (kHasBlocks && args_.quantization == Quantization::kNvfp4) return *args_.global_scale;
    return kHasFP8 && args_.quantization == Quantization::kStatic ? *args_.scale : 0.0f;
  }

  // Adds the residual to a row's sums, stores and returns the result, and contributes its squares. All threads of a
  // warp call it, including those without values (`at` does not exist).
  LLM_COMM_DEVICE Values add(uint32_t row, Position at, Values sums, Values residual) const {
    Values result = sums;
    if (args_.residual != nullptr) {
      const Floats a = floats(sums);
      const Floats b = floats(residual);
      Floats x;
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < Width; ++i) x.of[i] = a.of[i] + b.of[i];
      result = rounded(x);
    }
    if (at.exists && stores_) new_residual_.template store<Width>(element(row, at), result);
    float squares = at.exists ? sum_of_squares(result) : 0.0f;
    LLM_COMM_UNROLL(8)
    for (uint32_t mask = 1; mask < kLanesPerChunk; mask *= 2) squares += shuffle_xor(squares, mask);
    contribute(set_of_row(), at, squares);
    return result;
  }

  // Finishes a row after add() has been called for all its values: normalizes it and stores the outputs. Every warp
  // with values calls it, and in each block at least the leader's warp, because a block must stay while others deliver to
  // it.
  // - `position(tile)`: position of this thread's values of tile `tile` of `tiles`.
  // - `values`, `weight`: results of add() and load_weight(); used if there is a single tile.
  template <class PositionOf>
  LLM_COMM_DEVICE void finish(uint32_t row, uint32_t tiles, PositionOf position, Values values, Values weight,
                              float given_scale) {
    const auto each_tile = [&](auto step) {
      if (tiles == 1) {
        step(position(0), values, weight);
        return;
      }
      // This thread stored the values itself, so it may load them.
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const Position at = position(tile);
        step(at, at.exists ? new_residual_.template load<Width>(element(row, at)) : Values{}, load_weight(at));
      }
    };
    finish_tiles(row, each_tile, given_scale);
  }
  // finish() of values that the caller holds. each_tile(step): calls step(position, values, weight) for all of this
  // thread.
  template <class EachTile>
  LLM_COMM_DEVICE void finish_tiles(uint32_t row, EachTile each_tile, float given_scale) {
    const float squares = combine_partials(set_of_row(), [](float a, float b) { return a + b; });
    const float factor = reciprocal_sqrt(multiply_add(squares, args_.reciprocal_hidden, args_.epsilon));
    if constexpr (Rows == Output::kPlain) {
      each_tile([&](Position at, Values x, Values w) {
        if (at.exists && stores_) normed_.template store<Width>(element(row, at), normalize(x, w, factor));
      });
    } else if (kHasBlocks && (!kHasFP8 || args_.quantization >= Quantization::kNvfp4)) {
      each_tile([&](Position at, Values x, Values w) { store_blocks(row, at, normalize(x, w, factor), given_scale); });
    } else if (args_.quantization == Quantization::kStatic) {
      // Multiplies by the reciprocal, as vLLM's kernels do.
      const float reciprocal_scale = 1.0f / given_scale;
      each_tile([&](Position at, Values x, Values w) {
        store_quantized(row, at, normalize(x, w, factor), [&](float value) { return value * reciprocal_scale; });
      });
    } else if (args_.quantization == Quantization::kDynamic) {
      float magnitude = 0.0f;
      each_tile([&](Position at, Values x, Values w) {
        magnitude = at.exists ? largest_of(normalize(x, w, factor)) : 0.0f;
        LLM_COMM_UNROLL(8)
        for (uint32_t mask = 1; mask < kLanesPerChunk; mask *= 2) {
          magnitude = larger(magnitude, shuffle_xor(magnitude, mask));
        }
        contribute(2 + set_of_row(), at, magnitude);
      });
      // Divides, as vLLM does. Multiplying by the reciprocal would give other bits.
      const float scale = larger(combine_partials(2 + set_of_row(), &larger) / kLargestE4m3, kSmallestScale);
      if (stores_ && cluster_block_rank() == 0 && leads()) args_.scale[row] = scale;
      each_tile([&](Position at, Values x, Values w) {
        store_quantized(row, at, normalize(x, w, factor), [&](float value) { return value / scale; });
      });
    } else {
      each_tile([&](Position at, Values x, Values w) {
        const Values y = normalize(x, w, factor);
        float magnitude = largest_of(y);
        LLM_COMM_UNROLL(8)
        for (uint32_t mask = 1; mask < kLanesPerGroup; mask *= 2) {
          magnitude = larger(magnitude, shuffle_xor(magnitude, mask));
        }
        const float scale = scale_of_group(magnitude);
        if (at.exists && stores_ && at.index % kGroupSize == 0) {
          args_.scale[static_cast<uint64_t>(row) * args_.scale_row_stride +
                      static_cast<uint64_t>(at.index / kGroupSize) * args_.scale_group_stride] = scale;
        }
        store_quantized(row, at, y, [&](float value) { return value / scale; });
      });
    }
    ++rows_;
  }

 private:
  using E = Element<D>;
  static constexpr bool kHasFP8 = includes(Rows, Output::kFP8);
  static constexpr bool kHasBlocks = includes(Rows, Output::kBlocks);
  static constexpr uint32_t kLanesPerChunk = kChunkLines * kElementsPerLine / Width;
  // Groups lie within a warp and begin at multiples of kLanesPerGroup, because tiles are multiples of groups.
  static constexpr uint32_t kLanesPerGroup = kGroupSize / Width;
  static_assert(kLanesPerGroup <= kWarpThreads);

  template <uint32_t Count>
  struct alignas(Count) Bytes {
    uint8_t element[Count];
  };

  // Calls step() for the sets in use: for one row or two, sums, and magnitudes if there are any.
  template <class Step>
  static LLM_COMM_DEVICE void for_each_set(bool has_magnitudes, Step step) {
    LLM_COMM_UNROLL(2)
    for (uint32_t row = 0; row < (SingleRow ? 1 : 2); ++row) {
      step(row);
      if (kHasFP8 && has_magnitudes) step(2 + row);
    }
  }

  using Floats = llm_comm::Values<Width>;

  // Two elements of a line are rounded by one instruction, and stay in one register.
  static LLM_COMM_DEVICE Floats floats(Values values) {
    if constexpr (Tensor<D>::kHoldsWords) {
      return LineElements<D>::values(__builtin_bit_cast(Line, values));
    } else {
      Floats x;
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < Width; ++i) x.of[i] = E::value(values.element[i]);
      return x;
    }
  }
  static LLM_COMM_DEVICE Values rounded(const Floats& x) {
    if constexpr (Tensor<D>::kHoldsWords) {
      return __builtin_bit_cast(Values, LineElements<D>::round(x));
    } else {
      Values values;
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < Width; ++i) values.element[i] = E::round(x.of[i]);
      return values;
    }
  }

  LLM_COMM_DEVICE uint32_t set_of_row() const { return rows_ % 2; }

  LLM_COMM_DEVICE bool leads() const { return thread_index() == leader_; }

  LLM_COMM_DEVICE void expect(uint32_t set) const { delivery_expect(deliveries_ + set, chunks_, args_.cluster_blocks); }

  LLM_COMM_DEVICE uint64_t element(uint32_t row, Position at) const {
    return static_cast<uint64_t>(row) * (args_.row_lines * kElementsPerLine) + at.index;
  }

  // Adds in a tree over neighbours, which the sum over the lanes of a chunk continues: the result does not depend on
  // Width. The fused multiply-add is explicit, because the compiler may choose which product of a * a + b * b it
  // rounds.
  static LLM_COMM_DEVICE float sum_of_squares(Values values) {
    const Floats x = floats(values);
    float sums[Width / 2];
    LLM_COMM_UNROLL(4)
    for (uint32_t i = 0; i < Width / 2; ++i)
      sums[i] = multiply_add(x.of[2 * i + 1], x.of[2 * i + 1], x.of[2 * i] * x.of[2 * i]);
    LLM_COMM_UNROLL(2)
    for (uint32_t n = Width / 4; n > 0; n /= 2) {
      LLM_COMM_UNROLL(2)
      for (uint32_t i = 0; i < n; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    }
    return sums[0];
  }

  // Delivers the value of a chunk, which all its lanes hold, to every block of the cluster. All threads of a warp call
  // it.
  LLM_COMM_DEVICE void contribute(uint32_t set, Position at, float value) const {
    const uint32_t chunk = at.index / (kChunkLines * kElementsPerLine);
    if constexpr (kLanesPerChunk * 4 == kWarpThreads) {
      // If the warp holds four adjacent chunks, one store delivers all four.
      if (fills_warps_ && args_.cluster_blocks > 1) {
        const float values[4] = {value, shuffle_xor(value, kLanesPerChunk), shuffle_xor(value, 2 * kLanesPerChunk),
                                 shuffle_xor(value, 3 * kLanesPerChunk)};
        const uint32_t lane = thread_index() % kWarpThreads;
        if (!at.exists || lane >= kLanesPerChunk) return;
        for (uint32_t block = lane; block < args_.cluster_blocks; block += kLanesPerChunk) {
          deliver_four(partials_ + set * kMaxChunks + chunk, block, values, deliveries_ + set);
        }
        return;
      }
    }
    if (!at.exists) return;
    // A partial chunk at the end of a row has fewer lanes.
    const uint32_t lines = args_.row_lines - chunk * kChunkLines;
    const uint32_t lanes = lines < kChunkLines ? lines * (kElementsPerLine / Width) : kLanesPerChunk;
    float* const partial = partials_ + set * kMaxChunks + chunk;
    for (uint32_t block = thread_index() % kLanesPerChunk; block < args_.cluster_blocks; block += lanes) {
      deliver(partial, block, value, deliveries_ + set, args_.cluster_blocks);
    }
  }

  // Combines all partial values of a row: each lane combines two groups of four, then the lanes form a tree. Lanes of a
  // warp of 64 have a group each, and the same tree. It reads as many entries as the longest row has; unused entries are
  // zero.
  template <class Combine>
  LLM_COMM_DEVICE float combine_partials(uint32_t set, Combine combine) const {
    delivery_wait(deliveries_ + set, rows_ / 2 % 2);
    // Arm the set for the next row but one.
    if (!SingleRow && leads()) expect(set);
    const auto four = [&](const Line& partial) {
      return combine(combine(bits_to_float(partial.word[0]), bits_to_float(partial.word[1])),
                     combine(bits_to_float(partial.word[2]), bits_to_float(partial.word[3])));
    };
    constexpr uint32_t kGroups = kMaxChunks / 4 / kWarpThreads;  // of a lane
    static_assert(kGroups * 4 * kWarpThreads == kMaxChunks && (kGroups == 1 || kGroups == 2));
    const Line* const lines =
        reinterpret_cast<const Line*>(partials_ + set * kMaxChunks) + thread_index() % kWarpThreads;
    float result;
    if constexpr (kGroups == 1) {
      result = four(lines[0]);
    } else {
      const Line low = lines[0];
      const Line high = lines[kWarpThreads];
      result = combine(four(low), four(high));
    }
    LLM_COMM_UNROLL(6)
    for (uint32_t mask = kWarpThreads / 2; mask > 0; mask /= 2) result = combine(result, shuffle_xor(result, mask));
    return result;
  }

  static LLM_COMM_DEVICE float largest_of(Values values) {
    const Floats x = floats(values);
    float magnitude = 0.0f;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Width; ++i) magnitude = larger(magnitude, x.of[i] < 0.0f ? -x.of[i] : x.of[i]);
    return magnitude;
  }

  // Rounds once, at the end, with or without weight_bias, like GemmaRMSNorm of vLLM and SGLang. vLLM's RMSNorm also
  // rounds before it multiplies by the weight.
  LLM_COMM_DEVICE Values normalize(Values values, Values weight, float factor) const {
    const Floats x = floats(values);
    const Floats gamma = floats(weight);
    Floats result;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Width; ++i) result.of[i] = x.of[i] * factor * (gamma.of[i] + args_.weight_bias);
    return rounded(result);
  }

  // Bitwise the scale of vLLM's per_token_group_quant_8bit kernels
  // (csrc/quantization/w8a8/fp8/per_token_group_quant.cu), which divide too. The next power of two is computed from the
  // bits and equals their exp2f(ceilf(log2f(scale))). log2f could differ only for a scale just above a power of two, by
  // rounding to a whole number. No scale is that close: 448 is 7 * 2^6, and a magnitude has at most 11 significant
  // bits, so the scale is a power of two exactly or far from one.
  LLM_COMM_DEVICE float scale_of_group(float magnitude) const {
    const float scale = larger(magnitude, kLeastGroupMagnitude) / kLargestE4m3;
    if (args_.quantization != Quantization::kGroupUe8m0) return scale;
    const uint32_t bits = float_to_bits(larger(scale, kLeastUe8m0Scale));
    return bits_to_float((bits + 0x7FFFFFu) & 0x7F800000u);  // infinity stays infinity
  }

  template <class Scaled>
  LLM_COMM_DEVICE void store_quantized(uint32_t row, Position at, Values values, Scaled scaled) const {
    if (!at.exists || !stores_) return;
    const Floats x = floats(values);
    Bytes<Width> quantized;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Width; ++i) quantized.element[i] = float_to_e4m3(scaled(x.of[i]));
    uint8_t* const to = static_cast<uint8_t*>(args_.normed) + element(row, at);
    store_bytes(to, quantized, reinterpret_cast<uint64_t>(args_.normed) % Width == 0);
  }

  // Stores bytes one by one, or together if their address is aligned.
  template <uint32_t Count>
  static LLM_COMM_DEVICE void store_bytes(uint8_t* to, const Bytes<Count>& bytes, bool is_aligned) {
    if (is_aligned) {
      *reinterpret_cast<Bytes<Count>*>(to) = bytes;
      return;
    }
    for (uint32_t i = 0; i < Count; ++i) to[i] = bytes.element[i];
  }

  // Quantizes and stores values of a block. All threads of a warp call it. Adjacent lanes of a warp hold a block, because
  // chunks have whole blocks. The largest magnitude ignores NaN, as FlashInfer's does: it is NaN only if all values are.
  LLM_COMM_DEVICE void store_blocks(uint32_t row, Position at, Values values, float global_scale) const {
    const bool is_nvfp4 = args_.quantization == Quantization::kNvfp4;
    const Floats x = floats(values);
    float magnitude = without_sign(x.of[0]);
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 1; i < Width; ++i) magnitude = larger(magnitude, without_sign(x.of[i]));
    constexpr uint32_t kLanes = kNvfp4Block / Width;
    LLM_COMM_UNROLL(8)
    for (uint32_t mask = 1; mask < kLanes; mask *= 2) magnitude = larger(magnitude, shuffle_xor(magnitude, mask));
    static_assert(kMxfp8Block == 2 * kNvfp4Block);
    if (!is_nvfp4) magnitude = larger(magnitude, shuffle_xor(magnitude, kLanes));

    const BlockScale scale = is_nvfp4 ? nvfp4_scale(magnitude, global_scale) : mxfp8_scale(magnitude);
    if (!(at.exists && stores_)) return;
    const uint32_t size = is_nvfp4 ? kNvfp4Block : kMxfp8Block;
    if (at.index % size == 0) store_scale(row, at.index / size, args_.row_lines * kElementsPerLine / size, scale.code);
    clear_missing_rows(row, at, size);
    if (!is_nvfp4) {
      store_quantized(row, at, values, [&](float value) { return value * scale.factor; });
      return;
    }
    Bytes<Width / 2> quantized;
    LLM_COMM_UNROLL(4)
    for (uint32_t i = 0; i < Width / 2; ++i) {
      quantized.element[i] = static_cast<uint8_t>(float_to_e2m1(x.of[2 * i] * scale.factor) |
                                                  float_to_e2m1(x.of[2 * i + 1] * scale.factor) << 4);
    }
    uint8_t* const to = static_cast<uint8_t*>(args_.normed) + element(row, at) / 2;
    store_bytes(to, quantized, reinterpret_cast<uint64_t>(args_.normed) % (Width / 2) == 0);
  }

  // Stores the scale of a block. The last block of a row fills its tile with zeros: a matrix product multiplies them by
  // zeros beyond the row, and NaN would reach its result.
  LLM_COMM_DEVICE void store_scale(uint32_t row, uint32_t block, uint32_t blocks, uint8_t code) const {
    uint8_t* const scales = reinterpret_cast<uint8_t*>(args_.scale);
    if (args_.scale_row_stride != 0) {
      scales[uint64_t{row} * args_.scale_row_stride + block] = code;
      return;
    }
    uint8_t* const to = scales + swizzled_offset(args_.first_row + row, block, args_.scale_group_stride);
    *to = code;
    if (block + 1 != blocks) return;
    for (uint32_t i = 1; (block + i) % kTileBlocks != 0; ++i) to[i] = 0;
  }

  // Fills the last tiles of the call with zeros where they have no rows, as vLLM's kernel does. The threads of the last
  // row that hold blocks of a tile share its groups. `size`: elements of a block.
  LLM_COMM_DEVICE void clear_missing_rows(uint32_t row, Position at, uint32_t size) const {
    const uint32_t last = args_.first_row + row;
    const uint32_t last_of_tile = last % kTileRows;
    if (args_.scale_row_stride != 0 || last + 1 != args_.call_rows || last_of_tile + 1 == kTileRows) return;
    const uint32_t span = kTileBlocks * size;
    const uint32_t begin = at.index / span * span;
    const uint32_t behind = args_.row_lines * kElementsPerLine - begin;
    const uint32_t threads = (behind < span ? behind : span) / Width;
    uint8_t* const tile = reinterpret_cast<uint8_t*>(args_.scale) +
                          swizzled_offset(last - last_of_tile, begin / size, args_.scale_group_stride);
    const bool is_aligned = reinterpret_cast<uint64_t>(tile) % kTileBlocks == 0;
    for (uint32_t group = (at.index - begin) / Width; group < kTileGroups; group += threads) {
      for (uint32_t i = 0; i < kRowsOfTileGroup; ++i) {
        if (group + i * kTileGroups <= last_of_tile) continue;
        store_bytes(tile + (group * kRowsOfTileGroup + i) * kTileBlocks, Bytes<kTileBlocks>{}, is_aligned);
      }
    }
  }

  const AddRmsNormArgs& args_;
  uint32_t leader_;
  Tensor<D> residual_;
  Tensor<D> weight_;
  Tensor<D> normed_;
  Tensor<D> new_residual_;
  float* partials_;
  uint64_t* deliveries_;  // one for each set
  uint32_t chunks_;
  bool fills_warps_;   // each warp has 32 adjacent lines of the row, or none
  uint32_t rows_ = 0;  // rows finished
  bool stores_ = true;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
