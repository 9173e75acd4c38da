"""Who watches calls of torch, or stands for tensors, is not passed by: modes, tracers and transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool, make_communicator
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from llm_comm import Communicator, UnsupportedInputError

ALL_REDUCE = torch.ops.llm_comm.all_reduce.default
FUSED = torch.ops.llm_comm.all_reduce_add_rms_norm.default


class Watcher(TorchDispatchMode):
    """Lists the operators that are called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.seen.append(function)
        return function(*arguments, **(options or {}))


def reduce_right(comm: Communicator) -> None:
    assert comm.all_reduce(torch.ones(30)).eq(comm.world_size).all()


def call_all(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Each call once, with plain tensors."""
    total = comm.all_reduce(x) + 1
    tried = comm.try_all_reduce(total)
    assert tried is not None
    comm.all_reduce(tried, out=tried)
    normed, _ = comm.all_reduce_add_rms_norm(tried, total, tried[0].clone(), 1e-5)
    return normed + 1


def watch() -> None:
    with make_communicator() as comm:
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        expected = call_all(comm, x)
        with Watcher() as watcher:
            assert call_all(comm, x).equal(expected)
        assert [watcher.seen.count(operator) for operator in (ALL_REDUCE, FUSED)] == [3, 1]
        reduce_right(comm)


def test_dispatch_mode(ranks: RankPool) -> None:
    ranks.run(2, watch)


#: Of make_fx. Modes of a trace before dispatch lie on a stack of their own; symbolic sizes are no keys of a cache.
TRACES: dict[str, dict[str, Any]] = {
    "real": {},
    "before dispatch": {"pre_dispatch": True},
    "symbolic": {"tracing_mode": "symbolic"},
}


def trace(kind: str) -> None:
    """The traced program sums what it is given, not what was there when it was traced."""
    with make_communicator() as comm:
        first = torch.full((2, 64), 3.0).bfloat16()
        second = torch.arange(128).view(2, 64).remainder(7).bfloat16()
        with torch.no_grad():
            if kind in TRACES:
                program: Any = make_fx(lambda x: call_all(comm, x), **TRACES[kind])(first)
                targets = [node.target for node in program.graph.nodes]
                assert (targets.count(ALL_REDUCE), targets.count(FUSED)) == (3, 1)
            else:
                program = torch.jit.trace(lambda x: call_all(comm, x), first, check_trace=False)
                assert str(program.graph).count("llm_comm::all_reduce") == 4
            for x in (first, second):
                assert program(x).equal(call_all(comm, x))
        reduce_right(comm)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", [*TRACES, "torch.jit"])
def test_tracers_record_the_operator(ranks: RankPool, kind: str) -> None:
    ranks.run(2, trace, kind)


def ask_with_symbolic_sizes() -> None:
    with make_communicator() as comm:

        def answers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            assert comm.accepts(x)
            assert not comm.accepts(x.double())
            assert comm.accepts_all_reduce_add_rms_norm(x, weight)
            assert not comm.accepts_all_reduce_add_rms_norm(x, weight.float())
            return comm.all_reduce(x)

        x, weight = torch.ones(2, 64).bfloat16(), torch.ones(64).bfloat16()
        assert make_fx(answers, tracing_mode="symbolic")(x, weight)(x, weight).eq(comm.world_size).all()


def test_what_is_served_while_sizes_are_symbols(ranks: RankPool) -> None:
    ranks.run(2, ask_with_symbolic_sizes)


def transform() -> None:
    with make_communicator() as comm:
        x = torch.arange(24.0).view(4, 6)
        for in_dim in (0, 1):
            assert torch.vmap(comm.all_reduce, in_dim, in_dim)(x).equal(x * comm.world_size)
        assert torch.vmap(lambda row: comm.try_all_reduce(row) * 2)(x).equal(2 * x * comm.world_size)
        rows, weight = torch.ones(3, 2, 64).bfloat16(), torch.ones(64).bfloat16()

        def norm(rows: torch.Tensor) -> Any:
            return comm.all_reduce_add_rms_norm(rows, None, weight, 1e-5)

        for batched, alone in zip(torch.vmap(norm)(rows), norm(rows), strict=True):
            assert batched.equal(alone)
        # What is the same for the whole batch.
        assert torch.vmap(lambda row: row + comm.all_reduce(x[0]))(x).equal(x + comm.world_size * x[0])
        reduce_right(comm)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(ranks: RankPool) -> None:
    ranks.run(2, transform)


def differentiate() -> None:
    x = torch.ones(6)
    with make_communicator() as comm:

        def loss(x: torch.Tensor) -> torch.Tensor:
            return comm.all_reduce(x).sum() + x.sum()

        for transformed in (
            torch.func.grad(loss),
            lambda x: torch.func.jvp(loss, (x,), (x,)),
            lambda x: torch.func.vjp(loss, x),
            lambda x: torch.vmap(torch.func.grad(loss))(torch.stack([x, x])),
        ):
            with pytest.raises(UnsupportedInputError, match=r"detach\(\)"):
                transformed(x)
        # Of what is no part of the function's argument no gradient is asked.
        assert torch.func.grad(lambda y: (y * comm.all_reduce(x)).sum())(x).equal(comm.world_size * x)
        functional = torch.func.functionalize(lambda x: comm.all_reduce(x, out=x.clone()))
        assert functional(x).equal(comm.world_size * x)
        reduce_right(comm)


def test_gradients_by_transforms_are_errors(ranks: RankPool) -> None:
    ranks.run(2, differentiate)


def use_an_escaped_wrapper() -> None:
    """A tensor of a transform that has ended: torch does not tell its address. The call ends, not the communicator."""
    with make_communicator() as comm:
        kept: list[torch.Tensor] = []
        torch.vmap(lambda row: kept.append(row) or row)(torch.ones(3, 1, 64).bfloat16())
        (wrapper,) = kept
        rows, weight = torch.ones(1, 64).bfloat16(), torch.ones(64).bfloat16()
        comm.all_reduce(rows)  # its size is known
        for operand, call in (
            ("x", lambda: comm.all_reduce(wrapper)),
            ("out", lambda: comm.all_reduce(rows, out=wrapper)),
        ):
            with pytest.raises(UnsupportedInputError, match=f"{operand} has no memory of its own.*have storage"):
                call()
        for operand in ("x", "residual", "out", "residual_out"):
            operands = {"x": rows, "residual": None, "weight": weight, "eps": 1e-5, operand: wrapper}
            with pytest.raises(UnsupportedInputError, match=f"{operand} has no memory of its own"):
                comm.all_reduce_add_rms_norm(**operands)
        reduce_right(comm)


def test_escaped_wrapper(ranks: RankPool) -> None:
    ranks.run(2, use_an_escaped_wrapper)
