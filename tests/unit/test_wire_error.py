"""tools/wire_error.py: the bar of the default format, and the reader of weights on a file that is made here."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from tool_modules import tool


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    yield from tool("wire_error")


@pytest.mark.parametrize("activation", ["gaussian_4096", "outliers_4096", "outliers_8192"])
def test_sums_of_8_ranks_are_within_the_bar(study: ModuleType, activation: str) -> None:
    found = [study.errors(study.synthetic(activation, 8, seed), "e4m3", 64) for seed in range(3)]
    together = study.summary(found)
    assert together["rms_over_once_of_all"] <= 1.6
    assert together["max_in_steps_of_sum"]["largest"] <= 4


def test_an_exact_sum_has_the_error_of_bf16_alone(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "quantized_all_reduce", lambda x, wire, block: study.exact_sum(torch.stack(x)))
    found = study.errors(study.synthetic("outliers_4096", 4, 0), "int8", 32)
    assert found["rms_over_bf16_rounding"] == pytest.approx(1, rel=1e-3)


def test_outlier_channels_and_correlation_are_as_asked_for(study: ModuleType) -> None:
    partial = torch.stack(study.synthetic("outliers_4096_correlated", 8, 1)).double()
    channels = partial.sum(0).square().mean(0).sqrt()
    sixth, seventh = (channels.topk(7).values[5:] / channels.median()).tolist()
    assert sixth > 20
    assert seventh < 2
    outliers = channels.topk(6).indices
    power = partial.sum(0)[:, outliers].square().sum() / partial[:, :, outliers].square().sum()
    assert (power - 1) / 7 == pytest.approx(0.55, rel=0.3)


def test_differences_of_tokens(study: ModuleType) -> None:
    logits = torch.randn(2, 3, 10)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    others = torch.tensor([[1, 2, 3, 4], [5, 0, 7, 0]])
    found = study.compared((logits + 1, others), (logits, tokens))
    assert found["logits_rms"] == pytest.approx(0, abs=1e-6)
    assert (found["prompts_that_differ"], found["tokens_that_differ"]) == (1, 2)
    assert found["tokens_before_the_first_difference"] == 5


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def test_weights_of_a_gguf_file(study: ModuleType) -> None:
    plain = torch.arange(8, dtype=torch.float32)
    q8 = struct.pack("<e32b", 0.5, *range(-16, 16))
    q4 = struct.pack("<ee16B", 2.0, -3.0, *(low + 16 * (15 - low) for low in range(16)))
    tensors = [("a", (4, 2), 0, plain.numpy().tobytes()), ("b", (32,), 8, q8), ("c", (32,), 3, q4)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    head += gguf_text("size") + struct.pack("<II", 4, 7)
    head += gguf_text("names") + struct.pack("<IIQ", 9, 8, 2) + gguf_text("x") + gguf_text("yz")
    body = b""
    for name, shape, kind, data in tensors:
        head += gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(body))
        body += data + bytes(-len(data) % 32)
    found = study.wire_model.read_gguf(head + bytes(-len(head) % 32) + body)
    assert found.metadata == {"size": 7, "names": ["x", "yz"]}
    assert torch.equal(found.tensors["a"], plain.view(2, 4))
    assert found.tensors["b"].tolist() == [0.5 * value for value in range(-16, 16)]
    assert found.tensors["c"].tolist() == [2.0 * n - 3 for n in [*range(16), *range(15, -1, -1)]]


def test_partial_sums_add_up_to_the_product(study: ModuleType) -> None:
    x, weight = torch.ones(3, 16), torch.arange(32.0).view(2, 16)
    partial = study.wire_model.partial_sums(x, weight, 8)
    assert partial.shape == (8, 3, 2)
    assert torch.equal(study.exact_sum(partial).float(), x @ weight.t())
