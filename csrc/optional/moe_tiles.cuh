// Exchange of token rows between the ranks of expert parallelism: arguments, checks and launch shape that moe_dispatch
// and moe_combine share.
//
// Expert e belongs to rank e / (experts / world). Each rank has up to `max_tokens` tokens and as many places in the slot
// of every other rank, so no rank needs to know how many tokens another one has. A place holds one token's row. A row is
// sent at most once to a rank, and only if that rank owns one of the token's experts.
//
// Blocks walk over tiles: a part of `tile_lines` lines of one place, of all ranks. Tiles have the same numbers on all
// ranks, so a block waits only for blocks of its own number (P1 of operation.cuh).
#pragma once

#include "algorithms/algorithm.h"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMaxMoeTokens = 128;  // of a rank and call
inline constexpr uint32_t kMaxMoeTopK = 16;
inline constexpr uint32_t kMaxMoeExperts = 1 << 16;
inline constexpr uint32_t kMaxMoeRowBytes = 16384;
inline constexpr uint32_t kMaxMoeGroups = 512;  // scales of a row
// Maximum threads of a block. A thread then has 80 registers: with fewer the dispatch spills.
inline constexpr uint32_t kMaxMoeThreads = 768;

inline constexpr uint32_t kLineWords = sizeof(Line) / sizeof(uint32_t);

struct MoeArgs {
  DeviceComm comm;
  const int32_t* topk_ids;  // [tokens, top_k]
  uint32_t tokens;          // of this rank, at most max_tokens; other ranks may have more or fewer
  uint32_t max_tokens;      // this and all that follow: equal on all ranks
  uint32_t first;           // first place of this launch among max_tokens
  uint32_t places;          // of this launch
  uint32_t row_lines;
  uint32_t sent_lines;  // of a place, without header and flags: row_lines and the lines of the row's scales
  uint32_t top_k;
  uint32_t rank_experts;  // experts of a rank
  uint32_t row_tiles;     // tiles of sent_lines
  uint32_t tile_lines;    // a power of two
  uint32_t tile_lines_log2;

  // Number of an expert among those of `owner`, or rank_experts or more for an expert of another rank and for none.
  LLM_COMM_DEVICE uint32_t local_number(int32_t id, uint32_t owner) const {
    return static_cast<uint32_t>(id) - owner * rank_experts;
  }

  // True if one of the token's experts belongs to `owner`. `ids`: [tokens, top_k].
  LLM_COMM_DEVICE bool has_expert(const int32_t* ids, uint32_t token, uint32_t owner) const {
    bool found = false;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < top_k; ++i) found |= local_number(ids[token * top_k + i], owner) < rank_experts;
    return found;
  }

  // Row of a rank's token in a tensor of [world * max_tokens] rows.
  LLM_COMM_DEVICE uint32_t received_row(uint32_t source, uint32_t token) const { return source * max_tokens + token; }
};

// Thread (k, c) of a block exchanges line c of each of the block's tiles with peer k.
struct MoeThread {
  uint32_t rank;
  uint32_t peer;
  uint32_t column;
  bool is_own;  // exchanges nothing

  LLM_COMM_DEVICE explicit MoeThread(const MoeArgs& args)
      : rank(args.comm.rank),
        peer(thread_index() >> args.tile_lines_log2),
        column(thread_index() & (args.tile_lines - 1)),
        is_own(peer == rank) {}
};

// A tile as thread (k, c) sees it.
struct MoeTile {
  uint32_t place;  // in this launch
  uint32_t part;   // of the row
  uint32_t token;  // number on its rank
  uint32_t line;   // of sent_lines, for this thread
  bool has_line;

  LLM_COMM_DEVICE MoeTile(const MoeArgs& args, uint32_t tile, uint32_t column)
      : place(tile / args.row_tiles),
        part(tile - place * args.row_tiles),
        token(args.first + place),
        line(part * args.tile_lines + column),
        has_line(line < args.sent_lines) {}

  // This thread's line in a tensor of rows.
  LLM_COMM_DEVICE uint32_t line_in(const MoeArgs& args, uint32_t row) const { return row * args.row_lines + line; }
};

// ---- Descriptors -----------------------------------------------------------------------------------------------------

struct MoeOperation {
  enum Parameter { kExperts, kTopK, kGroups };

  // `info` with the parameters, and with rows of elements of `element_bytes` bytes.
  static constexpr OperationInfo with_experts(OperationInfo info, uint32_t element_bytes) {
    info.parameters[kExperts].name = "num_experts";
    info.parameters[kTopK].name = "top_k";
    info.row_multiple = sizeof(Line) / element_bytes;
    info.max_row = kMaxMoeRowBytes / element_bytes;
    return info;
  }

  static void check(const Problem& problem) {
    const double experts = problem.parameter[kExperts];
    const double top_k = problem.parameter[kTopK];
    const auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
    if (problem.units() > kMaxMoeTokens) {
      refuse(std::to_string(problem.units()) + " tokens a rank: it takes up to " + std::to_string(kMaxMoeTokens));
    }
    check_number("top_k", top_k, 1, kMaxMoeTopK);
    check_number("num_experts", experts, 1, kMaxMoeExperts);
    check_number("groups", problem.parameter[kGroups], 0, kMaxMoeGroups);
    if (static_cast<uint32_t>(experts) % problem.world != 0) {
      refuse(std::to_string(static_cast<uint32_t>(experts)) + " experts cannot be divided evenly among " +
             std::to_string(problem.world) + " ranks");
    }
  }

  static uint32_t row_lines(const Problem& problem) {
    return static_cast<uint32_t>(problem.unit_bytes() / sizeof(Line));
  }
  // MoeArgs::sent_lines. Scales are fp32; an operation without them has no parameter kGroups.
  static uint32_t sent_lines(const Problem& problem) {
    const auto groups = static_cast<uint32_t>(problem.parameter[kGroups]);
    return row_lines(problem) + divide_up(groups, kLineWords);
  }

