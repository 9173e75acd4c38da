// Two-shot all-reduce of symmetric tensors by pull (2PA, HB): every rank loads its slice from the inputs of all ranks,
// reduces it, and stores the sums to the outputs of all ranks.
//
// (N-1)/N of the message each way; nothing is staged. Inputs and outputs are in symmetric memory on every rank.
// direct.cuh proves that they may be accessed, that inputs may be overwritten afterwards, and that outputs are complete
// at the end.
//
// The output may be the input, on any rank. Only one rank accesses the lines of a slice, in all tensors. The thread of
// that rank that stores a line has loaded the line from all ranks before.
#pragma once

#include "algorithms/all_reduce/operation.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "algorithms/direct.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotPullHB = kKindOf<struct AllReduceTwoShotPullHB>;

template <DataType D, int World>
LLM_COMM_KERNEL(kMaxDirectThreads)
all_reduce_two_shot_pull_hb(LLM_COMM_KERNEL_PARAM DirectArgs<AllReduceArgs> args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint64_t bytes = args.count * sizeof(typename Element<D>::Storage);
  const auto lines = static_cast<uint32_t>(bytes / sizeof(Line));
  const Ranks<World> ranks(args.comm.world_size);
  const uint32_t slice = (lines + ranks.count() - 1) / ranks.count();
  const uint32_t own_lines = lines_of_slice(rank, slice, lines);
  const Chunks chunks(block, args.tile_lines, slice);

  DirectSession<World, 2> session(args.comm, kAllReduceTwoShotPullHB, bytes, block);
  session.wait_for_grids_before(slice, own_lines);
  session.begin();
  session.run(args.symmetric_offsets, [&] {
    const typename DirectSession<World, 2>::Addresses input(session, 0, 0);
    const typename DirectSession<World, 2>::Addresses output(session, 1, rank);  // every rank starts with another peer
    for (uint32_t t = 0; t < chunks.count(); ++t) {
      const uint32_t chunk_lines = chunks.lines(t, own_lines);
      const uint64_t first = uint64_t{rank} * slice + chunks.first(t);
      sum_chunk<D, World>(
          Team::whole_block(), chunk_lines,
          [&](uint32_t of, uint32_t k) { return load_line(input.at(of) + (first + k) * sizeof(Line)); },
          [&](uint32_t k, Line sum) {
            output.for_each([&](char* to) { store_line(to + (first + k) * sizeof(Line), sum); });
          },
          ranks);
    }
  });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotPullHB : Direct<AllReduceTwoShotPullHB> {
  struct Operation : DirectOperation<AllReduce> {
    static uint64_t buffer_bytes(const Problem& problem, uint32_t) { return problem.bytes(); }
  };
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_pull_hb",
                                       .protocol = "HB",
                                       .title = "two-shot all-reduce of symmetric tensors by pull (HB)",
                                       .symmetric = 0b11};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_pull_hb<D, World>;
  }

  static constexpr const char* kServed = kWholeLines;
  static bool is_served(const Problem& problem) { return problem.bytes() % sizeof(Line) == 0; }
  static uint64_t lines(const Problem& problem) {
    return divide_up(problem.bytes() / sizeof(Line), uint64_t{problem.world});
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
