"""Gate-and-up projections with their activation on emulated GPUs: values, promised bits, refusals, and graphs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from fused_reference import FUSED_DTYPES
from harness import RankPool, make_communicator
from linear_calls import INPUTS, OUTPUTS, TOKENS, X, ones
from reference import assert_bitwise_equal
from test_fused import assert_untouched_outside, at_offset
from test_linear import SHAPES, assert_is_layer, every_dtype, operands
from test_modes import Watcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from llm_comm import Communicator, UnsupportedInputError, _core

GATE_UP = ones(2 * OUTPUTS, INPUTS)
SILU, GELU = "linear_silu_and_mul", "linear_gelu_tanh_and_mul"
every_method = pytest.mark.parametrize("method", [SILU, GELU])
#: What it is given for bias, scales and the dtype of the result, unless operands are FP8.
UNSCALED = (None, None, None, None)


def operator_of(method: str) -> Any:
    return getattr(torch.ops.llm_comm, method).default


def assert_is_activated(method: str, y: torch.Tensor, products: torch.Tensor, what: str) -> None:
    """Of the products as a layer rounds them: fp32 arithmetic, rounded once. Where exp is beyond fp32 it is 0."""
    gate, up = products.double().chunk(2, dim=-1)
    exponent = gate if method == SILU else 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    exact = gate * torch.sigmoid(exponent) * up
    of_torch = torch.nn.functional.silu(gate) if method == SILU else torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(exact, of_torch * up, rtol=1e-9, atol=1e-9)
    info = torch.finfo(y.dtype)
    # exp is off by up to two units, the sum, the division and the product by half a unit; its argument by a few.
    arithmetic = (6 if method == SILU else 6 + 4 * exponent.abs().clamp(max=100)) * 2.0**-24
    bound = 1.01 * exact.abs() * (info.eps / 2 + arithmetic) + info.smallest_normal * info.eps + 1e-36 * up.abs()
    assert (y.shape, y.dtype) == (exact.shape, products.dtype), what
    excess = (y.double() - exact).abs() - bound
    assert excess.max() <= 0, f"{what}: off by {float(excess.max())} more than one rounding explains"


# ---- Values and bits -------------------------------------------------------------------------------------------------


def check_values(method: str, dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        for tokens, inputs, outputs in SHAPES:
            x, weight = operands(comm.rank, tokens, inputs, 2 * outputs, dtype)
            copies = x.clone(), weight.clone()
            what = f"{tokens} tokens, {inputs} inputs, {outputs} outputs"
            products = comm.linear(x, weight)
            assert_is_layer(products, x, weight, what)
            y = getattr(comm, method)(x, weight)
            assert_is_activated(method, y, products, what)
            assert x.equal(copies[0]), what
            assert weight.equal(copies[1]), what
            assert_bitwise_equal(getattr(comm, method)(x, weight), y, f"{what}: the second time")


@every_method
@every_dtype
@pytest.mark.parametrize("world", [1, 2])
def test_values(ranks: RankPool, world: int, dtype: torch.dtype, method: str) -> None:
    ranks.run(world, check_values, method, dtype)


def check_extremes(method: str) -> None:
    """Gates from far below zero, where exp(-gate) is no number of fp32, to far above, and zeros of both signs."""
    gates = torch.tensor([-0.0, 0.0, 1e-3, -1e-3, 1.0, -1.0, 15.0, -15.0, 80.0, -80.0, 200.0, -200.0])
    with make_communicator() as comm:
        for dtype in FUSED_DTYPES:
            x = torch.zeros(len(gates), 64, dtype=dtype)
            x[:, 0] = gates
            x[:, 1] = 1
            weight = torch.zeros(128, 64, dtype=dtype)
            weight[:64, 0] = 1
            weight[64:, 1] = torch.linspace(-3, 3, 64)
            y = getattr(comm, method)(x, weight)
            assert_is_activated(method, y, comm.linear(x, weight), str(dtype))
            assert y[-1].eq(0).all(), "far below zero"
            assert y[-2].equal((gates[-2].to(dtype).float() * weight[64:, 1].float()).to(dtype)), "and far above"


@every_method
def test_extremes(ranks: RankPool, method: str) -> None:
    ranks.run(1, check_extremes, method)


def check_rows(method: str) -> None:
    """Whatever rows are beside it, and however many."""
    with make_communicator() as comm:
        for dtype in FUSED_DTYPES:
            x, weight = operands(comm.rank, 64, 320, 256, dtype)
            whole = getattr(comm, method)(x, weight)
            for tokens, first in itertools.product((1, 5, 9, 17, 33), (0, 31)):
                rows = x[first : first + tokens].clone()
                found = getattr(comm, method)(rows, weight)
                assert_bitwise_equal(found, whole[first : first + tokens], f"{tokens} tokens from {first}")


@every_method
def test_the_bits_of_a_row_do_not_depend_on_the_batch(ranks: RankPool, method: str) -> None:
    ranks.run(1, check_rows, method)


def check_choices(method: str) -> None:
    """However the layer is cut: blocks that divide the outputs and that do not, rings from short to long."""
    with make_communicator() as comm:
        for (tokens, inputs, outputs), dtype in itertools.product(((1, 320, 64), (9, 256, 192)), FUSED_DTYPES):
            x, weight = operands(comm.rank, tokens, inputs, 2 * outputs, dtype)
            expected = getattr(comm, method)(x, weight)
            for block, ring in itertools.product((16, 32, 48, 64), ((2, 1), (3, 2), (2, 8))):
                what = f"{tokens} tokens, {outputs} outputs, {dtype}, blocks of {block}, {ring[0]} stages of {ring[1]}"
                run = comm._handle.core().prepare_linear(
                    tokens=tokens,
                    inputs=inputs,
                    outputs=outputs,
                    data_type=comm._operations.linear._data_types[dtype],
                    epilogue=method.removeprefix("linear_"),
                    choice=_core.LinearChoice(block_outputs=block, stages=ring[0], stage_boxes=ring[1]),
                )
                out, around = at_offset(torch.zeros_like(expected), 8)
                assert run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), 0, 0), what
                assert_bitwise_equal(out, expected, what)
                assert_untouched_outside(around, out, what)


@every_method
def test_choices_do_not_change_the_bits(ranks: RankPool, method: str) -> None:
    ranks.run(1, check_choices, method)


def check_halves() -> None:
    """Which half is which, and which rows belong together."""
    with make_communicator() as comm:
        for outputs in (64, 192, 320):
            weight = torch.zeros(2 * outputs, 64)
            weight[:outputs, 0] = torch.arange(outputs) % 7 - 3
            weight[outputs:, 1] = torch.arange(outputs) % 11 - 5
            x = torch.tensor([[1.0, 1.0, *[0.0] * 62], [0.0, 1.0, *[0.0] * 62], [1.0, 0.0, *[0.0] * 62]]).bfloat16()
            y = comm.linear_silu_and_mul(x, weight.bfloat16())
            exact = torch.nn.functional.silu(weight[:outputs, 0].double()) * weight[outputs:, 1].double()
            assert (y[0].double() - exact).abs().max() <= 0.05
            assert y[0].ne(0).equal((weight[:outputs, 0] != 0) & (weight[outputs:, 1] != 0))
            assert y[1:].eq(0).all(), "no gate, or nothing to gate"


def test_halves(ranks: RankPool) -> None:
    ranks.run(1, check_halves)


def check_results() -> None:
    """Their shapes, where they go, and where x may begin."""
    with make_communicator() as comm:
        for dtype in FUSED_DTYPES:
            x, weight = operands(comm.rank, 6, 128, 384, dtype)
            y = comm.linear_silu_and_mul(x, weight)
            assert y.shape == (6, 192)
            for rows in ((2, 3), (6, 1, 1), (1, 2, 3)):
                found = comm.linear_silu_and_mul(x.view(*rows, 128), weight)
                assert found.shape == (*rows, 192)
                assert found.view(6, 192).equal(y)
            assert comm.linear_silu_and_mul(x[0], weight).equal(y[0])
            flat = torch.empty(6 * 192, dtype=dtype)
            assert comm.linear_silu_and_mul(x, weight, out=flat) is flat
            assert flat.view(6, 192).equal(y)
            for step in range(8):
                moved, _ = at_offset(x, step)
                out, around = at_offset(torch.zeros_like(y), 3 * step % 8)
                version = out._version
                assert comm.linear_silu_and_mul(moved, weight, out=out) is out
                assert out._version == version + 1
                assert_bitwise_equal(out, y, f"step {step}")
                assert_untouched_outside(around, out, f"step {step}")


def test_results(ranks: RankPool) -> None:
    ranks.run(2, check_results)


# ---- What is declined ------------------------------------------------------------------------------------------------

#: Operands, and what is said of them.
DECLINED: dict[str, tuple[Any, Any, str]] = {
    "no token": (X[:0], GATE_UP, "0 tokens: it takes 1 to 64"),
    "65 tokens": (ones(65, INPUTS), GATE_UP, "65 tokens: it takes 1 to 64"),
    "96 inputs": (ones(2, 96), ones(128, 96), "96 inputs: it takes multiples of 64 up to 16777216"),
    "gate alone": (X, GATE_UP[:64], "32 outputs: it takes multiples of 64 up to 16777216"),
    "96 outputs": (X, ones(192, INPUTS), "96 outputs: it takes multiples of 64"),
    "no outputs": (X, GATE_UP[:0], "0 outputs: it takes multiples of 64"),
    "halves that differ": (
        X,
        ones(129, INPUTS),
        "gate_up_weight has shape (129, 128): it must be [2 * outputs, inputs]",
    ),
    "other inputs": (X, ones(128, 64), "gate_up_weight has shape (128, 64): it must be [2 * outputs, inputs]"),
    "a matrix each": (X, GATE_UP.view(2, 64, INPUTS), "gate_up_weight has shape (2, 64, 128)"),
    "fp32": (X.float(), GATE_UP.float(), "torch.float32 is not one of torch.bfloat16, torch.float16"),
    "weight of other type": (X, GATE_UP.half(), "gate_up_weight is torch.float16, x is torch.bfloat16"),
    "columns": (ones(INPUTS, TOKENS).t(), GATE_UP, "x: the tensor is not contiguous"),
    "transposed weight": (X, ones(INPUTS, 128).t(), "gate_up_weight: the tensor is not contiguous"),
    "weight elsewhere": (X, GATE_UP.to("meta"), "gate_up_weight: the tensor is on meta, the communicator on cpu"),
    "negated weight": (X, torch._neg_view(GATE_UP), "gate_up_weight: the tensor is a negated view"),
    "x requires grad": (X.clone().requires_grad_(), GATE_UP, "x: the tensor requires grad"),
    "weight requires grad": (X, torch.nn.Parameter(GATE_UP), "gate_up_weight: the tensor requires grad"),
    "no tensor": (X, [1.0], "gate_up_weight is a list, not a tensor"),
}


def assert_right(comm: Communicator) -> None:
    """What was declined has left nothing behind."""
    y = comm.linear_silu_and_mul(X, GATE_UP)
    assert y.shape == (TOKENS, OUTPUTS)
    assert y.eq(INPUTS * INPUTS).all()  # silu(128) is 128
    assert comm.linear(X, GATE_UP).eq(INPUTS).all()


def decline(method: str, name: str) -> None:
    x, weight, message = DECLINED[name]
    with make_communicator() as comm:
        for _ in range(2):  # the second time, calls of as many elements are prepared
            if isinstance(weight, torch.Tensor):
                assert not getattr(comm, f"accepts_{method}")(x, weight)
                # Tracing does not ask who has another's memory; the call does.
                assert getattr(comm._operations, method)._accepts_traced(x, weight) == ("negated" in name)
            with pytest.raises(UnsupportedInputError) as error:
                getattr(comm, method)(x, weight)
            assert str(error.value).startswith(f"{method}: ")
            assert message in str(error.value)
            assert_right(comm)


@every_method
@pytest.mark.parametrize("name", DECLINED)
def test_declined_operands(ranks: RankPool, name: str, method: str) -> None:
    ranks.run(1, decline, method, name)


def accept() -> None:
    with make_communicator() as comm:
        for x, weight in (
            (X, GATE_UP),
            (ones(64, INPUTS), GATE_UP),
            (X[0], ones(640, INPUTS)),
            (X.half(), GATE_UP.half()),
        ):
            assert comm.accepts_linear_silu_and_mul(x, weight)
            assert comm._operations.linear_silu_and_mul._accepts_traced(x, weight)
            assert comm.linear_silu_and_mul(x, weight).eq(INPUTS * INPUTS).all()
        # What of it a plain layer takes has nothing to do with it.
        assert comm.accepts_linear(X, GATE_UP[:64])
        misaligned = ones(2 * OUTPUTS * INPUTS + 8)[1:-7].view(2 * OUTPUTS, INPUTS)
        assert comm.accepts_linear_silu_and_mul(X, misaligned)
        with pytest.raises(
            UnsupportedInputError, match=r"linear_silu_and_mul: gate_up_weight begins at 0x\w+, .* 16 b"
        ):
            comm.linear_silu_and_mul(X, misaligned)
        assert_right(comm)


def test_accepted_operands(ranks: RankPool) -> None:
    ranks.run(2, accept)


OUTS: dict[str, tuple[dict[str, Any], str]] = {
    "of a plain layer": ({"out": ones(TOKENS, 2 * OUTPUTS)}, r"out \(\(2, 128\), .* like the result \(\(2, 64\)"),
    "other type": ({"out": ones(TOKENS, OUTPUTS, dtype=torch.float16)}, "like the result"),
    "strided": ({"out": ones(TOKENS, 2 * OUTPUTS)[:, ::2]}, "like the result"),
    "no tensor": ({"out": [1.0]}, "out a list"),
}


def reject_out(name: str) -> None:
    given, message = OUTS[name]
    with make_communicator() as comm:
        with pytest.raises(UnsupportedInputError, match=f"^linear_silu_and_mul: .*{message}"):
            comm.linear_silu_and_mul(**{"x": X, "gate_up_weight": GATE_UP, **given})
        assert_right(comm)


@pytest.mark.parametrize("name", OUTS)
def test_out_that_does_not_fit(ranks: RankPool, name: str) -> None:
    ranks.run(1, reject_out, name)


def drop() -> None:
    """A prepared layer holds the core, and with it the workspace."""
    with make_communicator() as comm:
        comm.linear_silu_and_mul(X, GATE_UP)
        layers = comm._operations.linear_silu_and_mul
        assert len(layers._prepared) == 1
    assert not layers._prepared
    for call in (comm.linear_silu_and_mul, comm.accepts_linear_silu_and_mul):
        with pytest.raises(RuntimeError, match="closed"):
            call(X, GATE_UP)


def test_nothing_is_kept_of_a_closed_communicator(ranks: RankPool) -> None:
    ranks.run(1, drop)


# ---- Compiled graphs, modes and transforms ---------------------------------------------------------------------------


class Mlp(torch.nn.Module):
    """A gated MLP, and the other way to call its first half."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.gate_up = torch.nn.Parameter(operands(comm.rank, 1, INPUTS, 2 * OUTPUTS, torch.bfloat16)[1])
        self.down = torch.nn.Parameter(operands(comm.rank, 1, OUTPUTS, INPUTS, torch.bfloat16)[1])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        comm = self.comm
        if not comm.accepts_linear_silu_and_mul(x, self.gate_up):
            return (x + 1,)
        assert not comm.accepts_linear_silu_and_mul(x.half(), self.gate_up)
        assert not comm.accepts_linear_silu_and_mul(x, self.gate_up[:OUTPUTS])
        hidden = comm.linear_silu_and_mul(x, self.gate_up)
        written = torch.empty_like(hidden)
        comm.linear_silu_and_mul(x * 2, self.gate_up, out=written)
        return hidden, written, comm.linear_all_reduce(hidden, self.down)


