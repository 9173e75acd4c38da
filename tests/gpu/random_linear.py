"""Random test: linear layers, plain, with an activation and with what comes behind them, each result compared by bits.

    torchrun --standalone --nproc-per-node 8 tests/gpu/random_linear.py

A case is a layer's x and weight on each rank, drawn from a seed, and one call: eager, or captured in a CUDA graph
that is replayed with other inputs. Half of them are of FP8 with scales (``fp8_layers.py``), where the device has
that, and three of five of these have scales of blocks. Half have a bias: on rank 0 alone, as in engines, or on each
rank. All ranks draw all ranks' inputs. The layer's result is compared with float64, and a row of it with that row
alone, which must have the same bits. What comes behind the layer must be bitwise what the ranks' results sum to in rank
order, and what the fused operation makes of those: ``random_cases.py`` tests both. Silu-and-mul must be within one
rounding of float64 for what the plain layer returns, and have the same bits in each call. Layers of any batch must have
the bits of ``linear``, of 64 tokens at a time.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import fp8_layers
import torch
from common import GraphPool, Recording, Session, add_seconds, parser, report, run, session
from fp8_layers import FP8, Scales
from values import differs, rank_order_sum
from verdicts import Guarded, Verdicts, Where, weights_of

from llm_comm import Communicator, Config
from llm_comm.operations.fp8 import empty_scales

SETTLE_EVERY = 50
MOST_FAILURES = 10
GATED = ("linear_silu_and_mul", "linear_gelu_tanh_and_mul")
ALONE = ("linear", *GATED, "batch_invariant_linear")
FEW = 64
MANY = 2000
KINDS = (*ALONE, "linear_all_reduce", "linear_all_reduce_add_rms_norm")
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    dtype: torch.dtype  # of results
    tokens: int
    inputs: int
    outputs: int
    scale: float  # of the weights
    quantize: str | None
    offset: int  # elements of x from a 16-byte boundary
    has_out: bool
    replays: int  # 0: eager
    fp8: bool
    per_token: bool  # of FP8: whether each row of x has a scale of its own
    per_channel: bool
    is_exact: bool  # of FP8: whole numbers, whose sums no addition cuts
    weight_bias: float
    biased: int  # ranks whose layer has a bias, from rank 0 on
    layout: str | None  # of FP8: that of the scales of blocks of x; None: there are no scales of blocks

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.outputs * (2 if self.kind in GATED else 1)

    @property
    def factors(self) -> torch.dtype:
        """Of x and of the weight."""
        return FP8 if self.fp8 else self.dtype

    def __str__(self) -> str:
        scales = f", FP8, per token {self.per_token}, per channel {self.per_channel}, exact {self.is_exact}"
        if self.layout is not None:
            scales = f", FP8, blocks, {self.layout}, exact {self.is_exact}"
        return (
            f"{self.kind} of {self.tokens} tokens, {self.inputs} inputs, {self.outputs} outputs, {self.dtype}, scale "
            f"{self.scale:g}, quantize {self.quantize}, weight_bias {self.weight_bias:g}, offset {self.offset}, "
            f"out {self.has_out}, {self.replays} replays, a bias on {self.biased} ranks{scales if self.fp8 else ''}"
        )


class Operands(NamedTuple):
    """Of a rank's layer."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: Scales | None

    def options(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """What a method of the communicator takes besides; ``dtype``: of the result, where it takes that."""
        given: dict[str, Any] = {"bias": self.bias}
        if self.scales is None:
            return given
        given |= {"x_scale": self.scales.x, "weight_scale": self.scales.weight}
        return given if dtype is None else {**given, "out_dtype": dtype}

    def row(self, number: int) -> Operands:
        """With that row of x alone."""
        rows, scales = slice(number, number + 1), self.scales
        if scales is not None and scales.x.numel() > 1:
            scales = scales._replace(x=scales.x[rows])
        return self._replace(x=self.x[rows], scales=scales)


def draw_case(number: int, options: argparse.Namespace, world: int) -> Case:
    rng = random.Random(f"{options.seed}/{number}")
    kinds = KINDS if world > 1 else ALONE
    most = options.max_features // 64

    def features(multiple: int = 64) -> int:
        drawn = 64 * max(1, min(most, round(2 ** rng.uniform(0, most.bit_length()))))
        return -(-drawn // multiple) * multiple

    kind = kinds[number % len(kinds)]
    fp8 = options.fp8 and rng.random() < 0.5
    dtype = rng.choice((torch.bfloat16, torch.float16))
    tokens = rng.choice((1, 2, 4, 8, 9, 16, 17, 32, 33, 64, rng.randint(1, 64)))
    if kind == "batch_invariant_linear":
        tokens, fp8 = rng.choice((tokens, 65, 128, 129, 256, 257, rng.randint(65, MANY))), False
    inputs, outputs = features(fp8_layers.BOX if fp8 else 64), features()
    by_groups = () if outputs % 128 else ("group", "group_column_major_tma", "group_column_major_ue8m0")
    return Case(
        number,
        kind,
        dtype,
        tokens,
        inputs,
        outputs,
        rng.choice((1e-3, 0.05, 1.0)),
        rng.choice((None, None, "static", "dynamic", *by_groups)),
        rng.choice((0, 0, 0, rng.randrange(8))),
        rng.random() < 0.5,
        rng.choice((1, 2, 3)) if rng.random() < options.graph_share else 0,
        fp8,
        *(rng.random() < 0.5 for _ in range(3)),
        rng.choice((0.0, 1.0, 0.5)),
        rng.choice((0, 0, 1, world)),
        rng.choice((None, None, "group", "group_column_major", "group_column_major_tma")),
    )


class Runner:
    def __init__(self, ranks: Session, communicator: Communicator, options: argparse.Namespace) -> None:
        self._ranks = ranks
        self._communicator = communicator
        self._seed = options.seed
        self._generator = torch.Generator(ranks.device)
        self._pool = GraphPool(ranks.device)
        self._weights = weights_of(2 * MANY * options.max_features, ranks.device)  # of bytes
        self.verdicts = Verdicts(ranks)

    def run(self, case: Case) -> None:
        device = self._ranks.device
        x = Guarded(case.tokens * case.inputs, case.factors, case.offset, device)
        shaped = x.data.view(case.tokens, case.inputs)
        weight = torch.empty(case.rows, case.inputs, dtype=case.factors, device=device)
        rank = self._ranks.rank
        given = Operands(shaped, weight, self._bias(case, 0, rank), self._scales(case, 0, rank))
        options, typed = given.options(), given.options(case.dtype)
        residual = torch.empty(case.tokens, case.outputs, dtype=case.dtype, device=device)
        norm_weight = torch.empty(case.outputs, dtype=case.dtype, device=device)
        scale = torch.full((1,), 0.01, device=device) if case.quantize == "static" else None
        out = Guarded(case.tokens * case.outputs, case.dtype, 0, device) if case.has_out else None
        target = None if out is None else out.data.view(case.tokens, case.outputs)

        def call() -> tuple[torch.Tensor, ...]:
            if case.kind == "linear":
                return (self._communicator.linear(shaped, weight, target, **typed),)
            if case.kind == "batch_invariant_linear":
                return (self._communicator.batch_invariant_linear(shaped, weight, target, bias=given.bias),)
            if case.kind in GATED:
                return (getattr(self._communicator, case.kind)(shaped, weight, target, **typed),)
            if case.kind == "linear_all_reduce":
                return (self._communicator.linear_all_reduce(shaped, weight, target, **typed),)
            return self._communicator.linear_all_reduce_add_rms_norm(
                shaped,
                weight,
                residual,
                norm_weight,
                EPSILON,
                weight_bias=case.weight_bias,
                out=target if case.quantize is None else None,
                quantize=case.quantize,
                scale=scale,
                **options,
            )

        for replay in range(max(1, case.replays)):
            operands = [self._operands(case, replay, of_rank) for of_rank in range(self._ranks.world)]
            own = operands[rank]
            shaped.copy_(own.x)
            weight.copy_(own.weight)
            if given.bias is not None and own.bias is not None:
                given.bias.copy_(own.bias)
            if given.scales is not None and own.scales is not None:
                for place, drawn in zip(given.scales, own.scales, strict=True):
                    place.copy_(drawn)
            residual.copy_(self._draw(case, replay, "residual", residual.shape))
            norm_weight.copy_(self._draw(case, replay, "norm", norm_weight.shape))
            self._ranks.synchronize()  # a layer reads its weight and its bias ahead of the stream
            if case.replays == 0:
                results = call()
            elif replay == 0:
                recording = Recording(call, device, self._pool.handle)
                results = recording.replay()
            else:
                results = recording.replay()
            self._verify(case, replay, results, operands, residual, norm_weight, scale, x, out)

    def _draw(self, case: Case, replay: int, name: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        seed = random.Random(f"{self._seed}/{case.number}/{replay}/{name}").getrandbits(62)
        values = torch.randn(shape, generator=self._generator.manual_seed(seed), device=self._ranks.device)
        return values.to(case.dtype)

    def _operands(self, case: Case, replay: int, rank: int) -> Operands:
        x = self._draw(case, replay, f"x{rank}", (case.tokens, case.inputs))
        weight, bias = self._draw(case, replay, f"w{rank}", (case.rows, case.inputs)), self._bias(case, replay, rank)
        if not case.fp8:
            return Operands(x, (weight.float() * case.scale).to(case.dtype), bias, None)
        if case.is_exact:
            x, weight = x.round().clamp(-2, 2), weight.round().clamp(-2, 2)
        return Operands(x.to(FP8), weight.to(FP8), bias, self._scales(case, replay, rank))

    def _bias(self, case: Case, replay: int, rank: int) -> torch.Tensor | None:
        """About as large as the sums to which it is added."""
        if rank >= case.biased:
            return None
        drawn = self._draw(case, replay, f"b{rank}", (case.rows,)).float()
        return (drawn * case.scale * case.inputs**0.5).to(case.dtype)

    def _scales(self, case: Case, replay: int, rank: int) -> Scales | None:
        if not case.fp8:
            return None
        if case.layout is not None:
            blocks = case.inputs // fp8_layers.BOX
            x = empty_scales(case.layout, torch.empty(case.tokens, case.inputs, device=self._ranks.device))
            x.copy_(self._draw(case, replay, f"xs{rank}", (case.tokens, blocks)).float().abs() + 0.1)
            of_blocks = (-(-case.rows // fp8_layers.BOX), blocks)
            return Scales(x, (self._draw(case, replay, f"ws{rank}", of_blocks).float().abs() + 0.1) * case.scale)
        of_x, of_weight = ((case.tokens, 1) if case.per_token else (1,), (case.rows, 1) if case.per_channel else (1,))
        x = self._draw(case, replay, f"xs{rank}", of_x).float().abs() + 0.1
        weight = self._draw(case, replay, f"ws{rank}", of_weight).float().abs() + 0.1
        return Scales(x, weight * case.scale)

    def _verify(
        self,
        case: Case,
        replay: int,
        results: tuple[torch.Tensor, ...],
        operands: list[Operands],
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        scale: torch.Tensor | None,
        x: Guarded,
        out: Guarded | None,
    ) -> None:
        rank = self._ranks.rank
        self._ranks.synchronize()
        linear = self._communicator.linear
        if case.tokens > FEW:
            layers = [torch.cat([linear(x, of.weight, bias=of.bias) for x in of.x.split(FEW)]) for of in operands]
        else:
            layers = [linear(of.x, of.weight, **of.options(case.dtype)) for of in operands]
        # Of one row, behind the layer of all of them: it must not depend on them.
        row = replay % case.tokens
        own, single = operands[rank], operands[rank].row(row)
        alone = linear(single.x, single.weight, **single.options(case.dtype))
        beyond = differs(alone[0], layers[rank][row]).sum() + _beyond(case, layers[rank], own).sum()
        if case.kind in ("linear", "batch_invariant_linear"):
            expected: tuple[torch.Tensor, ...] = (layers[rank],)
        elif case.kind in GATED:
            gated = getattr(self._communicator, case.kind)
            expected = (gated(own.x, own.weight, **own.options(case.dtype)),)
            alone = gated(single.x, single.weight, **single.options(case.dtype))
            beyond = beyond + differs(alone[0], expected[0][row]).sum()
            beyond = beyond + _beyond_activation(case.kind, expected[0], layers[rank]).sum()
        elif case.kind == "linear_all_reduce":
            rows = torch.stack([layer.flatten() for layer in layers])
            expected = (rank_order_sum(rows).view(case.tokens, case.outputs),)
        else:
            expected = self._communicator.all_reduce_add_rms_norm(
                *(layers[rank], residual, norm_weight, EPSILON),
                weight_bias=case.weight_bias,
                quantize=case.quantize,
                scale=scale,
            )
        wrong = torch.zeros((), dtype=torch.int64, device=self._ranks.device)
        for got, due in zip(results, expected, strict=True):
            if got.dtype != due.dtype or got.shape != due.shape:
                raise AssertionError(f"{case}: {got.dtype} of shape {tuple(got.shape)} came, due is {due.shape}")
            wrong = wrong + (_as_bytes(got) != _as_bytes(due)).sum()
        changed = (_as_bytes(x.data) != _as_bytes(own.x)).sum()
        damage = x.damage() + (0 if out is None else out.damage())
        digest = (_as_bytes(results[-1]).to(torch.int64) * self._weights[: results[-1].nbytes]).sum()
        if case.kind in ALONE:
            digest = digest * 0  # each rank's is its own
        self.verdicts.add(Where(case.number, f"replay {replay}", case, ""), [wrong, beyond, damage, changed], digest)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)  # flat may have strides


def _beyond(case: Case, got: torch.Tensor, of: Operands) -> torch.Tensor:
    """By element: no result of such a layer."""
    if of.scales is None:
        return _beyond_bound(got, of.x, of.weight, of.bias)
    beyond = fp8_layers.beyond_one_rounding if case.is_exact else fp8_layers.beyond_bound
    return beyond(got, of.x, of.weight, of.scales, of.bias)


def _beyond_bound(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """By element: further from float64 than fp32 accumulation in any order and one rounding can bring it. Tensor cores
    add the products of an instruction with a few bits less than fp32: hence 2^-21 for a term."""
    total = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    if bias is not None:  # one more term
        total, magnitude = total + bias.double(), magnitude + bias.double().abs()
    info = torch.finfo(got.dtype)
    bound = magnitude * (x.shape[1] * 2.0**-24 + 2.0**-21) + total.abs() * (info.eps / 2) + info.tiny * info.eps
    overflows = total.abs() + bound >= info.max
    return ~overflows & ~((got.double() - total).abs() <= bound)


def _beyond_activation(kind: str, got: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """By element: further from float64 than fp32 arithmetic on these products and one rounding can bring it. exp is off
    by up to two units in the last place, its argument by a few, and it is beyond fp32 where the activation is less than
    1e-36."""
    gate, up = products.double().chunk(2, dim=-1)
    is_silu = kind == "linear_silu_and_mul"
    exponent = gate if is_silu else 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    exact = gate * torch.sigmoid(exponent) * up
    info = torch.finfo(got.dtype)
    arithmetic = 2.0**-24 * (6 if is_silu else 6 + 4 * exponent.abs().clamp(max=100))
    bound = 1.01 * exact.abs() * (info.eps / 2 + arithmetic) + info.tiny * info.eps + 1e-36 * up.abs()
    overflows = exact.abs() + bound >= info.max
    is_known = gate.isfinite() & up.isfinite() & ~overflows
    return is_known & ~((got.double() - exact).abs() <= bound)


def _has_fp8(communicator: Communicator) -> bool:
    """Whether the device multiplies FP8."""
    x, weight = (torch.zeros(rows, fp8_layers.BOX, device=communicator.device).to(FP8) for rows in (1, 64))
    one = torch.ones(1, device=communicator.device)
    return communicator.accepts_linear(x, weight, x_scale=one, weight_scale=one)


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    add_seconds(options)
    options.add_argument("--cases", type=int, help="default: 1000 on GPUs, 60 on a shared or emulated one")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", type=int, metavar="CASE", help="run this case alone")
    options.add_argument("--max-features", type=int, help="default: 8192 on GPUs, 2048 on a shared one, else 256")
    options.add_argument("--graph-share", type=float, default=0.25)
    options.add_argument("--fp8", action=argparse.BooleanOptionalAction, default=True, help="half of the cases of FP8")
    arguments = options.parse_args()
    failures: list[str] = []
    done = 0
    begin = time.monotonic()
    with session(arguments) as ranks:
        alone = ranks.on_gpu and not ranks.shares_gpu
        if arguments.cases is None:
            arguments.cases = 1000 if alone else 60
        if arguments.max_features is None:
            arguments.max_features = 8192 if alone else 2048 if ranks.on_gpu else 256
        with Communicator(ranks.group, ranks.device, Config.load()) as communicator:
            arguments.fp8 = arguments.fp8 and _has_fp8(communicator)
            runner = Runner(ranks, communicator, arguments)
            numbers = range(arguments.cases) if arguments.only is None else [arguments.only]
            for number in numbers:
                case = draw_case(number, arguments, ranks.world)
                ranks.watchdog.progress(f"case {number}")
                try:
                    runner.run(case)
                except Exception as error:
                    raise AssertionError(f"rank {ranks.rank}: case {number}, {case} failed") from error
                done += 1
                if done % SETTLE_EVERY == 0 or done == len(numbers):
                    failures += runner.verdicts.settle()
                    communicator.check()
                    if len(failures) > MOST_FAILURES or ranks.is_late(arguments):
                        break
            del runner
        if ranks.rank == 0:
            for failure in failures[:MOST_FAILURES]:
                print(f"WRONG {failure}", file=sys.stderr)
            figures = {"cases": done, "wrong_results": len(failures), "seconds": round(time.monotonic() - begin, 1)}
            table = [tuple(figures), tuple(str(value) for value in figures.values())]
            report("random linear layers", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
