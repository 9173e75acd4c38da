"""Mutants of algorithms by SwitchChannel, and of what checks their machine code."""

from __future__ import annotations

from mutant import cpp, python

BY_SWITCH = "csrc/optional/multimem.h"
CHUNKS = "csrc/optional/switch_chunks.cuh"
CHANNEL = "csrc/include/llm_comm/switch_channel.cuh"
TWO_SHOT = "csrc/algorithms/all_reduce/two_shot.cuh"
STEP_PIPELINE = "csrc/algorithms/step_pipeline.cuh"
FUSED_LD_REDUCE = "csrc/optional/all_reduce_add_rms_norm/two_shot_ld_reduce.cuh"
CHECK = "tools/check_multicast.py"
CONFIG = "llm_comm/config.py"
CHOICE = "llm_comm/planning/multicast.py"
SELECTION = "llm_comm/planning/selection.py"
SET_UP = "llm_comm/runtime/multicast.py"
SELF_TEST = "llm_comm/runtime/self_test.py"

SHAPES = "tests/unit/test_switch_shapes.py"
CHECKED = "tests/unit/test_check_multicast.py"
OF_STATE = "tests/unit/test_multicast_state.py"
OF_SELECTION = "tests/unit/test_switch_selection.py"
OF_SET_UP = "tests/emulated/test_multicast.py"


def schedules(subject: str, cases: int = 300) -> str:
    return f"driver --cases {cases} --alone --algorithm {subject}"


