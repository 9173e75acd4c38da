"""The operators with a linear layer: models that call them compile as one graph, in which calls keep their order, and
modes, tracers and transforms see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from fused_reference import EPS, FP8, operands_of
from harness import RankPool, make_communicator
from reference import assert_bitwise_equal
from test_graph_order import turn_round
from test_modes import Watcher
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from llm_comm import Communicator, UnsupportedInputError

INPUTS, OUTPUTS = 64, 128
BF16 = torch.bfloat16
LAYER = torch.ops.llm_comm.linear.default
NORMS = [
    getattr(torch.ops.llm_comm, f"linear_all_reduce_add_rms_norm{of_quantization}").default
    for of_quantization in ("", "_static_fp8", "_dynamic_fp8")
]
#: What operators of layers are given for bias, scales and the dtype of the result, unless operands are FP8.
UNSCALED = (None, None, None, None)
#: In which other ranks take part.
IN_ORDER = [torch.ops.llm_comm.all_reduce.default, torch.ops.llm_comm.linear_all_reduce.default, *NORMS]


def operands(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * tokens + rank)
    x = torch.randn(tokens, INPUTS, generator=generator)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    return x.to(BF16), weight.to(BF16)


class Layer(torch.nn.Module):
    """Every operation, in every way to write it."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.weight = torch.nn.Parameter(operands(comm.rank, 1)[1])
        self.norm_weight = torch.nn.Parameter(operands_of(1, OUTPUTS, BF16)[1])
        self.scale = torch.tensor([0.05])

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        comm, fused = self.comm, self.comm.linear_all_reduce_add_rms_norm
        weights = self.weight, self.norm_weight
        assert comm.accepts_linear(x, self.weight)
        assert not comm.accepts_linear(residual, self.weight)
        assert comm.accepts_linear_all_reduce(x, self.weight)
        assert not comm.accepts_linear_all_reduce(x.half(), self.weight)
        assert comm.accepts_linear_all_reduce_add_rms_norm(x, *weights, "static")
        assert not comm.accepts_linear_all_reduce_add_rms_norm(x, *weights, "int8")
        assert not comm.accepts_linear_all_reduce_add_rms_norm(x, self.weight, self.weight)
        y = comm.linear(x, self.weight)
        written = torch.empty_like(residual)
        comm.linear(x * 2, self.weight, out=written)
        total = comm.linear_all_reduce(x + 1, self.weight)
        comm.linear_all_reduce(x * 3, self.weight, out=y)
        normed, residual = fused(x, weights[0], residual, weights[1], EPS, weight_bias=1.0)
        in_place = residual.clone()
        fused(x * 4, weights[0], in_place, weights[1], EPS, out=normed, residual_out=in_place)
        static, residual = fused(x, weights[0], residual, weights[1], EPS, quantize="static", scale=self.scale)
        dynamic, alone, scale = fused(x * 0.5, weights[0], None, weights[1], EPS, quantize="dynamic")
        assert comm.accepts_linear_all_reduce_add_rms_norm(x, *weights, "group_column_major")
        groups, _, scales = fused(x, weights[0], alone, weights[1], EPS, quantize="group_column_major")
        fp8 = static.float(), dynamic.float() * scale, groups.float(), scales
        return y, written, total, normed, in_place, residual, *fp8, alone


@torch.inference_mode()
def compile_layer(backend: str) -> None:
    with make_communicator() as comm:
        torch._dynamo.reset()
        layer = Layer(comm)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for tokens in (1, 3, 5, 64):  # the second makes the batch dynamic
            x, _ = operands(comm.rank, tokens)
            residual, _ = operands_of(tokens, OUTPUTS, BF16)
            for found, expected in zip(compiled(x, residual), layer(x, residual), strict=True):
                assert_bitwise_equal(found, expected, f"{backend}, {tokens} tokens")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_model_compiles_as_one_graph(ranks: RankPool, backend: str) -> None:
    ranks.run(2, compile_layer, backend)


def ask_compiled() -> None:
    """Which way a model goes is decided by the number of its tokens, in a graph too."""
    with make_communicator() as comm, torch.inference_mode():
        _, weight = operands(comm.rank, 1)

        def forward(x: torch.Tensor) -> torch.Tensor:
            if comm.accepts_linear_all_reduce(x, weight):
                return comm.linear_all_reduce(x, weight)
            return comm.all_reduce(torch.zeros_like(x))

        torch._dynamo.reset()
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (3, 64, 65, 70, 2):
            x = torch.ones(tokens, INPUTS).to(BF16)
            found = compiled(x)
            assert found.shape == (tokens, OUTPUTS if tokens <= 64 else INPUTS)
            assert found.equal(forward(x))


def test_a_graph_that_asks(ranks: RankPool) -> None:
    ranks.run(2, ask_compiled)


