// Kernels of experts with few tokens: gate and up with their activation, then the down-projection.
//
// Shape. With few tokens the time is that of reading the weights of the active experts once. Both kernels are those of
// linear layers (kernel.cuh): two teams multiply, one warp fetches, weight rows are the 64-row operand. A block
// multiplies all tokens, and drops the products of tokens that have other experts.
//
// Active experts. Each block finds them itself, in ascending order, from the numbers that the router chose. Their place
// in this order is their slot.
//
// Gate and up. A block computes some outputs of one slot. Blocks of slots that no expert has end. The activation times
// the token's factor is stored to intermediate[slot][token]; a token without this expert gets zeros.
//
// Down. A block computes some outputs of the result and goes over all slots. So one accumulator adds up the experts of
// a token, and nothing is left to reduce.
//
// Order of additions. Tile i of an expert's inputs belongs to team i % 2, which adds the experts in ascending order. A
// slot of an expert that a token does not have adds products of zero. So with finite weights the bits of a token do not
// depend on other tokens.
//
// Early start. The down-projection reads the router's choice and fetches weights before gate and up have ended. Each
// block of gate and up triggers it (grid_dependency_trigger) when it has waited for the grids before. So these have
// ended, and the choice is visible.
#pragma once

#include "algorithms/linear/epilogue.cuh"
#include "algorithms/linear/experts.h"
#include "algorithms/linear/experts_args.h"
#include "llm_comm/tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Layout of the block's dynamic shared memory, which begins at `start`.
struct ExpertsMemory {
  SharedAddress start;

  LLM_COMM_DEVICE SharedAddress full(uint32_t stage) const { return start + 16 * stage; }
  LLM_COMM_DEVICE SharedAddress empty(uint32_t stage) const { return full(stage) + 8; }
  LLM_COMM_DEVICE uint8_t* marks() const { return pointer_to<uint8_t>(start + experts::kMarksOffset); }
  LLM_COMM_DEVICE uint8_t* counts() const { return pointer_to<uint8_t>(start + experts::kCountsOffset); }
  LLM_COMM_DEVICE uint16_t* active() const { return pointer_to<uint16_t>(start + experts::kActiveOffset); }
  LLM_COMM_DEVICE float* factors() const { return pointer_to<float>(start + experts::kFactorsOffset); }
  LLM_COMM_DEVICE uint32_t* has_expert() const { return pointer_to<uint32_t>(start + experts::kHasExpertOffset); }
  LLM_COMM_DEVICE uint32_t* ids() const { return pointer_to<uint32_t>(start + experts::kIdsOffset); }
  LLM_COMM_DEVICE SharedAddress stage_at(uint32_t offset) const { return start + (experts::kHeaderBytes + offset); }
};

// Writes the active experts to memory.active() in ascending order and returns their number. Called by all threads.
LLM_COMM_DEVICE uint32_t find_active_experts(const ExpertsArgs& args, const ExpertsMemory& memory) {
  // A byte for each expert, 1 if it is active, and a byte for each four experts: how many of them are.
  uint8_t* const marks = memory.marks();
  uint8_t* const counts = memory.counts();
  const auto four = [](const uint8_t* bytes, uint32_t i) { return reinterpret_cast<const uint32_t*>(bytes)[i]; };
  const auto sum_of_bytes = [](uint32_t word) { return word * 0x01010101u >> 24; };
  const uint32_t chosen = args.tokens * args.top_k;
  for (uint32_t i = thread_index(); i < experts::kMaxExperts / 4; i += block_threads()) {
    reinterpret_cast<uint32_t*>(marks)[i] = 0;
  }
  for (uint32_t i = thread_index(); i < chosen; i += block_threads()) memory.ids()[i] = load_relaxed(args.ids + i);
  block_sync();
  for (uint32_t i = thread_index(); i < chosen; i += block_threads()) {
    const uint32_t id = memory.ids()[i];
    if (id < args.experts) marks[id] = 1;  // several threads may store the same byte
  }
  block_sync();
  for (uint32_t i = thread_index(); i < experts::kMaxExperts / 4; i += block_threads()) {
    counts[i] = static_cast<uint8_t>(sum_of_bytes(four(marks, i)));
  }
  block_sync();
  uint32_t all = 0;
  for (uint32_t i = 0; i < (args.experts + 15) / 16; ++i) all += sum_of_bytes(four(counts, i));
  for (uint32_t e = thread_index(); e < args.experts; e += block_threads()) {
    if (marks[e] == 0) continue;
    const auto below = [](uint32_t word, uint32_t bytes) { return word & ((1u << 8 * bytes) - 1); };
    uint32_t before =
        sum_of_bytes(below(four(counts, e / 16), e / 4 % 4)) + sum_of_bytes(below(four(marks, e / 4), e % 4));
    for (uint32_t i = 0; i < e / 16; ++i) before += sum_of_bytes(four(counts, i));
    memory.active()[before] = static_cast<uint16_t>(e);
  }
  block_sync();
  return all;
}

