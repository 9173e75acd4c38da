"""Random cases of the fused all-reduce + residual add + RMSNorm, for ``random_cases.py --fused``.

A case is one message through every communicator, eager or as a CUDA graph that is replayed with new inputs. The new
residual must have the bits of the sum in rank order plus torch's addition, the norm must be within an ulp of the one in
float64, and FP8 rows must be what torch makes of the normed ones. Where sums are quantized (option ``wire``), the sum
is that of ``quantized_rows``, by the tiles of the case's plan.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import GraphPool, Recording, Session
from plain_cases import QUANTIZED
from values import Inputs, Values, beyond_bound, bits, differs, draw_values, magnitudes, rank_order_sum
from verdicts import Guarded, Verdicts, Where, weights_of

from llm_comm import Communicator, registry
from llm_comm.bench.wire_reference import FORMAT_OF_WIRE, quantized_rows
from llm_comm.planning.tables import FUSED, Row

_DTYPES = (torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = 448.0
_GROUP_SIZE = 128
#: FP8 with a scale for each group.
GROUPS = tuple(
    f"group{layout}{power}" for layout in ("", "_column_major", "_column_major_tma") for power in ("", "_ue8m0")
)
_LARGEST_SQUARES = 3.4028234663852886e38
_HIDDEN = (8, 24, 64, 72, 512, 1024, 2048, 2880, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384)


@dataclass(frozen=True)
class FusedCase:
    """Offsets are elements from a 16-byte boundary, by tensor and rank."""

    number: int
    rows: int
    hidden: int
    dtype: torch.dtype
    values: Values
    eps: float
    has_residual: bool
    in_place: bool
    quantize: str | None
    scale: float
    replays: int
    offsets: tuple[tuple[int, ...], ...]
    communicators: tuple[str, ...]
    weight_bias: float

    def __str__(self) -> str:
        shape = f"{self.rows} x {self.hidden} {str(self.dtype).removeprefix('torch.')}, {self.values}"
        norm = f"eps {self.eps:g}, weight_bias {self.weight_bias:g}"
        how = f"{norm}, residual {self.has_residual}, in place {self.in_place}, quantize {self.quantize}"
        return f"{shape}, {how}, {self.replays} replays, offsets {self.offsets}"


def draw_fused_case(number: int, options: argparse.Namespace, world: int, communicators: tuple[str, ...]) -> FusedCase:
    rng = random.Random(f"fused/{options.seed}/{number}")
    dtype = rng.choice(_DTYPES)
    hidden = rng.choice(_HIDDEN) if rng.random() < 0.8 else 8 * rng.randint(1, 2048)
    hidden = min(hidden, options.max_count // 8 * 8)
    rows = max(1, min(int(2 ** rng.uniform(0, 9)), options.max_count // hidden))

    def offsets() -> tuple[int, ...]:
        if rng.random() < 0.7:
            return (0,) * world
        return tuple(rng.randrange(8) for _ in range(world))

    return FusedCase(
        number=number,
        rows=rows,
        hidden=hidden,
        dtype=dtype,
        values=draw_values(rng, dtype),
        eps=rng.choice((1e-5, 1e-6)),
        has_residual=rng.random() < 0.8,
        in_place=rng.random() < 0.4,
        quantize=rng.choice(_quantizations(hidden)),
        scale=rng.choice((0.002, 0.031, 1.7)),
        replays=rng.choice((1, 2) if options.few_calls else (1, 2, 5)) if rng.random() < options.graph_share else 0,
        offsets=tuple(offsets() for _ in range(5)),
        communicators=(rng.choice(communicators),) if options.few_calls else communicators,
        weight_bias=rng.choice((0.0, 0.0, 1.0, 1.0, 0.5, -1.25)),
    )


def _quantizations(hidden: int) -> tuple[str | None, ...]:
    """To choose from: a third by groups, where the rows have them."""
    others = (None, None, "static", "dynamic")
    return (*others * 3, *GROUPS) if hidden % _GROUP_SIZE == 0 else others


def _scales(case: FusedCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of a case, and the memory in which they lie: by columns, there may be rows of padding in it."""
    count = case.rows if case.quantize == "dynamic" else 1
    if case.quantize not in GROUPS:
        scale = torch.empty(count, device=device)
        return scale, scale
    groups = case.hidden // _GROUP_SIZE
    apart = -(-case.rows // 4) * 4 if "tma" in case.quantize else case.rows
    memory = torch.empty(groups * apart + 1, device=device)
    strides = (1, apart) if "column_major" in case.quantize else (groups, 1)
    return memory.as_strided((case.rows, groups), strides), memory


@dataclass(frozen=True)
class _Buffers:
    x: Guarded
    residual: Guarded
    weight: Guarded
    out: Guarded
    residual_out: Guarded
    quantized: Guarded
    scale: torch.Tensor
    scale_memory: torch.Tensor

    def guarded(self) -> tuple[Guarded, ...]:
        return self.x, self.residual, self.weight, self.out, self.residual_out, self.quantized


class FusedRunner:
    def __init__(self, ranks: Session, communicators: dict[str, Communicator], options: argparse.Namespace) -> None:
        self._ranks = ranks
        self.communicators = communicators
        # Tables decline what is not worth fusing, which is to be right all the same.
        for comm in communicators.values():
            comm.use_table(comm.table._replace(max_fused_bytes=1 << 40).with_rows(*_rows_in_tiles(comm)))
        self._in_any_order = {name for name, comm in communicators.items() if _sums_in_switch(comm)}
        self._seed = options.seed
        self._shows_elements = options.only is not None
        self._inputs = Inputs(ranks.device, ranks.world)
        self._graph_pool = GraphPool(ranks.device)
        self._weights = weights_of(options.max_count, ranks.device)
        self.verdicts = Verdicts(ranks)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.replays = 0
        self.elements = 0

    def run(self, case: FusedCase) -> None:
        for name in case.communicators:
            comm = self.communicators[name]
            buffers = self._buffers(case)
            rounds = max(1, case.replays)
            replay = None
            for number in range(rounds):
                rows, residual, weight = self._operands(case, number)
                self._fill(buffers, rows, residual, weight, case)
                if case.replays == 0:
                    self._call(comm, buffers, case)
                else:
                    replay = replay or self._record(comm, buffers, case)
                    self._fill(buffers, rows, residual, weight, case)
                    replay()
                    self.replays += 1
                # Sums in any order and quantized sums are a result of their own.
                result = f"round {number}" + f" of {name}" * (name in self._in_any_order or name in QUANTIZED)
                where = Where(case.number, result, case, name)
                self._verify(where, case, buffers, rows, residual if case.has_residual else None, weight)
            self.calls[name, "graph" if case.replays else "eager"] += rounds
            self.elements += rounds * case.rows * case.hidden

    def _record(self, comm: Communicator, buffers: _Buffers, case: FusedCase) -> Callable[[], None]:
        self._call(comm, buffers, case)  # not in a capture
        recording = Recording(lambda: self._call(comm, buffers, case), self._ranks.device, self._graph_pool.handle)
        return recording.replay

    def _buffers(self, case: FusedCase) -> _Buffers:
        rank, device, count = self._ranks.rank, self._ranks.device, case.rows * case.hidden
        x, residual, weight, out, residual_out = (
            Guarded(case.hidden if n == 2 else count, case.dtype, offsets[rank], device)
            for n, offsets in enumerate(case.offsets)
        )
        quantized = Guarded(count, torch.uint8, case.offsets[3][rank], device)
        return _Buffers(x, residual, weight, out, residual_out, quantized, *_scales(case, device))

    def _operands(self, case: FusedCase, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every rank's input [world, count], and the residual [count] and weight [hidden] of all."""
        seed = random.Random(f"{self._seed}/{case.number}/{number}").getrandbits(61)
        count = case.rows * case.hidden
        rows = self._inputs.rows(case.values, count, case.dtype, seed)
        residual = self._inputs.rows(case.values, count, case.dtype, seed + 1)[0]
        # Ordinary values: what fp32 makes of a weight near its ends is no matter of this library.
        weight = self._inputs.rows(Values("normal", 0, 1), case.hidden, case.dtype, seed + 2)[0]
        return rows, residual, weight

    def _fill(
        self, buffers: _Buffers, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, case: FusedCase
    ) -> None:
        for buffer in buffers.guarded():
            buffer.poison()
        buffers.x.data.copy_(rows[self._ranks.rank])
        buffers.residual.data.copy_(residual)
        buffers.weight.data.copy_(weight)
        buffers.scale_memory.fill_(case.scale)

    def _call(self, comm: Communicator, buffers: _Buffers, case: FusedCase) -> None:
        """The call as drawn; with quantization the quantized rows first, from inputs that are still there."""
        shape = (case.rows, case.hidden)
        x, weight = buffers.x.data.view(shape), buffers.weight.data
        residual = buffers.residual.data.view(shape) if case.has_residual else None
        residual_out = buffers.residual_out.data.view(shape)
        if case.quantize is not None:
            comm.all_reduce_add_rms_norm(
                x,
                residual,
                weight,
                case.eps,
                weight_bias=case.weight_bias,
                out=buffers.quantized.data.view(_FP8).view(shape),
                residual_out=residual_out,
                quantize=case.quantize,
                scale=buffers.scale,
            )
        out = x if case.in_place else buffers.out.data.view(shape)
        new = residual if case.in_place and residual is not None else residual_out
        options = {"weight_bias": case.weight_bias, "out": out, "residual_out": new}
        comm.all_reduce_add_rms_norm(x, residual, weight, case.eps, **options)

    def _verify(
        self,
        where: Where,
        case: FusedCase,
        buffers: _Buffers,
        rows: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
    ) -> None:
        normed = buffers.x.data if case.in_place else buffers.out.data
        new = buffers.residual.data if case.in_place and residual is not None else buffers.residual_out.data
        if where.call in self._in_any_order:
            wrong = beyond_bound(new, rows, residual)
        else:
            expected = self._expected_sum(self.communicators[where.call], rows, weight, case)
            wrong = differs(new, expected if residual is None else expected + residual)
        beyond = _beyond_an_ulp(normed, new, weight, case)
        mismatched = torch.zeros((), dtype=torch.int64, device=normed.device)
        if case.quantize is not None:
            other_sums = None
            if where.call in self._in_any_order:
                other_sums = magnitudes(rows if residual is None else torch.cat([rows, residual.unsqueeze(0)]))
            mismatched = _mismatched(buffers, normed, case, other_sums)
        nothing = torch.zeros((), dtype=torch.int64, device=normed.device)
        damage = sum((buffer.damage() for buffer in buffers.guarded()), nothing)
        changed = nothing if case.in_place else differs(buffers.x.data, rows[self._ranks.rank]).sum()
        weights = self._weights[: normed.numel()]
        digest = ((bits(normed).to(torch.int64) * 3 + bits(new).to(torch.int64)) * weights).sum()
        if case.quantize is not None:
            digest = digest + (buffers.quantized.data.to(torch.int64) * weights).sum()
        self.verdicts.add(where, [wrong.sum() + mismatched, beyond.sum(), damage, changed], digest)
        if self._shows_elements:
            places = [t.nonzero().flatten()[:4].tolist() for t in (wrong, beyond)]
            print(
                f"rank {self._ranks.rank}, {where.call}, {where.result}: residual {places[0]}, norm {places[1]}, "
                f"{int(mismatched)} FP8 or scales",
                flush=True,
            )

    @staticmethod
    def _expected_sum(comm: Communicator, rows: torch.Tensor, weight: torch.Tensor, case: FusedCase) -> torch.Tensor:
        """Return the sum of the ranks' inputs, of which ``rows`` has one each: [count]."""
        inputs = rows.view(-1, case.rows, case.hidden)
        plan = comm.plan_all_reduce_add_rms_norm(inputs[0], weight)
        algorithm = registry.operations()[FUSED].find(plan.algorithm, plan.protocol)
        if algorithm is None or not algorithm.wire:
            return rank_order_sum(rows)
        elements_of_slice = plan.tile_lines * 16 // case.dtype.itemsize
        return quantized_rows(inputs, FORMAT_OF_WIRE[algorithm.wire], elements_of_slice).flatten()


def _rows_in_tiles(comm: Communicator) -> list[Row]:
    """Rows of a table for an algorithm in tiles of rows that an option forces; else none.

    The few blocks have several tiles each, so that they use their buffers again.
    """
    return [
        Row(up_to, FUSED, algorithm.name, algorithm.protocol, blocks=blocks, tile_lines=tile_lines, depth=depth)
        for algorithm in registry.operations()[FUSED].algorithms
        if algorithm.name == comm.config.algorithm and algorithm.protocol == "HB"
        for up_to, blocks, tile_lines, depth in ((60_000, 1, 40, 2), (500_000, 2, 520, 3), (1 << 40, 5, 1100, 2))
    ]


def _sums_in_switch(comm: Communicator) -> bool:
    """Whether the algorithm that an option forces does."""
    return any(
        algorithm.sums_in_switch
        for algorithm in registry.operations()[FUSED].algorithms
        if algorithm.name == comm.config.algorithm
    )


def _beyond_an_ulp(normed: torch.Tensor, new: torch.Tensor, weight: torch.Tensor, case: FusedCase) -> torch.Tensor:
    """By element, whether the norm is further than one ulp from the float64 norm of the new residual.

    Where the squares sum up to about the largest fp32 value, fp32 and float64 may differ in kind: not judged. Beyond
    that fp32 makes zeros.
    """
    x = new.view(case.rows, case.hidden).double()
    squares = x.square().sum(-1, keepdim=True)
    factor = torch.where(squares > _LARGEST_SQUARES, 0.0, (squares / case.hidden + case.eps).rsqrt())
    exact = (x * factor * (weight.double() + case.weight_bias)).to(case.dtype).flatten()
    judged = ((squares < 0.99 * _LARGEST_SQUARES) | ~(squares < 1.01 * _LARGEST_SQUARES)).expand_as(x).flatten()
    off = (_places(normed) - _places(exact)).abs() > 1
    return judged & torch.where(exact.isnan(), ~normed.isnan(), off | normed.isnan())


def _places(values: torch.Tensor) -> torch.Tensor:
    """The place of each value among all values of its dtype: neighbours are one ulp apart."""
    patterns = bits(values).to(torch.int32)
    return torch.where(patterns < 0, -(patterns & 0x7FFF), patterns)


def _mismatched(
    buffers: _Buffers, normed: torch.Tensor, case: FusedCase, other_sums: torch.Tensor | None
) -> torch.Tensor:
    """Number of FP8 elements and scales that are not what torch makes of the normed rows.

    ``other_sums``: the normed rows are those of another call, whose sums need not have the same bits: magnitudes of
    what was summed. Then a scale may be 1 % off, and an element its neighbour; rows with sums that may be infinite in
    one call alone are not judged.
    """
    x = normed.view(case.rows, case.hidden).float()
    scale = buffers.scale if case.quantize in GROUPS else buffers.scale.view(-1, 1)
    wrong_scales = torch.zeros((), dtype=torch.int64, device=x.device)
    judged = torch.ones_like(x[:, :1], dtype=torch.bool)
    if other_sums is not None:
        safe = other_sums < 0.99 * torch.finfo(case.dtype).max
        judged = safe.view(case.rows, case.hidden).all(-1, keepdim=True)
    if case.quantize == "dynamic":
        smallest = torch.tensor(1.0) / torch.tensor(_LARGEST_FP8 * 512)
        largest = torch.where(x.isnan(), 0.0, x.abs()).amax(-1, keepdim=True)
        # A tensor on the device: on GPUs torch multiplies by the reciprocal of a number, which rounds twice.
        divisor = torch.full_like(largest, _LARGEST_FP8)
        expected_scale = (largest / divisor).clamp(min=float(smallest))
        near = (scale - expected_scale).abs() <= 0.01 * expected_scale
        wrong_scales = (judged & ~(scale == expected_scale if other_sums is None else near)).sum()
        scaled = x / scale
    elif case.quantize in GROUPS:
        expected_scale = _group_scales(x, case.quantize)
        is_right = scale == expected_scale
        if other_sums is not None:
            is_right |= (scale - expected_scale).abs() <= 0.01 * expected_scale
            if "ue8m0" in case.quantize:  # just below a power of two in one call, just above in the other
                is_right |= (scale == 2 * expected_scale) | (scale == expected_scale / 2)
        written = (buffers.scale_memory != case.scale).sum()
        beside = (written - (scale != case.scale).sum()).abs()
        wrong_scales = (judged & ~is_right).sum() + beside
        scaled = x / scale.repeat_interleave(_GROUP_SIZE, -1)
    else:
        scaled = x * (1.0 / scale)
    expected = scaled.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(_FP8).float()
    found = buffers.quantized.data.view(_FP8).view_as(x).float()
    is_right = found == expected
    if other_sums is not None:
        is_right |= (found - expected).abs() <= expected.abs() / 8 + 2.0**-9
    return wrong_scales + (judged & ~(is_right | (found.isnan() & expected.isnan()))).sum()


def _group_scales(x: torch.Tensor, quantize: str) -> torch.Tensor:
    """[rows, hidden / 128]: as vLLM's ``per_token_group_quant_fp8``."""
    largest = torch.where(x.isnan(), 0.0, x.abs()).unflatten(-1, (-1, _GROUP_SIZE)).amax(-1).clamp(min=1e-10)
    scales = largest / torch.full_like(largest, _LARGEST_FP8)
    if "ue8m0" not in quantize:
        return scales
    mantissa, exponent = torch.frexp(scales.clamp(min=1e-10))
    powers = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return torch.where(scales.isinf(), scales, powers)
