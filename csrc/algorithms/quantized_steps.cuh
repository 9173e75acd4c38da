// QuantizedSteps: the jobs of StepPipeline for quantized values: contributions, sums and shards travel with 8 bits an
// element and a scale for each block (quantized.cuh).
//
// A buffer of a chunk holds the codes of its lines, then the scales of its blocks. step_pipeline.cuh proves that buffers
// may be reused.
#pragma once

#include <type_traits>

#include "algorithms/quantized.cuh"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Chunks are multiples of this: the lanes of whole warps, and whole blocks of any type.
inline constexpr uint32_t kQuantizedChunkLines = kWarpThreads;
// Lines of the buffer of a chunk of `lines` lines: half of them for codes, of one byte in place of two or four, and one
// for the scales of each 32 lines. The scales of 32 lines of two-byte elements fill that line.
LLM_COMM_HOST_DEVICE constexpr uint32_t lines_of_quantized_chunk(uint32_t lines) { return lines / 32 * (32 / 2 + 1); }

// Jobs of the teams of a block: what each does with chunk t of a slice. A slice is a view of lines, as in StepPipeline.
template <DataType D, int World, Wire W, class Buffers = ChunkBuffers<World>>
class QuantizedSteps {
  using Quantized = QuantizedLine<LineElements<D>::kCount>;

 public:
  LLM_COMM_DEVICE QuantizedSteps(const DeviceComm& comm, uint32_t block, uint32_t chunk_lines, uint32_t depth,
                                 uint32_t slice)
      : rank_(comm.rank),
        ranks_(comm.world_size),
        room_((chunk_lines + kQuantizedChunkLines - 1) / kQuantizedChunkLines * kQuantizedChunkLines),
        chunks_(block, chunk_lines, slice),
        buffers_(comm, block, lines_of_quantized_chunk(room_), depth) {}

  // Quantizes this rank's contributions to the slices of other owners, and sends them.
  template <class SliceOf>
  LLM_COMM_DEVICE void stage(const Team& team, uint32_t t, SliceOf slice_of) const {
    buffers_.for_each_staged(t, [&](uint32_t owner, Line* staged) {
      const auto& slice = slice_of(owner);
      const uint32_t first = chunks_.first(t);
      const uint32_t lines = chunks_.lines(t, slice.lines());
      send_rows<kMovedTogether>(
          team, lines, [&](uint32_t k) { return k < lines ? slice.load(first + k) : Line{}; },
          [&](uint32_t, Line line) { return quantize<W>(LineElements<D>::values(line)); },
          [&](auto store) { store(staged); });
    });
  }

  // Quantizes this rank's shard, sends it to all peers, and stores the quantized values to `target` on this rank.
  template <class Source, class Target>
  LLM_COMM_DEVICE void spread(const Team& team, uint32_t t, const Source& source, const Target& target) const {
    const typename Buffers::ToOthers others(buffers_, kFirstHop, t);
    const uint32_t first = chunks_.first(t);
    const uint32_t lines = chunks_.lines(t, source.lines());
    send_rows<kMovedTogether>(
        team, lines, [&](uint32_t k) { return k < lines ? source.load(first + k) : Line{}; },
        [&](uint32_t k, Line line) {
          const Quantized quantized = quantize<W>(LineElements<D>::values(line));
          store(target, first, k, lines, quantized);
          return quantized;
        },
        [&](auto send) { others.for_each(send); });
  }

  // Adds the contributions to this rank's slice, sends the quantized sums to all peers, and stores them to `own`.
  template <class Own>
  LLM_COMM_DEVICE void sum_for_all(const Team& team, uint32_t t, const Own& own) const {
    const typename Buffers::ToOthers others(buffers_, kSecondHop, t);
    const uint32_t first = chunks_.first(t);
    const uint32_t lines = chunks_.lines(t, own.lines());
    sum(
        team, t, own, [&](uint32_t k, const Quantized& sum) { store(own, first, k, lines, sum); },
        [&](auto send) { others.for_each(send); });
  }
  // As sum_for_all(), with the quantized sums in this rank's own buffer.
  template <class Own>
  LLM_COMM_DEVICE void sum_and_keep(const Team& team, uint32_t t, const Own& own) const {
    const typename Buffers::ToOthers others(buffers_, kSecondHop, t);
    Line* const kept = buffers_.own(kSecondHop, t);
    sum(
        team, t, own, [](uint32_t, const Quantized&) {},
        [&](auto send) {
          others.for_each(send);
          send(kept);
        });
  }

