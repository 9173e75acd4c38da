// Kernels of experts with few tokens: gate and up with their activation, then the down-projection.
//
// Shape. With few tokens the time is that of reading the weights of the active experts once. A unit is 16 weight rows
// for one group of tokens. Warps multiply weight tiles, which come to shared memory by large fetches, with tokens that
// their lanes load.
//
// Groups. The tokens of an expert are cut into groups of at most `Rows` tokens, which are multiplied together. Most
// experts have one group. Each block finds the groups itself from the numbers that the router chose: experts ascend,
// and so do the tokens of each. A place is the index of a token's expert in the router's choice. The state between the
// layers has a row for each place. If a token has an expert twice, the first place stands for both.
//
// Gate and up. A unit has 8 rows of gate and 8 of up. The blocks of the grid go through the units together, so they read
// neighbouring memory. One warp fetches stages of 8 neighbouring tiles: 1 KiB of each row, which memory serves faster
// than less. kWarps others multiply one tile of a stage each. One more warp adds their sums when a unit is complete, and
// stores its outputs.
//
// Down. A unit has outputs of the block. Rows are short and lie side by side, so each warp has units and a ring of its
// own. The products of a unit are kept in shared memory, one row for each place. At the end the block adds up the places
// of each token, each times its factor. So nothing is left to reduce.
//
// Order of additions. Of gate and up, tile i of a row is of warp i % kWarps; the down-projection has one warp for a row.
// A warp adds the left and the right halves of its tiles in two sums, in ascending order, and then these two. With FP8
// it adds the two halves of a tile, and then the tiles in ascending order. The sums of the warps are added in ascending
// order, and so are the places of a token. So the bits of a token do not depend on other tokens or on the tiling.
//
// FP8. Weights are multiplied by tokens that are not quantized: an FP8 value is exact in their type. A tile has the
// columns of one block of scales, so the sum of its products is scaled when it is added to the sums of the row.
//
// Early start. Where few weights are read, a multiprocessor has room for a block of each kernel. The down-projection then
// reads the router's choice and fetches weights before gate and up have ended. Each block of gate and up triggers it
// (grid_dependency_trigger) when it has waited for the grids before. So these have ended, and the choice is visible.
#pragma once

#include "algorithms/linear/epilogue.cuh"
#include "algorithms/linear/experts_tokens.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Arrives once for the warp, when all of its lanes have come here.
LLM_COMM_DEVICE void arrive_as_warp(SharedAddress barrier) {
  warp_sync();
  if (thread_index() % kWarpThreads == 0) barrier_arrive(barrier);
}

// ---- Gate and up -----------------------------------------------------------------------------------------------------

// The fetching warp. All its lanes call all methods.
class GateUpFetch {
 public:
  LLM_COMM_DEVICE GateUpFetch(const ExpertsArgs& args, const ExpertsMemory& memory, const ExpertUnits& units)
      : args_(args), memory_(memory), units_(units), unit_(units.first()) {}

  // Fetches into every stage once.
  LLM_COMM_DEVICE void begin() {
    LLM_COMM_UNROLL(1)
    while (units_.have(unit_) && round_ == 0) next();
  }
  LLM_COMM_DEVICE void run() {
    LLM_COMM_UNROLL(1)
    while (units_.have(unit_)) {
      barrier_wait(memory_.empty(stage_), (round_ - 1) % 2);
      warp_sync();  // keeps the lanes in one round, as in LinearFetch
      next();
    }
  }

 private:
  LLM_COMM_DEVICE void next() {
    constexpr uint32_t kStageBytes = experts::kWarps * experts::kUnitRows * kBoxRowBytes;
    const SharedAddress full = memory_.full(stage_);
    fetch_begin(full, kStageBytes);
    fetch_boxes<2, true>(memory_.stages() + stage_ * kStageBytes, args_.weight, unit_.tile * (experts::kUnitRows / 2),
                         box_, experts::kUnitRows, experts::kWarps, full, BoxUse::kOnce,
                         2 * ExpertGroup(memory_.groups()[unit_.group]).expert());
    fetch_end(full);
    box_ += experts::kWarps;
    if (box_ * kBoxRowBytes >= args_.weight.row_bytes) {
      box_ = 0;
      unit_ = units_.after(unit_);
    }
    if (++stage_ < args_.stages) return;
    stage_ = 0;
    ++round_;
  }

