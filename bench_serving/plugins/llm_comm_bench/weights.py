"""Random weights of the scale of a trained model.

The engines' own dummy weights are within 1e-3, norms included, and equal on all ranks. What a layer adds to the
residual is then below its rounding, and the operands of all ranks are equal. An error of an all-reduce would be
invisible. Here each matrix differs between ranks, and activations are of order 1 throughout.
"""

from __future__ import annotations

import math
import re
import zlib

import torch

# Contribution of a layer relative to an embedding, so that the residual grows slowly over many layers.
_BRANCH_SCALE = 0.5
# Standard deviation of a router's logits. With 8 experts of 128, two or three experts then dominate a token, and the
# eighth has 1.5 % of the weight. An expert that enters or leaves the selection by rounding thus changes little, as in a
# trained model. With a value of 1 the eighth would have 8 %.
_ROUTER_SCALE = 4.0
# Restores the magnitude of the weighted sum of experts: the root mean square of these weights is 0.67.
_EXPERTS_SCALE = 1.5
# Largest input that a statically quantized layer represents. Normed activations and their products with gates reach 5
# to 15. fp8 e4m3 is equally precise at order 1 for any such range.
_LARGEST_INPUT = 16.0

# Scales of quantized weights: one for a tensor or for each of its layers, or (..._inv) one for each block.
_WEIGHT_SCALE = re.compile(r"(weight|w13_weight|w2_weight)_scale(_inv)?")
_INPUT_SCALE = re.compile(r"(w13_|w2_)?input_scale")


@torch.no_grad()
def fill(model: torch.nn.Module, rank: int, world_size: int) -> None:
    """Fill all parameters of ``model``, the shard of ``rank`` in a tensor-parallel group.

    Vectors (norms, biases) are replicated and get equal values on all ranks: scales near 1, biases 0. The same holds
    for matrices of linear layers that the engine does not split, such as routers of experts. Other matrices are
    sharded, and their values depend on the rank. The seed of a parameter depends on its name and the rank, so every
    start of the engine gets the same values.

    Weights in fp8 e4m3 are quantized values of the same distribution, and all elements of their scale parameter hold
    the matching scale. Static scales of inputs are equal in all layers. Scales of a KV cache are 1.

    Raises:
        ValueError: The quantization of a parameter is not supported.
    """
    filled: set[int] = set()  # parameter ids; embedding and output head may share one
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            if id(parameter) in filled or not torch.is_floating_point(parameter) or parameter.device.type == "meta":
                continue
            filled.add(id(parameter))
            full_name = f"{prefix}.{name}" if prefix else name
            data = parameter.data
            if match := _WEIGHT_SCALE.fullmatch(name):
                weight = own[match[1]]
                data.fill_(_bound(f"{prefix}.{match[1]}", weight.data, world_size) / _largest(weight, full_name))
            elif _INPUT_SCALE.fullmatch(name):
                data.fill_(_LARGEST_INPUT / torch.finfo(torch.float8_e4m3fn).max)
            elif name.endswith("_scale"):
                data.fill_(1.0)
            elif data.dim() < 2:
                if name.endswith("bias"):
                    data.zero_()
                else:
                    _uniform(data, 0.75, 1.25, _seed(full_name))
            else:
                seed = _seed(full_name if _is_replicated(module) else f"{full_name} of rank {rank}")
                _matrix(data, _bound(full_name, data, world_size), seed, full_name)


def _is_replicated(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a linear layer that each rank computes as a whole. Both engines use this class
    name."""
    return any(kind.__name__ == "ReplicatedLinear" for kind in type(module).__mro__)


def _bound(name: str, data: torch.Tensor, world_size: int) -> float:
    """Return half the width of a uniform distribution whose variance keeps activations at order 1.

    Args:
        name: Full name of the parameter, with its modules.
        data: Weight, [..., outputs, inputs]; or [inputs, outputs] with strided inputs, as engines store fp8 weights for
            their kernels.
        world_size: Number of ranks.
    """
    unit = math.sqrt(3)  # a uniform distribution of variance 1
    if "embed" in name:
        return unit
    is_transposed = data.dim() == 2 and data.stride(0) == 1 and data.stride(1) != 1
    inputs = data.shape[0] if is_transposed else data.shape[-1]
    scale = 1.0
    # Row-parallel matrices have a part of the inputs: their products are summed over the ranks.
    if any(part in name for part in ("o_proj", "down_proj", "w2_weight")):
        inputs *= world_size
        scale = _BRANCH_SCALE * (_EXPERTS_SCALE if "w2_weight" in name else 1.0)
    elif name.endswith(".gate.weight"):
        scale = _ROUTER_SCALE
    return unit * scale / math.sqrt(inputs)


def _matrix(data: torch.Tensor, bound: float, seed: int, name: str) -> None:
    if torch.finfo(data.dtype).bits >= 16:
        _uniform(data, -bound, bound, seed)
        return
    # torch cannot draw fp8. The quantized values are uniform over the range of the type.
    largest = _largest(data, name)
    drawn = torch.empty(data.shape, dtype=torch.float32, device=data.device)
    _uniform(drawn, -largest, largest, seed)
    data.copy_(drawn)


def _largest(weight: torch.Tensor, name: str) -> float:
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{name} belongs to a weight of {weight.dtype}; scaled weights are known for float8_e4m3fn alone: use "
            "--weights dummy, without --check"
        )
    return float(torch.finfo(weight.dtype).max)


def _seed(text: str) -> int:
    return zlib.crc32(text.encode())


def _uniform(data: torch.Tensor, low: float, high: float, seed: int) -> None:
    generator = torch.Generator(device=data.device)
    generator.manual_seed(seed)
    data.uniform_(low, high, generator=generator)
