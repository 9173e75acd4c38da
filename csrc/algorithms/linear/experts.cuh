// Kernels of experts with few tokens: gate and up with their activation, then the down-projection.
//
// Shape. With few tokens the time is that of reading the weights of the active experts once. Both kernels are those of
// linear layers (kernel.cuh): two teams multiply, one warp fetches, weight rows are the 64-row operand.
//
// Groups. The tokens of an expert are cut into groups of at most `Rows` tokens, which are multiplied together. Most
// experts have one group. Each block finds the groups itself from the numbers that the router chose: experts ascend,
// and so do the tokens of each. The state between the layers has one row for each token of each expert, in this order.
//
// Gate and up. A unit is some outputs of one group. There is one block for each multiprocessor, and block b computes
// every grid-th unit from b on. Its ring runs on from one unit to the next. The tokens of a group lie anywhere in x, so
// the fetching warp copies their lines one by one. The activation times the token's factor is stored.
//
// Down. A block computes some outputs of the result and goes over all groups. So nothing is left to reduce. The rows of
// a group are neighbours. The products of a group are added to the sums of its tokens, which are in shared memory.
//
// Order of additions. Tile i of an expert's inputs belongs to team i % 2. Each team adds the tiles of an expert from
// zero, then the experts of a token in ascending order. The sums of the two teams are added at the end of each layer.
// So the bits of a token do not depend on other tokens.
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
  uint32_t stages_offset;

  LLM_COMM_DEVICE SharedAddress full(uint32_t stage) const { return start + 16 * stage; }
  LLM_COMM_DEVICE SharedAddress empty(uint32_t stage) const { return full(stage) + 8; }
  // Of gate and up: the sums of a unit are there; and they have been read.
  LLM_COMM_DEVICE SharedAddress sums_full() const { return start + experts::kSumsBarriersOffset; }
  LLM_COMM_DEVICE SharedAddress sums_empty() const { return sums_full() + 8; }
  // Two words for each expert. Bit t % 32 of word t / 32: token t has the expert.
  LLM_COMM_DEVICE uint32_t* tokens() const { return pointer_to<uint32_t>(start + experts::kTokensOffset); }
  LLM_COMM_DEVICE uint32_t* subtotals() const { return pointer_to<uint32_t>(start + experts::kSubtotalsOffset); }
  LLM_COMM_DEVICE uint32_t* groups() const { return pointer_to<uint32_t>(start + experts::kGroupsOffset); }
  LLM_COMM_DEVICE uint16_t* first_rows() const { return pointer_to<uint16_t>(start + experts::kFirstRowsOffset); }
  LLM_COMM_DEVICE uint16_t* ids() const { return pointer_to<uint16_t>(start + experts::kIdsOffset); }
  // Of the rows of the state between the layers.
  LLM_COMM_DEVICE uint8_t* token_of_row() const { return pointer_to<uint8_t>(start + experts::kTokenOfRowOffset); }
  LLM_COMM_DEVICE float* factor_of_row() const { return pointer_to<float>(start + experts::kFactorOfRowOffset); }
  // Sums of the teams, [team][row of the group, or token][output].
  LLM_COMM_DEVICE float* sums() const { return pointer_to<float>(start + experts::kHeaderBytes); }
  LLM_COMM_DEVICE SharedAddress stage_at(uint32_t offset) const { return start + (stages_offset + offset); }
};

// Tokens that are multiplied together: rows of the state between the layers. Packed into a word.
struct ExpertGroup {
  uint32_t word;

  LLM_COMM_DEVICE ExpertGroup(uint32_t packed) : word(packed) {}
  LLM_COMM_DEVICE ExpertGroup(uint32_t expert, uint32_t first_row, uint32_t rows)
      : word(expert | first_row << 10 | rows << 21) {}
  LLM_COMM_DEVICE uint32_t expert() const { return word & 0x3FF; }
  LLM_COMM_DEVICE uint32_t first_row() const { return word >> 10 & 0x7FF; }
  LLM_COMM_DEVICE uint32_t rows() const { return word >> 21; }
  static_assert(experts::kMaxExperts < 1 << 10 && experts::kMaxTokens * experts::kMaxTopK < 1 << 11);
};