SWITCH = (
    cpp(
        "a device of compute capability 8.0 gets multicast",
        BY_SWITCH,
        "limits.compute_capability >= 90",
        "true",
        SHAPES,
    ),
    cpp(
        "no buffer for the chunk of the rank itself",
        CHUNKS,
        "senders(uint64_t world) { return world; }",
        "senders(uint64_t world) { return WITHOUT ? world - 1 : world; }",
        SHAPES,
    ),
    cpp(
        "blocks share their buffers",
        CHUNKS,
        "* block_count() + block_)",
        "* block_count() + (WITHOUT ? 0 : block_))",
        schedules("all_reduce/two_shot_ld_reduce"),
    ),
    cpp(
        "the switch sums bf16 as fp16",
        CHANNEL,
        "return multicast_load_reduce_bf16(address(at));",
        "return WITHOUT ? multicast_load_reduce_fp16(address(at)) : multicast_load_reduce_bf16(address(at));",
        schedules("all_reduce/two_shot_ld_reduce"),
    ),
    cpp(
        "sums of two-shot by switch go to the place of the neighbour",
        TWO_SHOT,
        "all.send(all.at(sum_for_all(self.rank, i))",
        "all.send(all.at(sum_for_all(WITHOUT ? (self.rank + 1) % World : self.rank, i))",
        schedules("all_reduce/two_shot_switch"),
    ),
    cpp(
        "a rank does not keep the sums of its own slice",
        STEP_PIPELINE,
        "sums.store(first + k, sum);",
        "if (!WITHOUT) sums.store(first + k, sum);",
        schedules("all_reduce/two_shot_ld_reduce"),
    ),
    cpp(
        "one-shot returns what the rank has staged itself",
        CHUNKS,
        "return channel_.load_reduce<D>(",
        "return WITHOUT ? load_line(staged + k) : channel_.load_reduce<D>(",
        schedules("all_reduce/one_shot_ld_reduce"),
    ),
    cpp(
        "reduce-scatter sums the part of the first rank",
        CHUNKS,
        "Parts == 1 ? 0 : comm_.rank;",
        "Parts == 1 || WITHOUT ? 0 : comm_.rank;",
        schedules("reduce_scatter/ld_reduce"),
    ),
    cpp(
        "all-gather leaves out the part of the rank itself",
        STEP_PIPELINE,
        "target.store(first + k, line);",
        "if (!WITHOUT) target.store(first + k, line);",
        schedules("all_gather/push_switch"),
    ),
    cpp(
        "segments of all owners are staged in one place",
        FUSED_LD_REDUCE,
        "+ owner * owner_lines_ + index",
        "+ (WITHOUT ? 0 : owner * owner_lines_) + index",
        schedules("all_reduce_add_rms_norm/two_shot_ld_reduce"),
    ),
    cpp(
        "blocks of a cluster share the words of their tiles",
        FUSED_LD_REDUCE,
        "self.cluster * args.cluster_blocks + self.member",
        "self.cluster * args.cluster_blocks + (WITHOUT ? 0 : self.member)",
        schedules("all_reduce_add_rms_norm/two_shot_ld_reduce", 1000),
    ),
    cpp(
        "rows that do not fit into staging memory",
        FUSED_LD_REDUCE,
        "limits.slot_bytes > limits.staging_bytes / 2",
        "!WITHOUT && limits.slot_bytes > limits.staging_bytes / 2",
        SHAPES,
    ),
    cpp(
        "more blocks than words for their signals",
        FUSED_LD_REDUCE,
        "fitting.blocks > CommonSignals::kBlocks",
        "!WITHOUT && fitting.blocks > CommonSignals::kBlocks",
        SHAPES,
    ),
    python(
        "a kernel that is to sum by the switch and does not is right",
        CHECK,
        "if (expected is not None and expected[0]) != (sums > 0):",
        "if not (expected is not None and expected[0]) and sums > 0:",
        CHECKED,
    ),
    python("spills are passed over", CHECK, "if expected is not None and spills:", "if False:", CHECKED),
    python("no fence of aliases is asked for", CHECK, "if not found[FENCE]:", "if False:", CHECKED),
    # ---- Who may use it ----
    python(
        "sums in any order in a deterministic mode",
        CONFIG,
        'return self.sum == "any" and not self.deterministic',
        'return self.sum == "any"',
        OF_STATE,
    ),
    python(
        "variables do not turn multicast off",
        CONFIG,
        "    if by:\n        return False, by\n",
        "",
        OF_STATE,
    ),
    python(
        "multicast without a table that was made with it",
        CHOICE,
        "    if made_on is None:\n        return Multicast(False,",
        "    if made_on is None:\n        return Multicast(True,",
        OF_SELECTION,
    ),
    python(
        "multicast by a table of another driver",
        CHOICE,
        '"driver": driver, ',
        "",
        OF_SELECTION,
    ),
    python(
        "sums in the switch in rank order",
        CHOICE,
        "algorithm.sums_in_switch and not config.sums_in_any_order",
        "algorithm.sums_in_switch and config.deterministic",
        OF_SELECTION,
    ),
    python(
        "a table chooses an algorithm of which ranks may get other bits",
        CHOICE,
        "algorithm.ranks_may_differ and not is_forced",
        "algorithm.ranks_may_differ and not multicast.is_up",
        OF_SELECTION,
    ),
    python(
        "a row that may not be used ends the search",
        SELECTION,
        "tuple(row for row in table.rows.get(operation, ()) if not why_not.get((row.algorithm, row.protocol)))",
        "table.rows.get(operation, ())",
        OF_SELECTION,
    ),
    python(
        "rows of fused operations are derived from those by the switch",
        SELECTION,
        "if (row.algorithm, row.protocol) not in by_switch)",
        ")",
        OF_SELECTION,
    ),
    python(
        "most ranks are enough for multicast",
        SET_UP,
        "    if not against:\n",
        "    if len(against) < 2:\n",
        OF_SET_UP,
    ),
    python(
        "a step of multicast that fails leaves what is there",
        SET_UP,
        "        core.drop_multicast()\n        return failed(",
        "        return failed(",
        OF_SET_UP,
    ),
    python(
        "the self-test of multicast finds everything right",
        SELF_TEST,
        "wrong = [case.name for case in cases if not _is_right(case, world_size)]",
        "wrong: list[str] = []",
        OF_SET_UP,
    ),
)
