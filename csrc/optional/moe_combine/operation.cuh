// Combination of the rows that the ranks of a token's experts have made.
//
// A rank gets, for each of its tokens, the sum over the ranks that own one of its experts. Rows are added in rank order
// in fp32 and rounded once. A token without an expert gets zeros. `ids` are those that moe_dispatch gave for the same
// `topk_ids`.
#pragma once

#include "optional/moe_tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

struct MoeCombineArgs : MoeArgs {
  const Line* y;       // [world * max_tokens, row_lines]: rows of the tokens that this rank has received
  const int32_t* ids;  // [world * max_tokens, top_k]: numbers of their experts on this rank, or -1
  Line* out;           // [tokens, row_lines]; this and `y` begin at a line boundary
};

struct MoeCombine : MoeOperation {
  using Args = MoeCombineArgs;
  static constexpr OperationInfo kInfo =
      with_experts({.name = "moe_combine",
                    .title = "combination of tokens",
                    .buffers = {{"y"}, {"ids"}, {"topk_ids"}, {"topk_ids_end"}, {.name = "out", .is_output = true}}},
                   2);

  static constexpr bool serves(DataType type) { return is_number(type) && element_bytes(type) == 2; }

  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid&) {
    Args args{};
    set_arguments(args, problem, tiling);
    return args;
  }

  static void set_launch(Args& args, const Problem& problem, const uint64_t* buffers, uint64_t first, uint64_t units) {
    set_places(args, problem, first, units, buffers[2], buffers[3]);
    args.y = reinterpret_cast<const Line*>(buffers[0]);
    args.ids = reinterpret_cast<const int32_t*>(buffers[1]);
    args.out = reinterpret_cast<Line*>(buffers[4]);
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