  const ExpertsArgs& args_;
  const ExpertsMemory& memory_;
  const ExpertUnits& units_;
  ExpertUnit unit_;
  uint32_t box_ = 0;
  uint32_t stage_ = 0, round_ = 0;
};

// Sums of the warps that share a unit, on their way to the warp that adds them. Each of the first `warps` warps calls
// give() for every unit, and the adding warp take().
template <uint32_t Rows>
class SumsOfWarps {
 public:
  using Sums = float[Rows / 8][4];

  LLM_COMM_DEVICE SumsOfWarps(const ExpertsMemory& memory, uint32_t warps) : memory_(memory), warps_(warps) {}

  LLM_COMM_DEVICE void give(const Sums& sums, uint32_t warp) {
    if (round_ > 0) barrier_wait(memory_.sums_empty(buffer_), (round_ - 1) % 2);
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      *line(warp, n) = {
          {float_to_bits(sums[n][0]), float_to_bits(sums[n][1]), float_to_bits(sums[n][2]), float_to_bits(sums[n][3])}};
    }
    arrive_as_warp(memory_.sums_full(buffer_));
    next();
  }

  LLM_COMM_DEVICE void take(Sums& sums) {
    barrier_wait(memory_.sums_full(buffer_), round_ % 2);
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      LLM_COMM_UNROLL(4)
      for (uint32_t i = 0; i < 4; ++i) sums[n][i] = 0.0f;
      LLM_COMM_UNROLL(4)
      for (uint32_t warp = 0; warp < warps_; ++warp) {
        const Line of_warp = *line(warp, n);
        LLM_COMM_UNROLL(4)
        for (uint32_t i = 0; i < 4; ++i) sums[n][i] += bits_to_float(of_warp.word[i]);
      }
    }
    arrive_as_warp(memory_.sums_empty(buffer_));
    next();
  }

 private:
  // Four sums of this lane.
  LLM_COMM_DEVICE Line* line(uint32_t warp, uint32_t n) const {
    const uint32_t of_lane0 = ((warp * experts::kSumsBuffers + buffer_) * (Rows / 8) + n) * kWarpThreads;
    return pointer_to<Line>(memory_.sums()) + of_lane0 + thread_index() % kWarpThreads;
  }
  LLM_COMM_DEVICE void next() {
    if (++buffer_ < experts::kSumsBuffers) return;
    buffer_ = 0;
    ++round_;
  }

  const ExpertsMemory& memory_;
  uint32_t warps_;
  uint32_t buffer_ = 0, round_ = 0;
};