// Position in the slots of a block and in the ring. A stage holds tiles of one slot.
struct ExpertCursor {
  uint32_t slot;
  uint32_t first = 0;  // index of the stage's first tile in the slot's inputs
  uint32_t stage = 0;
  uint32_t offset = 0;  // of the stage in bytes, from the first stage
  uint32_t round = 0;   // completed rounds of the ring; its lowest bit is the parity of `full`

  LLM_COMM_DEVICE void advance(const ExpertsArgs& args, uint32_t boxes) {
    first += args.stage_boxes;
    if (first >= boxes) {
      first = 0;
      ++slot;
    }
    offset += args.stage_bytes;
    if (++stage < args.stages) return;
    stage = 0;
    offset = 0;
    ++round;
  }
};

// The fetching warp. All its lanes call all methods.
template <bool Gated, uint32_t Tokens>
class ExpertsFetch {
 public:
  LLM_COMM_DEVICE ExpertsFetch(const ExpertsArgs& args, const ExpertsMemory& memory, uint32_t first_slot,
                               uint32_t end_slot, uint32_t first_output)
      : args_(args),
        memory_(memory),
        boxes_(args.weight.row_bytes / kBoxRowBytes),
        first_slot_(first_slot),
        end_slot_(end_slot),
        first_output_(first_output),
        x_offset_(args.stage_boxes * args.block_outputs * kBoxRowBytes) {}

  // Initialises the barriers and requests the weight tiles of the first round. A block_sync() must follow before other
  // warps use the barriers.
  LLM_COMM_DEVICE void begin() const {
    LLM_COMM_UNROLL(1)
    for (ExpertCursor at{first_slot_}; at.slot < end_slot_ && at.round == 0; at.advance(args_, boxes_)) {
      barrier_init(memory_.full(at.stage), kFetchArrivals);
      barrier_init(memory_.empty(at.stage), linear::kTeams * kTeamThreads / kWarpThreads);
      barrier_init_fence();
      fetch_weights(at);
    }
  }

  LLM_COMM_DEVICE void run() const {
    grid_dependency_wait();
    grid_dependency_trigger();
    ExpertCursor at{first_slot_};
    LLM_COMM_UNROLL(1)
    for (; at.slot < end_slot_ && at.round == 0; at.advance(args_, boxes_)) fetch_tokens(at);
    LLM_COMM_UNROLL(1)
    for (; at.slot < end_slot_; at.advance(args_, boxes_)) {
      barrier_wait(memory_.empty(at.stage), (at.round - 1) % 2);
      warp_sync();  // keeps the lanes in one round, as in LinearFetch
      fetch_weights(at);
      fetch_tokens(at);
    }
  }

