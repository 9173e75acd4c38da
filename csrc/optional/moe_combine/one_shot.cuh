// One-shot combination of tokens (LL): every rank sends the rows that it has made to the ranks of their tokens, line by
// line, and a flag for each place. A rank adds the rows of a token.
//
// One hop. Slot layout: [sender][place][flag, row], a rank's own region last. The flag says whether the sender has made
// the row, by its `ids`. The receiver expects rows by its own `topk_ids`, and waits for a flag that agrees. A disagreement
// therefore ends in an error: no sum is wrong.
//
// Rules of operation.cuh:
//   R1  A rank ends after it has received a flag from every peer for each place, and a launch has a place.
//   R2  The thread that receives a line resets it. Every line that was sent is received, because flag and expectation
//       agree; else the communicator has failed. A line of a row that is not sent is never written.
#pragma once

#include "llm_comm/ll_session.cuh"
#include "llm_comm/reduce.cuh"
#include "optional/moe_combine/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kMoeCombineOneShot = kKindOf<struct MoeCombineOneShot>;

// Shared memory of a block: `incomplete`, `is_summand` of each rank, the contributions to a tile.
inline constexpr uint64_t kKnownLines = divide_up((1 + kMaxWorldSize) * sizeof(uint32_t), sizeof(Line));

// Sum of the two elements in word `i` of a tile, over the ranks for which `is_summand` is set. `contributions`: the words
// of each rank's tile, `stride` words apart.
template <DataType D>
LLM_COMM_DEVICE uint32_t sum_summands(const uint32_t* is_summand, const uint32_t* contributions, uint32_t i,
                                      uint32_t stride, uint32_t world) {
  using E = Element<D>;
  struct Summand {
    uint32_t is_there;
    uint32_t word;
  };
  float low = 0, high = 0;
  bool is_first = true;
  add_in_batches<Summand>(
      world,
      [&](uint32_t rank) {
        return Summand{is_summand[rank], is_summand[rank] != 0 ? contributions[rank * stride + i] : 0};
      },
      [&](bool, const Summand& summand) {
        if (summand.is_there == 0) return;
        const float values[] = {E::value(static_cast<uint16_t>(summand.word)), E::high_value(summand.word)};
        low = is_first ? values[0] : low + values[0];
        high = is_first ? values[1] : high + values[1];
        is_first = false;
      });
  return E::round_two(low, high);
}

template <DataType D>
LLM_COMM_KERNEL(kMaxMoeThreads)
moe_combine_one_shot(LLM_COMM_KERNEL_PARAM MoeCombineArgs args) {
  constexpr uint32_t kMostSums = kLineWords / 2;  // words of a tile that a thread adds, in a world of 2
  const uint32_t block = block_number(args.comm);
  const MoeThread self(args);
  const uint32_t world = args.comm.world_size;
  const uint32_t place_lines = 1 + args.row_lines;
  const uint32_t tiles = args.places * args.row_tiles;
  const uint32_t tile_words = args.tile_lines * kLineWords;
  // Set by threads of the block whose wait was aborted: there is no valid sum then.
  uint32_t* const incomplete = shared_memory<uint32_t>();
  uint32_t* const is_summand = incomplete + 1;                      // [rank]
  Line* const contributions = shared_memory<Line>() + kKnownLines;  // [rank][column]
  if (thread_index() == 0) *incomplete = 0;

  LLSession session(args.comm, kMoeCombineOneShot, uint64_t{args.places} * args.row_lines * sizeof(Line), self.rank,
                    self.peer);
  session.divide_slots(uint64_t{args.places} * place_lines);
  session.wait_for_grids_before(tiles, reinterpret_cast<uint64_t>(contributions));
  // If begin() fails, the thread stays and does nothing. Others of its block may have begun and must learn that a line
  // is missing.
  const bool begun = session.begin();
  session.enter_slot();

  const auto flag_of = [&](const MoeTile& tile) { return uint64_t{tile.place} * place_lines; };
  const auto row_of = [&](const MoeTile& tile) { return flag_of(tile) + 1 + tile.line; };
  const auto has_flag = [&](const MoeTile& tile) { return tile.part == 0 && self.column == 0; };
  const auto load_made = [&](const MoeTile& tile) {
    return load_line(args.y + tile.line_in(args, args.received_row(self.peer, tile.token)));
  };
  const auto send = [&](const MoeTile& tile) {
    Line made{};
    if (tile.has_line && !self.is_own) made = load_made(tile);
    const bool is_made = args.has_expert(args.ids, args.received_row(self.peer, tile.token), 0);
    if (has_flag(tile)) session.send(flag_of(tile), {{is_made, 0, 0, 0}});
    if (is_made && tile.has_line && !self.is_own) session.send(row_of(tile), made);
  };

  // Collective over the block.
  const auto receive = [&](const MoeTile& tile) {
    const bool is_wanted = tile.token < args.tokens && args.has_expert(args.topk_ids, tile.token, self.peer);
    const bool is_received = is_wanted && tile.has_line && !self.is_own;
    if (self.column == 0) is_summand[self.peer] = is_wanted;
    if (is_wanted && tile.has_line) {
      contributions[thread_index()] = self.is_own ? load_made(tile) : session.receive(row_of(tile), 0);
    }
    if (has_flag(tile)) {
      Line flag;
      const auto agrees = [&] {
        return poll_line(session.incoming(flag_of(tile)), flag) && (flag.word[0] != 0) == is_wanted;
      };
      session.wait_until(agrees, 0);
    }
    block_sync();
    if (session.aborted()) *incomplete = 1;  // zero before the first barrier, read after the second
    uint32_t sums[kMostSums];
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < kMostSums; ++i) {
      const uint32_t word = thread_index() + i * block_threads();
      if (word < tile_words) sums[i] = sum_summands<D>(is_summand, contributions->word, word, tile_words, world);
    }
    // `is_summand` and `contributions` are read before this barrier and written after it.
    block_sync();
    if (*incomplete != 0) return;
    if (is_received) session.reset(row_of(tile));
    if (has_flag(tile)) session.reset(flag_of(tile));
    if (tile.token >= args.tokens) return;
    auto* const out = reinterpret_cast<uint32_t*>(args.out + tile.token * args.row_lines);
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < kMostSums; ++i) {
      const uint32_t word = thread_index() + i * block_threads();
      const uint32_t word_of_row = tile.part * tile_words + word;
      if (word < tile_words && word_of_row < args.row_lines * kLineWords) out[word_of_row] = sums[i];
    }
  };

  // A thread sends one tile ahead of the one it waits for, and before it waits, so no two ranks wait for each other.
  for (uint32_t tile = block;; tile += block_count()) {
    if (begun && tile < tiles) send(MoeTile(args, tile, self.column));
    if (tile == block) continue;
    receive(MoeTile(args, tile - block_count(), self.column));
    if (tile >= tiles) break;
  }
  if (thread_index() == 0) session.arrive();
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct MoeCombineOneShot : MoeTiled<MoeCombineOneShot> {
  using Operation = MoeCombine;
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot combination of tokens"};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &moe_combine_one_shot<D>;
  }

  static uint64_t place_lines(uint32_t sent_lines, uint32_t, uint32_t) { return 1 + sent_lines; }
  // One region for each rank. Of its own a rank uses the flags.
  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) { return world * lines * sizeof(Line); }
  static constexpr uint64_t shared_lines(uint64_t tile_lines, uint64_t world) {
    return kKnownLines + world * tile_lines;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
