// What follows a row's sums: the residual add, the RMS norm over the cluster that holds the row, and the outputs.
//
// The sum of squares meets in the shared memory of every block of the cluster: a warp stores the partial sums of its
// chunks there, and after one barrier every warp adds all partial sums up. That saves the second barrier that one adder
// would take to publish its total.
//
// Two sets of partial sums are used in turn. A block that stores those of row r + 2 has passed the barrier of row r + 1,
// at which every block of the cluster has arrived after it read those of row r.
#pragma once

#include "kernels/fused/args.cuh"
#include "llm_comm/fp8.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// At the start of a block's shared memory: sums for two rows in turn, then, likewise, largest magnitudes.
inline constexpr uint32_t kPartialSets = 4;
inline constexpr uint64_t kPartialBytes = kPartialSets * kMaxChunks * sizeof(float);
// So that a row of zeros has a scale too: as vLLM's rms_norm_dynamic_per_token_quant.
inline constexpr float kSmallestScale = 1.0f / (kLargestE4m3 * 512.0f);

template <DataType D, uint32_t Width>
class RmsNorm {
 public:
  using Values = Pack<D, Width>;

  // Values that a thread holds, at elements `index` and following of a row.
  struct Place {
    uint32_t index;
    bool exists;
  };

  // Every thread of the block makes one, before grid_dependency_wait(). `partials`: the start of shared memory.
  LLM_COMM_DEVICE RmsNorm(const AddRmsNormArgs& args, float* partials)
      : args_(args),
        residual_(args.residual),
        weight_(args.weight),
        normed_(args.normed),
        new_residual_(args.new_residual),
        partials_(partials),
        chunks_((args.row_lines + kChunkLines - 1) / kChunkLines) {
    // total() reads past the last chunk.
    for (uint32_t i = thread_index(); i < kPartialSets * kMaxChunks; i += block_threads()) partials_[i] = 0.0f;
    if (is_clustered()) cluster_arrive();
  }

  // All threads: before the first contribute(). Blocks of the cluster have begun then, and their partial sums are zero.
  LLM_COMM_DEVICE void meet() const {
    if (is_clustered()) cluster_wait();
  }

  LLM_COMM_DEVICE uint64_t fingerprint() const {
    return residual_.fingerprint() + weight_.fingerprint() + normed_.fingerprint() + new_residual_.fingerprint();
  }

  LLM_COMM_DEVICE Values load_residual(uint32_t row, Place at) const {
    return at.exists && args_.residual != nullptr ? residual_.template load<Width>(element(row, at)) : Values{};
  }
  LLM_COMM_DEVICE Values load_weight(Place at) const {
    return at.exists ? weight_.template load<Width>(at.index) : Values{};
  }
  LLM_COMM_DEVICE float load_scale() const {
    return args_.quantization == Quantization::kStatic ? 1.0f / *args_.scale : 0.0f;
  }

