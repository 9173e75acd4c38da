// One-shot dispatch of tokens (LL): every rank sends each token's row to the ranks that own its experts, line by line,
// and a header to every rank.
//
// One hop. Slot layout: [sender][place][header, flags, row, scales], then masks (ll_bytes.cuh). Words of a header: whether the
// row is sent, the numbers that the token's experts have on the receiver plus one (0: of another rank), their weights. A
// row of several tiles has a flag for each further tile, which says again whether the row is sent: each block then
// learns it by itself.
//
// A place without a token has a header too, of zeros. Threads poll flag, header and row at once, so a row that is sent
// costs no second wait.
//
// Rules of operation.cuh:
//   R1  A rank ends after it has received a header from every peer for each place, and a launch has a place.
//   R2  Every line that was sent is received: headers and flags always are sent, and the flag says whether the row is.
//       The thread that receives a line resets it. Several threads of a block poll a flag; one of them resets it when
//       all have read it. A line of a row that is not sent is never written.
#pragma once

#include "llm_comm/ll_bytes.cuh"
#include "optional/moe_dispatch/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kMoeDispatchOneShot = kKindOf<struct MoeDispatchOneShot>;

// Lines of a place in a slot.
struct DispatchLines {
  uint32_t header;
  uint32_t flags;
  uint32_t place;

  LLM_COMM_HOST_DEVICE constexpr DispatchLines(uint32_t top_k, uint32_t sent_lines, uint32_t row_tiles)
      : header(divide_up(1 + 2 * top_k, kLineWords)), flags(row_tiles - 1), place(header + flags + sent_lines) {}

  LLM_COMM_DEVICE uint32_t first(const MoeTile& tile) const { return tile.place * place; }
  LLM_COMM_DEVICE uint32_t flag(const MoeTile& tile) const {
    return first(tile) + (tile.part == 0 ? 0 : header + tile.part - 1);
  }
  LLM_COMM_DEVICE uint32_t row(const MoeTile& tile) const { return first(tile) + header + flags + tile.line; }
};

// Line `number` of a token's header for `owner`. Without a token: zeros.
LLM_COMM_DEVICE Line load_header(const MoeDispatchArgs& args, uint32_t number, uint32_t token, uint32_t owner,
                                 bool is_sent) {
  Line line{};
  if (!is_sent) return line;
  LLM_COMM_UNROLL(4)
  for (uint32_t i = 0; i < kLineWords; ++i) {
    const uint32_t word = kLineWords * number + i;
    if (word == 0) line.word[i] = 1;
    if (word == 0 || word > 2 * args.top_k) continue;
    const bool is_weight = word > args.top_k;
    const uint32_t choice = token * args.top_k + (word - 1) - (is_weight ? args.top_k : 0);
    const uint32_t local = args.local_number(args.topk_ids[choice], owner);
    if (local < args.rank_experts) line.word[i] = is_weight ? args.topk_weights[choice] : local + 1;
  }
  return line;
}

// Stores the ids and weights that line `number` of a header holds.
LLM_COMM_DEVICE void store_header(const MoeDispatchArgs& args, uint32_t number, uint32_t row, Line line) {
  LLM_COMM_UNROLL(4)
  for (uint32_t i = 0; i < kLineWords; ++i) {
    const uint32_t word = kLineWords * number + i;
    if (word == 0 || word > 2 * args.top_k) continue;
    if (word <= args.top_k) {
      args.ids[row * args.top_k + word - 1] = static_cast<int32_t>(line.word[i]) - 1;
    } else {
      args.weights[row * args.top_k + word - 1 - args.top_k] = line.word[i];
    }
  }
}

// Loads a thread's line of a token's row or scales.
LLM_COMM_DEVICE Line load_sent(const MoeDispatchArgs& args, const MoeTile& tile) {
  if (tile.line < args.row_lines) return load_line(args.x + tile.line_in(args, tile.token));
  const uint32_t first = (tile.line - args.row_lines) * kLineWords;
  Line line{};
  LLM_COMM_UNROLL(4)
  for (uint32_t i = 0; i < kLineWords; ++i) {
    if (first + i < args.groups) line.word[i] = args.x_scales[tile.token * args.groups + first + i];
  }
  return line;
}

// Stores a thread's line to row `row` of the result.
LLM_COMM_DEVICE void store_sent(const MoeDispatchArgs& args, const MoeTile& tile, uint32_t row, Line line) {
  if (tile.line < args.row_lines) {
    store_line(args.rows + tile.line_in(args, row), line);
    return;
  }
  const uint32_t first = (tile.line - args.row_lines) * kLineWords;
  LLM_COMM_UNROLL(4)
  for (uint32_t i = 0; i < kLineWords; ++i) {
    if (first + i < args.groups) args.scales[row * args.groups + first + i] = line.word[i];
  }
}