template <OperandType W, DataType D, uint32_t Rows>
LLM_COMM_DEVICE void multiply_gate_up(const ExpertsArgs& args, const ExpertsMemory& memory, const ExpertUnits& units,
                                      uint32_t warp) {
  constexpr uint32_t kBoxBytes = experts::kUnitRows * kBoxRowBytes;
  const uint32_t rounds = divide_up(args.weight.row_bytes / kBoxRowBytes, experts::kWarps);
  SumsOfWarps<Rows> sums_of_warps(memory, experts::kWarps);
  using Tokens = TokensAhead<W, D, Rows, false>;
  Tokens tokens(args, memory, units, warp);
  uint32_t stage = 0, parity = 0;
  LLM_COMM_UNROLL(1)
  for (ExpertUnit unit = units.first(); units.have(unit); unit = units.after(unit)) {
    typename Tokens::Sums sums = {};
    LLM_COMM_UNROLL(1)
    for (uint32_t first = 0; first < rounds; first += Tokens::kAhead) {
      LLM_COMM_UNROLL(2)
      for (uint32_t slot = 0; slot < Tokens::kAhead; ++slot) {
        const uint32_t round = first + slot;
        if (round >= rounds) break;
        const bool has_tile = round < tokens.steps();
        barrier_wait(memory.full(stage), parity);
        if (has_tile) {
          tokens.multiply(sums, memory.stages() + (stage * experts::kWarps + warp) * kBoxBytes, slot);
        }
        arrive_as_warp(memory.empty(stage));
        if (has_tile) tokens.refill(slot, round);
        if (++stage == args.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    if (tokens.steps() == 0) continue;
    float own[Rows / 8][4];
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      LLM_COMM_UNROLL(4)
      for (uint32_t i = 0; i < 4; ++i) own[n][i] = sums[n][0][i] + sums[n][1][i];
    }
    sums_of_warps.give(own, warp);
  }
}

// The adding warp: stores the state between the layers.
template <DataType D, uint32_t Rows>
LLM_COMM_DEVICE void store_gate_up(const ExpertsArgs& args, const ExpertsMemory& memory, const ExpertUnits& units,
                                   uint32_t warps) {
  const uint32_t lane = thread_index() % kWarpThreads;
  // Two lanes have neighbouring outputs of two tokens. Each stores both outputs of one token.
  const uint32_t output = row_of_sum(lane, 0);
  const uint32_t is_second = output % 2;
  SumsOfWarps<Rows> sums_of_warps(memory, warps);
  LLM_COMM_UNROLL(1)
  for (ExpertUnit unit = units.first(); units.have(unit); unit = units.after(unit)) {
    const uint32_t rows = ExpertGroup(memory.groups()[unit.group]).rows();
    float sums[Rows / 8][4];
    sums_of_warps.take(sums);
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      uint32_t bits[2];
      LLM_COMM_UNROLL(2)
      for (uint32_t i = 0; i < 2; ++i) {
        bits[i] = activate_and_mul<D>(args.epilogue, Element<D>::round(sums[n][i]), Element<D>::round(sums[n][2 + i]));
      }
      const uint32_t kept = is_second != 0 ? bits[1] : bits[0];
      const uint32_t given = is_second != 0 ? bits[0] : bits[1];
      const uint32_t taken = float_to_bits(shuffle_xor(bits_to_float(given), kLanesToNextRow));
      const uint32_t row = 8 * n + token_of(lane, is_second);
      if (row >= rows) continue;
      const uint64_t place = ExpertPlace(memory.places()[unit.group * Rows + row]).place();
      const uint64_t first = place * args.weight.rows + unit.tile * (experts::kUnitRows / 2) + (output - is_second);
      store_plain(static_cast<uint32_t*>(args.out) + first / 2,
                  is_second != 0 ? taken | kept << 16 : kept | taken << 16);
    }
  }
}

template <OperandType W, DataType D, uint32_t Rows>
LLM_COMM_KERNEL(experts::kGateUpThreads)
experts_gate_up(LLM_COMM_KERNEL_PARAM ExpertsArgs args) {
  const ExpertsMemory memory{tile_memory(), args.layout};
  const uint32_t warp = same_in_warp(thread_index() / kWarpThreads);
  const uint32_t boxes = args.weight.row_bytes / kBoxRowBytes;
  const uint32_t summed = boxes < experts::kWarps ? boxes : experts::kWarps;  // warps with tiles
  memory.clear_tokens(args.experts);
  if (warp == experts::kWarps) {
    LLM_COMM_UNROLL(1)
    for (uint32_t stage = 0; stage < args.stages; ++stage) {
      barrier_init(memory.full(stage), kFetchArrivals);
      barrier_init(memory.empty(stage), experts::kWarps);
    }
    LLM_COMM_UNROLL(2)
    for (uint32_t buffer = 0; buffer < experts::kSumsBuffers; ++buffer) {
      barrier_init(memory.sums_full(buffer), summed);
      barrier_init(memory.sums_empty(buffer), 1);
    }
    barrier_init_fence();
  }
  block_sync();
  grid_dependency_wait();  // for x and the router's choice
  grid_dependency_trigger();
  const uint32_t groups = same_in_warp(find_groups<Rows>(args, memory));
  const uint32_t tiles = args.weight.rows / (experts::kUnitRows / 2);
  const ExpertUnits units{tiles, block_index(), groups * tiles, block_count()};
  if (warp == experts::kWarps) {
    GateUpFetch fetch(args, memory, units);
    fetch.begin();
    block_sync();
    fetch.run();
  } else if (warp > experts::kWarps) {
    block_sync();
    store_gate_up<D, Rows>(args, memory, units, summed);
  } else {
    find_places<Rows, true>(args, memory);
    block_sync();
    multiply_gate_up<W, D, Rows>(args, memory, units, warp);
  }
}

// ---- Down ------------------------------------------------------------------------------------------------------------

// Fetches of a warp into its ring. All lanes call all methods.
class DownFetch {
 public:
  LLM_COMM_DEVICE DownFetch(const ExpertsArgs& args, const ExpertsMemory& memory, const ExpertUnits& units,
                            uint32_t warp)
      : args_(args),
        memory_(memory),
        units_(units),
        boxes_(args.weight.row_bytes / kBoxRowBytes),
        stage_bytes_(args.stage_boxes * args.unit_rows * kBoxRowBytes),
        ring_(memory.stages() + warp * args.stages * stage_bytes_),
        full_(memory.full(0, warp)),
        unit_(units.first()) {}

  LLM_COMM_DEVICE SharedAddress stage_at(uint32_t stage) const { return ring_ + stage * stage_bytes_; }
  LLM_COMM_DEVICE SharedAddress full(uint32_t stage) const { return full_ + 8 * stage; }

  // Fetches into the next stage of the ring, if tiles are left. The lanes have read what was there.
  LLM_COMM_DEVICE void next() {
    if (!units_.have(unit_)) return;
    const uint32_t row = block_index() * args_.block_outputs + unit_.tile * args_.unit_rows;
    fetch_begin(full(stage_), stage_bytes_);
    fetch_boxes<1, true>(stage_at(stage_), args_.weight, row, box_, args_.unit_rows, args_.stage_boxes, full(stage_),
                         BoxUse::kOnce, ExpertGroup(memory_.groups()[unit_.group]).expert());
    fetch_end(full(stage_));
    box_ += args_.stage_boxes;
    if (box_ >= boxes_) {
      box_ = 0;
      unit_ = units_.after(unit_);
    }
    if (++stage_ == args_.stages) stage_ = 0;
  }

 private:
  const ExpertsArgs& args_;
  const ExpertsMemory& memory_;
  const ExpertUnits& units_;
  uint32_t boxes_;  // of a row
  uint32_t stage_bytes_;
  SharedAddress ring_;
  SharedAddress full_;
  ExpertUnit unit_;
  uint32_t box_ = 0;
  uint32_t stage_ = 0;
};

// Writes the products of a warp's units to shared memory.
template <OperandType W, DataType D, uint32_t Rows>
LLM_COMM_DEVICE void multiply_down(const ExpertsArgs& args, const ExpertsMemory& memory, const ExpertUnits& units,
                                   DownFetch& fetch, uint32_t stride) {
  const uint32_t lane = thread_index() % kWarpThreads;
  const uint32_t boxes = args.weight.row_bytes / kBoxRowBytes;
  using Tokens = TokensAhead<W, D, Rows, true>;
  Tokens tokens(args, memory, units, 0);
  uint32_t stage = 0, parity = 0, of_stage = 0;
  LLM_COMM_UNROLL(1)
  for (ExpertUnit unit = units.first(); units.have(unit); unit = units.after(unit)) {
    typename Tokens::Sums sums = {};
    LLM_COMM_UNROLL(1)
    for (uint32_t first = 0; first < tokens.steps(); first += Tokens::kAhead) {
      LLM_COMM_UNROLL(2)
      for (uint32_t slot = 0; slot < Tokens::kAhead; ++slot) {
        const uint32_t step = first + slot;
        if (step >= tokens.steps()) break;
        if (of_stage == 0) barrier_wait(fetch.full(stage), parity);
        LLM_COMM_UNROLL(2)
        for (uint32_t i = 0; i < Tokens::kTogether; ++i) {
          if (step * Tokens::kTogether + i >= boxes) continue;
          tokens.multiply(sums, fetch.stage_at(stage) + (of_stage + i) * (args.unit_rows * kBoxRowBytes), slot, i);
        }
        of_stage += Tokens::kTogether;
        if (of_stage == args.stage_boxes || step + 1 == tokens.steps()) {
          of_stage = 0;
          warp_sync();  // all lanes have read the stage
          fetch.next();
          if (++stage == args.stages) {
            stage = 0;
            parity ^= 1;
          }
        }
        tokens.refill(slot, step);
      }
    }
    const uint32_t rows = ExpertGroup(memory.groups()[unit.group]).rows();
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      LLM_COMM_UNROLL(4)
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t row = 8 * n + token_of(lane, i);
        const uint32_t output = row_of_sum(lane, i);
        if (row >= rows || output >= args.unit_rows) continue;
        const uint32_t place = ExpertPlace(memory.places()[unit.group * Rows + row]).place();
        memory.products()[place * stride + unit.tile * args.unit_rows + output] = sums[n][0][i] + sums[n][1][i];
      }
    }
  }
}

