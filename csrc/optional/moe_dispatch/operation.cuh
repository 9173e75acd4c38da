// Dispatch of tokens to the ranks that own their experts.
//
// A rank gets [world * max_tokens] places in the order of source rank and token. A place has the token's row if one of
// its experts is on this rank. It has the numbers of those experts on this rank, and -1 for experts of other ranks. Their
// weights follow, with 0 for experts of other ranks. Rows that no rank sends are left as they are. Rows are moved as
// bytes, with the scales of their groups if they have some.
#pragma once

#include "optional/moe_tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

struct MoeDispatchArgs : MoeArgs {
  const Line* x;                 // [tokens, row_lines]; this and `rows` begin at a line boundary
  const uint32_t* topk_weights;  // [tokens, top_k], bits of fp32
  Line* rows;                    // [world * max_tokens, row_lines]
  int32_t* ids;                  // [world * max_tokens, top_k]
  uint32_t* weights;             // [world * max_tokens, top_k]
  const uint32_t* x_scales;      // [tokens, groups], bits of fp32; without groups nullptr, as is `scales`
  uint32_t* scales;              // [world * max_tokens, groups]
  uint32_t groups;
};

struct MoeDispatch : MoeOperation {
  using Args = MoeDispatchArgs;
  static constexpr OperationInfo kInfo =
      with_experts({.name = "moe_dispatch",
                    .title = "dispatch of tokens",
                    .buffers = {{"x"},
                                {"topk_ids"},
                                {"topk_ids_end"},
                                {"topk_weights"},
                                {.name = "rows", .is_output = true},
                                {.name = "ids", .is_output = true},
                                {.name = "weights", .is_output = true},
                                {.name = "x_scales", .is_optional = true},
                                {.name = "scales", .is_output = true, .is_optional = true}},
                    .parameters = {{}, {}, {"groups"}}},
                   1);

  static constexpr bool serves(DataType type) { return type == DataType::kByte; }

  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid&) {
    Args args{};
    set_arguments(args, problem, tiling);
    args.groups = static_cast<uint32_t>(problem.parameter[kGroups]);
    return args;
  }

  static void check_buffers(const Problem& problem, const uint64_t* buffers) {
    const bool has_groups = problem.parameter[kGroups] != 0;
    if (has_groups != (buffers[7] != 0) || has_groups != (buffers[8] != 0)) {
      throw std::invalid_argument("x_scales and scales must be given exactly if there are groups");
    }
  }

  static void set_launch(Args& args, const Problem& problem, const uint64_t* buffers, uint64_t first, uint64_t units) {
    set_places(args, problem, first, units, buffers[1], buffers[2]);
    args.x = reinterpret_cast<const Line*>(buffers[0]);
    args.topk_weights = reinterpret_cast<const uint32_t*>(buffers[3]);
    args.rows = reinterpret_cast<Line*>(buffers[4]);
    args.ids = reinterpret_cast<int32_t*>(buffers[5]);
    args.weights = reinterpret_cast<uint32_t*>(buffers[6]);
    args.x_scales = reinterpret_cast<const uint32_t*>(buffers[7]);
    args.scales = reinterpret_cast<uint32_t*>(buffers[8]);
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
