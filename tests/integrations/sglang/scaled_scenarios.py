"""SGLang's linear layers of FP8 by llm_comm: run by ``test_sglang_scaled.py``, as ``scenarios.py`` is by its test.

``apply_fp8_linear``, by which SGLang's methods for FP8 go, is an excerpt, as the layers of ``linear_scenarios.py`` are.
The kernels that it calls are stand-ins.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fusion_scenarios import excerpt
from linear_scenarios import numbers, served, use_table
from lost_seams import lose
from rank_processes import dist_rank, scenario, serve
from scenarios import ours
from torch import nn

from llm_comm.integrations.sglang import seams
from llm_comm.planning.layers import LayerRow

INPUTS, OUTPUTS = 256, 128
FP8 = torch.float8_e4m3fn
_theirs: list[int] = []


def per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return (x.float() / scale).to(FP8), scale


def static(x: torch.Tensor, scale: torch.Tensor, repeat_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    x8 = (x.float() / scale).clamp(-448, 448).to(FP8)
    return x8, scale.expand(len(x), 1).contiguous() if repeat_scale else scale


def fp8_scaled_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    _theirs.append(len(x))
    y = x.float() @ weight.float() * weight_scale.view(1, -1) * x_scale.view(-1, 1)
    return (y if bias is None else y + bias.float()).to(out_dtype)


#: Where no hook finds it: they go by all modules.
THEIRS = SimpleNamespace(kernel=fp8_scaled_mm)

fp8_utils = excerpt(
    seams.FP8_KERNEL.partition(":")[0],
    "apply_fp8_linear",
    fp8_scaled_mm=fp8_scaled_mm,
    cutlass_fp8_supported=lambda: True,
    sglang_per_token_quant_fp8=per_token,
    static_quant_fp8=static,
    use_triton_w8a8_fp8_kernel=False,
    envs=SimpleNamespace(SGLANG_ENABLE_FP8_GEMM_CONFIG_TUNE=SimpleNamespace(get=lambda: False)),  # since 0.5.23
    get_platform=lambda: SimpleNamespace(is_sm90=True),  # the same
    fp8_dtype=FP8,
    **dict.fromkeys(("_is_cuda", "USE_ROWWISE_TORCH_SCALED_MM"), True),
    **dict.fromkeys(("_is_hip", "_use_aiter"), False),
)


class Layer:
    """As SGLang's methods for FP8 leave one: the weight transposed, a scale for each output."""

    def __init__(self, inputs: int = INPUTS, outputs: int = OUTPUTS) -> None:
        random = torch.Generator().manual_seed(dist_rank())
        weight = (16 * torch.randn(outputs, inputs, generator=random)).to(FP8)
        self.weight = nn.Parameter(weight.t(), requires_grad=False)
        scale = (0.5 + torch.rand(1, outputs, generator=random)) / 256
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def __call__(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        result: torch.Tensor = fp8_utils.apply_fp8_linear(x, self.weight, self.weight_scale, **options)
        return result

    def check(self, x: torch.Tensor, **options: Any) -> None:
        """Against SGLang's own kernel: a rounding apart at most."""
        with mock.patch.object(fp8_utils, "fp8_scaled_mm", THEIRS.kernel):
            want = self(x, **options)
        _theirs.clear()
        torch.testing.assert_close(
            self(x, **options).float(), want.float(), rtol=2 * torch.finfo(x.dtype).eps, atol=1e-4
        )


# ---- Scenarios ------------------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def layers_are_computed_by_llm_comm() -> None:
    with served() as (log, calls):
        layer = Layer()
        for dtype in (torch.bfloat16, torch.float16):
            for shape in ((1, INPUTS), (64, INPUTS), (2, 3, INPUTS)):
                layer.check(numbers(shape, dtype))
                assert not _theirs
            layer.check(numbers((3, INPUTS), dtype), bias=nn.Parameter(torch.ones(OUTPUTS, dtype=dtype)))
            assert not _theirs
        layer.check(numbers((4, INPUTS)), input_scale=torch.tensor([0.01]))
        assert calls == [1, 64, 6, 3, 1, 64, 6, 3, 4], calls
        said = f"first linear layer computed by llm_comm (2 ranks, shape (1, {INPUTS}), weight ({OUTPUTS}, {INPUTS}))"
        assert len(log.having(said)) == (dist_rank() == 0)
        x = numbers((5, INPUTS))
        x8, scale = per_token(x)
        options = {"x_scale": scale, "weight_scale": layer.weight_scale.detach(), "out_dtype": x.dtype}
        assert torch.equal(layer(x), ours("tp")._llm_comm.linear(x8, layer.weight.detach().t(), **options))


@scenario(LLM_COMM_FUSE_LINEAR="1")
def what_llm_comm_does_not_serve_is_left_to_sglang() -> None:
    with served() as (_, calls):
        layer, x = Layer(), numbers((4, INPUTS))
        bias = torch.ones(OUTPUTS, dtype=x.dtype)
        fetched = Layer()
        fetched.weight = fetched.weight.detach()  # from the host, for a pass
        for other, given, options in (
            (layer, x, {"bias": bias}),  # no parameter: someone may have just made it
            (layer, numbers((65, INPUTS)), {}),
            (Layer(outputs=96), x, {}),
            (Layer(inputs=192), numbers((4, 192)), {}),
            (fetched, x, {}),
        ):
            other.check(given, **options)
            assert len(_theirs) == 1, (other, options)
        assert not calls
        ours("tp").leave()
        layer.check(x)
        assert not calls


@scenario()
def only_the_layers_of_a_table_are_computed_by_llm_comm() -> None:
    use_table(
        LayerRow("linear", OUTPUTS, 2 * INPUTS, True, 16, True), LayerRow("linear_fp8", OUTPUTS, INPUTS, True, 4, True)
    )
    with served() as (_, calls):
        layer, other = Layer(), Layer(inputs=2 * INPUTS)
        for tokens in (4, 5):
            layer.check(numbers((tokens, INPUTS)))
            other.check(numbers((tokens, 2 * INPUTS)))
        assert calls == [4]


@scenario(LLM_COMM_FUSE_LINEAR="1")
def without_the_function_other_layers_are_still_computed() -> None:
    """As in a version that calls it otherwise: FP8 is no reason to leave the rest."""
    lose(seams.TABLE, seams.FP8_KERNEL)
    with served() as (log, calls):
        assert len(log.having("linear layers of FP8: off, SGLang ", logging.WARNING)) == (dist_rank() == 0)
        assert len(log.having("; linear layers of up to 64 tokens by llm_comm")) == (dist_rank() == 0)
        Layer().check(numbers((4, INPUTS)))
        assert not calls


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # as SGLang does
    serve(globals(), "sglang_scheduler_{}")
