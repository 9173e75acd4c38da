// All-gather by push (HB) of quantized values: shards travel as FP8 (e4m3) with a scale for each block (quantized.cuh).
// For option `wire`, and only for calls that permit it.
//
// The steps are those of push_hb.cuh. A rank keeps the quantized values of its own shard too, so all ranks get the same
// bits. Blocks are counted from the beginning of a shard; the last one is filled up with zeros. In place the thread
// that has loaded a line of the shard stores it. step_pipeline.cuh proves that the buffers may be reused.
#pragma once

#include "algorithms/all_gather/push_hb.cuh"
#include "algorithms/quantized_reference.h"
#include "algorithms/quantized_steps.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherPushFP8HB = kKindOf<struct AllGatherPushFP8HB>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kAllGatherPushTeams))
all_gather_push_fp8_hb(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  const uint32_t block = block_number(args.comm);
  const auto target_of = [&](uint32_t owner) {
    return ShardView<D>(args.output, args.shards.shard[owner], args.shards.row_elements, args.range);
  };
  const ShardView<D> source(args.input, args.shards.shard[args.comm.rank], 0, args.range);
  const ShardView<D> own = target_of(args.comm.rank);
  const uint32_t lines = ShardView<D>::lines_of(args.range.count);

  HBSession session(args.comm, kAllGatherPushFP8HB, ShardView<D>::bytes_of(args.range.count),
                    SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const StepPipeline<D, World> pipeline(session, args.comm, block, args.tile_lines, args.depth, lines);
  const QuantizedSteps<D, World, Wire::kFP8> steps(args.comm, block, args.tile_lines, args.depth, lines);
  session.wait_for_grids_before(source.precomputed(), own.precomputed());
  session.begin();
  pipeline.run([&](const Team& team, uint32_t t) { steps.spread(team, t, source, own); },
               [&](const Team& team, uint32_t t) { steps.collect(team, kFirstHop, t, target_of); });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherPushFP8HB : QuantizedChunks<AllGatherPushFP8HB> {
  static constexpr AlgorithmInfo kInfo{
      .name = "push_fp8_hb", .protocol = "HB", .title = "all-gather by push of quantized values (fp8)", .wire = "fp8"};
  static constexpr uint32_t kTeams = kAllGatherPushTeams;

  struct Operation : AllGather {
    static constexpr bool serves(DataType type) { return is_number(type); }

    // An element is the quantized sum of one contribution.
    template <class Input>
    static uint32_t expect(const Problem& problem, uint32_t rank, uint64_t i, Input input) {
      const Shards shards = shards_of(problem);
      return AllGather::expect(problem, rank, i, [&](uint32_t owner, uint64_t j) {
        return quantized_sum_of_owner<Wire::kFP8>(
            problem.type, 1, shards.shard[owner].length, 0, j,
            [&](uint32_t, uint64_t element) { return input(owner, element); }, true);
      });
    }
  };

  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_push_fp8_hb<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