  static LLM_COMM_DEVICE Line line(const Quantized& sum) { return LineElements<D>::round(dequantize<W>(sum)); }

  // Adds the contributions to this rank's slice, and stores the sums to `target`, not quantized.
  template <class Own, class Target>
  LLM_COMM_DEVICE void sum_exactly(const Team& team, uint32_t t, const Own& own, const Target& target) const {
    const uint32_t first = chunks_.first(t);
    const uint32_t lines = chunks_.lines(t, own.lines());
    for_each_row<kSummedTogether>(
        team, lines, contributions_to(t, own),
        [&](uint32_t k, uint32_t, const Contributions& all) {
          if (k < lines) target.store(first + k, LineElements<D>::round(sum_of(all)));
        },
        [](uint32_t, uint32_t) {});
  }

  // The sums of all ranks in chunk t, where each rank keeps its own too.
  class Sums {
   public:
    LLM_COMM_DEVICE Sums(const QuantizedSteps& steps, uint32_t t)
        : steps_(steps),
          first_(steps.buffers_.from(kSecondHop, t, 0)),
          buffer_lines_(lines_of_quantized_chunk(steps.room_)) {}
    // Line k of the part that `owner` has added.
    LLM_COMM_DEVICE Quantized load(uint32_t owner, uint32_t k) const {
      return steps_.get(first_ + owner * buffer_lines_, k);
    }

   private:
    const QuantizedSteps& steps_;
    const Line* first_;
    uint32_t buffer_lines_;
  };

