"""Qkv layers with their norms, rotary embedding and cache write, in graphs of vLLM's compiler: run by
``test_vllm_rope.py``, as ``scenarios.py`` is by its test.

Layer, norms, rotary embedding and the code around the attention's operators are vLLM's own. ``linear_rope`` computes by
torch what the communicator's method of that name does, except in the scenario of the kernel itself. The attention is
one that shows what it has found in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from column_scenarios import COLUMN_PASS
from compiler_harness import (
    HIDDEN,
    Compiler,
    Model,
    as_list,
    compiler,
    compiler_config,
    gemma_norms,
    matches,
    norms,
)
from linear_scenarios import use_table
from rank_processes import data, dist_rank, scenario
from scenarios import parallel_state
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from llm_comm.communicator import Communicator
from llm_comm.integrations.vllm import rope as ours
from llm_comm.planning.layers import LINEAR, LayerRow

HEADS, KV_HEADS, HEAD = 4, 2, 64
SIZES = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
WEIGHT = (sum(SIZES), HIDDEN)
ROPE_PASS = "RopePass"
BLOCKS, BLOCK_SIZE = 6, 16

# ---- What is replaced -----------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def qkv_layers_go_with_their_rotary_embedding() -> None:
    with rope_compiler() as (vllm, calls):
        for block in (Block(), Block(bias=True), Block(partial=True), Block(interleaved=True)):
            expect(vllm, calls, block.model(), 1)
        expect(vllm, calls, Block(interleaved=True, partial=True).model(), 1)
        assert vllm.column_calls == []
        is_rank_0 = dist_rank() == 0
        said = "llm_comm computes 1 of 1 qkv layers of a graph for batches of 1 to 32 tokens with their rotary"
        assert len(vllm.log.having(said)) == is_rank_0
        said = "llm_comm: first qkv with rope and cache write computed by llm_comm (2 ranks, shape (4, 64), weight "
        assert len(vllm.log.having(said)) == is_rank_0


@scenario(LLM_COMM_FUSE_LINEAR="1")
def norms_of_heads_go_with_them() -> None:
    with rope_compiler() as (vllm, calls):
        for block in (Block(norms=True), Block(norms=True, interleaved=True), Block(norms=True, partial=True)):
            expect(vllm, calls, block.model(), 1)
            assert calls[-1].epsilon == 1e-5


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def rotary_embeddings_that_are_an_operator_of_vllm_go_with_them() -> None:
    config = compiler_config(custom_ops=["+rotary_embedding"])
    with rope_compiler(config) as (vllm, calls):
        for block in (Block(), Block(norms=True), Block(partial=True, bias=True), Block(interleaved=True)):
            expect(vllm, calls, block.model(), 1)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_in_one_graph_share_cosines() -> None:
    with rope_compiler() as (vllm, calls):
        first, second = Block(), Block()

        def model(x: torch.Tensor) -> Any:
            at = positions(x)
            return *first(x, at), *second(x * 2, at)

        expect(vllm, calls, model, 2)


# ---- Cache writes ---------------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def the_kernel_writes_the_cache_once_the_layer_is_known() -> None:
    """Through inductor, with the graph split at the attention, as for a model."""
    with rope_compiler(compiler_config(norms_by="native")) as (vllm, calls), attention() as theirs:
        blocks = [Block(attention="layer.0"), Block(norms=True, attention="layer.1")]

        def model(x: torch.Tensor) -> Any:
            at = positions(x)
            return blocks[1](blocks[0](x, at)[:, :HIDDEN] * 0.25, at)

        compiled = vllm.compile(model)

        def step(rows: int, writes: bool, mode: Any = CUDAGraphMode.NONE, fewer: int = 0) -> None:
            check_step(blocks, model, compiled, calls, theirs, rows, [writes] * 2, mode, fewer)

        step(4, False)
        step(4, True)
        step(7, True, fewer=2)
        step(4, True, CUDAGraphMode.FULL)
        # Of a graph in pieces only the operator would be captured.
        step(4, False, CUDAGraphMode.PIECEWISE)
        step(5, True)
        # A run without a cache, as of vLLM's profiling.
        calls.clear()
        with forward(blocks, None):
            compiled(data((4, HIDDEN)))
        assert [call.cache for call in calls] == [None, None]
        step(5, True)
        assert matches(ROPE_PASS) == 2


@scenario(LLM_COMM_FUSE_LINEAR="1")
def a_graph_that_is_not_split_at_the_attention_writes_the_cache_too() -> None:
    config = compiler_config(norms_by="native", splitting_ops=[])
    with rope_compiler(config) as (vllm, calls), attention() as theirs:
        blocks = [Block(attention="layer.0"), Block(norms=True, attention="layer.1")]

        def model(x: torch.Tensor) -> Any:
            at = positions(x)
            return blocks[1](blocks[0](x, at)[:, :HIDDEN] * 0.25, at)

        compiled = vllm.compile(model)
        check_step(blocks, model, compiled, calls, theirs, 4, [False] * 2)
        check_step(blocks, model, compiled, calls, theirs, 4, [True] * 2)
        assert matches(ROPE_PASS) == 2


@scenario(LLM_COMM_FUSE_LINEAR="1")
def a_wrong_idea_of_the_layer_leaves_no_trace_in_a_cache() -> None:
    with rope_compiler(compiler_config(norms_by="native")) as (vllm, calls), attention() as theirs:
        blocks = [Block(attention=f"layer.{i}") for i in range(3)]

        def model(x: torch.Tensor) -> Any:
            at = positions(x)
            for block in blocks:
                x = block(x, at)[:, :HIDDEN] * 0.25
            return x

        compiled = vllm.compile(model)

        def step(writes: list[bool]) -> None:
            check_step(blocks, model, compiled, calls, theirs, 4, writes)

        step([False] * 3)
        step([True] * 3)
        layers, weights = [block.attention for block in blocks], [block.qkv_proj.weight for block in blocks]
        references = {id(layer): ours._State.layers[weight] for layer, weight in zip(layers, weights, strict=True)}
        # Each would write the cache of another layer. The last two take each other's, so the first of them writes one.
        for weight, layer in zip(weights, (layers[2], layers[0], layers[1]), strict=True):
            ours._State.layers[weight] = references[id(layer)]
        step([False] * 3)
        step([True] * 3)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def one_layer_used_twice_is_written_by_vllm_the_second_time() -> None:
    with rope_compiler(compiler_config(norms_by="native")) as (vllm, _), attention() as theirs:
        one = Block(attention="layer.0")
        other = Block(attention="layer.1")
        other.qkv_proj = one.qkv_proj

        def model(x: torch.Tensor) -> Any:
            at = positions(x)
            return other(one(x, at)[:, :HIDDEN] * 0.25, at)

        compiled = vllm.compile(model)
        for _ in range(3):
            blocks = [one, other]
            x = data((4, HIDDEN))
            with forward(blocks, 4):
                want = model(x)
            cache = [block.attention.kv_cache.clone() for block in blocks]
            for block in blocks:
                block.attention.kv_cache.zero_()
            with forward(blocks, 4):
                got = compiled(x)
            torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02)
            for block, wanted in zip(blocks, cache, strict=True):
                torch.testing.assert_close(block.attention.kv_cache.float(), wanted.float(), rtol=0.02, atol=0.02)
        assert theirs


@scenario(LLM_COMM_FUSE_LINEAR="1")
def caches_of_other_kinds_are_written_by_vllm() -> None:
    class Other(FlashAttentionImpl):  # type: ignore[misc]
        pass

    def change(layer: Any, name: str, value: Any) -> None:
        setattr(layer.impl if name == "attn_type" else layer, name, value)

    with rope_compiler(compiler_config(norms_by="native")) as (vllm, calls), attention() as theirs:
        block = Block(attention="layer.0")

        def model(x: torch.Tensor) -> Any:
            return block(x, positions(x))

        compiled = vllm.compile(model)
        layer = block.attention
        subclass = object.__new__(Other)
        vars(subclass).update(vars(layer.impl))
        for name, value in (
            ("kv_cache_dtype", "fp8"),
            ("attn_type", "encoder_decoder"),
            ("impl", subclass),
        ):
            before = getattr(layer.impl if name == "attn_type" else layer, name)
            change(layer, name, value)
            for _ in range(2):
                check_step([block], model, compiled, calls, theirs, 4, [False])
            change(layer, name, before)
        check_step([block], model, compiled, calls, theirs, 4, [False])
        check_step([block], model, compiled, calls, theirs, 4, [True])


@scenario(LLM_COMM_FUSE_LINEAR="1")
def the_kernel_itself_gives_the_same_results_and_caches() -> None:
    with compiler(compiler_config(norms_by="native")) as vllm, attention() as theirs:
        blocks = [
            Block(attention="layer.0", bias=True),
            Block(attention="layer.1", norms=True, partial=True),
            Block(attention="layer.2", norms=True, interleaved=True),
        ]

        def model(x: torch.Tensor) -> Any:
            at = positions(x)
            for block in blocks:
                x = block(x, at)[:, :HIDDEN] * 0.25
            return x

        compiled = vllm.compile(model)
        check_step(blocks, model, compiled, None, theirs, 4, [False] * 3)
        check_step(blocks, model, compiled, None, theirs, 4, [True] * 3)
        check_step(blocks, model, compiled, None, theirs, 7, [True] * 3, fewer=2)
        assert matches(ROPE_PASS) == 3


# ---- What is not ----------------------------------------------------------------------------------------------------


@scenario(LLM_COMM_FUSE_LINEAR="1")
def what_llm_comm_does_not_compute_is_left_alone() -> None:
    with rope_compiler() as (vllm, calls):
        block, normed = Block(), Block(norms=True)
        gemma, odd, alone = Block(norms=True), Block(norms=True), Block(norms=True)
        gemma.q_norm, gemma.k_norm = gemma_norms(1e-5, 1e-5, hidden=HEAD)
        odd.k_norm.variance_epsilon = 1e-6
        wide, unlike = Block(), Block()
        wide.rope.cos_sin_cache = wide.rope.cos_sin_cache.float()
        wide.rope._match_cos_sin_cache_dtype = lambda query: wide.rope.cos_sin_cache
        unlike.sizes = [2 * HEAD, 3 * HEAD, 3 * HEAD]

        quarters = Block()
        parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}
        quarters.rope = get_rope(HEAD, 128, True, parameters, dtype=torch.bfloat16)  # rotates 8 elements

        def only_k(x: torch.Tensor) -> Any:
            q, k, v = alone.qkv_proj(x * 1).split(SIZES, dim=-1)
            k = alone.k_norm(k.view(-1, KV_HEADS, HEAD)).view(k.shape)
            q, k = alone.rope(positions(x), q, k)
            return q.view(-1, HEADS, HEAD), k.view(-1, KV_HEADS, HEAD), v

        def used_elsewhere(x: torch.Tensor) -> Any:
            q, k, v = block(x, positions(x))
            return q, k, v, k * 2

        def rows_of_q(x: torch.Tensor) -> Any:
            q, k, v = block.rotated(x, positions(x))
            return q, k.view(-1, KV_HEADS, HEAD), v

        def used_before(x: torch.Tensor) -> Any:
            q, k, v = block.qkv_proj(x * 1).split(SIZES, dim=-1)
            rotated, k = block.rope(positions(x), q, k)
            return rotated.view(-1, HEADS, HEAD), k.view(-1, KV_HEADS, HEAD), v, q + 1

        def result_used_elsewhere(x: torch.Tensor) -> Any:
            y = block.qkv_proj(x * 1)
            q, k, v = y.split(SIZES, dim=-1)
            q, k = block.rope(positions(x), q, k)
            return q.view(-1, HEADS, HEAD), k.view(-1, KV_HEADS, HEAD), v, y

        def computed_weight(x: torch.Tensor) -> Any:
            q, k, v = F.linear(x, block.qkv_proj.weight * 2).split(SIZES, dim=-1)
            q, k = block.rope(positions(x), q, k)
            return q.view(-1, HEADS, HEAD), k.view(-1, KV_HEADS, HEAD), v

        def other_positions(x: torch.Tensor) -> Any:
            q, k, v = block.qkv_proj(x * 1).split(SIZES, dim=-1)
            q, _ = block.rope(positions(x), q, k)
            _, k = block.rope(positions(x) + 1, q, k)
            return q.view(-1, HEADS, HEAD), k.view(-1, KV_HEADS, HEAD), v

        for model in (
            *(one.model() for one in (gemma, odd, wide, unlike, quarters)),
            *(only_k, used_elsewhere, rows_of_q, used_before, result_used_elsewhere, computed_weight, other_positions),
        ):
            expect(vllm, calls, model, 0)
        # Larger batches are another graph's.
        before = matches(ROPE_PASS)
        vllm.trace(normed.model(), 33)(data((4, HIDDEN)))
        assert matches(ROPE_PASS) == before


@scenario()
def preferences_say_which_layers_and_batches() -> None:
    """Through inductor: a graph for batches with the operator, one for larger batches with layers alone, and vLLM's."""
    use_table([LayerRow(LINEAR, WEIGHT[0], HIDDEN, pdl=False, up_to=8, is_faster=True)])
    config = compiler_config(norms_by="native")
    before = config.compilation_config.compile_ranges_endpoints

    def prefers(_: Any, outputs: int, inputs: int, tokens: int) -> bool:
        return tokens in (2, 4) and outputs in (HIDDEN, WEIGHT[0])

    with rope_compiler(config, prefers=prefers, most_tokens=4) as (vllm, calls):
        group = parallel_state.get_tp_group().device_communicator
        assert (group.max_rope_tokens, group.max_linear_tokens) == (4, 8)
        assert config.compilation_config.compile_ranges_endpoints == [4, 8, *before]
        assert group.prefers_linear_rope(*WEIGHT)
        assert not group.prefers_linear_rope(2 * WEIGHT[0], HIDDEN)
        model = Block(norms=True).model()
        compiled = vllm.compile(model)
        for rows, called, alone in ((4, 1, 0), (3, 0, 1), (2, 1, 0), (8, 0, 1), (9, 0, 0)):
            calls.clear()
            vllm.column_calls.clear()
            check(compiled, model, rows)
            assert (len(calls), len(vllm.column_calls)) == (called, alone), (rows, calls, vllm.column_calls)
        assert (matches(ROPE_PASS), matches(COLUMN_PASS)) == (1, 1)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def what_is_declined_is_computed_all_the_same() -> None:
    with rope_compiler() as (vllm, calls):
        with mock.patch.object(Communicator, "try_linear_rope", return_value=None):
            for block in (Block(bias=True), Block(norms=True), Block(interleaved=True, partial=True)):
                before = matches(ROPE_PASS)
                check(vllm.trace(block.model(), 32), block.model())
                assert matches(ROPE_PASS) == before + 1
        assert calls == []


