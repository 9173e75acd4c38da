// All-reduce over port channels: copy engines move the message chunk by chunk, and a few blocks reduce.
//
// Two ranks: one hop. Each sends its whole message to the other's staging memory, and both reduce. The traffic is that
// of a two-shot. exchange_chunks() explains why buffers, sources and staging memory are safe to use. In place, a sum
// overwrites a source that may not have been sent. A chunk is therefore reduced only after its local completion too.
//
// More ranks: two-shot (2PA). In step s a block
//   1. reduces chunk s of this rank's slice, which the peers scattered to the first half of its staging memory;
//   2. sends the sum from the output to the second half of all peers (gather);
//   3. collects chunk s - 1 of the peers' slices;
//   4. signals step s, and scatters chunk s + stages.
//
// Why a buffer may be reused. Each half has `stages` >= 2 buffers for each sender.
//   - Chunk s of a slice overwrites chunk s - stages. The peer has reduced that in its step s - stages and collected it
//     in step s - stages + 1; both are earlier steps.
//   - H1: a block ends when every peer has done its last step, in which it collects the last chunk. So every peer has
//     reduced all chunks.
//   - H2: sums are sent only after a chunk of each peer has arrived. A rank without lines in that chunk sends none.
//
// Why in-place calls are safe. Collecting chunk s - 1 of a slice overwrites input of this rank. The owner has sent its
// sum, so it has received this rank's contribution. The gather reads the output until the peer has the data, that is,
// until the peer has collected it; no later step writes there.
//
// R1 of operation.cuh: a block waits for each peer. R2: no slot is used. P1: it waits for blocks of its own number
// only.
#pragma once

#include "algorithms/all_reduce/message.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "optional/port_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReducePort = kKindOf<struct AllReducePort>;

// Kernel body for two ranks.
template <DataType D>
LLM_COMM_DEVICE void all_reduce_in_one_hop(const AllReduceArgs& args, uint32_t block, PortSession& session) {
  const uint32_t rank = args.comm.rank;
  const Message<D> message(args);
  const Chunks chunks(block, args.tile_lines, message.lines());
  const uint32_t stages = stages_of(args.depth);
  const uint32_t stages_of_half = (stages + 1) / 2;
  const PortBuffers buffers(args.comm, block, args.tile_lines, stages_of_half);
  const bool in_place = args.input == args.output;

  const auto send = [&](uint32_t peer, uint32_t t) {
    const uint32_t first = chunks.first(t);
    const uint32_t lines = chunks.lines(t, message.lines());
    if (lines == 0) return true;
    return session.put(peer, buffers.offset(peer, rank, t % stages), message.input_from(first),
                       message.bytes_of_lines(first, lines), 0, t) &&
           (!in_place || session.request_local_completion(peer, t));
  };
  const auto await = [&](uint32_t peer, uint32_t t) {
    if (chunks.lines(t, message.lines()) == 0) return true;
    return session.wait_for_data(peer, 0, t, 0) && (!in_place || session.wait_for_local_completion(peer, t, 0));
  };
  const auto take = [&](uint32_t t) {
    const uint32_t first = chunks.first(t);
    const Line* const received = buffers.received(1 - rank, t % stages);
    sum_chunk<D, 2>(
        Team::whole_block(), chunks.lines(t, message.lines()),
        [&](uint32_t of, uint32_t k) { return of == rank ? message.load(first + k) : load_line(received + k); },
        [&](uint32_t k, Line line) { message.store(first + k, line); });
  };
  exchange_chunks(session, chunks.count(), stages, stages_of_half, send, await, take);
}

