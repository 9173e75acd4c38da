// Two-shot all-reduce of symmetric outputs (2PA) by copy engines (CE): every rank reduces one slice of the message.
// Copy engines bring it the other ranks' contributions, and bring its sums to all outputs.
//
// Two hops; each rank sends 2 (N-1)/N of the message. No store of a kernel crosses a link, because copy engines reach a
// higher bandwidth (docs/experiments/channels.md). A slice is divided into pieces, so that one piece is reduced while
// others are in flight (stream_copies.cuh). The input may be any tensor; the output has the same symmetric offset on
// every rank.
//
// Nothing is staged. A rank's contribution to another rank's slice goes to a slice of the owner's output, the zone of
// the sender. The zone of the last rank is the owner's own slice; the zone of any other rank is that rank's slice. So
// the zones of an owner are distinct, and none is the last slice, which may be short. With two ranks the zone is the
// owner's slice.
//
// Incoming contributions would overwrite an input that is also the output, so in-place calls are not supported
// (kIsOutOfPlace).
//
// Why each write is safe:
//   W1  A rank writes to its zone: the owner has passed the entry barrier, so earlier grids have ended there. Only the
//       sender writes to the zone until the owner has reduced it.
//   W2  The owner's sum is written to a peer's output: that place is, piece by piece, a zone that the peer has reduced,
//       or no zone. With two ranks it is never a zone, so there is nothing to wait for.
//   W3  The owner stores its sum to its own slice: what arrived there was loaded by the same thread for this sum.
//
// R1 of operation.cuh: in each grid a block waits for each peer. R2: no slot is used. P1: blocks wait for blocks of
// their own number.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "algorithms/all_reduce/message.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "algorithms/stream_copies.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotCE = kKindOf<struct AllReduceTwoShotCE>;

// Slice of the owner's output that is the zone of `sender`.
LLM_COMM_HOST_DEVICE constexpr uint32_t zone_of(uint32_t sender, uint32_t owner, uint32_t world) {
  return world == 2 || sender == world - 1 ? owner : sender;
}

// Grid of a piece: a block reduces chunks of the piece of this rank's slice.
template <DataType D, int World>
LLM_COMM_DEVICE void sum_piece(const StreamCopyArgs<AllReduceArgs>& args, const Message<D>& message, uint32_t piece) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t lines = message.lines();
  const Ranks<World> ranks(args.comm.world_size);
  const uint32_t slice = (lines + ranks.count() - 1) / ranks.count();
  const uint32_t piece_lines = (slice + args.depth - 1) / args.depth;
  const uint32_t own_lines = lines_of_slice(rank, slice, lines);
  const uint32_t of_piece = lines_of_slice(piece, piece_lines, own_lines);
  const Chunks chunks(block, args.tile_lines, piece_lines);
  AllReduceArgs of_output = args;
  of_output.input = args.output;
  const Message<D> output(of_output);  // the output as a source of loads
  piece_between_copies<World, (World > 2)>(
      args, kAllReduceTwoShotCE, message.bytes(), block, message.precomputed() + of_piece, [&] {
        for (uint32_t t = 0; t < chunks.count(); ++t) {
          const uint32_t in_slice = piece * piece_lines + chunks.first(t);
          sum_chunk<D, World>(
              Team::whole_block(), chunks.lines(t, of_piece),
              [&](uint32_t of, uint32_t k) {
                return of == rank ? message.load(rank * slice + in_slice + k)
                                  : output.load(zone_of(of, rank, ranks.count()) * slice + in_slice + k);
              },
              [&](uint32_t k, Line sum) { message.store(rank * slice + in_slice + k, sum); }, ranks);
        }
      });
}