  // Dequantizes what the other owners have sent.
  template <class SliceOf>
  LLM_COMM_DEVICE void collect(const Team& team, uint32_t hop, uint32_t t, SliceOf slice_of) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t i = 1; i < ranks_.count(); ++i) {
      const uint32_t owner = ranks_.after(rank_, i);
      const auto& slice = slice_of(owner);
      const Line* const sent = buffers_.from(hop, t, owner);
      const uint32_t first = chunks_.first(t);
      const uint32_t lines = chunks_.lines(t, slice.lines());
      for_each_row<kMovedTogether>(
          team, lines, [&](uint32_t k) { return get(sent, k); },
          [&](uint32_t k, uint32_t, const Quantized& sum) { store(slice, first, k, lines, sum); },
          [](uint32_t, uint32_t) {});
    }
  }

 private:
  static constexpr uint32_t kPerLine = LineElements<D>::kCount;
  using Codes = typename Quantized::Codes;
  static constexpr uint32_t kBlockLines = kQuantizedBlock / kPerLine;
  static constexpr uint32_t kRowBlocks = kWarpThreads / kBlockLines;
  // Rows whose loads a thread has in flight together. More cost registers, which the compiler then spills.
  static constexpr uint32_t kMovedTogether = World == 2 ? 1 : 2;
  static constexpr uint32_t kSummedTogether = World == 2 ? 2 : 1;

  // A line of this rank's slice on all ranks: its own, and those of the other ranks in rank order.
  struct LoadedContributions {
    Line own;
    Quantized of_other[World - 1];
  };
  // Many ranks have too many contributions for registers: they are added as they are loaded.
  using Contributions = std::conditional_t<kIsExactWorld<World>, LoadedContributions, Values<kPerLine>>;

  // Returns a function that loads the contributions to a line of chunk t.
  template <class Own>
  LLM_COMM_DEVICE auto contributions_to(uint32_t t, const Own& own) const {
    return [this, &own, incoming = typename Buffers::FromOthers(buffers_, kFirstHop, t), first = chunks_.first(t),
            lines = chunks_.lines(t, own.lines())](uint32_t k) {
      const Line own_line = k < lines ? own.load(first + k) : Line{};
      if constexpr (kIsExactWorld<World>) {
        LoadedContributions all;
        all.own = own_line;
        LLM_COMM_UNROLL(8)
        for (uint32_t i = 0; i < World - 1; ++i) all.of_other[i] = get(incoming.of(i), k);
        return all;
      } else {
        return sum_in_batches(own_line, [&](uint32_t i) { return get(incoming.of(i), k); });
      }
    };
  }

  // Adds the contributions to this rank's slice. take(k, sum) gets the quantized sums; for_each_buffer(send) calls
  // send(buffer) for each buffer that they are stored to.
  template <class Own, class Take, class ForEachBuffer>
  LLM_COMM_DEVICE void sum(const Team& team, uint32_t t, const Own& own, Take take,
                           ForEachBuffer for_each_buffer) const {
    send_rows<kSummedTogether>(
        team, chunks_.lines(t, own.lines()), contributions_to(t, own),
        [&](uint32_t k, const Contributions& all) {
          const Quantized sum = quantize<W>(sum_of(all));
          take(k, sum);
          return sum;
        },
        for_each_buffer);
  }

  // Loads and processes `lines` lines, rounded up to whole rows of kWarpThreads, since all lanes of a warp call
  // quantize(). Each warp has consecutive rows and goes through them in groups of up to kBlockLines. It loads `Batch`
  // rows at a time, calls process(line, row of the group, loaded line), and after each group
  // end_group(first row, rows).
  template <uint32_t Batch, class Load, class Process, class EndGroup>
  static LLM_COMM_DEVICE void for_each_row(const Team& team, uint32_t lines, Load load, Process process,
                                           EndGroup end_group) {
    const uint32_t rows = (lines + kWarpThreads - 1) / kWarpThreads;
    const uint32_t warps = team.threads / kWarpThreads;
    const uint32_t rows_of_warp = (rows + warps - 1) / warps;
    const uint32_t lane = team.thread % kWarpThreads;
    const uint32_t begin = team.thread / kWarpThreads * rows_of_warp;
    const uint32_t end = begin + rows_of_warp < rows ? begin + rows_of_warp : rows;
    LLM_COMM_UNROLL(1)
    for (uint32_t first = begin; first < end; first += kBlockLines) {
      const uint32_t group = end - first < kBlockLines ? end - first : kBlockLines;
      LLM_COMM_UNROLL(1)
      for (uint32_t row = 0; row < group; row += Batch) {
        decltype(load(0)) loaded[Batch];
        LLM_COMM_UNROLL(4)
        for (uint32_t j = 0; j < Batch; ++j) {
          if (row + j < group) loaded[j] = load((first + row + j) * kWarpThreads + lane);
        }
        LLM_COMM_UNROLL(4)
        for (uint32_t j = 0; j < Batch; ++j) {
          if (row + j < group) process((first + row + j) * kWarpThreads + lane, row + j, loaded[j]);
        }
      }
      end_group(first, group);
    }
  }

  // for_each_row() of lines that are sent as quantized_of(line, loaded line). for_each_buffer(store): calls
  // store(buffer) for each buffer that receives them. The scales of a group are sent with one store of a warp, since
  // small packets waste bandwidth of the links.
  template <uint32_t Batch, class Load, class QuantizedOf, class ForEachBuffer>
  LLM_COMM_DEVICE void send_rows(const Team& team, uint32_t lines, Load load, QuantizedOf quantized_of,
                                 ForEachBuffer for_each_buffer) const {
    const uint32_t lane = team.thread % kWarpThreads;
    const uint32_t row_of_lane = lane % kBlockLines;  // each lane sends the scale of one block of the group
    float scale = 0;
    for_each_row<Batch>(
        team, lines, load,
        [&](uint32_t k, uint32_t row, const auto& loaded) {
          const Quantized line = quantized_of(k, loaded);
          for_each_buffer([&](Line* buffer) { store_plain(reinterpret_cast<Codes*>(buffer) + k, line.codes); });
          if (row == row_of_lane) scale = line.scale;
        },
        [&](uint32_t first, uint32_t rows) {
          if (row_of_lane >= rows) return;
          const uint32_t block = (first + row_of_lane) * kRowBlocks + lane / kBlockLines;
          for_each_buffer([&](Line* buffer) { store_plain(scales(buffer) + block, scale); });
        });
  }

  // The sum of a line in rank order.
  LLM_COMM_DEVICE Values<kPerLine> sum_of(const LoadedContributions& all) const {
    Values<kPerLine> sum;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < World; ++i) {
      if (i == rank_) add(sum, i == 0, LineElements<D>::values(all.own));
      if (i < World - 1) add(sum, i == 0 && rank_ != 0, dequantize<W>(all.of_other[i]));
    }
    return sum;
  }
  static LLM_COMM_DEVICE const Values<kPerLine>& sum_of(const Values<kPerLine>& sum) { return sum; }

  // The same of many ranks, with the loads of kRanksOfBatch other ranks in flight. load(i): of the i-th of them.
  template <class Load>
  LLM_COMM_DEVICE Values<kPerLine> sum_in_batches(Line own, Load load) const {
    Values<kPerLine> sum{};
    uint32_t i = 0;
    add_in_batches<Quantized>(ranks_.count() - 1, load, [&](bool is_first, const Quantized& of_other) {
      if (i == rank_) add(sum, is_first, LineElements<D>::values(own));
      add(sum, is_first && rank_ != 0, dequantize<W>(of_other));
      ++i;
    });
    if (i == rank_) add(sum, false, LineElements<D>::values(own));  // the last rank
    return sum;
  }

  static LLM_COMM_DEVICE void add(Values<kPerLine>& sum, bool is_first, const Values<kPerLine>& x) {
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < kPerLine; ++i) sum.of[i] = is_first ? x.of[i] : sum.of[i] + x.of[i];
  }

  LLM_COMM_DEVICE float* scales(Line* buffer) const {
    return reinterpret_cast<float*>(reinterpret_cast<Codes*>(buffer) + room_);
  }
  LLM_COMM_DEVICE Quantized get(const Line* buffer, uint32_t k) const {
    return {load_plain(reinterpret_cast<const Codes*>(buffer) + k),
            load_plain(scales(const_cast<Line*>(buffer)) + k / kBlockLines)};
  }

  template <class Target>
  static LLM_COMM_DEVICE void store(const Target& target, uint32_t first, uint32_t k, uint32_t lines,
                                    const Quantized& sum) {
    const Values<kPerLine> x = dequantize<W>(sum);
    if (k < lines) target.store(first + k, LineElements<D>::round(x));
  }

  uint32_t rank_;
  Ranks<World> ranks_;
  uint32_t room_;  // lines of a chunk in a buffer, in whole warps
  Chunks chunks_;
  Buffers buffers_;
};

