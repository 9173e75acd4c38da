"""The torch operator: models that call a communicator compile as one graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool, make_communicator
from reference import assert_bitwise_equal, assert_is_sum, contributions
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from llm_comm import Communicator, UnsupportedInputError

FEATURES = 48


class RowParallel(torch.nn.Module):
    """A layer whose weight is split over the ranks by rows, in two ways to write the sum."""

    def __init__(self, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        self.comm = comm
        generator = torch.Generator().manual_seed(comm.rank)
        self.weight = torch.randn(FEATURES, FEATURES, generator=generator).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.comm.all_reduce(x @ self.weight)
        second = torch.relu(first) @ self.weight
        return self.comm.all_reduce(second, out=second) + 1


class Recorder:
    """Backend of torch.compile that keeps the graphs and hands them on."""

    def __init__(self, backend: str) -> None:
        self.calls: list[list[Any]] = []
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.calls.append([node.target for node in graph.graph.nodes])
        return self._compile(graph, inputs)


@torch.inference_mode()
def compile_layer(backend: str) -> None:
    with make_communicator() as comm:
        for dtype in (torch.bfloat16, torch.float32):
            torch._dynamo.reset()
            layer, recorder = RowParallel(comm, dtype), Recorder(backend)
            compiled = torch.compile(layer, fullgraph=True, backend=recorder)
            for rows in (1, 5, 9):  # the second makes the batch dynamic
                x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(rows)).to(dtype)
                assert_bitwise_equal(compiled(x), layer(x), f"{backend}, {rows} rows of {dtype}")
            operator = torch.ops.llm_comm.all_reduce
            for targets in recorder.calls:
                assert sum(target in (operator, operator.default) for target in targets) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_model_compiles_as_one_graph(ranks: RankPool, backend: str) -> None:
    ranks.run(2, compile_layer, backend)


def sum_if_accepted(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    return comm.all_reduce(x) if comm.accepts(x) else x


def sum_by_trying(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    total = comm.try_all_reduce(x)
    return x if total is None else total


def sum_what_is_served(layer: Callable[[Communicator, torch.Tensor], torch.Tensor]) -> None:
    with make_communicator(max_message_bytes=4096) as comm:
        # Sizes that have not been asked about yet, and what is declined whatever its size.
        for x, factor in (
            (torch.ones(1024), comm.world_size),
            (torch.ones(1025), 1),
            (torch.ones(8, dtype=torch.int32), 1),
            (torch.ones(4, 6).t(), 1),
        ):
            torch._dynamo.reset()
            recorder = Recorder("aot_eager")
            compiled = torch.compile(lambda x: layer(comm, x), fullgraph=True, backend=recorder)
            assert compiled(x).eq(factor).all()
            operator = torch.ops.llm_comm.all_reduce
            targets = [target for call in recorder.calls for target in call]
            assert sum(target in (operator, operator.default) for target in targets) == (factor > 1)


@pytest.mark.parametrize("layer", [sum_if_accepted, sum_by_trying])
def test_what_is_served_in_a_graph(
    ranks: RankPool, layer: Callable[[Communicator, torch.Tensor], torch.Tensor]
) -> None:
    ranks.run(2, sum_what_is_served, layer)


def ask_first_for_many_sizes(dynamic: bool | None) -> None:
    """One graph has to do for all sizes, but for the smallest, or torch.compile gives up after eight."""
    weight = torch.ones(64, dtype=torch.bfloat16)
    with make_communicator(max_message_bytes=4096) as comm:

        def layer(x: torch.Tensor) -> torch.Tensor:
            if comm.accepts_all_reduce_add_rms_norm(x, weight):
                return comm.all_reduce_add_rms_norm(x, None, weight, 1e-5)[1]
            return comm.all_reduce(x) if comm.accepts(x) else x

        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counter)
        for rows in range(2, 40):
            x = torch.ones(rows, 64, dtype=torch.bfloat16)
            assert comm.accepts(x) == comm.accepts_all_reduce_add_rms_norm(x, weight) == (rows <= 32)
            assert compiled(x).eq(comm.world_size if rows <= 32 else 1).all()
        assert counter.frame_count <= 3
        for x in (torch.ones(4, 64), torch.ones(64, 4, dtype=torch.bfloat16).t()):
            torch._dynamo.reset()
            assert not comm.accepts_all_reduce_add_rms_norm(x, weight)
            assert torch.compile(lambda x: comm.accepts_all_reduce_add_rms_norm(x, weight), backend="eager")(x) is False
            accepted = comm.accepts(x)
            assert torch.compile(lambda x: comm.accepts(x) + 0, backend="eager")(x) == accepted


@pytest.mark.parametrize("dynamic", [None, True])
def test_accepts_in_a_graph_for_all_sizes(ranks: RankPool, dynamic: bool | None) -> None:
    ranks.run(2, ask_first_for_many_sizes, dynamic)


def give_outputs_that_do_not_fit() -> None:
    """``copy_`` would convert them, or repeat a result of one element."""
    x = torch.ones(2, 1, 8, dtype=torch.bfloat16)
    weight = torch.ones(8, dtype=torch.bfloat16)
    with make_communicator() as comm:

        def add(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return comm.all_reduce(x, out=out) + 1

        def norm(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return comm.all_reduce_add_rms_norm(x, None, weight, 1e-5, residual_out=out)[1] + 1

        for function, name in ((add, "all_reduce: out"), (norm, "all_reduce_add_rms_norm: residual_out")):
            for out in (torch.empty(2, 2, 8, dtype=x.dtype), torch.empty(x.shape)):
                torch._dynamo.reset()
                with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"{name} .* must be like what goes there"):
                    torch.compile(function, fullgraph=True, backend="aot_eager")(x, out)
            out = torch.empty(16, dtype=x.dtype)
            torch._dynamo.reset()
            assert torch.compile(function, fullgraph=True, backend="aot_eager")(x, out).eq(comm.world_size + 1).all()
            assert out.eq(comm.world_size).all()


def test_outputs_that_do_not_fit(ranks: RankPool) -> None:
    ranks.run(2, give_outputs_that_do_not_fit)


def sum_beside_a_compilation() -> None:
    """torch's flag that says it is compiling holds for all threads of the process, from torch 2.13 on."""
    is_compiling, is_done = threading.Event(), threading.Event()

    def slow(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        is_compiling.set()
        assert is_done.wait(60)
        return graph.forward

    with make_communicator() as comm:
        compiled = torch.compile(lambda x: x * 2, backend=slow)
        thread = threading.Thread(target=lambda: compiled(torch.ones(3)))
        thread.start()
        try:
            assert is_compiling.wait(60)
            if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
                assert torch.compiler.is_compiling()
            x = torch.ones(2, 64, dtype=torch.bfloat16)
            assert comm.all_reduce(x).eq(comm.world_size).all()
            assert comm.try_all_reduce(x).eq(comm.world_size).all()
            assert comm.try_all_reduce(x.t()) is None
            _, total = comm.all_reduce_add_rms_norm(x, None, x[0], 1e-5)
            assert total.eq(comm.world_size).all()
        finally:
            is_done.set()
            thread.join()


def test_sum_while_another_thread_compiles(ranks: RankPool) -> None:
    ranks.run(2, sum_beside_a_compilation)


def check_operator() -> None:
    with make_communicator() as comm:
        inputs = contributions(comm.world_size, 60, torch.bfloat16)
        x = inputs[comm.rank].view(6, 10)
        assert_is_sum(torch.ops.llm_comm.all_reduce(x, comm.name).view(-1), inputs, "the operator")
        torch.library.opcheck(torch.ops.llm_comm.all_reduce.default, (x, comm.name))
        with pytest.raises(UnsupportedInputError, match="not contiguous"):
            torch.ops.llm_comm.all_reduce(x.t(), comm.name)
    with pytest.raises(RuntimeError, match="closed"):
        torch.ops.llm_comm.all_reduce(x, comm.name)
    name = comm.name
    del comm
    with pytest.raises(RuntimeError, match=f"no communicator '{name}'"):
        torch.ops.llm_comm.all_reduce(x, name)


def test_operator(ranks: RankPool) -> None:
    ranks.run(2, check_operator)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_fake_result_is_like_the_input(shape: tuple[int, ...]) -> None:
    with FakeTensorMode():
        x = torch.empty(shape, dtype=torch.float16)
        out = torch.ops.llm_comm.all_reduce(x, "any")
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    assert out is not x
