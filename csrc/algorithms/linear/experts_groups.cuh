// The router's choice, as each block of the experts' kernels reads it: groups of tokens that are multiplied together, and
// the places of their rows (experts.cuh, "Groups").
#pragma once

#include "algorithms/linear/experts.h"
#include "algorithms/linear/experts_args.h"
#include "llm_comm/tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// The block's dynamic shared memory, which begins at `start`.
struct ExpertsMemory {
  SharedAddress start;
  const experts::Layout& layout;

  // Barrier of a stage: its tiles are there. Gate and up have one ring, the down-projection one for each warp.
  LLM_COMM_DEVICE SharedAddress full(uint32_t stage, uint32_t warp = 0) const {
    return start + 8 * (warp * experts::kMaxStages + stage);
  }
  // Barrier of a stage of gate and up: it has been read.
  LLM_COMM_DEVICE SharedAddress empty(uint32_t stage) const { return full(stage, 1); }
  // Barriers of the sums of a unit of gate and up: they are there; and they have been read.
  LLM_COMM_DEVICE SharedAddress sums_full(uint32_t buffer) const { return full(buffer, 2); }
  LLM_COMM_DEVICE SharedAddress sums_empty(uint32_t buffer) const { return full(buffer, 3); }
  LLM_COMM_DEVICE uint32_t* tokens() const { return pointer_to<uint32_t>(start + layout.tokens); }
  LLM_COMM_DEVICE uint32_t* warp_groups() const { return pointer_to<uint32_t>(start + layout.warp_groups); }
  LLM_COMM_DEVICE uint32_t* groups() const { return pointer_to<uint32_t>(start + layout.groups); }
  LLM_COMM_DEVICE uint16_t* first_groups() const { return pointer_to<uint16_t>(start + layout.first_groups); }
  LLM_COMM_DEVICE uint16_t* places() const { return pointer_to<uint16_t>(start + layout.places); }
  LLM_COMM_DEVICE uint16_t* ids() const { return pointer_to<uint16_t>(start + layout.ids); }
  LLM_COMM_DEVICE uint8_t* stands() const { return pointer_to<uint8_t>(start + layout.stands); }
  LLM_COMM_DEVICE float* factors() const { return pointer_to<float>(start + layout.factors); }
  LLM_COMM_DEVICE float* products() const { return pointer_to<float>(start + layout.products); }
  LLM_COMM_DEVICE SharedAddress sums() const { return start + layout.sums; }
  LLM_COMM_DEVICE SharedAddress stages() const { return start + layout.stages; }

  LLM_COMM_DEVICE void clear_tokens(uint32_t experts) const {
    for (uint32_t i = thread_index(); i < 2 * experts; i += block_threads()) tokens()[i] = 0;
  }
};

// Place of a row of a group, and its token.
struct ExpertPlace {
  uint16_t bits;

  LLM_COMM_DEVICE explicit ExpertPlace(uint16_t packed) : bits(packed) {}
  LLM_COMM_DEVICE ExpertPlace(uint32_t place, uint32_t token) : bits(static_cast<uint16_t>(place | token << 10)) {}
  LLM_COMM_DEVICE uint32_t place() const { return bits & 0x3FF; }
  LLM_COMM_DEVICE uint32_t token() const { return bits >> 10; }
  static_assert(experts::kMaxTokens <= 1 << 6 && experts::kMaxTokens * experts::kMaxTopK <= 1 << 10);
};

// Tokens that are multiplied together, packed into a word.
struct ExpertGroup {
  uint32_t word;

  LLM_COMM_DEVICE explicit ExpertGroup(uint32_t packed) : word(packed) {}
  LLM_COMM_DEVICE ExpertGroup(uint32_t expert, uint32_t rows) : word(expert | rows << 16) {}
  LLM_COMM_DEVICE uint32_t expert() const { return word & 0xFFFF; }
  LLM_COMM_DEVICE uint32_t rows() const { return word >> 16; }
};

// Sum of what the lanes before this one have, and of what all have. Called by all lanes.
LLM_COMM_DEVICE uint32_t sum_of_lanes_before(uint32_t own, uint32_t& all) {
  // Small numbers are exact as floats.
  float sum = static_cast<float>(own), before = 0.0f;
  LLM_COMM_UNROLL(5)
  for (uint32_t mask = 1; mask < kWarpThreads; mask *= 2) {
    const float other = shuffle_xor(sum, mask);
    if ((thread_index() & mask) != 0) before += other;
    sum += other;
  }
  all = static_cast<uint32_t>(sum);
  return static_cast<uint32_t>(before);
}

