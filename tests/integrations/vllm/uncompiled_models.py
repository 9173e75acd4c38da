"""Layers of models that vLLM does not compile, with vLLM's own forward.

Their modules import what is not installed here, from packages for images to CUDA compilers. So a class is taken out of
its file, with all of its methods but the constructor.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import vllm
from rank_processes import dist_rank
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear

from llm_comm.integrations.vllm import uncompiled_layers

HIDDEN = 64
#: By architecture: attributes with which a layer has a residual added between its attention and the norm behind it.
PLAIN = {
    "KimiLinearForCausalLM": {"use_attn_res": False, "use_sequence_parallel": False},
    "Glm5NextForCausalLM": {"mhc": False, "is_mtp_layer": True, "is_sequence_parallel": False},
}
#: Those with which it has not, or not on all tokens.
NOT_PLAIN = {
    "KimiLinearForCausalLM": ({"use_attn_res": True}, {"use_sequence_parallel": True}),
    "Glm5NextForCausalLM": ({"mhc": True, "is_mtp_layer": False}, {"is_sequence_parallel": True}),
}


def is_there(architecture: str) -> bool:
    """Whether this version of vLLM has the file."""
    return _file(architecture).is_file()


def put_in_place(architecture: str) -> None:
    """Makes the module of the layers of ``architecture`` one with their class alone, whose constructor is another."""
    name, kind = uncompiled_layers.LAYERS[architecture].symbol.split(":")
    tree = ast.parse(_file(architecture).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    found.body = [node for node in found.body if getattr(node, "name", "") != "__init__"]
    future = ast.parse("from __future__ import annotations").body
    made = ModuleType(name)
    made.__dict__.update(nn=nn, torch=torch)
    exec(compile(ast.Module([*future, found], []), name, "exec"), made.__dict__)
    getattr(made, kind).__init__ = _build
    sys.modules[name] = made


def build(architecture: str, **attributes: Any) -> Any:
    """A layer, built as vLLM builds it."""
    name, kind = uncompiled_layers.LAYERS[architecture].symbol.split(":")
    return getattr(sys.modules[name], kind)(**{**PLAIN[architecture], **attributes})


def expected(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``layer`` makes of ``x`` and its residual, which is ``x`` too where the layer comes first."""
    first = normed(x, layer.input_layernorm)
    parts = [_Attention.weight_of(rank) for rank in range(2)]
    total = sum((first @ part.T).float() for part in parts).bfloat16()
    residual = (total.float() + x.float()).bfloat16()
    return normed(residual, layer.post_attention_layernorm) * 2, residual


def normed(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """What ``norm`` makes of ``x``, rounded once."""
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return (values * norm.weight.float()).bfloat16()


def _file(architecture: str) -> Path:
    name = uncompiled_layers.LAYERS[architecture].symbol.split(":")[0]
    return Path(vllm.__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")


class _Attention(nn.Module):
    """Its projection alone, of which each rank has half of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = RowParallelLinear(2 * HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16)
        self.o_proj.weight.data = self.weight_of(dist_rank())

    @staticmethod
    def weight_of(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return (torch.randn(HIDDEN, HIDDEN, generator=generator) / 8).bfloat16()

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.o_proj(hidden_states)[0]  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def _build(layer: Any, **attributes: Any) -> None:
    nn.Module.__init__(layer)
    layer.self_attn, layer.mlp = _Attention(), _Mlp()
    for number, name in enumerate(("input_layernorm", "post_attention_layernorm"), 1):
        norm = RMSNorm(HIDDEN, eps=1e-5, dtype=torch.bfloat16)
        norm.weight.data = torch.linspace(0.5, 1.0 + number, HIDDEN).bfloat16()
        setattr(layer, name, norm)
    for name, value in attributes.items():
        setattr(layer, name, value)