 private:
  LLM_COMM_DEVICE void fetch_weights(const ExpertCursor& at) const {
    constexpr uint32_t kParts = Gated ? 2 : 1;
    const uint32_t expert = memory_.active()[at.slot];
    const SharedAddress full = memory_.full(at.stage);
    fetch_begin(full, args_.stage_bytes);
    fetch_boxes<kParts, true>(memory_.stage_at(at.offset), args_.weight, first_output_, at.first, args_.block_outputs,
                              args_.stage_boxes, full, BoxUse::kOnce, kParts * expert);
  }
  LLM_COMM_DEVICE void fetch_tokens(const ExpertCursor& at) const {
    const SharedAddress full = memory_.full(at.stage);
    fetch_boxes<1, !Gated>(memory_.stage_at(at.offset) + x_offset_, args_.x, 0, at.first, Tokens, args_.stage_boxes,
                           full, BoxUse::kShared, Gated ? 0 : at.slot);
    fetch_end(full);
  }

  const ExpertsArgs& args_;
  const ExpertsMemory& memory_;
  uint32_t boxes_;
  uint32_t first_slot_;
  uint32_t end_slot_;
  uint32_t first_output_;
  uint32_t x_offset_;
};

// Adds the products of the team's tiles of all slots to `sums`. Called by all threads of the team.
template <OperandType F, uint32_t Tokens>
LLM_COMM_DEVICE void multiply_for_experts(const ExpertsArgs& args, const ExpertsMemory& memory, uint32_t team,
                                          uint32_t first_slot, uint32_t end_slot, float (&sums)[Tokens / 2]) {
  static_assert(linear::kTeams == 2, "the tiles of a team: every second one of an expert");
  const uint32_t all = args.weight.row_bytes / kBoxRowBytes;
  const uint32_t weight_bytes = args.block_outputs * kBoxRowBytes;
  constexpr uint32_t kTokenBytes = Tokens * kBoxRowBytes;
  const Box weights = box_at(memory.stage_at(0));
  const Box tokens = box_at(memory.stage_at(args.stage_boxes * weight_bytes));
  uint32_t stage_before = 0;
  bool is_first = true;
  LLM_COMM_UNROLL(1)
  for (ExpertCursor at{first_slot}; at.slot < end_slot; at.advance(args, all)) {
    const uint32_t boxes = all - at.first < args.stage_boxes ? all - at.first : args.stage_boxes;
    barrier_wait(memory.full(at.stage), at.round % 2);
    LLM_COMM_UNROLL(1)
    for (uint32_t i = (at.first + team) % 2; i < boxes; i += 2) {
      multiply_boxes<F>(sums, moved(weights, at.offset + i * weight_bytes), args.block_outputs,
                        moved(tokens, at.offset + i * kTokenBytes));
    }
    multiply_end();
    if (!is_first) {
      multiply_wait<1>(sums);
      warp_sync();  // all lanes of the warp have read the stage
      if (thread_index() % kWarpThreads == 0) barrier_arrive(memory.empty(stage_before));
    }
    is_first = false;
    stage_before = at.stage;
  }
  multiply_wait<0>(sums);
}