def compile_what_requires_grad() -> None:
    """No gradient is lost without an error, in a graph either."""
    errors = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.TorchRuntimeError, UnsupportedInputError)
    with make_communicator() as comm:
        layer = Layer(comm)
        x, _ = operands(comm.rank, 2)

        def sums(x: torch.Tensor) -> torch.Tensor:
            return comm.linear_all_reduce(x, layer.weight)

        def layers(x: torch.Tensor) -> torch.Tensor:
            return comm.linear(x, layer.weight)

        for program in (sums, layers):
            torch._dynamo.reset()
            compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
            with pytest.raises(errors, match=r"weight: .*requires grad.*torch\.no_grad\(\).*detach\(\)"):
                compiled(x)
            with torch.no_grad():
                assert compiled(x).equal(program(x))


def test_a_gradient_is_an_error(ranks: RankPool) -> None:
    ranks.run(2, compile_what_requires_grad)


# ---- Operators -------------------------------------------------------------------------------------------------------


def check_operators() -> None:
    with make_communicator() as comm:
        x, weight = operands(comm.rank, 3)
        residual, norm_weight = operands_of(3, OUTPUTS, BF16)
        for operator in (LAYER, torch.ops.llm_comm.linear_all_reduce.default):
            torch.library.opcheck(operator, (x, weight, *UNSCALED, comm.name))
            with pytest.raises(UnsupportedInputError, match="not contiguous"):
                operator(x.t(), weight, *UNSCALED, comm.name)
        for operator in NORMS:
            scale = [torch.ones(1)] if operator is NORMS[1] else []
            for r in (residual, None):
                torch.library.opcheck(
                    operator, (x, weight, r, norm_weight, None, None, None, EPS, 0.0, comm.name, *scale)
                )
                operator(x, weight, r, norm_weight, None, None, None, EPS, 0.0, comm.name, *scale, after=x)
            with pytest.raises(UnsupportedInputError, match="not contiguous"):
                operator(x.t(), weight, residual, norm_weight, None, None, None, EPS, 0.0, comm.name, *scale)
    for operator in (LAYER, torch.ops.llm_comm.linear_all_reduce.default):
        with pytest.raises(RuntimeError, match="closed"):
            operator(x, weight, *UNSCALED, comm.name)


def test_operators(ranks: RankPool) -> None:
    ranks.run(2, check_operators)


@pytest.mark.parametrize("shape", [(INPUTS,), (3, INPUTS), (2, 5, INPUTS)])
def test_fake_results_are_like_the_real_ones(shape: tuple[int, ...]) -> None:
    result = (*shape[:-1], OUTPUTS)
    with FakeTensorMode():
        x, weight = torch.empty(shape, dtype=torch.float16), torch.empty(OUTPUTS, INPUTS, dtype=torch.float16)
        residual, norm_weight = torch.empty(result, dtype=torch.float16), torch.empty(OUTPUTS, dtype=torch.float16)
        layers = [operator(x, weight, *UNSCALED, "any") for operator in (LAYER, torch.ops.llm_comm.linear_all_reduce)]
        operands = x, weight, residual, norm_weight, None, None, None, EPS, 0.0, "any"
        norms = [operator(*operands, *([torch.empty(1)] if operator is NORMS[1] else [])) for operator in NORMS]
    assert [(tuple(y.shape), y.dtype) for y in layers] == [(result, torch.float16)] * 2
    plain, rows, scales = (result, torch.float16), (result, FP8), ((*shape[:-1], 1), torch.float32)
    found = [[(tuple(y.shape), y.dtype) for y in results] for results in norms]
    assert found == [[plain, plain], [rows, plain], [rows, plain, scales]]


# ---- Order in graphs -------------------------------------------------------------------------------------------------