 protected:
  static void set_arguments(MoeArgs& args, const Problem& problem, const Tiling& tiling) {
    args.max_tokens = static_cast<uint32_t>(problem.units());
    args.row_lines = row_lines(problem);
    args.sent_lines = sent_lines(problem);
    args.top_k = static_cast<uint32_t>(problem.parameter[kTopK]);
    args.rank_experts = static_cast<uint32_t>(problem.parameter[kExperts]) / problem.world;
    args.row_tiles = divide_up(args.sent_lines, tiling.tile_lines);
    args.tile_lines = tiling.tile_lines;
    while (args.tile_lines >> args.tile_lines_log2 > 1) ++args.tile_lines_log2;
  }

  // Places of a launch, and tokens of this rank. Their number differs between ranks, so it is no parameter: the ids lie
  // from address `ids` to `ids_end`.
  static void set_places(MoeArgs& args, const Problem& problem, uint64_t first, uint64_t units, uint64_t ids,
                         uint64_t ids_end) {
    const uint64_t token_bytes = uint64_t{args.top_k} * sizeof(int32_t);
    if (ids_end < ids || (ids_end - ids) % token_bytes != 0 || (ids_end - ids) / token_bytes > problem.units()) {
      throw std::invalid_argument(std::to_string(ids_end - ids) + " bytes of topk_ids are not 0 to " +
                                  std::to_string(problem.units()) + " tokens");
    }
    args.first = static_cast<uint32_t>(first);
    args.places = static_cast<uint32_t>(units);
    args.topk_ids = reinterpret_cast<const int32_t*>(ids);
    args.tokens = static_cast<uint32_t>((ids_end - ids) / token_bytes);
  }

 private:
  static void check_number(const std::string& name, double value, uint32_t least, uint32_t most) {
    if (value >= least && value <= most && value == static_cast<double>(static_cast<uint32_t>(value))) return;
    throw std::invalid_argument(name + " is " + std::to_string(value) + "; it must be a whole number from " +
                                std::to_string(least) + " to " + std::to_string(most));
  }
};

// Launch shape. A launch takes a range of places. Algorithm defines
//   place_lines(sent_lines, top_k, row_tiles)  lines of a place in a slot
//   slot_bytes(sender_lines, world)            bytes of a slot for so many lines of each other rank
//   shared_lines(tile_lines, world)            shared memory of a block, in lines
template <class Algorithm>
struct MoeTiled {
  static constexpr Tunables kTunables{
      {{"blocks", 1, kArrivalsPerOperation - 1}, {"tile_lines", 1, kMaxMoeThreads / 2, true}}};
  static constexpr uint32_t kVariants = 1;

  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    const uint32_t most = most_tile_lines(problem);
    const uint32_t tile_lines = tuning.tile_lines < most ? tuning.tile_lines : most;
    const uint64_t fitting =
        most_units(limits.slot_bytes, [&](uint64_t places) { return slot_bytes_of(problem, tile_lines, places); });
    // Launches of one call have equal numbers of places, up to rounding.
    const uint64_t tokens = problem.units();
    const uint64_t places = fitting == 0 || fitting >= tokens ? fitting : divide_up(tokens, divide_up(tokens, fitting));
    return {tuning.blocks, tile_lines, 1, 0, places};
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t places, const Limits& limits) {
    if (tiling.tile_lines > most_tile_lines(problem)) {
      throw std::invalid_argument("tile_lines is " + std::to_string(tiling.tile_lines) + "; it must be at most " +
                                  std::to_string(most_tile_lines(problem)) + " among " + std::to_string(problem.world) +
                                  " ranks");
    }
    const uint64_t slot_bytes = slot_bytes_of(problem, tiling.tile_lines, places);
    if (slot_bytes > limits.slot_bytes) {
      throw std::invalid_argument(std::to_string(places) + " tokens need a slot of " + std::to_string(slot_bytes) +
                                  " bytes, the workspace has slots of " + std::to_string(limits.slot_bytes) +
                                  ": lower launch_units or raise workspace_bytes");
    }
    const uint64_t tiles = places * divide_up(MoeOperation::sent_lines(problem), tiling.tile_lines);
    return {static_cast<uint32_t>(tiling.blocks < tiles ? tiling.blocks : tiles), problem.world * tiling.tile_lines,
            static_cast<uint32_t>(Algorithm::shared_lines(tiling.tile_lines, problem.world) * sizeof(Line))};
  }

  // First as many blocks of 256 threads as a device runs at once.
  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    std::vector<TuningParameters> found;
    for (const uint32_t threads : {256u, 512u, 128u}) {
      uint32_t tile_lines = floor_power_of_two(threads / problem.world);
      while (tile_lines / 2 >= MoeOperation::sent_lines(problem)) tile_lines /= 2;
      for (const uint32_t blocks : {3u, 8u}) {
        found.push_back({.blocks = blocks * limits.multiprocessors(), .tile_lines = tile_lines});
      }
    }
    return found;
  }

 private:
  static uint32_t most_tile_lines(const Problem& problem) { return floor_power_of_two(kMaxMoeThreads / problem.world); }
  static uint64_t slot_bytes_of(const Problem& problem, uint32_t tile_lines, uint64_t places) {
    const uint32_t lines = MoeOperation::sent_lines(problem);
    const uint32_t top_k = static_cast<uint32_t>(problem.parameter[MoeOperation::kTopK]);
    return Algorithm::slot_bytes(places * Algorithm::place_lines(lines, top_k, divide_up(lines, tile_lines)),
                                 problem.world);
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