template <OperandType F, DataType D, bool Gated, uint32_t Tokens>
LLM_COMM_KERNEL(linear::kThreads)
experts_layer(LLM_COMM_KERNEL_PARAM ExpertsArgs args) {
  const ExpertsMemory memory{tile_memory()};
  const uint32_t team = same_in_warp(thread_index() / kTeamThreads);
  const bool fetches = team == linear::kTeams;
  constexpr uint32_t kParts = Gated ? 2 : 1;
  const uint32_t outputs = args.block_outputs / kParts;
  const uint32_t tiles = (args.weight.rows + outputs - 1) / outputs;
  const uint32_t first = block_index() % tiles * outputs;
  if constexpr (Gated) grid_dependency_wait();  // for the router's choice
  const uint32_t active = find_active_experts(args, memory);
  const uint32_t first_slot = Gated ? block_index() / tiles : 0;
  const uint32_t end_slot = Gated ? first_slot + 1 : active;
  if (Gated && first_slot >= active) return;
  if constexpr (Gated) {
    const uint32_t expert = memory.active()[first_slot];
    for (uint32_t token = thread_index(); token < args.tokens; token += block_threads()) {
      uint32_t has_expert = 0;
      float factor = 0.0f;
      for (uint32_t i = token * args.top_k; i < (token + 1) * args.top_k; ++i) {
        if (memory.ids()[i] != expert) continue;
        has_expert = 1;
        factor += bits_to_float(load_plain(args.factors + i));
      }
      memory.has_expert()[token] = has_expert;
      memory.factors()[token] = factor;
    }
  }
  const ExpertsFetch<Gated, Tokens> fetch(args, memory, first_slot, end_slot, first);
  if (fetches) fetch.begin();
  block_sync();
  float sums[Tokens / 2] = {};
  if (fetches) {
    fetch.run();
  } else {
    multiply_for_experts<F, Tokens>(args, memory, team, first_slot, end_slot, sums);
  }
  block_sync();  // all stages have been read: the sums may overwrite them

  // Partial sums, [team][token][output]. The padding avoids bank conflicts between the threads of a warp.
  auto* const partial = pointer_to<float>(memory.stage_at(0));
  const uint32_t stride = args.block_outputs + linear::kSumsPadding;
  if (!fetches) {
    const uint32_t thread = thread_index() % kTeamThreads;
    LLM_COMM_UNROLL(128)
    for (uint32_t i = 0; i < Tokens / 2; ++i) {
      const uint32_t output = output_of(thread, i);
      if (output < args.block_outputs) partial[(team * Tokens + token_of(thread, i)) * stride + output] = sums[i];
    }
  }
  block_sync();
  // `out` may be written: the fetching warp has waited for earlier grids, also where it had nothing to fetch.
  const uint32_t lines = outputs / linear::kLineElements;
  LLM_COMM_UNROLL(1)
  for (uint32_t i = thread_index(); i < args.tokens * lines; i += block_threads()) {
    const uint32_t token = i / lines;
    const uint32_t output = i % lines * linear::kLineElements;
    if (first + output >= args.weight.rows) continue;
    const float* const of_even = partial + token * stride + output;
    const float* const of_odd = of_even + Tokens * stride;
    const bool is_wanted = !Gated || memory.has_expert()[token] != 0;
    Line line{};
    LLM_COMM_UNROLL(8)
    for (uint32_t j = 0; j < linear::kLineElements; ++j) {
      uint16_t bits = Element<D>::round(of_even[j] + of_odd[j]);
      if constexpr (Gated) {
        const uint16_t up = Element<D>::round(of_even[outputs + j] + of_odd[outputs + j]);
        const float activated = Element<D>::value(activate_and_mul<D>(args.epilogue, bits, up));
        bits = Element<D>::round(activated * memory.factors()[token]);
      }
      if (is_wanted) line.word[j / 2] |= static_cast<uint32_t>(bits) << 16 * (j % 2);
    }
    const uint64_t row = Gated ? uint64_t{first_slot} * args.tokens + token : token;
    store_line(static_cast<uint16_t*>(args.out) + row * args.weight.rows + first + output, line);
  }
}

template <OperandType F, DataType D>
ExpertsKernel ExpertsKernels<F, D>::find(bool is_gated, uint32_t token_rows) {
  switch (token_rows) {
    case 8:
      return is_gated ? &experts_layer<F, D, true, 8> : &experts_layer<F, D, false, 8>;
    case 16:
      return is_gated ? &experts_layer<F, D, true, 16> : &experts_layer<F, D, false, 16>;
    case 32:
      return is_gated ? &experts_layer<F, D, true, 32> : &experts_layer<F, D, false, 32>;
    case 64:
      return is_gated ? &experts_layer<F, D, true, 64> : &experts_layer<F, D, false, 64>;
    default:
      return nullptr;
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