  // Adds the residual to a row's sums, stores that, and contributes its squares. All threads of a warp make the call;
  // those without values (`at` does not exist) as well. Returns the new residual.
  LLM_COMM_DEVICE Values add(uint32_t row, Place at, Values sums, Values residual) const {
    Values result = sums;
    if (args_.residual != nullptr) {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < Width; ++i) {
        result.element[i] = E::round(E::value(sums.element[i]) + E::value(residual.element[i]));
      }
    }
    if (at.exists) new_residual_.template store<Width>(element(row, at), result);
    float squares = at.exists ? sum_of_squares(result) : 0.0f;
    LLM_COMM_UNROLL(8)
    for (uint32_t mask = 1; mask < kLanesPerChunk; mask *= 2) squares += shuffle_xor(squares, mask);
    contribute(parity_, at, squares);
    return result;
  }

  // Ends a row, whose values have all been given to add(): norms it and stores that. All threads of the block make the
  // call; `takes_part` is false in warps without values. `place(tile)` is where this thread's values of tile `tile` of
  // `tiles` lie; where there is one tile, `values` and `weight` are what add() and load_weight() returned for it.
  template <class PlaceOf>
  LLM_COMM_DEVICE void finish(uint32_t row, uint32_t tiles, PlaceOf place, Values values, Values weight,
                              float reciprocal_scale, bool takes_part) {
    const auto each_tile = [&](auto step) {
      if (tiles == 1) {
        step(place(0), values, weight);
        return;
      }
      // The thread itself stored the values.
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const Place at = place(tile);
        step(at, at.exists ? new_residual_.template load<Width>(element(row, at)) : Values{}, load_weight(at));
      }
    };
    sync();
    const float factor =
        takes_part ? reciprocal_sqrt(multiply_add(total(), args_.reciprocal_hidden, args_.epsilon)) : 0.0f;
    if (args_.quantization == Quantization::kNone) {
      if (takes_part) {
        each_tile([&](Place at, Values x, Values w) {
          if (at.exists) normed_.template store<Width>(element(row, at), normalize(x, w, factor));
        });
      }
    } else if (args_.quantization == Quantization::kStatic) {
      if (takes_part) {
        each_tile([&](Place at, Values x, Values w) {
          store_quantized(row, at, normalize(x, w, factor), [&](float value) { return value * reciprocal_scale; });
        });
      }
    } else {
      if (takes_part) {
        each_tile([&](Place at, Values x, Values w) { contribute_largest(at, normalize(x, w, factor)); });
      }
      sync();
      if (takes_part) {
        // Divides, as vLLM does, rather than multiply by the reciprocal: other bits.
        const float scale = larger(largest() / kLargestE4m3, kSmallestScale);
        if (block_index() % args_.cluster_blocks == 0 && thread_index() == 0) args_.scale[row] = scale;
        each_tile([&](Place at, Values x, Values w) {
          store_quantized(row, at, normalize(x, w, factor), [&](float value) { return value / scale; });
        });
      }
    }
    parity_ ^= 1;
  }

 private:
  using E = Element<D>;
  static constexpr uint32_t kLanesPerChunk = kChunkLines * kElementsPerLine / Width;

  struct alignas(Width) Quantized {
    uint8_t element[Width];
  };

  LLM_COMM_DEVICE bool is_clustered() const { return args_.cluster_blocks > 1; }

  LLM_COMM_DEVICE void sync() const {
    if (is_clustered()) {
      cluster_arrive();
      cluster_wait();
    } else {
      block_sync();
    }
  }

  LLM_COMM_DEVICE uint64_t element(uint32_t row, Place at) const {
    return static_cast<uint64_t>(row) * (args_.row_lines * kElementsPerLine) + at.index;
  }

  // As a tree over neighbours, which the sum over the lanes of a chunk goes on with: the same whatever Width is. The
  // fused multiply-add is explicit because a compiler may choose which product of a * a + b * b it rounds.
  static LLM_COMM_DEVICE float sum_of_squares(Values values) {
    float sums[Width / 2];
    LLM_COMM_UNROLL(4)
    for (uint32_t i = 0; i < Width / 2; ++i) {
      const float a = E::value(values.element[2 * i]);
      const float b = E::value(values.element[2 * i + 1]);
      sums[i] = multiply_add(b, b, a * a);
    }
    LLM_COMM_UNROLL(2)
    for (uint32_t n = Width / 4; n > 0; n /= 2) {
      LLM_COMM_UNROLL(2)
      for (uint32_t i = 0; i < n; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    }
    return sums[0];
  }

  // Stores the value of a chunk, which all its lanes hold, in every block of the cluster.
  LLM_COMM_DEVICE void contribute(uint32_t set, Place at, float value) const {
    if (!at.exists) return;
    // A partial chunk at the end of a row has fewer lanes.
    const uint32_t lanes = chunk_lanes(at);
    float* const partial = partials_ + set * kMaxChunks + at.index / (kChunkLines * kElementsPerLine);
    for (uint32_t block = thread_index() % kLanesPerChunk; block < args_.cluster_blocks; block += lanes) {
      store_to_block(partial, block, value);
    }
  }

  // Lanes of the chunk that hold values: all but at the end of a row.
  LLM_COMM_DEVICE uint32_t chunk_lanes(Place at) const {
    const uint32_t chunk = at.index / (kChunkLines * kElementsPerLine);
    const uint32_t lines = args_.row_lines - chunk * kChunkLines;
    return lines < kChunkLines ? lines * (kElementsPerLine / Width) : kLanesPerChunk;
  }

  LLM_COMM_DEVICE void contribute_largest(Place at, Values values) const {
    float magnitude = 0.0f;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; at.exists && i < Width; ++i) {
      const float value = E::value(values.element[i]);
      magnitude = larger(magnitude, value < 0.0f ? -value : value);
    }
    LLM_COMM_UNROLL(8)
    for (uint32_t mask = 1; mask < kLanesPerChunk; mask *= 2)
      magnitude = larger(magnitude, shuffle_xor(magnitude, mask));
    contribute(2 + parity_, at, magnitude);
  }

  // Four partial values a lane and round; then the lanes, as a tree. Its result is the same in all lanes.
  template <class Combine>
  LLM_COMM_DEVICE float combine_partials(uint32_t set, Combine combine) const {
    const Line* const lines = reinterpret_cast<const Line*>(partials_ + set * kMaxChunks);
    float result = 0.0f;
    for (uint32_t first = 0; first * 4 < chunks_; first += kWarpThreads) {
      const Line partial = lines[first + thread_index() % kWarpThreads];
      result = combine(result, combine(combine(bits_to_float(partial.word[0]), bits_to_float(partial.word[1])),
                                       combine(bits_to_float(partial.word[2]), bits_to_float(partial.word[3]))));
    }
    LLM_COMM_UNROLL(5)
    for (uint32_t mask = kWarpThreads / 2; mask > 0; mask /= 2) result = combine(result, shuffle_xor(result, mask));
    return result;
  }

  LLM_COMM_DEVICE float total() const {
    return combine_partials(parity_, [](float a, float b) { return a + b; });
  }
  LLM_COMM_DEVICE float largest() const { return combine_partials(2 + parity_, &larger); }

  static LLM_COMM_DEVICE Values normalize(Values values, Values weight, float factor) {
    Values result;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Width; ++i) {
      result.element[i] = E::round(E::value(values.element[i]) * factor * E::value(weight.element[i]));
    }
    return result;
  }

  template <class Scaled>
  LLM_COMM_DEVICE void store_quantized(uint32_t row, Place at, Values values, Scaled scaled) const {
    if (!at.exists) return;
    Quantized quantized;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Width; ++i) quantized.element[i] = float_to_e4m3(scaled(E::value(values.element[i])));
    uint8_t* const to = static_cast<uint8_t*>(args_.normed) + element(row, at);
    if (reinterpret_cast<uint64_t>(args_.normed) % Width == 0) {
      *reinterpret_cast<Quantized*>(to) = quantized;
      return;
    }
    for (uint32_t i = 0; i < Width; ++i) to[i] = quantized.element[i];
  }

  const AddRmsNormArgs& args_;
  Elements<D> residual_;
  Elements<D> weight_;
  Elements<D> normed_;
  Elements<D> new_residual_;
  float* partials_;
  uint32_t chunks_;
  uint32_t parity_ = 0;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
