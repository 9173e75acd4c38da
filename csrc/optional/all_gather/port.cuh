// All-gather over port channels: copy engines bring every rank's shard, chunk by chunk, to the staging memory of all
// peers, where a few blocks copy it to its position.
//
// One hop. exchange_chunks() explains why buffers, sources and staging memory are safe to use. The last chunks of a
// short shard are empty: no rank sends them or waits for them.
#pragma once

#include "algorithms/all_gather/operation.cuh"
#include "optional/port_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherPort = kKindOf<struct AllGatherPort>;

template <DataType D, int World>
LLM_COMM_KERNEL(kMaxPortThreads)
all_gather_port(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  const uint32_t block = block_number(args.comm);
  const Ranks<World> ranks(args.comm.world_size);
  const uint32_t rank = args.comm.rank;
  const auto target_of = [&](uint32_t owner) {
    return ShardView<D>(args.output, args.shards.shard[owner], args.shards.row_elements, args.range);
  };
  const ShardView<D> source(args.input, args.shards.shard[rank], 0, args.range);
  const ShardView<D> own = target_of(rank);
  const Chunks chunks(block, args.tile_lines, ShardView<D>::lines_of(args.range.count));
  const uint32_t stages = stages_of(args.depth);
  const uint32_t stages_of_half = (stages + 1) / 2;

  PortSession session(args.comm, kAllGatherPort, ShardView<D>::bytes_of(args.range.count), block,
                      shared_memory<Line>()->word);
  const PortBuffers buffers(args.comm, block, args.tile_lines, stages_of_half);
  session.wait_for_grids_before(source.precomputed(), own.precomputed());
  session.begin();

  const auto send = [&](uint32_t peer, uint32_t t) {
    const uint32_t first = chunks.first(t);
    const uint32_t lines = chunks.lines(t, source.lines());
    return lines == 0 || session.put(peer, buffers.offset(peer, rank, t % stages), source.bytes_from(first),
                                     source.bytes_of_lines(first, lines), 0, t);
  };
  const auto await = [&](uint32_t peer, uint32_t t) {
    const uint64_t elements = args.range.within(args.shards.shard[peer].length);
    return chunks.lines(t, ShardView<D>::lines_of(elements)) == 0 || session.wait_for_data(peer, 0, t, 0);
  };
  const auto take = [&](uint32_t t) {
    const uint32_t first = chunks.first(t);
    LLM_COMM_UNROLL(1)
    for (uint32_t i = 1; i < ranks.count(); ++i) {
      const uint32_t from = ranks.after(rank, i);
      const ShardView<D> target = target_of(from);
      const Line* const received = buffers.received(from, t % stages);
      move_lines(
          Team::whole_block(), chunks.lines(t, target.lines()), [&](uint32_t k) { return load_line(received + k); },
          [&](uint32_t k, Line line) { target.store(first + k, line); });
    }
    move_lines(
        Team::whole_block(), chunks.lines(t, source.lines()), [&](uint32_t k) { return source.load(first + k); },
        [&](uint32_t k, Line line) { own.store(first + k, line); });
  };
  exchange_chunks(session, chunks.count(), stages, stages_of_half, send, await, take);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherPort : InPortChunks<AllGatherPort> {
  using Operation = AllGather;
  static constexpr AlgorithmInfo kInfo{"port", "Port", "all-gather by copy engines"};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_port<D, World>;
  }

  static constexpr uint32_t hops(uint32_t) { return 1; }
  static constexpr uint64_t stages_of_half(uint64_t stages, uint64_t) { return (stages + 1) / 2; }
  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