def keep_order() -> None:
    """On rank 1 alone calls are turned round, where nothing but their operands keeps them."""
    with make_communicator() as comm, torch.inference_mode():
        graphs: list[list[Any]] = []

        def compile_reversed(module: torch.fx.GraphModule, _inputs: Any) -> Any:
            turn_round(module.graph)
            module.recompile()
            graphs.append([node.target for node in module.graph.nodes if node.target in (LAYER, *IN_ORDER)])
            return make_boxed_func(module.forward)

        norm_weight = torch.ones(OUTPUTS, dtype=BF16)
        _, weight = operands(comm.rank, 1)

        def program(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results: list[torch.Tensor] = []
            for i, x in enumerate(xs):
                results.append(comm.linear(x, weight))
                results.append(comm.linear_all_reduce(x, weight))
                results.append(comm.linear_all_reduce_add_rms_norm(x, weight, None, norm_weight, EPS)[i % 2])
                results.append(comm.all_reduce(x))
                fused = comm.linear_all_reduce_add_rms_norm
                results.append(fused(x, weight, None, norm_weight, EPS, quantize="dynamic")[2 - i % 2].float())
                scale = torch.full((1,), 0.5)
                results.append(fused(x, weight, None, norm_weight, EPS, quantize="static", scale=scale)[1])
            return tuple(results)

        xs = [operands(comm.rank, tokens)[0] for tokens in (1, 3, 4)]
        expected = program(*xs)
        torch._dynamo.reset()
        backend: Any = aot_autograd(fw_compiler=compile_reversed) if comm.rank == 1 else "aot_eager"
        compiled = torch.compile(program, fullgraph=True, backend=backend)
        for found in (compiled(*xs), compiled(*xs)):
            for one, other in zip(found, expected, strict=True):
                assert one.equal(other)
        if comm.rank == 1:
            (calls,) = graphs
            order = [IN_ORDER[1], NORMS[0], IN_ORDER[0], NORMS[2], NORMS[1]] * 3
            assert [call for call in calls if call is not LAYER] == order
            assert calls != [call for _ in xs for call in (LAYER, *order[:5])], "layers alone have no order to keep"


def test_calls_keep_their_order(ranks: RankPool) -> None:
    ranks.run(2, keep_order)


# ---- Modes, tracers, transforms --------------------------------------------------------------------------------------


def call_all(comm: Communicator, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each call once, with plain tensors."""
    y = comm.linear(x, weight) + 1
    total = comm.linear_all_reduce(x, weight, out=y)
    normed, _ = comm.linear_all_reduce_add_rms_norm(x, weight, total, total[0].clone(), EPS)
    return normed + 1


def counts(targets: list[Any]) -> list[int]:
    return [targets.count(operator) for operator in (LAYER, IN_ORDER[1], NORMS[0])]


def watch() -> None:
    with make_communicator() as comm:
        x, weight = operands(comm.rank, 3)
        expected = call_all(comm, x, weight)
        with Watcher() as watcher:
            assert call_all(comm, x, weight).equal(expected)
        assert counts(watcher.seen) == [1, 1, 1]


def test_dispatch_mode(ranks: RankPool) -> None:
    ranks.run(2, watch)


#: Of make_fx.
TRACES: dict[str, dict[str, Any]] = {
    "real": {},
    "before dispatch": {"pre_dispatch": True},
    "symbolic": {"tracing_mode": "symbolic"},
}


def trace(kind: str) -> None:
    """The traced program takes what it is given, not what was there when it was traced."""
    with make_communicator() as comm, torch.no_grad():
        (first, weight), (second, _) = operands(comm.rank, 4), operands(comm.rank + 9, 4)
        if kind in TRACES:

            def asked(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                assert comm.accepts_linear(x, weight)
                assert comm.accepts_linear_all_reduce(x, weight)
                assert not comm.accepts_linear_all_reduce(x.half(), weight)
                assert not comm.accepts_linear_all_reduce_add_rms_norm(x, weight, weight)
                return call_all(comm, x, weight)

            program: Any = make_fx(asked, **TRACES[kind])(first, weight)
            assert counts([node.target for node in program.graph.nodes]) == [1, 1, 1]
        else:
            program = torch.jit.trace(lambda *given: call_all(comm, *given), (first, weight), check_trace=False)
            assert str(program.graph).count("llm_comm::linear") == 3
        for x in (first, second):
            assert program(x, weight).equal(call_all(comm, x, weight))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", [*TRACES, "torch.jit"])
def test_tracers_record_the_operators(ranks: RankPool, kind: str) -> None:
    ranks.run(2, trace, kind)


def transform() -> None:
    with make_communicator() as comm:
        x, weight = operands(comm.rank, 6)
        norm_weight = torch.ones(OUTPUTS, dtype=BF16)
        batch = x.view(3, 2, INPUTS)
        assert torch.vmap(lambda x: comm.linear(x, weight))(batch).view(6, OUTPUTS).equal(comm.linear(x, weight))
        total = comm.linear_all_reduce(x, weight)
        assert torch.vmap(lambda x: comm.linear_all_reduce(x, weight))(batch).view(6, OUTPUTS).equal(total)

        def norm(x: torch.Tensor) -> Any:
            return comm.linear_all_reduce_add_rms_norm(x, weight, None, norm_weight, EPS)

        for batched, alone in zip(torch.vmap(norm)(batch), norm(x), strict=True):
            assert batched.view(6, OUTPUTS).equal(alone)
        with pytest.raises(UnsupportedInputError, match=r"detach\(\)"):
            torch.func.grad(lambda x: comm.linear(x, weight).sum())(x)
        functional = torch.func.functionalize(lambda x: comm.linear_all_reduce(x, weight, out=x.new_empty(total.shape)))
        assert functional(x).equal(total)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms(ranks: RankPool) -> None:
    ranks.run(2, transform)