@scenario(LLM_COMM_FUSE_LINEAR="1")
def graphs_without_the_operator_have_another_key() -> None:
    keys = set()
    with rope_compiler() as (vllm, _):
        group = parallel_state.get_tp_group().device_communicator
        for computes in (True, False):
            config = compiler_config()
            with (
                set_current_vllm_config(config),
                mock.patch(
                    "llm_comm.integrations.vllm.fusion.why_not_rope", return_value=None if computes else "it cannot"
                ),
            ):
                group._set_up_fusion(group._llm_comm)
                assert group.max_rope_tokens == 32 * computes
                keys.add(config.compute_hash())
                backend = vllm._replace(config=config).backend()
                backend.configure_post_pass()
            names = [type(one).__name__ for one in backend.pass_manager.passes]
            assert (ROPE_PASS in names) == computes
            assert not computes or names.index(ROPE_PASS) < names.index(COLUMN_PASS)
    assert len(keys) == 2


# ---- What they are made of ------------------------------------------------------------------------------------------


class Block:
    """Attention of a decoder layer.

    Args:
        norms: q and k are normed.
        bias: Of the qkv layer.
        partial: Half of a head is rotated.
        interleaved: As in ``rope.py``.
        attention: Name of the attention layer; "": q, k and v are the results.
    """

    def __init__(
        self,
        norms: bool = False,
        bias: bool = False,
        partial: bool = False,
        interleaved: bool = False,
        attention: str = "",
    ) -> None:
        world = parallel_state.get_tp_group().world_size
        torch.manual_seed(len(attention) + dist_rank())
        self.sizes = SIZES
        self.qkv_proj = QKVParallelLinear(
            HIDDEN, HEAD, world * HEADS, world * KV_HEADS, bias=bias, params_dtype=torch.bfloat16, return_bias=False
        )
        self.qkv_proj.weight.data = torch.randint(-1, 2, self.qkv_proj.weight.shape).bfloat16() / 8
        if bias:
            self.qkv_proj.bias.data = torch.randint(-9, 10, self.qkv_proj.bias.shape).bfloat16() / 8
        self.q_norm, self.k_norm = norms_of_heads() if norms else (None, None)
        parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5 if partial else 1.0}
        # vLLM keeps one for all layers of the same parameters.
        self.rope = get_rope(HEAD, 128, not interleaved, parameters, dtype=torch.bfloat16)
        self.attention = AttentionLayer(attention) if attention else None

    def model(self) -> Model:
        return lambda x: self(x, positions(x))

    def rotated(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv_proj(x * 1).split(self.sizes, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:  # as in vLLM's models
            q_by_head = q.view(*q.shape[:-1], q.shape[-1] // HEAD, HEAD)
            q = self.q_norm(q_by_head).view(q.shape)
            k_by_head = k.view(*k.shape[:-1], k.shape[-1] // HEAD, HEAD)
            k = self.k_norm(k_by_head).view(k.shape)
        return *self.rope(at, q, k), v

    def __call__(self, x: torch.Tensor, at: torch.Tensor) -> Any:
        q, k, v = self.rotated(x, at)
        if self.attention is not None:
            return self.attention(q, k, v)
        return tuple(part.view(-1, part.shape[-1] // HEAD, HEAD) for part in (q, k, v))


def norms_of_heads() -> list[Any]:
    return norms(1e-5, 1e-5, hidden=HEAD)


def positions(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0].to(torch.int64).abs()


class AttentionLayer(torch.nn.Module):
    """What vLLM's ``Attention`` has once there is a cache; ``forward`` is vLLM's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer_name = name
        self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v = HEADS, KV_HEADS, HEAD, HEAD
        self.kv_cache_dtype, self.calculate_kv_scales, self.query_quant = "auto", False, None
        self.kv_sharing_target_layer_name, self.use_direct_call = None, False
        self.attn_backend = flash_attn.FlashAttentionBackend
        self.impl: Any = object.__new__(FlashAttentionImpl)
        self.impl.attn_type, self.impl.head_size, self.impl.kv_cache_dtype = "decoder", HEAD, "auto"
        self._k_scale = self._v_scale = torch.ones(1)
        # Rows of a block lie apart by heads, as with vLLM's layout NHD.
        self.kv_cache = torch.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS, 2 * HEAD, dtype=torch.bfloat16).transpose(1, 2)

    def forward(self, *operands: torch.Tensor) -> Any:
        return Attention.forward(self, *operands)


class Call(NamedTuple):
    """A call of the communicator's method.

    Attributes:
        rows: Tokens.
        cache: As given.
        epsilon: Of the norms.
    """

    rows: int
    cache: Any
    epsilon: float


def linear_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    head_size: int,
    kv_heads: int,
    bias: torch.Tensor | None = None,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    qkv = F.linear(x, weight, bias)
    heads = qkv.view(len(x), -1, head_size)
    parts = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    for place, part in enumerate(parts):
        if norm_weights is not None:
            values = part.float()
            values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
            part.copy_(values.to(x.dtype) * norm_weights[place])
        rotated = part[..., : cos_sin.shape[1]]
        one, other = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
        first, second = one * cos - other * sin, other * cos + one * sin
        one.copy_(first)
        other.copy_(second)
    if cache is not None:
        write(heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:], *cache)
    return qkv


def write(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    assert key_cache.shape == (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD)
    assert key_cache.stride(-1) == 1
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = key[row]
            value_cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = value[row]


@contextmanager
def rope_compiler(
    config: VllmConfig | None = None, prefers: Any = None, most_tokens: int = 32
) -> Iterator[tuple[Compiler, list[Call]]]:
    calls: list[Call] = []

    def try_linear_rope(_: Any, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(Call(len(operands[0]), options.get("cache"), options["eps"]))
        return linear_rope(*operands, **options)

    with (
        mock.patch.object(Communicator, "try_linear_rope", try_linear_rope),
        mock.patch.object(Communicator, "prefers_linear_rope", prefers or (lambda *_: True)),
        mock.patch.object(Communicator, "max_preferred_rope_tokens", most_tokens),
        compiler(config) as vllm,
    ):
        yield vllm, calls


@contextmanager
def attention() -> Iterator[list[int]]:
    """vLLM's attention, of which the result is q and what lies in the cache. Yields the rows of each cache write."""
    writes: list[int] = []

    def reshape_and_cache_flash(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *_: Any) -> None:
        writes.append(len(key))
        write(key, value, key_cache, value_cache, slots)

    def run(impl: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, *_: Any, output: Any) -> None:
        output.copy_(query)
        slots = CURRENT["slots"]
        if slots is not None:
            for row, slot in enumerate(slots.tolist()):
                keys, values = kv_cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE].split(HEAD, -1)
                output[row] += (keys - values).repeat_interleave(HEADS // KV_HEADS, 0)

    def forward(impl: Any, *operands: Any, output: Any, **_: Any) -> None:
        run(impl, *operands, output=output)

    with (
        mock.patch.object(flash_attn, "reshape_and_cache_flash", reshape_and_cache_flash),
        mock.patch.object(FlashAttentionImpl, "forward", forward),
    ):
        yield writes


#: Slots of the forward pass at hand, which this attention takes instead of metadata.
CURRENT: dict[str, Any] = {"slots": None}


@contextmanager
def forward(blocks: list[Block], rows: int | None, mode: Any = CUDAGraphMode.NONE) -> Iterator[None]:
    """A forward pass of vLLM.

    Args:
        blocks: Blocks with attention.
        rows: Tokens that have a slot, the second of them one that is not written; None: there is no cache.
        mode: How vLLM runs it.
    """
    layers = {block.attention.layer_name: block.attention for block in blocks if block.attention is not None}
    slots = None if rows is None else torch.arange(rows) * 5 + 3
    CURRENT["slots"] = slots
    context = ForwardContext(
        no_compile_layers=layers,
        attn_metadata=None,
        slot_mapping={} if slots is None else dict.fromkeys(layers, slots),
        cudagraph_runtime_mode=mode,
    )
    with override_forward_context(context):
        yield


def check_step(
    blocks: list[Block],
    model: Model,
    compiled: Model,
    calls: list[Call] | None,
    theirs: list[int],
    rows: int,
    writes: list[bool],
    mode: Any = CUDAGraphMode.NONE,
    fewer: int = 0,
) -> None:
    """Run a forward pass of ``model`` and of ``compiled``, with empty caches, and compare results and caches.

    Args:
        blocks: Blocks with attention.
        calls: Record of ``rope_compiler``; None: the kernel computes.
        theirs: Record of ``attention``.
        rows: Tokens.
        writes: By layer, whether llm_comm's kernel writes the cache and vLLM does not.
        mode: How vLLM runs it.
        fewer: Tokens at the end that have no slot.
    """
    layers = [block.attention for block in blocks if block.attention is not None]
    x, results = data((rows, HIDDEN)), []
    for run in (model, compiled):
        for layer in layers:
            layer.kv_cache.zero_()
        if calls is not None:
            calls.clear()
        theirs.clear()
        with forward(blocks, rows - fewer, mode):
            results.append([run(x), *(layer.kv_cache.clone() for layer in layers)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02)
        assert got.abs().sum() > 0
    assert len(theirs) == writes.count(False), (writes, theirs)
    if calls is not None:
        assert len(calls) == len(blocks)
        assert not all(writes) or all(call.cache is not None for call in calls)


def expect(vllm: Compiler, calls: list[Call], model: Model, replaced: int) -> None:
    """Compile and run ``model``, of whose qkv layers so many become operators."""
    calls.clear()
    before = matches(ROPE_PASS)
    check(vllm.trace(model, 32), model)
    assert matches(ROPE_PASS) - before == replaced, matches(ROPE_PASS) - before
    assert len(calls) == replaced, calls


def check(compiled: Model, model: Model, rows: int = 4) -> None:
    """Compare results. The strides of q and k may differ."""
    x = data((rows, HIDDEN))
    for want, got in zip(as_list(model(x)), as_list(compiled(x)), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02)
