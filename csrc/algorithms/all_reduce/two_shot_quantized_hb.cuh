// Two-shot all-reduce of quantized values (2PA, HB, push): contributions and sums travel with 8 bits an element and a
// scale for each block (quantized.cuh). For option `wire`.
//
// The steps are those of two_shot_hb.cuh: each rank sends its contribution to a slice to the slice's owner, which adds
// and sends the sums to all. The owner adds its own contribution unquantized, in fp32 and in rank order, and quantizes
// the sum once. It keeps the same quantized sum that it sends, so all ranks get the same bits. The sum of an element
// depends on the owner of its slice and on the other elements of its block.
//
// A slice is whole blocks, so blocks begin at multiples of kQuantizedBlock elements of the message. The last block is
// filled up with zeros.
//
// A buffer of a chunk holds the codes of its lines, then the scales of its blocks. step_pipeline.cuh proves that buffers
// may be reused.
#pragma once

#include "algorithms/all_reduce/chunked_slices.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "algorithms/quantized.cuh"
#include "algorithms/quantized_reference.h"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Lines of the largest slice, in whole blocks, of a message of elements of `bytes` bytes each.
LLM_COMM_HOST_DEVICE constexpr uint64_t lines_of_quantized_slice(uint64_t lines, uint64_t world, uint32_t bytes) {
  const uint64_t lines_of_block = kQuantizedBlock * bytes / sizeof(Line);
  const uint64_t blocks = (lines + lines_of_block - 1) / lines_of_block;
  return (blocks + world - 1) / world * lines_of_block;
}

// Chunks are multiples of this: the lanes of whole warps, and whole blocks of any type.
inline constexpr uint32_t kQuantizedChunkLines = kWarpThreads;
// Lines of the buffer of a chunk of `lines` lines: half of them for codes, of one byte in place of two or four, and one
// for the scales of each kQuantizedChunkLines.
LLM_COMM_HOST_DEVICE constexpr uint32_t lines_of_quantized_chunk(uint32_t lines) {
  return lines / kQuantizedChunkLines * (kQuantizedChunkLines / 2 + 1);
}

// Jobs of the teams of a block: what each does with chunk t of a slice.
template <DataType D, int World, Wire W>
class QuantizedSteps {
 public:
  LLM_COMM_DEVICE QuantizedSteps(const DeviceComm& comm, uint32_t block, uint32_t chunk_lines, uint32_t depth,
                                 uint32_t slice)
      : rank_(comm.rank),
        chunk_lines_(chunk_lines),
        chunks_(block, chunk_lines, slice),
        buffers_(comm, block, lines_of_quantized_chunk(chunk_lines), depth) {}

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

  // Adds the contributions to this rank's slice, sends the quantized sums to all peers, and keeps them.
  template <class Own>
  LLM_COMM_DEVICE void sum_for_all(const Team& team, uint32_t t, const Own& own) const {
    const typename Buffers::ToOthers others(buffers_, kSecondHop, t);
    const typename Buffers::FromOthers incoming(buffers_, kFirstHop, t);
    const uint32_t first = chunks_.first(t);
    const uint32_t lines = chunks_.lines(t, own.lines());
    struct Contributions {
      Line own;
      Quantized of_other[World - 1];
    };
    send_rows<kSummedTogether>(
        team, lines,
        [&](uint32_t k) {
          Contributions all;
          all.own = k < lines ? own.load(first + k) : Line{};
          LLM_COMM_UNROLL(8)
          for (uint32_t i = 0; i < World - 1; ++i) all.of_other[i] = get(incoming.of(i), k);
          return all;
        },
        [&](uint32_t k, const Contributions& all) {
          const Quantized sum = quantize<W>(sum_of(all.own, all.of_other));
          store(own, first, k, lines, sum);
          return sum;
        },
        [&](auto store) { others.for_each(store); });
  }