template <OperandType W, DataType D, uint32_t Rows>
LLM_COMM_KERNEL(experts::kMaxDownThreads)
experts_down(LLM_COMM_KERNEL_PARAM ExpertsArgs args) {
  const ExpertsMemory memory{tile_memory(), args.layout};
  const uint32_t warp = same_in_warp(thread_index() / kWarpThreads);
  memory.clear_tokens(args.experts);
  LLM_COMM_UNROLL(1)
  for (uint32_t stage = 0; stage < args.stages; ++stage) barrier_init(memory.full(stage, warp), kFetchArrivals);
  barrier_init_fence();
  block_sync();
  const uint32_t groups = same_in_warp(find_groups<Rows>(args, memory));
  const uint32_t tiles = args.block_outputs / args.unit_rows;
  const ExpertUnits units{tiles, warp, groups * tiles, block_threads() / kWarpThreads};
  DownFetch fetch(args, memory, units, warp);
  LLM_COMM_UNROLL(1)
  for (uint32_t stage = 0; stage < args.stages; ++stage) fetch.next();
  find_places<Rows, false>(args, memory);
  block_sync();
  grid_dependency_wait();  // for the state between the layers, and for who reads what `out` holds
  grid_dependency_trigger();
  // The padding avoids bank conflicts between the lanes of a warp.
  const uint32_t stride = args.block_outputs + linear::kSumsPadding;
  multiply_down<W, D, Rows>(args, memory, units, fetch, stride);
  block_sync();
  // A thread has two neighbouring outputs.
  const uint32_t first_output = block_index() * args.block_outputs;
  const uint32_t pairs = args.block_outputs / 2;
  LLM_COMM_UNROLL(1)
  for (uint32_t i = thread_index(); i < args.tokens * pairs; i += block_threads()) {
    const uint32_t token = i / pairs;
    const uint32_t output = i % pairs * 2;
    if (first_output + output >= args.weight.rows) continue;
    float low = 0.0f, high = 0.0f;
    LLM_COMM_UNROLL(4)
    for (uint32_t k = 0; k < args.top_k; ++k) {
      const uint32_t place = token * args.top_k + k;
      const float factor = memory.factors()[place];
      const bool stands = memory.stands()[place] != 0;
      const float* const of_place = memory.products() + place * stride + output;
      low = multiply_add(factor, stands ? of_place[0] : 0.0f, low);
      high = multiply_add(factor, stands ? of_place[1] : 0.0f, high);
    }
    store_plain(static_cast<uint32_t*>(args.out) + (uint64_t{token} * args.weight.rows + first_output + output) / 2,
                static_cast<uint32_t>(Element<D>::round(low)) | static_cast<uint32_t>(Element<D>::round(high)) << 16);
  }
}

template <OperandType W, DataType D>
ExpertsKernel ExpertsKernels<W, D>::find(bool is_gated, uint32_t rows) {
  switch (rows) {
    case 8:
      return is_gated ? &experts_gate_up<W, D, 8> : &experts_down<W, D, 8>;
    case 16:
      return is_gated ? &experts_gate_up<W, D, 16> : &experts_down<W, D, 16>;
    case 32:
      return is_gated ? &experts_gate_up<W, D, 32> : &experts_down<W, D, 32>;
    default:
      return nullptr;
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
