"""Random weights of the scale of a trained model.

The engines' own dummy weights lie within 1e-3, norms included, and are the same on all ranks: what a layer adds to the
residual is below its rounding, all ranks' addends are equal, and no error of an all-reduce could be seen. Here each
matrix differs from rank to rank, and activations are of order 1 throughout.
"""

from __future__ import annotations

import math
import zlib

import torch

# A layer adds this much of the size of an embedding, so that the residual grows slowly over many layers.
_BRANCH_SCALE = 0.5


@torch.no_grad()
def fill(model: torch.nn.Module, rank: int, world_size: int) -> None:
    """Fills all parameters of ``model``, the shard of ``rank`` in a tensor-parallel group.

    Vectors (norms, biases) are replicated in dense models and get the same values on all ranks: scales near 1, biases
    0. Matrices are sharded, and get values of their rank. The seed of a parameter depends on its name and the rank, so
    every start of the engine gets the same values.
    """
    for name, parameter in model.named_parameters():
        if not torch.is_floating_point(parameter) or parameter.device.type == "meta":
            continue
        data = parameter.data
        if data.dim() < 2:
            if name.endswith("bias"):
                data.zero_()
            else:
                _uniform(data, 0.75, 1.25, _seed(name))
            continue
        bound = _bound(name, data.shape[-1], world_size)
        _uniform(data, -bound, bound, _seed(f"{name} of rank {rank}"))


def _bound(name: str, columns: int, world_size: int) -> float:
    """Half the width of a uniform distribution whose variance keeps activations at order 1."""
    unit = math.sqrt(3)  # a uniform distribution of variance 1
    if "embed" in name:
        return unit
    # Row-parallel matrices hold a part of the columns: their products are summed over the ranks.
    row_parallel = any(part in name for part in ("o_proj", "down_proj"))
    fan_in = columns * world_size if row_parallel else columns
    return unit * (_BRANCH_SCALE if row_parallel else 1.0) / math.sqrt(fan_in)


def _seed(text: str) -> int:
    return zlib.crc32(text.encode())


def _uniform(data: torch.Tensor, low: float, high: float, seed: int) -> None:
    generator = torch.Generator(device=data.device)
    generator.manual_seed(seed)
    data.uniform_(low, high, generator=generator)