template <DataType D, int World>
LLM_COMM_KERNEL(kMaxDirectThreads)
all_reduce_two_shot_ce(LLM_COMM_KERNEL_PARAM StreamCopyArgs<AllReduceArgs> args) {
  const Message<D> message(args);
  if (args.stage == kEntryBarrier) {
    entry_barrier_before_copies<World>(args, kAllReduceTwoShotCE, message.bytes());
  } else if (args.stage == kExitBarrier) {
    exit_barrier_after_copies<World>(args, kAllReduceTwoShotCE, message.bytes());
  } else {
    sum_piece<D, World>(args, message, args.stage - kFirstPiece);
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

// Slices of a message and their pieces, in bytes; the kernel computes the same in lines. The last ones may be short or
// empty.
class SlicesInPieces {
 public:
  SlicesInPieces(const Problem& problem, uint32_t pieces)
      : all_(problem.bytes()),
        slice_(divide_up(divide_up(all_, sizeof(Line)), uint64_t{problem.world}) * sizeof(Line)),
        piece_(divide_up(slice_ / sizeof(Line), uint64_t{pieces}) * sizeof(Line)) {}

  uint64_t slice() const { return slice_; }
  uint64_t piece_lines() const { return piece_ / sizeof(Line); }
  // Number of non-empty pieces.
  uint32_t pieces() const { return static_cast<uint32_t>(divide_up(slice_, piece_)); }
  // Start of piece i of a slice.
  uint64_t first(uint32_t slice, uint32_t i) const { return slice * slice_ + i * piece_; }
  uint64_t bytes(uint32_t slice, uint32_t i) const {
    const uint64_t end = std::min({first(slice, i) + piece_, (slice + 1) * slice_, all_});
    return end < first(slice, i) ? 0 : end - first(slice, i);
  }

 private:
  uint64_t all_;
  uint64_t slice_;
  uint64_t piece_;
};

struct AllReduceTwoShotCE {
  struct Operation : StreamCopyOperation<AllReduce> {
    static constexpr bool kIsOutOfPlace = true;

    static Args arguments(const Problem& problem, const Tiling& tiling, const Grid& grid) {
      Args args = StreamCopyOperation<AllReduce>::arguments(problem, tiling, grid);
      args.depth = tiling.depth;  // number of pieces; the depth of chunked algorithms has other bounds
      return args;
    }

    static uint64_t buffer_bytes(const Problem& problem, uint32_t) { return problem.bytes(); }

    static uint64_t grids(const Problem& problem, const Tiling& tiling) {
      return kFirstPiece + SlicesInPieces(problem, tiling.depth).pieces();
    }

    // Enqueues all incoming copies before the first outgoing one: outgoing copies wait for sums and would delay the
    // others.
    template <class Launch, class Copies>
    static void enqueue(Args& args, const Problem& problem, const Tiling& tiling, const Grid& grid, Launch launch,
                        Copies& copies) {
      enqueue_around(args, launch, [&] {
        const uint32_t pieces = SlicesInPieces(problem, tiling.depth).pieces();
        const uint32_t rank = args.comm.rank;
        auto side_stream = copies.side_stream();
        side_stream.follow();
        for (uint32_t i = 0; i < pieces; ++i) {
          side_stream.copy(copies.placed(coming(problem, tiling, rank, i)));
          side_stream.record_event(i);
        }
        for (uint32_t i = 0; i < pieces; ++i) {
          side_stream.wait_event(i);
          args.stage = kFirstPiece + i;
          launch(grid);
          side_stream.follow();
          side_stream.copy(copies.placed(going(problem, tiling, rank, i)));
        }
        side_stream.join();
      });
    }

   private:
    // Copies from the input to the owners of the slices.
    static std::vector<StreamCopy> coming(const Problem& problem, const Tiling& tiling, uint32_t rank, uint32_t piece) {
      return to_peers(problem, tiling, rank, [&](uint32_t owner, const SlicesInPieces& of) {
        const uint32_t zone = zone_of(rank, owner, problem.world);
        return StreamCopy{owner, 0, of.first(owner, piece), of.first(zone, piece), of.bytes(owner, piece)};
      });
    }
    // Copies of sums from the output to all peers.
    static std::vector<StreamCopy> going(const Problem& problem, const Tiling& tiling, uint32_t rank, uint32_t piece) {
      return to_peers(problem, tiling, rank, [&](uint32_t peer, const SlicesInPieces& of) {
        return StreamCopy{peer, 1, of.first(rank, piece), of.first(rank, piece), of.bytes(rank, piece)};
      });
    }

    template <class CopyTo>
    static std::vector<StreamCopy> to_peers(const Problem& problem, const Tiling& tiling, uint32_t rank,
                                            CopyTo copy_to) {
      const SlicesInPieces of(problem, tiling.depth);
      std::vector<StreamCopy> all;
      for (uint32_t i = 1; i < problem.world; ++i) {
        const StreamCopy copy = copy_to((rank + i) % problem.world, of);  // every rank starts with another peer
        if (copy.bytes != 0) all.push_back(copy);
      }
      return all;
    }
  };
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_ce",
                                       .protocol = "CE",
                                       .title = "two-shot all-reduce with copies in the stream",
                                       .symmetric = 0b10};
  // `depth`: pieces of a slice. All of them are sent before the first sum is.
  static constexpr Tunables kTunables{
      {{"blocks", 1, kMaxDirectBlocks}, {"tile_lines", 1, 1u << 16}, {"depth", 1, kMaxCopyPieces}}};
  static constexpr uint32_t kVariants = 1;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_ce<D, World>;
  }

  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits&) {
    return {tuning.blocks, tuning.tile_lines, 1, tuning.depth == 0 ? 1 : tuning.depth, problem.count};
  }

  // Every slice that serves as a zone must be whole. With more than two ranks a message of a few lines does not satisfy
  // this.
  static constexpr const char* kServed =
      "the slices of all ranks but the last must be whole: the message has too few lines of 16 bytes for so many ranks";
  static bool is_served(const Problem& problem) {
    return problem.world == 2 || (problem.world - 1) * SlicesInPieces(problem, 1).slice() <= problem.bytes();
  }

  // Grid of a piece.
  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t, const Limits& limits) {
    if (!is_served(problem)) throw std::invalid_argument(kServed);
    Grid grid = grid_over_lines(problem, tiling, SlicesInPieces(problem, tiling.depth).piece_lines(), limits);
    grid.is_after_copies = true;
    return grid;
  }

  // Two pieces hide the reduction. Every further piece costs two more copies of 3.4 us (docs/experiments/channels.md).
  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    std::vector<TuningParameters> found;
    if (!is_served(problem)) return found;
    const uint32_t sms = limits.multiprocessors();
    for (uint32_t depth : {2u, 3u, 4u, 8u}) {
      for (uint32_t blocks : up_to(kTunables.max("blocks"), {sms, sms / 2 + 1})) {
        found.push_back({.blocks = blocks, .tile_lines = 2048, .depth = depth});
      }
    }
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
