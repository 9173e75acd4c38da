"""Tuning of linear layers in ``llm-comm tune``.

For each layer the tuner finds the batch sizes at which llm_comm's kernel is faster than cuBLAS, and the tunables.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from llm_comm.bench import linear_report
from llm_comm.bench.choosing import is_slower, last_of_alike
from llm_comm.bench.linear import LayerBench
from llm_comm.bench.linear_arms import CUTLASS, Names
from llm_comm.bench.report import OURS, Progress
from llm_comm.communicator import Communicator
from llm_comm.planning.layers import LINEAR, LINEAR_SILU_AND_MUL, LayerRow, is_fp8, of_factors


def measure(
    comm: Communicator,
    group: dist.ProcessGroup,
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    reps: int,
    *,
    silu: bool = False,
    fp8: bool = False,
) -> list[linear_report.LayerRow]:
    """Time cuBLAS and the tilings of llm_comm's kernel in chains of that layer alone. Collective: the slowest
    rank counts.

    Args:
        comm: Communicator. Its option ``pdl`` decides whether kernels are dependent launches.
        group: Group of the ranks.
        shapes: Outputs and inputs of each layer on one rank. For gate and up: the outputs of gate alone.
        tokens: Batch sizes to measure. Each is the largest batch of its row in the table.
        reps: Timed runs of each tiling.
        silu: Whether the layers are gate-and-up projections with silu-and-mul. The comparison is then cuBLAS with a
            separate kernel for silu-and-mul, as in engines.
        fp8: Whether operands are FP8, with a scale for each row.

    Returns:
        Results of all shapes and batch sizes.
    """
    if not shapes:
        return []
    progress = Progress(enabled=comm.rank == 0)
    pdl = [(comm.config.pdl, comm)]
    fp8_scales = "row" if fp8 else None
    bench = LayerBench(pdl, group, reps, progress, choices=True, chains=False, silu=silu, fp8=fp8_scales)
    found: list[linear_report.LayerRow] = []
    for shape in shapes:
        measured = bench.rows(shape, sorted(tokens), torch.bfloat16, None)
        progress.clear()
        if comm.rank == 0:
            for row in rows_of(measured, on_gpu=not comm.is_emulated):
                print(line(row), flush=True)
        found += measured
    return found


def rows_of(measured: Sequence[linear_report.LayerRow], on_gpu: bool = True) -> tuple[LayerRow, ...]:
    """Return the table rows of one layer. Neighbouring batch sizes with equal choices share a row, with the figures of
    the largest."""
    rows = [_row(one, Names.of(on_gpu, one.silu, one.fp8).layer) for one in measured]
    return tuple(last_of_alike(rows))


def _row(measured: linear_report.LayerRow, other: str) -> LayerRow:
    operation = of_factors(LINEAR_SILU_AND_MUL if measured.silu else LINEAR, measured.fp8)
    layer = (operation, measured.outputs, measured.inputs, measured.pdl, measured.tokens)
    us = measured.results[OURS].us
    # Compare with the fastest kernel: the engine may use vLLM's instead of torch's.
    times = [measured.results[name].us for name in (other, CUTLASS) if name in measured.results]
    other_us = min((time for time in times if time is not None), default=None)
    choice: tuple[int, int, int] = (0, 0, 0)
    best = measured.best
    # Keep the kernel's own choice unless another tiling is faster by more than the noise of repeated runs.
    if best is not None and best.result.us is not None and (us is None or is_slower(us, best.result.us)):
        us, choice = best.result.us, (best.block_outputs, best.stages, best.stage_boxes)
    is_faster = us is not None and other_us is not None and is_slower(other_us, us)
    return LayerRow(*layer, is_faster, *choice, _rounded(us), _rounded(other_us))


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


def line(row: LayerRow) -> str:
    """Return the line that is printed for a row."""
    chosen = " ".join(f"{name}={value}" for name, value in row.tunables().items() if value)
    times = [f"{'-':>8}" if us is None else f"{us:8.2f}" for us in (row.us, row.cublas_us)]
    layer = f"{row.operation} {row.outputs}x{row.inputs} PDL {'on' if row.pdl else 'off'}"
    other = "scaled_mm" if is_fp8(row.operation) else "cuBLAS"
    other += " + silu" if row.operation == LINEAR_SILU_AND_MUL else ""
    return (
        f"{row.up_to:>3} tokens {times[0]} us  {layer}  {chosen or 'as the kernel chooses'}   {other} {times[1]}"
        f"{'' if row.is_faster else '   not faster: left to the engine'}"
    )