// Writes ids and groups, and returns the number of groups. Called by all threads, kWarps warps or more. tokens() are zero.
template <uint32_t Rows>
LLM_COMM_DEVICE uint32_t find_groups(const ExpertsArgs& args, const ExpertsMemory& memory) {
  const uint32_t places = args.tokens * args.top_k;
  const uint32_t* const tokens = memory.tokens();
  for (uint32_t i = thread_index(); i < places; i += block_threads()) {
    const uint32_t id = load_relaxed(args.ids + i) - args.first_expert;  // wraps around for smaller numbers
    const bool is_expert = id < args.experts;
    memory.ids()[i] = static_cast<uint16_t>(is_expert ? id : experts::kMaxExperts);
    const uint32_t token = i / args.top_k;
    if (is_expert) set_bits(memory.tokens() + 2 * id + token / 32, 1u << token % 32);
  }
  block_sync();
  // A thread counts the groups of neighbouring experts.
  constexpr uint32_t kOfThread = experts::kMaxExperts / (experts::kWarps * kWarpThreads);
  const uint32_t first = kOfThread * thread_index();
  uint32_t rows[kOfThread];
  uint32_t own = 0;
  LLM_COMM_UNROLL(2)
  for (uint32_t i = 0; i < kOfThread; ++i) {
    const uint32_t e = first + i;
    rows[i] = e < args.experts ? count_bits(tokens[2 * e]) + count_bits(tokens[2 * e + 1]) : 0;
    own += divide_up(rows[i], Rows);
  }
  uint32_t of_warp = 0;
  uint32_t group = sum_of_lanes_before(own, of_warp);
  const uint32_t warp = thread_index() / kWarpThreads;
  if (warp < experts::kWarps && thread_index() % kWarpThreads == 0) memory.warp_groups()[warp] = of_warp;
  block_sync();
  uint32_t all = 0;
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < experts::kWarps; ++i) {
    const uint32_t of_other = memory.warp_groups()[i];
    if (i < warp) group += of_other;
    all += of_other;
  }
  LLM_COMM_UNROLL(2)
  for (uint32_t i = 0; i < kOfThread; ++i) {
    if (rows[i] > 0) memory.first_groups()[first + i] = static_cast<uint16_t>(group);
    for (uint32_t row = 0; row < rows[i]; row += Rows) {
      memory.groups()[group++] = ExpertGroup(first + i, rows[i] - row < Rows ? rows[i] - row : Rows).word;
    }
  }
  block_sync();
  return all;
}

// Writes the places of the groups. For the down-projection also the factor of each place and whether it stands for an
// expert. Called by the first kWarps warps, before a block_sync().
template <uint32_t Rows, bool Gated>
LLM_COMM_DEVICE void find_places(const ExpertsArgs& args, const ExpertsMemory& memory) {
  const uint16_t* const ids = memory.ids();
  const uint32_t threads = Gated ? experts::kWarps * kWarpThreads : block_threads();
  for (uint32_t i = thread_index(); i < args.tokens * args.top_k; i += threads) {
    const uint32_t id = ids[i];
    const uint32_t token = i / args.top_k;
    bool is_first = id != experts::kMaxExperts;
    float factor = 0.0f;
    for (uint32_t j = token * args.top_k; j < (token + 1) * args.top_k; ++j) {
      if (ids[j] != id) continue;
      if (j < i) is_first = false;
      if constexpr (!Gated) factor += bits_to_float(load_relaxed(args.factors + j));
    }
    if constexpr (!Gated) {
      memory.factors()[i] = is_first ? args.scaling_factor * factor : 0.0f;
      memory.stands()[i] = is_first;
    }
    if (!is_first) continue;
    const uint32_t* const tokens = memory.tokens() + 2 * id;
    const uint32_t before = (1u << token % 32) - 1;  // the tokens before this one among its 32
    const uint32_t row =
        token < 32 ? count_bits(tokens[0] & before) : count_bits(tokens[0]) + count_bits(tokens[1] & before);
    memory.places()[memory.first_groups()[id] * Rows + row] = ExpertPlace(i, token).bits;
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
