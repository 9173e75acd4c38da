// Two-shot all-reduce (2PA, HB, push): every rank sums a slice of the message and sends the sum to all. Plain stores, one
// synchronization for each chunk of a slice.
//
// Two hops, 2 (N-1)/N of the message sent by each rank. A block has a chunk of each slice under way at a time, and takes three
// steps for it: it scatters what this rank has of chunk t, reduces chunk t - depth of this rank's slice, and collects chunk
// t - 2 depth of the others' slices. All three are done in step t, for which the block has waited for step t - depth of the
// blocks of its number.
//
// Buffers: 2 depth for each hop, in turn.
//   Scattering chunk t overwrites chunk t - 2 depth at a peer. The peer reduced that in its step t - depth, for which this block
//   has waited.
//   Sending the sums of chunk t - depth, in step t, overwrites those of chunk t - 3 depth. The peer collected those in its
//   step t - depth.
//   The first chunks of an operation (hb_session.cuh): H1, chunks are scattered to the first half, and a rank ends after it has
//   waited for every peer's last reduction; H2, sums are sent to the second half, from step `depth` on.
//
// R1 of operation.cuh: a block waits for each peer. R2: it uses no slot.
#pragma once

#include "algorithms/all_reduce/message.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "llm_comm/hb_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotHB{7};

// Moves lines thread(), thread() + threads, ... of so many, several at a time: a thread has that many loads under way.
template <class Load, class Store>
LLM_COMM_DEVICE void move_lines(uint32_t lines, Load load, Store store) {
  constexpr uint32_t kBatch = 4;
  const uint32_t threads = block_threads();
  for (uint32_t i = thread_index(); i < lines; i += kBatch * threads) {
    Line line[kBatch];
    LLM_COMM_UNROLL(4)
    for (uint32_t j = 0; j < kBatch; ++j) {
      if (i + j * threads < lines) line[j] = load(i + j * threads);
    }
    LLM_COMM_UNROLL(4)
    for (uint32_t j = 0; j < kBatch; ++j) {
      if (i + j * threads < lines) store(i + j * threads, line[j]);
    }
  }
}