template <DataType D, int World>
LLM_COMM_DEVICE void all_reduce_in_two_hops(const AllReduceArgs& args, uint32_t block, PortSession& session) {
  const uint32_t rank = args.comm.rank;
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const Ranks<World> ranks(args.comm.world_size);
  const uint32_t slice = (lines + ranks.count() - 1) / ranks.count();
  const Chunks chunks(block, args.tile_lines, slice);
  const uint32_t stages = stages_of(args.depth);
  const PortBuffers buffers(args.comm, block, args.tile_lines, stages);
  const auto lines_of = [&](uint32_t t, uint32_t owner) {
    return chunks.lines(t, lines_of_slice(owner, slice, lines));
  };
  const auto stage_of = [&](uint32_t t, uint32_t hop) { return hop * stages + t % stages; };

  const auto send = [&](uint32_t peer, uint32_t t, uint32_t owner, uint32_t hop) {
    const uint32_t count = lines_of(t, owner);
    const uint32_t first = owner * slice + chunks.first(t);
    const void* const source = hop == kScatter ? message.input_from(first) : message.output_from(first);
    return count == 0 || session.put(peer, buffers.offset(peer, rank, stage_of(t, hop)), source,
                                     message.bytes_of_lines(first, count), hop, t);
  };
  const auto await = [&](uint32_t peer, uint32_t t, uint32_t owner, uint32_t hop) {
    return lines_of(t, owner) == 0 || session.wait_for_data(peer, hop, t, hop);
  };
  const auto reduce = [&](uint32_t t) {
    const uint32_t first = rank * slice + chunks.first(t);
    const uint32_t stage = stage_of(t, kScatter);
    sum_chunk<D, World>(
        Team::whole_block(), lines_of(t, rank),
        [&](uint32_t of, uint32_t k) {
          return of == rank ? message.load(first + k) : load_line(buffers.received(of, stage) + k);
        },
        [&](uint32_t k, Line line) { message.store(first + k, line); }, ranks);
  };
  const auto collect = [&](uint32_t t) {
    LLM_COMM_UNROLL(1)
    for (uint32_t i = 1; i < ranks.count(); ++i) {
      const uint32_t from = ranks.after(rank, i);
      const uint32_t first = from * slice + chunks.first(t);
      const Line* const received = buffers.received(from, stage_of(t, kGather));
      move_lines(
          Team::whole_block(), lines_of(t, from), [&](uint32_t k) { return load_line(received + k); },
          [&](uint32_t k, Line line) { message.store(first + k, line); });
    }
  };

  const bool has_begun = session.for_each_peer([&](uint32_t peer) {
    for (uint32_t t = 0; t < stages && t < chunks.count(); ++t) {
      if (!send(peer, t, peer, kScatter)) return false;
    }
    return true;
  });
  if (!has_begun) return;
  for (uint32_t s = 0; s <= chunks.count(); ++s) {
    if (s < chunks.count()) {
      if (!session.for_each_peer([&](uint32_t peer) { return await(peer, s, rank, kScatter); })) return;
      reduce(s);
      block_sync();
    }
    const bool goes_on = session.for_each_peer([&](uint32_t peer) {
      if (s < chunks.count()) {
        if (s >= stages && !session.wait_for_step(peer, s - stages + 1, kGather)) return false;
        if (!send(peer, s, rank, kGather)) return false;
      }
      return s == 0 || await(peer, s - 1, peer, kGather);
    });
    if (!goes_on) return;
    if (s > 0) collect(s - 1);
    block_sync();
    const bool has_scattered = session.for_each_peer([&](uint32_t peer) {
      session.signal(peer, s);
      if (s + stages >= chunks.count()) return true;
      return session.wait_for_step(peer, s, kScatter) && send(peer, s + stages, peer, kScatter);
    });
    if (!has_scattered) return;
  }
  session.for_each_peer([&](uint32_t peer) { return session.wait_for_step(peer, chunks.count(), kGather); });
}

template <DataType D, int World>
LLM_COMM_KERNEL(kMaxPortThreads)
all_reduce_port(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  const uint32_t block = block_number(args.comm);
  const Message<D> message(args);
  PortSession session(args.comm, kAllReducePort, message.bytes(), block, shared_memory<Line>()->word);
  session.wait_for_grids_before(message.precomputed());
  session.begin();
  if constexpr (World == 2) {
    all_reduce_in_one_hop<D>(args, block, session);
  } else {
    all_reduce_in_two_hops<D, World>(args, block, session);
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReducePort : InPortChunks<AllReducePort> {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{"port", "Port", "all-reduce by copy engines"};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_port<D, World>;
  }

  static constexpr uint32_t hops(uint32_t world) { return world == 2 ? 1 : 2; }
  static constexpr uint64_t stages_of_half(uint64_t stages, uint64_t world) {
    return world == 2 ? (stages + 1) / 2 : stages;
  }
  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    const uint64_t lines = divide_up(units * element_bytes(problem.type), sizeof(Line));
    return problem.world == 2 ? lines : divide_up(lines, uint64_t{problem.world});
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
