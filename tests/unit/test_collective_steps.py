"""Collective set-up: what can fail on one rank is a step of the rendezvous, or the other ranks would wait for that rank
until their time-out, and the process group would be lost.

A function is collective if it calls a step of a rendezvous, passes a rendezvous on, or calls a function that does. The
test looks at all other calls of such a function. A step runs its work as a function, so bodies of lambdas and nested
functions are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "llm_comm"
#: Commands end with all their ranks when one fails: their launcher sees to that. The last one is the mechanism itself.
LEFT_OUT = re.compile(r"(bench|cli|demo|planning)/.*|runtime/rendezvous\.py")
STEPS = {"attempt", "collect", "gather", "vote", "exchange_descriptors", "share_descriptors"}
#: Values that are a rendezvous.
OF_RENDEZVOUS = re.compile(r"(self\._?)?rendezvous|here|Rendezvous\(.*\)|self\._heap\.rendezvous\(\)")
#: Collective calls that show no rendezvous.
COLLECTIVE = re.compile(
    r"(.*\._?)?heap\.(empty|rendezvous_for|rendezvous)|self\.rendezvous_for|self\._connect|self\._between_ranks"
    r"|Communicator|ProgramKernels|agree|load_kernel|open_channels|objection_of_any"
)
#: Calls that cannot fail on one rank alone: they work on what the ranks have in common, only keep what they are given,
#: or fail for a communicator that is closed.
SAFE = re.compile(
    r"""
    any|all|dict|enumerate|int|isinstance|len|list|max|min|next|range|set|sorted|str|tuple|zip
    |logger\.\w+|quoted|_?in_words|_?_fit|_?together|check_alike|math\.prod|contextlib\.suppress|secrets\.token_hex
    |.*\.(append|items|join|keys|values|get|pop|replace|_replace|upper|core|core_of_released|check_one_node|describe)
    |(self\._)?layout\.\w+|cls|torch\.(empty|get_default_dtype)|_core\.bytes_of_\w+|devices\.make_limits|programs\.named_by|topology_of|_symmetric_offset
    |places_of|ways_to_share|kind_of_transport|Config\.load|served_device|sums_in_rank_order|_dead_on_all|_shared_gpus|functools\.partial
    |(NotJoinedError|Agreed|Channels|Compared|Compiled|Connected|CoreHandle|LlmCommAllReduce|Multicast|Planner|planner_of|Rendezvous
      |Site|SymmetricHeap|ThreadPoolExecutor|Watchdog|Workspace)
    # Rows of what ranks have said, and objects that only keep what they are given.
    |partial|Layer|LayerKey|LayerRow|Row|rows_of|_Tuning|_CollectiveTuner|_?budget_s|options_of|log\.warning
    # Catches what fails.
    |tuner\.why_not_measured|why_too_slow
    # Words for ranks, and a copy of a table.
    |(.*\.)?names\.\w+|table\.with_programs
    # The operations of a communicator, once its ranks are connected.
    |torch_operators\.(Operations|register)|Linear\w*|AllToAllV?|Experts|Router|MoeDispatch|MoeCombine|GenericOperations.*|self\._forget
    """,
    re.VERBOSE,
)


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that a function runs itself and without an error: not those of nested functions and of handlers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.Raise):
            continue
        if isinstance(child, ast.ExceptHandler):
            continue
        if isinstance(child, ast.Try):
            # An error that is kept, for a vote that follows, may be any.
            kept = any(catches_all(handler) and not raises(handler) for handler in child.handlers)
            yield from own_nodes(ast.Module([*([] if kept else child.body), *child.orelse], []))
            continue
        yield child
        yield from own_nodes(child)


def catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in {"Exception", "BaseException"}


def raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def is_collective(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in STEPS:
        return OF_RENDEZVOUS.fullmatch(ast.unparse(call.func.value)) is not None
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    handed_on = any(OF_RENDEZVOUS.fullmatch(ast.unparse(value)) for value in given)
    return handed_on or COLLECTIVE.fullmatch(ast.unparse(call.func)) is not None


def unguarded(source: str) -> list[str]:
    """``function: call`` of each call in a collective function that may fail on one rank alone."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [node for node in own_nodes(function) if isinstance(node, ast.Call)]
        if not any(is_collective(call) for call in calls):
            continue
        found += [
            f"{function.name}: {ast.unparse(call.func)}"
            for call in calls
            if not is_collective(call) and SAFE.fullmatch(ast.unparse(call.func)) is None
        ]
    return found


def test_what_can_fail_on_one_rank_is_a_step() -> None:
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if not LEFT_OUT.fullmatch(name)}
    assert {name: found for name, source in sources.items() if (found := unguarded(source))} == {}


STEP = "    rendezvous.attempt('a step', lambda: core.load())\n"


@pytest.mark.parametrize(
    "around",
    [
        "    core.load()\n{}",
        "{}    core.load()\n",
        "    kernel = Kernel(1)\n    heap.empty(1)\n",
        "    try:\n        core.load()\n    except ValueError:\n        raise\n{}",
        "    try:\n        core.load()\n    except Exception as error:\n        raise Other from error\n{}",
        "    if True:\n        share(rendezvous, core.load())\n",
        "    return open_channels(heap, core.load())\n",
    ],
)
def test_what_is_no_step_is_found(around: str) -> None:
    found = {call.rpartition(": ")[2] for call in unguarded(f"def f():\n{around.format(STEP)}")}
    assert found in ({"core.load"}, {"Kernel"})


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "    def load():\n        core.load()\n    rendezvous.collect('a step', load)\n",
        "    try:\n        core.load()\n    except Exception as error:\n        objection = error\n{}",
        "    try:\n    {}    except BaseException:\n        core.drop()\n        raise\n",
        "    core.load()\n",
    ],
)
def test_what_is_a_step_is_not_found(around: str) -> None:
    assert unguarded(f"def f():\n{around.format(STEP)}") == []