template <DataType D>
LLM_COMM_KERNEL(kMaxMoeThreads)
moe_dispatch_one_shot(LLM_COMM_KERNEL_PARAM MoeDispatchArgs args) {
  const uint32_t block = block_number(args.comm);
  const MoeThread self(args);
  const DispatchLines lines(args.top_k, args.sent_lines, args.row_tiles);
  const uint32_t tiles = args.places * args.row_tiles;
  const uint32_t sender_lines = args.places * lines.place;

  LLSession session(args.comm, kMoeDispatchOneShot, uint64_t{args.places} * args.row_lines * sizeof(Line), self.rank,
                    self.peer);
  session.divide_slots(sender_lines);
  LLBytes exchange(session, args.comm, sender_lines);
  session.wait_for_grids_before(sender_lines, tiles);
  // A thread may leave without sending. Its peers' waits then end with an error. What it does not receive is missing on
  // this rank only, which has an error already.
  if (!session.begin()) return;
  session.enter_slot();

  const auto send = [&](const MoeTile& tile) {
    const bool has_token = tile.token < args.tokens;
    Line value{};
    if (has_token && tile.has_line) value = load_sent(args, tile);
    const bool is_sent = has_token && args.has_expert(args.topk_ids, tile.token, self.peer);
    const uint32_t own_row = args.received_row(self.rank, tile.token);
    for (uint32_t i = self.column; tile.part == 0 && i < lines.header; i += args.tile_lines) {
      const Line header = load_header(args, i, tile.token, self.peer, is_sent);
      if (self.is_own) {
        store_header(args, i, own_row, header);
      } else {
        exchange.send(lines.first(tile) + i, header);
      }
    }
    if (self.is_own) {
      if (is_sent && tile.has_line) store_sent(args, tile, own_row, value);
      return;
    }
    if (tile.part != 0 && self.column == 0) exchange.send(lines.flag(tile), {{is_sent, 0, 0, 0}});
    if (is_sent && tile.has_line) exchange.send(lines.row(tile), value);
  };

  // Returns false if a wait was aborted.
  const auto receive = [&](const MoeTile& tile) {
    const uint32_t row = args.received_row(self.peer, tile.token);
    const uint32_t first = lines.first(tile);
    // The flag, a further line of the header, a line of the row.
    const bool has_header = tile.part == 0 && self.column < lines.header;
    const bool has_further = has_header && self.column != 0;
    const Line* const from[] = {session.incoming(lines.flag(tile)), session.incoming(first + self.column),
                                session.incoming(lines.row(tile))};
    Line found[] = {sentinel_line(), has_further ? sentinel_line() : Line{}, tile.has_line ? sentinel_line() : Line{}};
    const auto is_row_sent = [&] { return found[0].word[0] != 0; };
    const auto have_come = [&] {
      const bool all = poll_lines(from, found);
      return all || (has_arrived(found[0]) && has_arrived(found[1]) && !is_row_sent());
    };
    if (!session.wait_until(have_come, 0)) return false;
    if (tile.has_line && is_row_sent()) {
      session.reset(lines.row(tile));
      const Line value = exchange.restore(lines.row(tile), found[2], 0);
      if (!session.aborted()) store_sent(args, tile, row, value);
    }
    if (has_further) session.reset(first + self.column);
    if (has_header) {
      const Line header = exchange.restore(first + self.column, has_further ? found[1] : found[0], 0);
      if (!session.aborted()) store_header(args, self.column, row, header);
    }
    for (uint32_t i = self.column + args.tile_lines; tile.part == 0 && i < lines.header; i += args.tile_lines) {
      const Line header = exchange.receive(first + i, 0);
      if (!session.aborted()) store_header(args, i, row, header);
    }
    return !session.aborted();
  };

  // A thread sends one tile ahead of the one it waits for, and before it waits, so no two ranks wait for each other.
  for (uint32_t tile = block;; tile += block_count()) {
    if (tile < tiles) send(MoeTile(args, tile, self.column));
    if (tile == block) continue;
    if (!self.is_own && !receive(MoeTile(args, tile - block_count(), self.column))) break;
    if (tile >= tiles) break;
  }
  // Each block arrives once. Its threads have all read the operation number and the flags by then.
  block_sync();
  if (thread_index() == 0) session.arrive();
  if (self.is_own || self.column != 0 || session.aborted()) return;
  for (uint32_t tile = block; tile < tiles; tile += block_count()) {
    session.reset(lines.flag(MoeTile(args, tile, self.column)));
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct MoeDispatchOneShot : MoeTiled<MoeDispatchOneShot> {
  using Operation = MoeDispatch;
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot dispatch of tokens"};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &moe_dispatch_one_shot<D>;
  }

  static uint64_t place_lines(uint32_t sent_lines, uint32_t top_k, uint32_t row_tiles) {
    return DispatchLines(top_k, sent_lines, row_tiles).place;
  }
  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) { return LLBytes<1>::slot_bytes(lines, world); }
  static constexpr uint64_t shared_lines(uint64_t, uint64_t) { return 0; }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