// Writes the groups to memory.groups() and returns their number. Called by all threads.
template <uint32_t Rows>
LLM_COMM_DEVICE uint32_t find_groups(const ExpertsArgs& args, const ExpertsMemory& memory) {
  constexpr uint32_t kOfSubtotal = experts::kExpertsOfSubtotal;
  uint32_t* const tokens = memory.tokens();
  for (uint32_t i = thread_index(); i < 2 * args.experts; i += block_threads()) tokens[i] = 0;
  block_sync();
  for (uint32_t i = thread_index(); i < args.tokens * args.top_k; i += block_threads()) {
    const uint32_t id = load_relaxed(args.ids + i);
    const bool is_expert = id < args.experts;
    memory.ids()[i] = static_cast<uint16_t>(is_expert ? id : experts::kMaxExperts);
    const uint32_t token = i / args.top_k;
    if (is_expert) set_bits(tokens + 2 * id + token / 32, 1u << token % 32);
  }
  block_sync();
  // Rows of experts in the lower half of a word and their groups in the upper one. Sums of both do not overflow.
  const auto rows_and_groups = [&](uint32_t begin, uint32_t end) {
    uint32_t sum = 0;
    for (uint32_t e = begin; e < end; ++e) {
      const uint32_t rows = count_bits(tokens[2 * e]) + count_bits(tokens[2 * e + 1]);
      sum += rows | (rows + Rows - 1) / Rows << 16;
    }
    return sum;
  };
  const uint32_t subtotals = (args.experts + kOfSubtotal - 1) / kOfSubtotal;
  for (uint32_t i = thread_index(); i < subtotals; i += block_threads()) {
    const uint32_t end = (i + 1) * kOfSubtotal;
    memory.subtotals()[i] = rows_and_groups(i * kOfSubtotal, end < args.experts ? end : args.experts);
  }
  block_sync();
  for (uint32_t e = thread_index(); e < args.experts; e += block_threads()) {
    const uint32_t rows = rows_and_groups(e, e + 1) & 0xFFFF;
    if (rows == 0) continue;
    uint32_t before = rows_and_groups(e / kOfSubtotal * kOfSubtotal, e);
    for (uint32_t i = 0; i < e / kOfSubtotal; ++i) before += memory.subtotals()[i];
    const uint32_t first_row = before & 0xFFFF;
    uint32_t* group = memory.groups() + (before >> 16);
    memory.first_rows()[e] = static_cast<uint16_t>(first_row);
    for (uint32_t row = 0; row < rows; row += Rows) {
      *group++ = ExpertGroup(e, first_row + row, rows - row < Rows ? rows - row : Rows).word;
    }
  }
  uint32_t all = 0;
  for (uint32_t i = 0; i < subtotals; ++i) all += memory.subtotals()[i];
  block_sync();
  return all >> 16;
}

// Writes the tokens of the rows, and for gate and up their factors. Called by the threads of both teams.
template <bool Gated>
LLM_COMM_DEVICE void find_rows(const ExpertsArgs& args, const ExpertsMemory& memory) {
  const uint16_t* const ids = memory.ids();
  for (uint32_t i = thread_index(); i < args.tokens * args.top_k; i += linear::kTeams * kTeamThreads) {
    const uint32_t id = ids[i];
    if (id == experts::kMaxExperts) continue;
    const uint32_t token = i / args.top_k;
    const uint32_t* const tokens = memory.tokens() + 2 * id;
    const uint32_t before = (1u << token % 32) - 1;  // the tokens before this one among its 32
    const uint32_t row =
        memory.first_rows()[id] +
        (token < 32 ? count_bits(tokens[0] & before) : count_bits(tokens[0]) + count_bits(tokens[1] & before));
    // A token may have an expert twice. All of them write the same.
    memory.token_of_row()[row] = static_cast<uint8_t>(token);
    if constexpr (Gated) {
      float factor = 0.0f;
      for (uint32_t j = token * args.top_k; j < (token + 1) * args.top_k; ++j) {
        if (ids[j] == id) factor += bits_to_float(load_plain(args.factors + j));
      }
      memory.factor_of_row()[row] = factor;
    }
  }
}

// Units of a block. Unit u is the outputs of tile u % tiles for group u / tiles.
struct ExpertUnits {
  uint32_t groups;
  uint32_t tiles;
  uint32_t first_group, first_tile;
  uint32_t step_groups, step_tiles;

  LLM_COMM_DEVICE static ExpertUnits of_gate_up(uint32_t groups, uint32_t tiles) {
    return {groups, tiles, block_index() / tiles, block_index() % tiles, block_count() / tiles, block_count() % tiles};
  }
  LLM_COMM_DEVICE static ExpertUnits of_down(uint32_t groups, uint32_t tiles) {
    return {groups, tiles, 0, block_index(), 1, 0};
  }
};

