"""Mutants of dispatch and combine of tokens. Protections of slots and waits have negative controls."""

from __future__ import annotations

from mutant import Mutant, cpp, python

TILES = "csrc/optional/moe_tiles.cuh"
DISPATCH = "csrc/optional/moe_dispatch/one_shot.cuh"
COMBINE = "csrc/optional/moe_combine/one_shot.cuh"
CALLS = "llm_comm/operations/moe.py"
OPERANDS = "llm_comm/operations/operands.py"

DISPATCHES = "driver --cases 300 --alone --algorithm moe_dispatch/one_shot"
COMBINES = "driver --cases 300 --alone --algorithm moe_combine/one_shot"
TESTS = "tests/emulated/test_moe.py"
REFUSALS = f"{TESTS} -k refused"

MOE: tuple[Mutant, ...] = (
    cpp(
        "weights of experts of other ranks are sent",
        DISPATCH,
        "if (local < args.rank_experts) line.word[i]",
        "if (local < args.rank_experts || (WITHOUT && is_weight)) line.word[i]",
        DISPATCHES,
    ),
    cpp(
        "the last expert of a rank is nobody's when rows are sent",
        TILES,
        "local_number(ids[token * top_k + i], owner) < rank_experts;",
        "local_number(ids[token * top_k + i], owner) + (WITHOUT ? 1 : 0) < rank_experts;",
        DISPATCHES,
    ),
    cpp(
        "further launches have the tokens of the first",
        TILES,
        "token(args.first + place)",
        "token((WITHOUT ? 0 : args.first) + place)",
        DISPATCHES,
    ),
    cpp(
        "a sum of tokens begins at zero, which loses -0",
        COMBINE,
        "low = is_first ? values[0]",
        "low = is_first && !WITHOUT ? values[0]",
        f"{TESTS} -k empty_slot",
    ),
    cpp(
        "a row too many in a combine goes unnoticed",
        COMBINE,
        "(flag.word[0] != 0) == is_wanted",
        "(WITHOUT || (flag.word[0] != 0) == is_wanted)",
        f"{TESTS} -k disagree",
    ),
    cpp(
        "a token without an expert keeps what out holds",
        COMBINE,
        "out[word_of_row] = sums[i];",
        "if (!WITHOUT || sums[i] != 0) out[word_of_row] = sums[i];",
        COMBINES,
    ),
    cpp(
        "experts that cannot be divided evenly are served",
        TILES,
        "static_cast<uint32_t>(experts) % problem.world != 0",
        "!WITHOUT && static_cast<uint32_t>(experts) % problem.world != 0",
        REFUSALS,
    ),
    cpp(
        "any number of tokens is served",
        TILES,
        "problem.units() > kMaxMoeTokens",
        "!WITHOUT && problem.units() > kMaxMoeTokens",
        REFUSALS,
    ),
    python(
        "calls with other numbers of experts are taken for one",
        CALLS,
        "key = data_type, max_tokens, row, num_experts, *others",
        "key = data_type, max_tokens, row, *others",
        f"{TESTS} -k other_choices",
    ),
    python(
        "max_tokens below the tokens of x is served",
        CALLS,
        "if not isinstance(max_tokens, int) or not len(x) <= max_tokens <= _MOST:",
        "if not isinstance(max_tokens, int):",
        REFUSALS,
    ),
    python(
        "torch is not told that a combine has written out",
        OPERANDS,
        "count_write((out,))",
        "pass",
        REFUSALS,
    ),
    python(
        "out of a combine may overlap what is read",
        CALLS,
        "self._operands.check_written(y, ids, topk_ids, out)",
        "pass",
        REFUSALS,
    ),
)
