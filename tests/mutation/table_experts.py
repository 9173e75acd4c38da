"""Mutants of experts: the order of their tokens, and in the hooks of both engines weights that must be left to the
engine."""

from __future__ import annotations

from mutant import Mutant, cpp, python

WEIGHTS = "llm_comm/integrations/experts.py"
OF_WEIGHTS = "tests/unit/test_scaled_experts.py"

EXPERTS: tuple[Mutant, ...] = (
    cpp(
        "tokens of the next unit take the place of this one's",
        "csrc/algorithms/linear/experts_tokens.cuh",
        "(steps_ > kAhead ? steps_ - kAhead : 0)",
        "(steps_ > kAhead && !WITHOUT ? steps_ - kAhead : 0)",
        "tests/emulated/test_experts.py -k fp8_weights",
    ),
    cpp(
        "numbers of experts of other ranks are taken for this rank's",
        "csrc/algorithms/linear/experts_groups.cuh",
        "load_relaxed(args.ids + i) - args.first_expert;",
        "load_relaxed(args.ids + i) - (WITHOUT ? 0 : args.first_expert);",
        "tests/emulated/test_experts.py -k other_ranks",
    ),
    python(
        "FP8 experts with blocks of another size are served",
        WEIGHTS,
        "tuple(block) != (GROUP_SIZE, GROUP_SIZE)",
        "len(block) != 2",
        OF_WEIGHTS,
    ),
    python(
        "scales of FP8 experts may have any dtype",
        WEIGHTS,
        "scale is None or scale.dtype is not torch.float32",
        "scale is None",
        OF_WEIGHTS,
    ),
    python(
        "scales of FP8 experts may have any shape",
        WEIGHTS,
        "if scale.shape != of_blocks:",
        "if scale.dim() != 3:",
        OF_WEIGHTS,
    ),
    python(
        "a scale for each expert passes for scales of blocks",
        WEIGHTS,
        "if block is None and scale.shape == (experts,):",
        "if scale.shape == (experts,):",
        OF_WEIGHTS,
    ),
    python(
        "a measurement with scales of blocks holds for one scale of each expert",
        WEIGHTS,
        "None if scale is None else scale.stride()",
        "scale is None",
        OF_WEIGHTS,
    ),
)