// Position in the units of a block and in the ring. A stage holds tiles of one unit.
struct ExpertCursor {
  uint32_t group;
  uint32_t tile;
  uint32_t first = 0;  // index of the stage's first tile in the unit's inputs
  uint32_t stage = 0;
  uint32_t offset = 0;  // of the stage in bytes, from the first stage
  uint32_t round = 0;   // completed rounds of the ring; its lowest bit is the parity of `full`

  LLM_COMM_DEVICE explicit ExpertCursor(const ExpertUnits& units) : group(units.first_group), tile(units.first_tile) {}

  LLM_COMM_DEVICE void advance(const ExpertsArgs& args, const ExpertUnits& units, uint32_t boxes) {
    first += args.stage_boxes;
    if (first >= boxes) {
      first = 0;
      group += units.step_groups;
      tile += units.step_tiles;
      if (tile >= units.tiles) {
        tile -= units.tiles;
        ++group;
      }
    }
    offset += args.stage_bytes;
    if (++stage < args.stages) return;
    stage = 0;
    offset = 0;
    ++round;
  }
};

// The fetching warp. All its lanes call all methods.
template <bool Gated, uint32_t Rows>
class ExpertsFetch {
 public:
  LLM_COMM_DEVICE ExpertsFetch(const ExpertsArgs& args, const ExpertsMemory& memory, const ExpertUnits& units)
      : args_(args),
        memory_(memory),
        units_(units),
        boxes_(args.weight.row_bytes / kBoxRowBytes),
        x_offset_(args.stage_boxes * args.block_outputs * kBoxRowBytes) {}

  // Initialises the barriers and requests the weight tiles of the first round. A block_sync() must follow before other
  // warps use the barriers.
  LLM_COMM_DEVICE void begin() const {
    constexpr uint32_t kWarps = linear::kTeams * kTeamThreads / kWarpThreads;
    if constexpr (Gated) {
      barrier_init(memory_.sums_full(), kWarps);
      barrier_init(memory_.sums_empty(), kWarps);
    }
    LLM_COMM_UNROLL(1)
    for (ExpertCursor at(units_); at.group < units_.groups && at.round == 0; at.advance(args_, units_, boxes_)) {
      barrier_init(memory_.full(at.stage), kFetchArrivals + (Gated ? kNumberArrivals : 0));
      barrier_init(memory_.empty(at.stage), kWarps);
      barrier_init_fence();
      fetch_weights(at);
    }
  }

  LLM_COMM_DEVICE void run() const {
    grid_dependency_wait();
    grid_dependency_trigger();
    ExpertCursor at(units_);
    LLM_COMM_UNROLL(1)
    for (; at.group < units_.groups && at.round == 0; at.advance(args_, units_, boxes_)) fetch_tokens(at);
    LLM_COMM_UNROLL(1)
    for (; at.group < units_.groups; at.advance(args_, units_, boxes_)) {
      barrier_wait(memory_.empty(at.stage), (at.round - 1) % 2);
      warp_sync();  // keeps the lanes in one round, as in LinearFetch
      fetch_weights(at);
      fetch_tokens(at);
    }
  }

 private:
  LLM_COMM_DEVICE void fetch_weights(const ExpertCursor& at) const {
    constexpr uint32_t kParts = Gated ? 2 : 1;
    const SharedAddress full = memory_.full(at.stage);
    fetch_begin(full, Gated ? x_offset_ : args_.stage_bytes);
    fetch_boxes<kParts, true>(memory_.stage_at(at.offset), args_.weight, at.tile * (args_.block_outputs / kParts),
                              at.first, args_.block_outputs, args_.stage_boxes, full, BoxUse::kOnce,
                              kParts * group_at(at).expert());
  }
  LLM_COMM_DEVICE void fetch_tokens(const ExpertCursor& at) const {
    const SharedAddress full = memory_.full(at.stage);
    const SharedAddress tiles = memory_.stage_at(at.offset) + x_offset_;
    const ExpertGroup group = group_at(at);
    if constexpr (Gated) {
      constexpr uint32_t kLines = kBoxRowBytes / sizeof(Line);
      const uint32_t boxes = boxes_ - at.first < args_.stage_boxes ? boxes_ - at.first : args_.stage_boxes;
      for (uint32_t i = thread_index() % kWarpThreads; i < group.rows() * boxes * kLines; i += kWarpThreads) {
        const uint32_t row = i / kLines / boxes;
        const uint32_t box = i / kLines % boxes;
        const uint64_t token = memory_.token_of_row()[group.first_row() + row];
        fetch_line(tiles + box * (Rows * kBoxRowBytes), row, i % kLines,
                   static_cast<const char*>(args_.x.data) + token * args_.x.row_bytes +
                       (at.first + box) * kBoxRowBytes + i % kLines * sizeof(Line));
      }
    } else {
      fetch_boxes<1>(tiles, args_.x, group.first_row(), at.first, Rows, args_.stage_boxes, full, BoxUse::kShared);
    }
    fetch_end<Gated>(full);
  }
  LLM_COMM_DEVICE ExpertGroup group_at(const ExpertCursor& at) const { return memory_.groups()[at.group]; }

