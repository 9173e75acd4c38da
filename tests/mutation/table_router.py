"""Mutants of the router of experts. Protections of waits and deliveries have negative controls."""

from __future__ import annotations

from mutant import Mutant, cpp, python

KERNEL = "csrc/algorithms/linear/router.cuh"
HOST = "csrc/algorithms/linear/router.cpp"
CALLS = "llm_comm/operations/router.py"

TESTS = "tests/emulated/test_router.py"
PROBLEMS = f"{TESTS} -k not_served"
METHOD = f"{TESTS} -k the_method"

ROUTER: tuple[Mutant, ...] = (
    cpp(
        "a router gives a token one expert again and again",
        KERNEL,
        "keys[i] = keys[i] == next ? 0 : keys[i];",
        "keys[i] = keys[i] == next && !WITHOUT ? 0 : keys[i];",
        f"{TESTS} -k equal_logits",
    ),
    cpp(
        "a router's softmax counts experts that there are not",
        KERNEL,
        "if (!args.renormalize && keys[i] != 0) total",
        "if (!args.renormalize && (WITHOUT || keys[i] != 0)) total",
        TESTS,
    ),
    cpp(
        "a router's shares are not relative to the largest logit, their sum is",
        KERNEL,
        "exponential(value_of(own) - largest)",
        "exponential(value_of(own))",
        TESTS,
    ),
    cpp(
        "a router takes keys of negative logits for those of positive ones",
        KERNEL,
        "(value & 0x8000) != 0 ? ~value & 0xFFFF : value | 0x8000",
        "value ^ 0x8000",
        f"{TESTS} -k equal_logits",
    ),
    cpp(
        "a router adds the bias to the first expert alone",
        KERNEL,
        "args.bias[expert]",
        "args.bias[0]",
        TESTS,
    ),
    cpp(
        "columns of a router that do not fill all parts are lost",
        HOST,
        "divide_up(boxes, blocks * parts)",
        "boxes / (blocks * parts)",
        TESTS,
    ),
    cpp(
        "a router may choose more experts than there are",
        HOST,
        "problem.experts < kMaxTopK ? problem.experts : kMaxTopK",
        "kMaxTopK",
        PROBLEMS,
    ),
    cpp(
        "a router takes any number of columns",
        HOST,
        'linear::why_not_features(problem.hidden, "columns")',
        'linear::why_not_features(problem.hidden, "columns", 1)',
        PROBLEMS,
    ),
    python(
        "calls of a router with renormalize are taken for those without",
        CALLS,
        "(x.shape, experts, top_k, x.dtype, renormalize),",
        "(x.shape, experts, top_k, x.dtype),",
        METHOD,
    ),
    python(
        "a router reads x where it is not aligned",
        CALLS,
        "x = aligned(x)",
        "pass",
        METHOD,
    ),
    python(
        "a router's weight may begin anywhere",
        CALLS,
        'weights=("router_weight",),',
        "weights=(),",
        METHOD,
    ),
    python(
        "a router takes a bias of any length",
        CALLS,
        "(bias is not None and len(bias) != experts)",
        "False",
        METHOD,
    ),
)