template <DataType D, int World>
LLM_COMM_KERNEL(kMaxBlockThreads)
all_reduce_two_shot_hb(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  constexpr uint32_t kPerLine = Message<D>::kPerLine;
  using LinePack = Pack<D, kPerLine>;

  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t depth = args.depth;
  const uint32_t chunk = args.tile_lines;
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const uint32_t slice = (lines + World - 1) / World;
  const uint32_t stride = block_count() * chunk;
  const uint32_t chunks = (slice + stride - 1) / stride;
  // Set by threads whose wait has been aborted, or that may not begin: the block goes no further.
  uint32_t* const incomplete = shared_memory<Line>()->word;
  if (thread_index() == 0) *incomplete = 0;

  HBSession session(args.comm, kAllReduceTwoShotHB, message.bytes(), block);
  session.wait_for_grids_before(message.precomputed());
  const bool begun = session.begin();
  block_sync();
  if (!begun) *incomplete = 1;

  // [hop] by halves, [buffer][block][sender][line]
  const auto buffer = [&](uint32_t receiver, uint32_t hop, uint32_t t, uint32_t sender) {
    const uint64_t turn = t % (2 * depth);
    return session.staging(receiver, hop) + ((turn * block_count() + block) * World + sender) * chunk;
  };
  // Lines of a chunk of a slice, and where they begin in the slice.
  const auto first_of = [&](uint32_t t) { return t * stride + block * chunk; };
  const auto lines_of = [&](uint32_t t, uint32_t owner) {
    const uint32_t all = lines_of_slice(owner, slice, lines);
    const uint32_t first = first_of(t);
    return first >= all ? 0 : (all - first < chunk ? all - first : chunk);
  };

  for (uint32_t t = 0; t < chunks + 2 * depth; ++t) {
    const uint32_t peer = thread_index();
    if (t >= depth && peer < World && peer != rank &&
        !session.wait(peer, t - depth, t < 2 * depth ? kScatter : kGather))
      *incomplete = 1;
    block_sync();
    if (t == 0 && thread_index() == 0) session.arrive();
    if (*incomplete != 0) return;

    if (t < chunks) {
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i < World; ++i) {
        const uint32_t to = (rank + i) % World;  // every rank begins with another one
        Line* const target = buffer(to, kScatter, t, rank);
        const uint32_t first = to * slice + first_of(t);
        move_lines(
            lines_of(t, to), [&](uint32_t k) { return message.load(first + k); },
            [&](uint32_t k, Line line) { store_line(target + k, line); });
      }
    }
    if (t >= depth && t - depth < chunks) {
      const uint32_t u = t - depth;
      const uint32_t first = rank * slice + first_of(u);
      for (uint32_t k = thread_index(); k < lines_of(u, rank); k += block_threads()) {
        LinePack contribution[World];
        LLM_COMM_UNROLL(8)
        for (uint32_t of = 0; of < World; ++of) {
          const Line line = of == rank ? message.load(first + k) : load_line(buffer(rank, kScatter, u, of) + k);
          contribution[of] = *reinterpret_cast<const LinePack*>(&line);
        }
        const LinePack sums = sum_in_rank_order<D, World>(contribution, 1);
        const Line line = *reinterpret_cast<const Line*>(&sums);
        message.store(first + k, line);
        for (uint32_t i = 1; i < World; ++i) {
          const uint32_t to = (rank + i) % World;
          store_line(buffer(to, kGather, u, rank) + k, line);
        }
      }
    }
    if (t >= 2 * depth) {
      const uint32_t v = t - 2 * depth;
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i < World; ++i) {
        const uint32_t from = (rank + i) % World;
        const Line* const source = buffer(rank, kGather, v, from);
        const uint32_t first = from * slice + first_of(v);
        move_lines(
            lines_of(v, from), [&](uint32_t k) { return load_line(source + k); },
            [&](uint32_t k, Line line) { message.store(first + k, line); });
      }
    }
    block_sync();
    if (t < chunks + depth && peer < World && peer != rank) session.signal(peer, t);
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotHB {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{"two_shot_hb", "HB", "two-shot all-reduce (HB)"};
  static constexpr OperationKind kKind = kAllReduceTwoShotHB;
  static constexpr uint32_t kMaxDepth = 8;
  static constexpr Tunables kTunables{
      {{"blocks", 1, kMaxSemaphoreBlocks}, {"tile_lines", 1, 1u << 16}, {"depth", 1, kMaxDepth}}};
  static constexpr uint32_t kVariants = 1;
  static constexpr uint32_t kMaxThreads = 512;

  // What a grid takes of the staging memory: 2 depth buffers for each hop.
  static constexpr uint64_t staging_bytes(const Tiling& tiling, uint64_t world) {
    return 2 * 2 * uint64_t{tiling.depth} * tiling.blocks * world * tiling.tile_lines * sizeof(Line);
  }

  // Blocks keep their number, and their chunks shrink, where the staging memory is too small for both.
  static Tiling tile(const Problem& problem, const Choice& choice, const Limits& limits) {
    Tiling tiling{choice.blocks, choice.tile_lines, 1, choice.depth == 0 ? 1 : choice.depth, problem.count};
    const uint64_t of_a_line = staging_bytes({tiling.blocks, 1, 1, tiling.depth, 0}, problem.world);
    const uint64_t most = of_a_line == 0 ? 0 : limits.staging_bytes / of_a_line;
    if (tiling.tile_lines > most) tiling.tile_lines = static_cast<uint32_t>(most);
    return tiling;
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    const uint64_t bytes = units * element_bytes(problem.type);
    const uint64_t slice = divide_up(divide_up(bytes, sizeof(Line)), uint64_t{problem.world});
    if (units >> 32 != 0) throw std::invalid_argument("a launch must have fewer than 2^32 elements");
    if (tiling.blocks == 0 || tiling.blocks > kMaxSemaphoreBlocks) {
      throw std::invalid_argument("blocks is " + std::to_string(tiling.blocks) + "; it must be 1 to " +
                                  std::to_string(kMaxSemaphoreBlocks));
    }
    if (tiling.depth == 0 || tiling.depth > kMaxDepth) {
      throw std::invalid_argument("depth is " + std::to_string(tiling.depth) + "; it must be 1 to 8");
    }
    if (tiling.tile_lines == 0 || staging_bytes(tiling, problem.world) > limits.staging_bytes) {
      throw std::invalid_argument("chunks of " + std::to_string(tiling.tile_lines) + " lines in " +
                                  std::to_string(tiling.blocks) + " blocks do not fit into " +
                                  std::to_string(limits.staging_bytes) +
                                  " bytes of staging memory: lower blocks or depth, or raise workspace_bytes");
    }
    const uint64_t tiles = divide_up(slice, uint64_t{tiling.tile_lines});
    const uint64_t blocks = tiling.blocks < tiles ? tiling.blocks : tiles;
    if ((divide_up(tiles, blocks) + 2 * tiling.depth) >> kMaxStepsLog2 != 0) {
      throw std::invalid_argument("a message of " + std::to_string(bytes) +
                                  " bytes takes too many steps: raise blocks or tile_lines");
    }
    const uint64_t threads = uint64_t{tiling.tile_lines} * (problem.world - 1);
    return {static_cast<uint32_t>(blocks),
            static_cast<uint32_t>(threads < problem.world ? problem.world
                                  : threads > kMaxThreads ? kMaxThreads
                                                          : threads),
            static_cast<uint32_t>(sizeof(Line))};
  }

  static std::vector<Choice> candidates(const Problem& problem, const Limits& limits) {
    std::vector<Choice> found;
    if (problem.bytes() < 1 << 20) return found;
    const uint32_t sms = limits.sm_count == 0 ? 1 : limits.sm_count;
    for (uint32_t blocks : {sms / 4 + 1, sms / 2 + 1, sms, 2 * sms, 4 * sms}) {
      for (uint32_t tile_lines : {128u, 256u, 512u, 1024u, 2048u}) {
        for (uint32_t depth : {1u, 2u}) {
          const Tiling tiling{blocks, tile_lines, 1, depth, 0};
          if (blocks > kMaxSemaphoreBlocks || staging_bytes(tiling, problem.world) > limits.staging_bytes) continue;
          found.push_back({.blocks = blocks, .tile_lines = tile_lines, .depth = depth});
        }
      }
    }
    return found;
  }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_hb<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