  const ExpertsArgs& args_;
  const ExpertsMemory& memory_;
  ExpertUnits units_;
  uint32_t boxes_;
  uint32_t x_offset_;
};

// Arrives once for the warp, when all of its lanes have come here.
LLM_COMM_DEVICE void arrive_as_warp(SharedAddress barrier) {
  warp_sync();
  if (thread_index() % kWarpThreads == 0) barrier_arrive(barrier);
}

// Multiplies the team's tiles of each unit of the block, and calls take(sums, unit) with the sums of each. Called by
// all threads of the team.
template <OperandType F, bool Gated, uint32_t Rows, class Take>
LLM_COMM_DEVICE void multiply_for_experts(const ExpertsArgs& args, const ExpertsMemory& memory,
                                          const ExpertUnits& units, uint32_t team, Take take) {
  static_assert(linear::kTeams == 2, "the tiles of a team: every second one of an expert");
  const uint32_t all = args.weight.row_bytes / kBoxRowBytes;
  const uint32_t weight_bytes = args.block_outputs * kBoxRowBytes;
  constexpr uint32_t kRowsBytes = Rows * kBoxRowBytes;
  const Box weights = box_at(memory.stage_at(0));
  const Box tokens = box_at(memory.stage_at(args.stage_boxes * weight_bytes));
  LLM_COMM_UNROLL(1)
  for (ExpertCursor at(units); at.group < units.groups;) {
    const ExpertCursor unit = at;
    float sums[Rows / 2] = {};
    uint32_t stage_before = 0;
    LLM_COMM_UNROLL(1)
    do {
      const uint32_t boxes = all - at.first < args.stage_boxes ? all - at.first : args.stage_boxes;
      barrier_wait(memory.full(at.stage), at.round % 2);
      if constexpr (Gated) acquire_lines();
      LLM_COMM_UNROLL(1)
      for (uint32_t i = (at.first + team) % 2; i < boxes; i += 2) {
        multiply_boxes<F>(sums, moved(weights, at.offset + i * weight_bytes), args.block_outputs,
                          moved(tokens, at.offset + i * kRowsBytes));
      }
      multiply_end();
      if (at.first > 0) {
        multiply_wait<1>(sums);
        arrive_as_warp(memory.empty(stage_before));
      }
      stage_before = at.stage;
      at.advance(args, units, all);
    } while (at.first > 0);
    multiply_wait<0>(sums);
    arrive_as_warp(memory.empty(stage_before));
    take(sums, unit);
  }
}

// Line of outputs from the sums of both teams. `of_even`: those of the even tiles. With `factor`, the activation of gate
// and up times it; up lies `outputs` behind gate.
template <DataType D, bool Gated>
LLM_COMM_DEVICE Line line_of_sums(const ExpertsArgs& args, const float* of_even, uint32_t to_odd, uint32_t outputs,
                                  float factor) {
  const float* const of_odd = of_even + to_odd;
  Line line{};
  LLM_COMM_UNROLL(8)
  for (uint32_t j = 0; j < linear::kLineElements; ++j) {
    uint16_t bits = Element<D>::round(of_even[j] + of_odd[j]);
    if constexpr (Gated) {
      const uint16_t up = Element<D>::round(of_even[outputs + j] + of_odd[outputs + j]);
      bits = Element<D>::round(Element<D>::value(activate_and_mul<D>(args.epilogue, bits, up)) * factor);
    }
    line.word[j / 2] |= static_cast<uint32_t>(bits) << 16 * (j % 2);
  }
  return line;
}

