"""Calls that do not depend on each other keep their order in compiled graphs, whatever the compiler of a rank does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch._inductor.config as inductor_config
from functorch.compile import make_boxed_func
from harness import RankPool, make_communicator
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from llm_comm import Communicator

Operands = tuple[torch.Tensor, ...]

OPERATORS = [
    getattr(torch.ops.llm_comm, name).default
    for name in (
        "all_reduce",
        "all_reduce_add_rms_norm",
        "all_reduce_add_rms_norm_static_fp8",
        "all_reduce_add_rms_norm_dynamic_fp8",
        "all_gather",
        "reduce_scatter",
    )
]


def turn_round(graph: torch.fx.Graph) -> None:
    """A pass that puts nodes as far back as the flow of data lets it: what depends on nothing comes last one first."""
    nodes = list(graph.nodes)
    placed = {node for node in nodes if node.op == "placeholder"}
    last = next(node for node in reversed(nodes) if node in placed)
    waiting = [node for node in nodes if node.op not in ("placeholder", "output")]
    while waiting:
        node = next(n for n in reversed(waiting) if placed.issuperset(n.all_input_nodes))
        waiting.remove(node)
        placed.add(node)
        last.append(node)
        last = node
    graph.lint()


class Kept:
    """``turn_round``, and the calls of the graphs that it has seen, in the order that it left them in."""

    def __init__(self) -> None:
        self.graphs: list[list[torch.fx.Node]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        turn_round(graph)
        self.graphs.append([node for node in graph.nodes if node.target in OPERATORS])

    def compile(self, module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)


def sums(comm: Communicator, operands: Operands) -> Operands:
    """Sums of several sizes, none of which depends on another."""
    return tuple(comm.all_reduce(x) for x in operands)


def norms(comm: Communicator, operands: Operands) -> Operands:
    """All operators, of which each has several results, and some have none that anybody uses."""
    results: list[torch.Tensor] = []
    for i, x in enumerate(operands):
        weight = torch.ones(x.shape[-1], dtype=x.dtype)
        results.append(comm.all_reduce_add_rms_norm(x, None, weight, 1e-5)[i % 2])
        results.append(comm.all_reduce_add_rms_norm(x, x, weight, 1e-5, quantize="dynamic")[2 - i % 2])
        results.append(comm.all_reduce(x))
        scale = torch.full((1,), 0.5)
        results.append(comm.all_reduce_add_rms_norm(x, x, weight, 1e-5, quantize="static", scale=scale)[1 - i % 2])
    return tuple(result.float() for result in results)


def parts(comm: Communicator, operands: Operands) -> Operands:
    """Gathers and scatters of several shapes beside sums, of even and uneven parts."""
    results: list[torch.Tensor] = []
    for x in operands:
        results.append(comm.all_gather(x, x.dim() - 1))
        results.append(comm.all_reduce(x))
        results.append(comm.reduce_scatter(x, 1))
        results.append(comm.reduce_scatter(x, 0, [0] * (comm.world_size - 1) + [x.shape[0]]))
    return tuple(results)


def written(comm: Communicator, operands: Operands) -> Operands:
    """A sum is written before the next call, which must not see what was written."""
    first = comm.all_reduce(operands[0])
    first.add_(1)
    second = torch.empty_like(operands[1])
    comm.all_reduce(operands[1], out=second)
    first.mul_(second.sum())
    return first, second, comm.all_reduce(operands[2])


class Case(NamedTuple):
    program: Callable[[Communicator, Operands], Operands]
    calls: int


CASES = {"sums": Case(sums, 4), "norms": Case(norms, 16), "parts": Case(parts, 16), "written": Case(written, 3)}
PASSES = ("joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass")  # an odd number of turns


def compile_and_compare(comm: Communicator, name: str, **how: Any) -> None:
    case = CASES[name]
    operands = tuple(torch.ones(i + 1, 16 * (i + 1)).bfloat16() for i in range(4))
    expected = case.program(comm, operands)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *operands: case.program(comm, operands), fullgraph=True, **how)
    for found in (compiled(*operands), compiled(*operands)):
        for one, other in zip(found, expected, strict=True):
            assert one.equal(other)


def turn_calls_round(name: str) -> None:
    """On rank 1 alone."""
    with make_communicator() as comm, torch.inference_mode():
        kept = Kept()
        backend = aot_autograd(fw_compiler=kept.compile) if comm.rank == 1 else "aot_eager"
        compile_and_compare(comm, name, backend=backend)
        if comm.rank == 1:
            (calls,) = kept.graphs
            assert len(calls) == CASES[name].calls


@pytest.mark.parametrize("name", CASES)
def test_a_pass_that_turns_calls_round(ranks: RankPool, name: str) -> None:
    ranks.run(2, turn_calls_round, name)


def compile_otherwise(options: dict[str, Any]) -> None:
    """With other options of inductor on rank 1. Nothing is to be generated, for which inductor needs a C++ compiler."""
    with make_communicator() as comm, torch.inference_mode():
        mine = {"force_disable_caches": True, "compile_threads": 1, "cpp.vec_isa_ok": False}
        kept = Kept()
        if comm.rank == 1:
            mine |= {key: kept if value is turn_round else value for key, value in options.items()}
        with inductor_config.patch(mine):
            compile_and_compare(comm, "sums", backend="inductor")
        assert len(kept.graphs) == sum(value is kept for value in mine.values())


@pytest.mark.parametrize(
    "options",
    [
        dict.fromkeys(PASSES, turn_round),
        {"reorder_for_locality": False, "reorder_for_peak_memory": False},
        {"reorder_for_compute_comm_overlap": True, "max_fusion_size": 1},
    ],
    ids=["passes", "order", "overlap"],
)
def test_other_options_of_inductor(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks.run(2, compile_otherwise, options)


def leave_what_is_in_order() -> None:
    """Where each call needs the one before anyway, the graph is what it would be without."""
    with make_communicator() as comm, torch.inference_mode():
        kept = Kept()

        def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                normed, x = comm.all_reduce_add_rms_norm(x, x, weight, 1e-5)
                x = x + comm.all_reduce(normed * 2)
            return x

        x, weight = torch.ones(2, 64).bfloat16(), torch.ones(64).bfloat16()
        compiled = torch.compile(layers, fullgraph=True, backend=aot_autograd(fw_compiler=kept.compile))
        assert compiled(x, weight).equal(layers(x, weight))
        (calls,) = kept.graphs
        assert len(calls) == 6
        assert all(len(call.args) == len(call.target._schema.arguments) - 1 for call in calls)


def test_calls_that_depend_on_each_other_are_left_alone(ranks: RankPool) -> None:
    ranks.run(2, leave_what_is_in_order)


def nest() -> None:
    """What effect tokens of torch would not compile."""
    with make_communicator() as comm:

        def branch(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 3, lambda x: comm.all_reduce(x) + 1, lambda x: comm.all_reduce(x) - 1, (x,))

        def loop(x: torch.Tensor) -> torch.Tensor:
            def body(i: torch.Tensor, x: torch.Tensor) -> Operands:
                return i + 1, comm.all_reduce(x) + comm.all_reduce(x * 2)

            result: torch.Tensor = torch.while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))[1]
            return result

        def recompute(x: torch.Tensor) -> torch.Tensor:
            weight = torch.full_like(x, 2.0).requires_grad_()
            result: torch.Tensor = checkpoint(lambda x: comm.all_reduce(x) * weight, x, use_reentrant=False)
            return result.detach()

        x = torch.arange(4.0)
        for program in (branch, loop, recompute):
            torch._dynamo.reset()
            compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
            assert compiled(x).equal(program(x)), program.__name__


def test_nested_graphs(ranks: RankPool) -> None:
    ranks.run(2, nest)


def trace_again() -> None:
    """Graphs are traced more than once on their way, and an exported one by whoever loads it."""
    with make_communicator() as comm, torch.no_grad():

        def program(x: torch.Tensor) -> Operands:
            return comm.all_reduce(x), comm.all_reduce(x * 2), comm.all_reduce(x * 3)

        x = torch.ones(8)
        graph = make_fx(program, tracing_mode="symbolic")(x)
        again = make_fx(graph, tracing_mode="symbolic")(x)
        for one in (graph, again):
            calls = [node for node in one.graph.nodes if node.target in OPERATORS]
            for before, call in itertools.pairwise(calls):
                assert call.args[2] is before
            turn_round(one.graph)
            one.recompile()
            for found, expected in zip(one(x), program(x), strict=True):
                assert found.equal(expected)


def test_a_graph_that_is_traced_again(ranks: RankPool) -> None:
    ranks.run(2, trace_again)