// Launch shape of algorithms by QuantizedSteps. Algorithm defines kTeams and shard_lines() as for Chunked.
template <class Algorithm>
struct QuantizedChunks : Chunked<Algorithm> {
  using Base = Chunked<Algorithm>;
  static constexpr Tunables kTunables{{{"blocks", 1, kMaxChunkedBlocks},
                                       {"tile_lines", kQuantizedChunkLines, 1u << 16},
                                       {"depth", kMinHBDepth, Base::kMaxDepth}}};

  static constexpr uint64_t buffer_lines(uint64_t tile_lines) {
    return lines_of_quantized_chunk(static_cast<uint32_t>(tile_lines));
  }

  // If the staging memory is too small, chunks shrink and the number of blocks stays.
  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    Tiling tiling{tuning.blocks, kQuantizedChunkLines, 1, tuning.depth < kMinHBDepth ? kMinHBDepth : tuning.depth,
                  problem.count};
    const uint64_t of_smallest = Base::staging_bytes(tiling, problem.world);
    const uint64_t most = of_smallest == 0 ? 0 : limits.staging_bytes / of_smallest;
    const uint64_t wanted = tuning.tile_lines / kQuantizedChunkLines;
    tiling.tile_lines *= static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, most < 1 ? 1 : most));
    return tiling;
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    if (tiling.tile_lines % kQuantizedChunkLines != 0) {
      throw std::invalid_argument("tile_lines is " + std::to_string(tiling.tile_lines) + "; it must be a multiple of " +
                                  std::to_string(kQuantizedChunkLines));
    }
    return Base::grid(problem, tiling, units, limits);
  }

  // First a shape for any size, within 3 % of the fastest from 8 to 64 MiB on 2 GPUs: as many blocks as multiprocessors,
  // if the staging memory has room for them. A block gets one chunk, or several of kMostLines.
  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    constexpr uint64_t kFewestLines = 64;
    constexpr uint64_t kMostLines = 1024;
    constexpr uint32_t kDepth = kMinHBDepth;
    const uint64_t of_a_block = Base::staging_bytes({1, kQuantizedChunkLines, 1, kDepth, 0}, problem.world);
    const uint64_t most = std::clamp<uint64_t>(limits.staging_bytes / of_a_block, 1, kMaxChunkedBlocks);
    const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(limits.multiprocessors(), most));
    const uint64_t lines =
        divide_up(Algorithm::shard_lines(problem, problem.count), uint64_t{blocks} * kQuantizedChunkLines) *
        kQuantizedChunkLines;
    std::vector<TuningParameters> found = Base::candidates(problem, limits);
    found.insert(found.begin(), {.blocks = blocks,
                                 .tile_lines = static_cast<uint32_t>(std::clamp(lines, kFewestLines, kMostLines)),
                                 .depth = kDepth});
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
