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
#pragma once

#include "algorithms/all_reduce/chunked_slices.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "algorithms/quantized_reference.h"
#include "algorithms/quantized_steps.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Lines of the largest slice, in whole blocks, of a message of elements of `bytes` bytes each.
LLM_COMM_HOST_DEVICE constexpr uint64_t lines_of_quantized_slice(uint64_t lines, uint64_t world, uint32_t bytes) {
  const uint64_t lines_of_block = kQuantizedBlock * bytes / sizeof(Line);
  const uint64_t blocks = (lines + lines_of_block - 1) / lines_of_block;
  return (blocks + world - 1) / world * lines_of_block;
}

template <DataType D, int World, Wire W>
LLM_COMM_DEVICE void two_shot_quantized_hb(const AllReduceArgs& args, OperationKind kind) {
  const uint32_t block = block_number(args.comm);
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // arguments() may lower it
  const Ranks<World> ranks(args.comm.world_size);
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const auto slice =
      static_cast<uint32_t>(lines_of_quantized_slice(lines, ranks.count(), sizeof(typename Element<D>::Storage)));
  const auto slice_of = [&](uint32_t owner) { return Slice<D>(message, owner, slice, lines); };

  HBSession session(args.comm, kind, message.bytes(), SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const StepPipeline<D, World> pipeline(session, args.comm, block, args.tile_lines, depth, slice);
  const QuantizedSteps<D, World, W> steps(args.comm, block, args.tile_lines, depth, slice);
  session.wait_for_grids_before(message.precomputed());
  session.begin();
  pipeline.run([&](const Team& team, uint32_t t) { steps.stage(team, t, slice_of); },
               [&](const Team& team, uint32_t t) { steps.sum_for_all(team, t, slice_of(args.comm.rank)); },
               [&](const Team& team, uint32_t t) { steps.collect(team, kSecondHop, t, slice_of); });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

// Algorithm defines kInfo, kWire and kernel().
template <class Algorithm>
struct TwoShotQuantizedHB : QuantizedChunks<Algorithm> {
  static constexpr uint32_t kTeams = kTwoShotTeams;

  struct Operation : AllReduce {
    template <class Input>
    static uint32_t expect(const Problem& problem, uint32_t, uint64_t i, Input input) {
      const uint64_t slice = lines_of_quantized_slice(divide_up(problem.bytes(), sizeof(Line)), problem.world,
                                                      element_bytes(problem.type)) *
                             sizeof(Line) / element_bytes(problem.type);
      return quantized_sum_of_one<Algorithm::kWire>(problem.type, problem.world, problem.count, slice, i, input);
    }
  };

  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    const uint32_t bytes = element_bytes(problem.type);
    return lines_of_quantized_slice(divide_up(units * bytes, sizeof(Line)), problem.world, bytes);
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
