// All-gather of symmetric outputs by copy engines (PortChannel): every rank copies its shard to its position in the
// output of each peer, with one copy per peer, and stores it to its own output meanwhile.
//
// One hop. Each rank sends its shard to N-1 peers, and nothing is staged. A copy engine reaches a higher bandwidth than
// stores of a kernel, but only in large copies; hence one copy per peer. It starts late, after a host thread has seen
// the request. Until then the blocks store the head of the shard to the peers, and the copy leaves the head out. The
// input may be any tensor; the output is in symmetric memory on every rank. direct.cuh proves that the outputs may be
// written and that they are complete at the end.
//
// Block 0 makes the requests to the proxy. The proof covers the proxy's accesses too: a rank has finished its work only
// when the shards of all peers have arrived. When all ranks have finished, everything that this rank has put has left
// its input.
#pragma once

#include "algorithms/all_gather/operation.cuh"
#include "algorithms/copy_head.h"
#include "algorithms/direct.cuh"
#include "llm_comm/port_words.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherDirectPort = kKindOf<struct AllGatherDirectPort>;

template <DataType D, int World>
LLM_COMM_KERNEL(kMaxDirectThreads)
all_gather_direct_port(LLM_COMM_KERNEL_PARAM DirectArgs<ShardsArgs> args) {
  const uint32_t block = block_number(args.comm);
  const Ranks<World> ranks(args.comm.world_size);
  const uint32_t rank = args.comm.rank;
  const uint32_t peer = thread_index();
  const bool talks = block == 0 && peer < ranks.count() && peer != rank;
  const ShardView<D> source(args.input, args.shards.shard[rank], 0, args.range);
  const uint32_t lines = source.lines();
  const uint32_t most = kMaxHeadLines / (ranks.count() - 1);
  const uint32_t head = lines / kPiecesPerHead < most ? lines / kPiecesPerHead : most;

  DirectSession<World, 1> session(args.comm, kAllGatherDirectPort, ShardView<D>::bytes_of(args.range.count), block);
  session.wait_for_grids_before(source.precomputed());
  session.begin();
  session.run(args.symmetric_offsets, [&] {
    const PortWords words(args.comm, 0);
    const auto wait = [&](auto poll) { return session.wait_until(poll, peer, kDone); };
    const auto output = [&](uint32_t of) {
      return ShardView<D>(session.address(0, of), args.shards.shard[rank], args.shards.row_elements, args.range);
    };
    if (talks && head < lines) {
      const uint64_t offset = ShardView<D>::bytes_of(args.shards.shard[rank].first) + uint64_t{head} * sizeof(Line);
      words.put_to_heap(peer, session.symmetric_offset(0, peer) + offset, source.bytes_from(head),
                        source.bytes_of_lines(head, lines - head), 0, session.value_of(0), wait);
    }
    LLM_COMM_UNROLL(1)
    for (uint32_t i = 0; i < ranks.count(); ++i) {
      const uint32_t to = ranks.after(rank, 1 + i);  // this rank last
      const ShardView<D> target = output(to);
      const uint32_t stored = to == rank ? lines : head;
      const Chunks chunks(block, args.tile_lines, stored);
      for (uint32_t t = 0; t < chunks.count(); ++t) {
        const uint32_t first = chunks.first(t);
        move_lines(
            Team::whole_block(), chunks.lines(t, stored), [&](uint32_t k) { return source.load(first + k); },
            [&](uint32_t k, Line line) { target.store(first + k, line); });
      }
    }
    if (talks && args.shards.shard[peer].length != 0) words.wait_for_data(peer, 0, session.value_of(0), wait);
  });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherDirectPort : Direct<AllGatherDirectPort> {
  struct Operation : DirectOperation<AllGather> {
    static uint64_t buffer_bytes(const Problem& problem, uint32_t buffer) {
      return AllGather::elements(problem, buffer, 0) * element_bytes(problem.type);
    }
  };
  static constexpr AlgorithmInfo kInfo{.name = "direct_port",
                                       .protocol = "Port",
                                       .title = "all-gather of symmetric tensors by copy engines",
                                       .symmetric = 0b10};
  static constexpr bool kUsesPorts = true;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_direct_port<D, World>;
  }

  // A copy engine would copy each row separately, so only single-row shards are supported. Shards may begin at any
  // address.
  static constexpr const char* kServed = "copy engines take shards that lie in one piece: dim must be 0";
  static bool is_served(const Problem& problem) { return problem.parameter[kRows] == 1; }

  static uint64_t lines(const Problem& problem) { return divide_up(problem.bytes(), uint64_t{sizeof(Line)}); }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
