// All-gather of symmetric outputs by push (HB): every rank stores its shard at its position in the output of each rank.
//
// One hop. Each rank sends its shard to N-1 peers, and nothing is staged. The input may be any tensor; the output is in
// symmetric memory on every rank. direct.cuh proves that the outputs may be written and that they are complete at the
// end.
#pragma once

#include "algorithms/all_gather/operation.cuh"
#include "algorithms/direct.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherDirectPushHB = kKindOf<struct AllGatherDirectPushHB>;

// Positions of a shard's lines in the whole tensor. Both are multiples of lines.
class LinesOfShard {
 public:
  LLM_COMM_DEVICE LinesOfShard(const Shards& shards, uint32_t rank, uint32_t element_bytes)
      : first_(shards.shard[rank].first * element_bytes),
        row_bytes_(shards.row_elements * element_bytes),
        lines_of_row_(static_cast<uint32_t>(shards.shard[rank].size * element_bytes / sizeof(Line))),
        has_gaps_(shards.rows > 1) {}

  // Byte offset in the tensor of a line of the shard.
  LLM_COMM_DEVICE uint64_t offset(uint32_t line) const {
    if (!has_gaps_) return first_ + uint64_t{line} * sizeof(Line);
    const uint32_t row = line / lines_of_row_;
    return first_ + row * row_bytes_ + uint64_t{line - row * lines_of_row_} * sizeof(Line);
  }

 private:
  uint64_t first_;
  uint64_t row_bytes_;
  uint32_t lines_of_row_;
  bool has_gaps_;
};

template <DataType D, int World>
LLM_COMM_KERNEL(kMaxDirectThreads)
all_gather_direct_push_hb(LLM_COMM_KERNEL_PARAM DirectArgs<ShardsArgs> args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const ShardView<D> source(args.input, args.shards.shard[rank], 0, args.range);
  const LinesOfShard target(args.shards, rank, sizeof(typename ShardView<D>::Storage));
  const Chunks chunks(block, args.tile_lines, source.lines());

  DirectSession<World, 1> session(args.comm, kAllGatherDirectPushHB, ShardView<D>::bytes_of(args.range.count), block);
  session.wait_for_grids_before(source.precomputed());
  session.begin();
  session.run(args.symmetric_offsets, [&] {
    const typename DirectSession<World, 1>::Addresses output(session, 0, rank);
    for (uint32_t t = 0; t < chunks.count(); ++t) {
      const uint32_t first = chunks.first(t);
      move_lines(
          Team::whole_block(), chunks.lines(t, source.lines()), [&](uint32_t k) { return source.load(first + k); },
          [&](uint32_t k, Line line) {
            const uint64_t offset = target.offset(first + k);
            output.for_each([&](char* to) { store_line(to + offset, line); });
          });
    }
  });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherDirectPushHB : Direct<AllGatherDirectPushHB> {
  struct Operation : DirectOperation<AllGather> {
    static uint64_t buffer_bytes(const Problem& problem, uint32_t buffer) {
      return AllGather::elements(problem, buffer, 0) * element_bytes(problem.type);
    }
  };
  static constexpr AlgorithmInfo kInfo{.name = "direct_push_hb",
                                       .protocol = "HB",
                                       .title = "all-gather of symmetric tensors by push (HB)",
                                       .symmetric = 0b10};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_direct_push_hb<D, World>;
  }

  static constexpr const char* kServed = kWholeLines;
  static bool is_served(const Problem& problem) {
    for (uint32_t rank = 0; rank < problem.world; ++rank) {
      const auto size = static_cast<uint64_t>(problem.parameter[kFirstSize + rank]);
      if (size * element_bytes(problem.type) % sizeof(Line) != 0) return false;
    }
    return true;
  }

  static uint64_t lines(const Problem& problem) { return divide_up(problem.bytes(), uint64_t{sizeof(Line)}); }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