@torch.inference_mode()
def compile_mlp(backend: str) -> None:
    with make_communicator() as comm:
        torch._dynamo.reset()
        mlp = Mlp(comm)
        compiled = torch.compile(mlp, fullgraph=True, backend=backend)
        for tokens in (1, 3, 5, 64, 65):  # the second makes the batch dynamic
            x, _ = operands(comm.rank, tokens, INPUTS, 64, torch.bfloat16)
            found, expected = compiled(x), mlp(x)
            assert len(expected) == (3 if tokens <= 64 else 1)
            for one, other in zip(found, expected, strict=True):
                assert_bitwise_equal(one, other, f"{backend}, {tokens} tokens")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_model_compiles_as_one_graph(ranks: RankPool, backend: str) -> None:
    ranks.run(2, compile_mlp, backend)


def check_operator(method: str) -> None:
    operator = operator_of(method)
    with make_communicator() as comm, torch.no_grad():
        x, weight = operands(comm.rank, 6, INPUTS, 2 * OUTPUTS, torch.bfloat16)
        y = getattr(comm, method)(x, weight)
        torch.library.opcheck(operator, (x, weight, *UNSCALED, comm.name))
        with pytest.raises(UnsupportedInputError, match=f"{method}: x: .*not contiguous"):
            operator(x.t(), weight, *UNSCALED, comm.name)
        with Watcher() as watcher:
            assert getattr(comm, method)(x, weight).equal(y)
        assert watcher.seen.count(operator) == 1
        traced = make_fx(lambda x, weight: getattr(comm, method)(x, weight) + 1)(x * 0, weight)
        assert [node.target for node in traced.graph.nodes].count(operator) == 1
        assert traced(x, weight).equal(y + 1)
        batched = torch.vmap(lambda x: getattr(comm, method)(x, weight))(x.view(3, 2, INPUTS))
        assert batched.view(6, OUTPUTS).equal(y)
        parameter = torch.nn.Parameter(weight)
        assert getattr(comm, method)(x, parameter).equal(y)
    with pytest.raises(RuntimeError, match="closed"):
        operator(x, weight, *UNSCALED, comm.name)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_method
def test_operator(ranks: RankPool, method: str) -> None:
    ranks.run(1, check_operator, method)


@every_method
@pytest.mark.parametrize("shape", [(INPUTS,), (3, INPUTS), (2, 5, INPUTS)])
def test_fake_results_are_like_the_real_ones(shape: tuple[int, ...], method: str) -> None:
    with FakeTensorMode():
        weight = torch.empty(2 * OUTPUTS, INPUTS, dtype=torch.float16)
        y = operator_of(method)(torch.empty(shape, dtype=torch.float16), weight, *UNSCALED, "any")
    assert (tuple(y.shape), y.dtype) == ((*shape[:-1], OUTPUTS), torch.float16)