  // Dequantizes the sums of the other owners.
  template <class SliceOf>
  LLM_COMM_DEVICE void collect(const Team& team, uint32_t t, SliceOf slice_of) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t i = 1; i < World; ++i) {
      const uint32_t owner = (rank_ + i) % World;
      const auto& slice = slice_of(owner);
      const Line* const sent = buffers_.from(kSecondHop, t, owner);
      const uint32_t first = chunks_.first(t);
      const uint32_t lines = chunks_.lines(t, slice.lines());
      for_each_row<kMovedTogether>(
          team, lines, [&](uint32_t k) { return get(sent, k); },
          [&](uint32_t k, uint32_t, const Quantized& sum) { store(slice, first, k, lines, sum); },
          [](uint32_t, uint32_t) {});
    }
  }

 private:
  using Buffers = ChunkBuffers<World>;
  static constexpr uint32_t kPerLine = LineElements<D>::kCount;
  using Quantized = QuantizedLine<kPerLine>;
  using Codes = typename Quantized::Codes;
  static constexpr uint32_t kBlockLines = kQuantizedBlock / kPerLine;
  static constexpr uint32_t kRowBlocks = kWarpThreads / kBlockLines;
  // Rows whose loads a thread has in flight together. More cost registers, which the compiler then spills.
  static constexpr uint32_t kMovedTogether = World == 2 ? 1 : 2;
  static constexpr uint32_t kSummedTogether = World == 2 ? 2 : 1;

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
  LLM_COMM_DEVICE Values<kPerLine> sum_of(Line own, const Quantized (&of_other)[World - 1]) const {
    Values<kPerLine> sum;
    const auto add = [&](bool is_first, const Values<kPerLine>& x) {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 0; i < kPerLine; ++i) sum.of[i] = is_first ? x.of[i] : sum.of[i] + x.of[i];
    };
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < World; ++i) {
      if (i == rank_) add(i == 0, LineElements<D>::values(own));
      if (i < World - 1) add(i == 0 && rank_ != 0, dequantize<W>(of_other[i]));
    }
    return sum;
  }

  LLM_COMM_DEVICE float* scales(Line* buffer) const {
    return reinterpret_cast<float*>(reinterpret_cast<Codes*>(buffer) + chunk_lines_);
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
  uint32_t chunk_lines_;
  Chunks chunks_;
  Buffers buffers_;
};

template <DataType D, int World, Wire W>
LLM_COMM_DEVICE void two_shot_quantized_hb(const AllReduceArgs& args, OperationKind kind) {
  const uint32_t block = block_number(args.comm);
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // arguments() may lower it
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const auto slice =
      static_cast<uint32_t>(lines_of_quantized_slice(lines, World, sizeof(typename Element<D>::Storage)));
  const auto slice_of = [&](uint32_t owner) { return Slice<D>(message, owner, slice, lines); };

  HBSession session(args.comm, kind, message.bytes(), SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const StepPipeline<D, World> pipeline(session, args.comm, block, args.tile_lines, depth, slice);
  const QuantizedSteps<D, World, W> steps(args.comm, block, args.tile_lines, depth, slice);
  session.wait_for_grids_before(message.precomputed());
  session.begin();
  pipeline.run([&](const Team& team, uint32_t t) { steps.stage(team, t, slice_of); },
               [&](const Team& team, uint32_t t) { steps.sum_for_all(team, t, slice_of(args.comm.rank)); },
               [&](const Team& team, uint32_t t) { steps.collect(team, t, slice_of); });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

// Algorithm defines kInfo, kWire and kernel().
template <class Algorithm>
struct TwoShotQuantizedHB : Chunked<Algorithm> {
  using Base = Chunked<Algorithm>;
  static constexpr uint32_t kTeams = kTwoShotTeams;
  static constexpr Tunables kTunables{{{"blocks", 1, kMaxChunkedBlocks},
                                       {"tile_lines", kQuantizedChunkLines, 1u << 16},
                                       {"depth", kMinHBDepth, Base::kMaxDepth}}};

  struct Operation : AllReduce {
    template <class Input>
    static uint32_t expect(const Problem& problem, uint32_t, uint64_t i, Input input) {
      return quantized_sum_of_one<Algorithm::kWire>(problem.type, problem.world, problem.count, i, input);
    }
  };

  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    const uint32_t bytes = element_bytes(problem.type);
    return lines_of_quantized_slice(divide_up(units * bytes, sizeof(Line)), problem.world, bytes);
  }

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
        divide_up(shard_lines(problem, problem.count), uint64_t{blocks} * kQuantizedChunkLines) * kQuantizedChunkLines;
    std::vector<TuningParameters> found = Base::candidates(problem, limits);
    found.insert(found.begin(), {.blocks = blocks,
                                 .tile_lines = static_cast<uint32_t>(std::clamp(lines, kFewestLines, kMostLines)),
                                 .depth = kDepth});
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
