"""``llm-comm bench linear``: linear layers y = x W^T, alone and followed by all-reduce, residual add and RMSNorm.

A CUDA graph holds a chain of layers, each with a weight of its own. There are enough weights that none is in the L2
cache when its layer runs, as in a model.

Layers alone are compared with cuBLAS. With several ranks, chains of layer, all-reduce, residual add and RMSNorm are
compared too:

* llm_comm in one call;
* cuBLAS with llm_comm's fused all-reduce;
* cuBLAS with NCCL's all-reduce;
* cuBLAS with add and norm but no all-reduce, as if communication were free.

Variants, each without chains:

* ``--fp8``: FP8 layers, compared with torch's and vLLM's kernels.
* ``--silu``: gate-and-up projections with silu-and-mul, in one kernel of llm_comm and in two kernels of others.
* more than 64 tokens: ``Communicator.batch_invariant_linear``.

Arms with kernels of llm_comm are timed with and without dependent launches (``Config.pdl``), other arms once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm import _core, files
from llm_comm.bench import report, timing
from llm_comm.bench.agreement import checked, first_failure
from llm_comm.bench.comparison import in_ranks, replayable
from llm_comm.bench.fused import NORM_REMARK
from llm_comm.bench.layer_chains import make_weights
from llm_comm.bench.linear_arms import (
    FP8_REMARK,
    SILU_REMARK,
    Arm,
    are_many,
    arms_of_choices,
    check_layers,
    other_chains,
    other_layers,
    our_chains,
    our_layer,
)
from llm_comm.bench.linear_operands import Fp8Judge, Judge, JudgeOfLayers, Operands, SiluJudge
from llm_comm.bench.linear_report import LayerRow, MeasuredTuning, plot, remarks_on, tables
from llm_comm.bench.report import DTYPES, Progress, Result
from llm_comm.bench.timing import ALIGNING_CALLS, Schedule
from llm_comm.cli import launch
from llm_comm.cli.launch import Placement
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.operations.fp8 import FP8

#: Outputs and inputs of row-parallel layers of Llama-3.3-70B and Qwen3-32B on one rank at TP=8.
SHAPES = ((8192, 1024), (8192, 3584), (5120, 1024), (5120, 3200))
#: Outputs and inputs of the gate-and-up projections of the same models, on one rank at TP=8.
SILU_SHAPES = ((3584, 8192), (3200, 5120))
TOKENS = (1, 4, 16, 64)
#: Maximum tokens, a chunk of a prefill. The float64 references of more, one for each weight, would fill a GPU.
MOST_TOKENS = 4096
_WEIGHT_BYTES = 600 << 20
_REPS = 20
# Sizes for emulated GPUs, which only check results and must finish in seconds.
_EMULATED_SHAPES = ((192, 128), (64, 320))
_EMULATED_FP8_SHAPES = ((192, 128), (64, 384))
_EMULATED_TOKENS = (1, 9)
_EMULATED_WEIGHTS = 2
_EMULATED_REPS = 3
_PDL = {"on": (True,), "off": (False,), "both": (True, False)}


def run(args: argparse.Namespace) -> int:
    """Run ``llm-comm bench linear``. Return 0, or 1 if a result was wrong or a file could not be written.

    Raises:
        ConfigError: The options do not fit together or do not fit this machine, or the configuration is wrong.
    """
    world = 1 if args.choices and not launch.in_rank() and args.world is None else args.world
    placement = launch.place(world, args.device, least=1)
    if args.choices and placement.world != 1:
        raise ConfigError(f"--choices times the layer alone: {placement.world} ranks are too many; use --world 1")
    if args.silu and args.fp8:
        raise ConfigError("--silu and --fp8 are benchmarks of their own: choose one")
    shapes = SILU_SHAPES if args.silu else SHAPES
    emulated = _EMULATED_FP8_SHAPES if args.fp8 else _EMULATED_SHAPES
    args.shapes = args.shapes or (shapes if placement.on_gpu else emulated)
    args.tokens = args.tokens or (TOKENS if placement.on_gpu else _EMULATED_TOKENS)
    args.reps = args.reps or (_REPS if placement.on_gpu else _EMULATED_REPS)
    check_layers(args.shapes, args.tokens, "--shapes", fp8=bool(args.fp8), most_tokens=MOST_TOKENS)
    only_few = [f"--{name}" for name in ("silu", "fp8", "choices") if getattr(args, name)]
    if only_few and any(map(are_many, args.tokens)):
        raise ConfigError(
            f"{only_few[0]} with --tokens {','.join(map(str, args.tokens))}: it takes 1 to {_core.linear_max_tokens}"
        )
    return in_ranks(args, placement, lambda group, config: _run_rank(args, placement, group, config))


def _run_rank(args: argparse.Namespace, placement: Placement, group: dist.ProcessGroup, config: Config) -> int:
    with contextlib.ExitStack() as stack:
        comms = [
            (pdl, stack.enter_context(Communicator(group, placement.device, config.replace(pdl=pdl))))
            for pdl in _PDL[args.pdl]
        ]
        progress = Progress(enabled=launch.rank() == 0)
        bench = LayerBench(comms, group, args.reps, progress, choices=args.choices, silu=args.silu, fp8=args.fp8)
        rows = []
        for shape in args.shapes:
            rows += bench.rows(shape, args.tokens, DTYPES[args.dtype], args.weights)
        progress.clear()
    written = _publish(args, placement, rows) if launch.rank() == 0 else True
    return 1 if not written or any(row.wrong for row in rows) else 0


def _publish(args: argparse.Namespace, placement: Placement, rows: Sequence[LayerRow]) -> bool:
    """Print the tables and write the files. Return whether all files were written."""
    kind = "gate-and-up projections with silu-and-mul" if args.silu else "linear layers"
    kind += f" of FP8, a scale for each {args.fp8}" if args.fp8 else ""
    title = f"{kind}, {args.dtype}, {placement.describe()}"
    method = f"aligned: median of {args.reps} runs of a chain, slowest rank"
    print(f"{title}; microseconds a layer; {method}")
    print(tables(rows, placement.on_gpu))
    remarks = [] if placement.on_gpu else [report.EMULATED_REMARK]
    if placement.on_gpu and args.silu:
        remarks.append(SILU_REMARK)
    elif placement.on_gpu and args.fp8:
        remarks.append(FP8_REMARK)
    elif placement.on_gpu and placement.world > 1:
        remarks.append(NORM_REMARK)
    for remark in [*remarks, *remarks_on(rows)]:
        print(remark)
    written = True
    if args.json:
        content: dict[str, Any] = {"command": "bench linear", **report.environment(placement)}
        settings = {"dtype": args.dtype, "method": "aligned", "reps": args.reps, "pdl": args.pdl}
        settings |= {"silu": args.silu, "fp8": args.fp8}
        found = {"rows": [row.as_dict(compared=placement.on_gpu) for row in rows], "remarks": remarks}
        written = files.write_json("--json", args.json, {**content, **settings, **found})
    if args.plot:
        written &= report.could_draw(args.plot, partial(plot, args.plot, rows, f"{title}\n{method}"))
    return written


class LayerBench:
    """Benchmark of linear layers on this rank. The methods are collective.

    Args:
        comms: Communicators, each with its setting of dependent launches (PDL).
        group: Group of the ranks.
        reps: Timed runs of a chain.
        progress: Display of progress.
        choices: Whether to time other tilings of llm_comm's kernel too.
        chains: Whether to time layer, all-reduce, add and norm too, if there are several ranks.
        silu: Whether the layers are gate-and-up projections with silu-and-mul.
        fp8: ``"row"`` or ``"tensor"``: operands are FP8, with a scale for each row or tensor. None: operands have the
            dtype of results.
    """

    def __init__(
        self,
        comms: Sequence[tuple[bool, Communicator]],
        group: dist.ProcessGroup,
        reps: int,
        progress: Progress,
        *,
        choices: bool = False,
        chains: bool = True,
        silu: bool = False,
        fp8: str | None = None,
    ) -> None:
        self._comms, self._group, self._reps, self._progress = comms, group, reps, progress
        self._choices, self._chains, self._silu, self._fp8 = choices, chains, silu, fp8
        self._comm = comms[0][1]

    def rows(
        self, shape: tuple[int, int], tokens: Sequence[int], dtype: torch.dtype, weight_bytes: int | None
    ) -> list[LayerRow]:
        """Check and time all arms at one shape.

        Args:
            shape: Outputs and inputs.
            tokens: Batch sizes.
            dtype: Dtype of results.
            weight_bytes: Total bytes of the weights of a chain; None: enough to exceed the L2 cache.
        """
        outputs, inputs = shape
        shape_of_weight = (2 * outputs if self._silu else outputs, inputs)
        factors = FP8 if self._fp8 else dtype
        count = self._weights(math.prod(shape_of_weight) * factors.itemsize, weight_bytes)
        weights = make_weights(count, shape_of_weight, factors, self._comm.device, self._comm.rank)
        rows = []
        for rows_of_x in tokens:
            if self._fp8:
                operands = Operands.of_fp8(weights, rows_of_x, self._comm.rank, dtype, self._fp8 == "row")
            else:
                operands = Operands.of(weights, rows_of_x, self._comm.rank, silu=self._silu)
            judge = self._judge(operands)
            # Chains exist for unquantized layers of few tokens without activation only.
            with_chains = self._chains and self._comm.world_size > 1 and not are_many(rows_of_x)
            judge_of_chains = judge if isinstance(judge, Judge) and with_chains else None
            what = f"linear {shape[0]}x{shape[1]}, {rows_of_x} tokens"
            arms = list(other_layers(self._comm, operands, judge))
            if judge_of_chains:
                arms += other_chains(self._comm, self._group, operands, judge_of_chains)
            others = {arm.name: self._measure(arm, weights, what) for arm in arms}
            for pdl, comm in self._comms:
                where = f"{what}, PDL {'on' if pdl else 'off'}"
                arms = [our_layer(comm, operands, judge)]
                if judge_of_chains:
                    arms += our_chains(comm, operands, judge_of_chains)
                ours = {arm.name: self._measure(arm, weights, where) for arm in arms}
                choices = self._of_choices(comm, operands, judge, where) if self._choices else ((), None)
                comm.check()
                layers = self._calls(weights)
                row = LayerRow(
                    *shape, rows_of_x, pdl, layers, {**ours, **others}, *choices, operands.silu, bool(self._fp8)
                )
                rows.append(row)
        return rows

    def _judge(self, operands: Operands) -> JudgeOfLayers:
        if self._silu:
            return SiluJudge(operands)
        return Fp8Judge(operands) if self._fp8 else Judge(operands, self._group)

    def _weights(self, bytes_each: int, weight_bytes: int | None) -> int:
        if self._comm.is_emulated and weight_bytes is None:
            return _EMULATED_WEIGHTS
        count = max(_EMULATED_WEIGHTS, -(-(weight_bytes or _WEIGHT_BYTES) // bytes_each))
        # Add weights for the untimed calls at the start, which leave their weights in the L2 cache.
        return count if self._comm.is_emulated else count + ALIGNING_CALLS

    def _calls(self, weights: Sequence[Tensor]) -> int:
        return len(weights) if self._comm.is_emulated else len(weights) - ALIGNING_CALLS

    def _measure(self, arm: Arm, weights: Sequence[Tensor], what: str) -> Result:
        """Check the result with every weight, and time the chain if all are right."""
        self._progress.show(f"{what}: {arm.name}")

        def check() -> float:
            return max(arm.error(arm.call(weight), index) for index, weight in enumerate(weights))

        failure, error = checked(check, self._group)
        if failure:
            return Result(skipped=failure)
        if not self._comm.is_emulated:
            # Replay all layers but the last. The output buffer still holds the last layer's result from ``check``, so
            # a replay that writes nothing would be detected.
            replay = replayable(in_turn(arm.call, weights), len(weights) - 1)
            error = max(error, arm.error(replay(), len(weights) - 2))
            _, error = first_failure("", error, self._group)
        result = Result(error=error)
        return result if result.wrong else self._time(arm, weights, error)

    def _time(self, arm: Arm, weights: Sequence[Tensor], error: float) -> Result:
        call, schedule = in_turn(arm.call, weights), Schedule(self._calls(weights), self._reps, aligned=True)
        if self._comm.is_emulated:
            timed = timing.time_eager(call, _nothing, schedule, self._comm.device, self._group)
        else:
            timed = timing.time_graph(call, _nothing, schedule, self._group)
        return Result(timed.us, timed.min_us, timed.host_us, error)

    def _of_choices(
        self, comm: Communicator, operands: Operands, judge: JudgeOfLayers, what: str
    ) -> tuple[Sequence[MeasuredTuning], MeasuredTuning | None]:
        """Time the most promising tilings of the kernel. Return all of them, and the fastest one, timed again."""
        timed: list[tuple[MeasuredTuning, Arm]] = []
        for choice, arm in arms_of_choices(comm, operands, judge):
            result = self._measure(arm, operands.weights, what)
            timed.append((MeasuredTuning(choice.block_outputs, choice.stages, choice.stage_boxes, result), arm))
        right = [(choice, arm) for choice, arm in timed if choice.result.us is not None]
        best = None
        if right:
            best, arm = min(right, key=lambda one: one[0].result.us or 0.0)
            # The best of many times is partly luck, so the tiling is timed again and its second time counts.
            best = best._replace(result=self._measure(arm, operands.weights, what))
        return [choice for choice, _ in timed], best


def in_turn(
    call: Callable[[Tensor], tuple[Tensor, ...]], weights: Sequence[Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that calls ``call`` with the next weight each time, in a cycle."""
    turn = itertools.cycle(weights)
    return lambda: call(next(turn))


def _nothing() -> None:
    """Reset the inputs between runs: nothing to do, since no arm changes its inputs."""
