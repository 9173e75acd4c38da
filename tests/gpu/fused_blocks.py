"""NVFP4 and MXFP8 outputs of the fused norm: bytes of values and scales, against torch's arithmetic on the CPU.

    torchrun --standalone --nproc-per-node 4 tests/gpu/fused_blocks.py

The reference quantizes the normed rows that the same call returns without quantization (``fused_reference.in_blocks``).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from common import Session, parser, run, session
from fused_reference import BLOCKS, in_blocks, in_tiles, operands_of, rows_of

from llm_comm import Communicator
from llm_comm.planning.tables import FUSED, Row, TuningTable, by_operation

MIB = 1 << 20
#: Algorithm, protocol and tunables: a cluster for every row, blocks of many tiles, and tiles of rows.
LAUNCHES = (
    ("one_shot", "LL", {"blocks": 1056, "threads": 512, "cluster": 8, "depth": 0}),
    ("one_shot", "LL", {"blocks": 2, "threads": 128, "cluster": 1, "depth": 1}),
    ("two_shot", "LL", {"blocks": 1056, "threads": 512, "cluster": 4, "depth": 0}),
    ("two_shot", "LL", {"blocks": 8, "threads": 128, "cluster": 2, "depth": 1}),
    ("two_shot_hb", "HB", {"blocks": 4, "tile_lines": 512, "depth": 2}),
)
#: Rows and hidden size.
SHAPES = ((1, 32), (3, 96), (130, 160), (16, 7168))


def check(ranks: Session, communicator: Communicator, what: str) -> int:
    """Check all modes, shapes and types of a launch. Return the number of calls."""
    calls = 0
    for (rows, hidden), dtype, quantize in itertools.product(SHAPES, (torch.bfloat16, torch.float16), BLOCKS):
        x = rows_of(ranks.world, rows, hidden, dtype)[ranks.rank].to(ranks.device)
        residual, weight = (tensor.to(ranks.device) for tensor in operands_of(rows, hidden, dtype))
        weight[:16] = 0  # a block of zeros
        global_scale = torch.tensor([37.5], device=ranks.device) if quantize.startswith("nvfp4") else None
        normed, _ = communicator.all_reduce_add_rms_norm(x, residual, weight, 1e-5)
        found, _, scale = communicator.all_reduce_add_rms_norm(
            x, residual, weight, 1e-5, quantize=quantize, global_scale=global_scale
        )
        values, by_rows = in_blocks(normed.cpu(), quantize, None if global_scale is None else global_scale.cpu())
        scales = by_rows if quantize.endswith("_linear") else in_tiles(by_rows)
        for name, one, other in (("values", found, values), ("scales", scale, scales)):
            if not torch.equal(one.cpu().view(torch.uint8), other):
                raise AssertionError(f"{name}: {what}, {rows} rows of {hidden} {dtype}, {quantize}")
        calls += 2
        ranks.watchdog.progress(f"{what}, {quantize}")
    return calls


def main(arguments: argparse.Namespace) -> int:
    calls = 0
    with session(arguments) as ranks, Communicator(ranks.group, ranks.device) as communicator:
        for algorithm, protocol, tunables in LAUNCHES:
            row = Row(64 * MIB, FUSED, algorithm, protocol, **tunables)
            communicator.use_table(TuningTable("fused_blocks", by_operation([row]), 64 * MIB))
            calls += check(ranks, communicator, f"{algorithm} {tunables}")
        ranks.synchronize()
        communicator.check()
        ranks.barrier()
        if ranks.rank == 0:
            print(f"{calls} calls right", flush=True)
    return 0


if __name__ == "__main__":
    run(lambda: main(parser(__doc__.splitlines()[0]).parse_args()))