template <OperandType F, DataType D, bool Gated, uint32_t Rows>
LLM_COMM_KERNEL(linear::kThreads)
experts_layer(LLM_COMM_KERNEL_PARAM ExpertsArgs args) {
  const ExpertsMemory memory{tile_memory(), args.stages_offset};
  const uint32_t team = same_in_warp(thread_index() / kTeamThreads);
  const bool fetches = team == linear::kTeams;
  const uint32_t outputs = args.block_outputs / (Gated ? 2 : 1);
  const uint32_t tiles = (args.weight.rows + outputs - 1) / outputs;
  const uint32_t lines = outputs / linear::kLineElements;
  // The padding avoids bank conflicts between the threads of a warp.
  const uint32_t stride = args.block_outputs + linear::kSumsPadding;
  float* const sums_of_teams = memory.sums();
  if constexpr (Gated) grid_dependency_wait();  // for the router's choice
  const uint32_t groups = same_in_warp(find_groups<Rows>(args, memory));
  const ExpertUnits units = Gated ? ExpertUnits::of_gate_up(groups, tiles) : ExpertUnits::of_down(groups, tiles);
  const ExpertsFetch<Gated, Rows> fetch(args, memory, units);
  if (fetches) {
    fetch.begin();
  } else {
    find_rows<Gated>(args, memory);
    if constexpr (!Gated) {
      for (uint32_t i = thread_index(); i < linear::kTeams * args.tokens * stride; i += linear::kTeams * kTeamThreads) {
        sums_of_teams[i] = 0.0f;
      }
    }
  }
  block_sync();
  if (fetches) {
    fetch.run();
  } else if constexpr (Gated) {
    uint32_t done = 0;  // units
    multiply_for_experts<F, Gated, Rows>(args, memory, units, team, [&](auto& sums, const ExpertCursor& unit) {
      const uint32_t thread = thread_index() % kTeamThreads;
      if (done > 0) barrier_wait(memory.sums_empty(), (done - 1) % 2);
      LLM_COMM_UNROLL(16)
      for (uint32_t i = 0; i < Rows / 2; ++i) {
        const uint32_t output = output_of(thread, i);
        if (output < args.block_outputs) {
          sums_of_teams[(team * Rows + token_of(thread, i)) * stride + output] = sums[i];
        }
      }
      arrive_as_warp(memory.sums_full());
      barrier_wait(memory.sums_full(), done % 2);
      const ExpertGroup group = memory.groups()[unit.group];
      LLM_COMM_UNROLL(1)
      for (uint32_t i = thread_index(); i < group.rows() * lines; i += linear::kTeams * kTeamThreads) {
        const uint32_t output = i % lines * linear::kLineElements;
        const uint32_t row = group.first_row() + i / lines;
        if (unit.tile * outputs + output >= args.weight.rows) continue;
        store_line(static_cast<uint16_t*>(args.out) + uint64_t{row} * args.weight.rows + unit.tile * outputs + output,
                   line_of_sums<D, Gated>(args, sums_of_teams + i / lines * stride + output, Rows * stride, outputs,
                                          memory.factor_of_row()[row]));
      }
      arrive_as_warp(memory.sums_empty());
      ++done;
    });
  } else {
    multiply_for_experts<F, Gated, Rows>(args, memory, units, team, [&](auto& sums, const ExpertCursor& unit) {
      const uint32_t thread = thread_index() % kTeamThreads;
      const ExpertGroup group = memory.groups()[unit.group];
      LLM_COMM_UNROLL(16)
      for (uint32_t i = 0; i < Rows / 2; ++i) {
        const uint32_t output = output_of(thread, i);
        const uint32_t row = token_of(thread, i);
        if (output >= args.block_outputs || row >= group.rows()) continue;
        const uint32_t token = memory.token_of_row()[group.first_row() + row];
        sums_of_teams[(team * args.tokens + token) * stride + output] += sums[i];
      }
      warp_sync();  // another lane may add to the same sum for the next group
    });
  }
  block_sync();  // also keeps the fetching warp until its copies have arrived
  if constexpr (Gated) return;
  // `out` may be written: the fetching warp has waited for earlier grids, also where it had nothing to fetch.
  const uint32_t first = block_index() * outputs;
  LLM_COMM_UNROLL(1)
  for (uint32_t i = thread_index(); i < args.tokens * lines; i += block_threads()) {
    const uint32_t token = i / lines;
    const uint32_t output = i % lines * linear::kLineElements;
    if (first + output >= args.weight.rows) continue;
    store_line(static_cast<uint16_t*>(args.out) + uint64_t{token} * args.weight.rows + first + output,
               line_of_sums<D, Gated>(args, sums_of_teams + token * stride + output, args.tokens * stride, 0, 0.0f));
  }
}

template <OperandType F, DataType D>
ExpertsKernel ExpertsKernels<F, D>::find(bool is_gated, uint32_t rows) {
  switch (rows) {
    case 8:
      return is_gated ? &experts_layer<F, D, true, 8> : &experts_layer<F, D, false, 8>;
    case 16:
      return is_gated ? &experts_layer<F, D, true, 16> : &experts_layer<F, D, false, 16>;
    case 32:
      return is_gated ? &experts_layer<F, D, true, 32> : &experts_layer<F, D, false, 32>;
    default:
      return nullptr;
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
