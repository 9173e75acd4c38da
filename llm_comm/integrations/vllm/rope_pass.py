"""Pass of vLLM's compiler that merges a qkv layer with the norms of its heads and the rotary embedding (``rope.py``).

A qkv layer in the graphs of both supported versions of vLLM is ``split_with_sizes`` of a linear layer's result. q and k
are reshaped to heads and normed if the model norms them, and then rotated. Forms of the rotation:

- Torch operators on [tokens, heads, head_size], for q and for k apart. Cosines and sines come from rows of vLLM's
  ``cos_sin_cache``. The rotation may concern the first elements of a head only.
- With ``+rotary_embedding`` in ``custom_ops``: vLLM's operator, for q and k together. Without norms it rotates parts
  of the layer's result in place. The graph has this as ``slice_scatter`` of both into the result, which is split again.

Other rotations, such as those with three positions a token, and norms with other weights than inputs of the graph stay
vLLM's.

The operator's q and k are views of qkv, where the graph had tensors of their own. So their strides change. A graph that
is split off later could not know that, and vLLM's attention takes any strides. So q and k may only go to the attention:
to its operators, or out of the graph as heads, which is what vLLM's ``Attention`` makes of them. Where vLLM's operator
works in place, nothing changes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch._inductor.pattern_matcher as pm
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx.experimental.symbolic_shapes import statically_known_true
from vllm.compilation.passes.inductor_pass import enable_fake_mode, get_pass_context
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group

from llm_comm import _core
from llm_comm.integrations.vllm.compiled_graphs import log_once
from llm_comm.integrations.vllm.graph_layers import RESHAPES, Layer, Node, layer_of
from llm_comm.integrations.vllm.linear_passes import LayerPass
from llm_comm.integrations.vllm.rope import linear_rope

_aten = torch.ops.aten
#: Operators of vLLM's attention that q and k may go to.
_ATTENTION = ("unified_kv_cache_update", "unified_attention_with_output")


class _Rotation(NamedTuple):
    """Rotation of q or k.

    Attributes:
        result: Node of the rotated heads.
        positions, cos_sin: Operands.
        head_size: Elements of a head.
        interleaved: Pairs of elements follow one another.
        nodes: Nodes that the rotation is made of.
    """

    result: Node
    positions: Node
    cos_sin: Node
    head_size: int
    interleaved: bool
    nodes: tuple[Node, ...]


class _Part(NamedTuple):
    """q or k of a qkv layer.

    Attributes:
        source: Node of q or k in the layer's result, [tokens, heads * head_size].
        norm: Weight and epsilon of the norm; None: there is none.
        rotation: Rotation.
        nodes: Nodes between ``source`` and the rotation.
    """

    source: Node
    norm: tuple[Node, float] | None
    rotation: _Rotation
    nodes: tuple[Node, ...]


class _Qkv(NamedTuple):
    """A qkv layer with its rotation.

    Attributes:
        layer: Linear layer.
        split: Node that splits its result.
        q, k: Its parts.
        rotated: Node of the whole result with q and k rotated in place; None: q and k are tensors of their own.
    """

    layer: Layer
    split: Any
    q: _Part
    k: _Part
    rotated: Node | None


class RopePass(LayerPass, VllmPatternMatcherPass):  # type: ignore[misc]
    """Replaces qkv layers with their norms and rotations, if llm_comm is preferred for some batch."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self._max_tokens = get_tp_group().device_communicator.max_rope_tokens
        self.pm_pass = pm.PatternMatcherPass(pass_name=self.pass_name)
        #: Rotations of torch operators in the graph at hand, by the heads that they rotate.
        self._found: dict[Node, _Rotation] = {}
        for interleaved in (False, True):
            for rotary_dim in (8, 4):  # all elements of a head, and some
                self._register(interleaved, rotary_dim)
        self.dump_patterns(config, self.pm_pass)

    @enable_fake_mode  # type: ignore[untyped-decorator]
    def _register(self, interleaved: bool, rotary_dim: int) -> None:
        """Register a pattern of rotations. The matcher finds them, and ``__call__`` replaces those of qkv layers."""

        def search(x: Any, cos: Any, sin: Any) -> Any:
            return _rotated(x, cos, sin, interleaved)

        def note(match: pm.Match) -> bool:
            rotation = _rotation_of(match, interleaved)
            if rotation is not None:
                self._found[match.kwargs["x"]] = rotation
            return False  # the match is replaced later, or not at all

        x, half = torch.empty(5, 4, 8, dtype=torch.bfloat16), torch.empty(5, 1, rotary_dim // 2, dtype=torch.bfloat16)
        pm.register_replacement(
            search, lambda x, cos, sin: x, [x, half, half.clone()], _traced, self.pm_pass, extra_check=note
        )

    @VllmInductorPass.time_and_log  # type: ignore[untyped-decorator]
    def __call__(self, graph: torch.fx.Graph) -> None:
        group = get_tp_group()
        self._found.clear()
        self.pm_pass.apply(graph)
        found = list(self._layers(graph))
        self._found.clear()
        preferred = [qkv for qkv in found if group.device_communicator.prefers_linear_rope(*qkv.layer.shape)]
        for qkv in preferred:
            _replace(graph, qkv, group.unique_name)
        self.matched_count = len(preferred)
        VllmPatternMatcherPass.match_table[self.pass_name] += self.matched_count
        batches = get_pass_context().compile_range
        if found:
            log_once(
                f"llm_comm computes {len(preferred)} of {len(found)} qkv layers of a graph for batches of "
                f"{batches.start} to {batches.end} tokens with their rotary embedding"
            )

    def _layers(self, graph: torch.fx.Graph) -> Iterator[_Qkv]:
        for split in graph.nodes:
            if split.target is _aten.split_with_sizes.default and len(split.args[1]) == 3:
                qkv = self._qkv(split)
                if qkv is not None and _is_served(qkv):
                    yield qkv

    def _qkv(self, split: Any) -> _Qkv | None:
        y = split.args[0]
        layer, parts = layer_of(y), {user.args[1]: user for user in split.users if user.target is operator.getitem}
        if layer is None or layer.reshape is not None:
            return None
        if not {0, 1} <= set(parts) or len(split.users) != len(parts):
            return None
        q, k = (self._part(parts[place], place) for place in (0, 1))
        if q is None or k is None:
            return None
        if set(y.users) == {split}:
            return _Qkv(layer, split, q, k, None)
        rotated = _scattered(split, q.rotation.result, k.rotation.result)
        return None if rotated is None else _Qkv(layer, split, q, k, rotated)

    def _part(self, source: Node, place: int) -> _Part | None:
        """Return q (``place`` 0) or k (1), whose node is ``source``; None if it is not rotated, or not as known."""
        nodes: list[Node] = []
        node, norm = source, None
        while True:
            rotation = self._found.get(node)
            if rotation is not None:
                is_alone = set(node.users) <= set(rotation.nodes)
                return _Part(source, norm, rotation, tuple(nodes)) if is_alone else None
            if len(node.users) != 1:
                return None
            (user,) = node.users
            if user.target is auto_functionalized:
                called = _rotation_of_vllm(user, node, place)
                return None if called is None else _Part(source, norm, called, tuple(nodes))
            if user.target is torch.ops.vllm_ir.rms_norm.default and norm is None and user.args[0] is node:
                norm = _norm_of(user)
                if norm is None:
                    return None
            elif user.target not in RESHAPES:
                return None
            nodes.append(user)
            node = user


def _traced(*arguments: Any, **options: Any) -> torch.fx.GraphModule:
    """Trace a pattern with the reshapes that inductor leaves in graphs."""
    traced = pm.fwd_only(*arguments, **options)
    view_to_reshape(traced)
    return traced


def _rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Pattern of vLLM's ``RotaryEmbedding.forward_static`` for q or k.

    Args:
        x: [tokens, heads, head_size].
        cos, sin: [tokens, 1, rotary_dim / 2].
        interleaved: As in ``rope.py``.
    """
    rotary_dim = 2 * cos.shape[-1]
    is_whole = rotary_dim == x.shape[-1]
    rotated = x if is_whole else x[..., :rotary_dim]
    one, other = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else torch.chunk(rotated, 2, dim=-1)
    pair = one * cos - other * sin, other * cos + one * sin
    if not interleaved:
        result = torch.cat(pair, dim=-1)
    else:
        result = torch.stack(pair, dim=-1)
        if is_whole:  # vLLM's pass has merged the reshape with the next one
            return result
        result = result.flatten(-2)
    return result if is_whole else torch.cat((result, x[..., rotary_dim:]), dim=-1)


def _rotation_of(match: pm.Match, interleaved: bool) -> _Rotation | None:
    """Return the rotation of a match if its cosines and sines are rows of one input of the graph."""
    x, halves, nodes = match.kwargs["x"], [], list(match.nodes)
    for place, name in enumerate(("cos", "sin")):
        unsqueezed = match.kwargs[name]
        half = unsqueezed.args[0] if unsqueezed.target is _aten.unsqueeze.default else None
        if half is None or half.target is not operator.getitem or half.args[1] != place:
            return None
        halves.append(half.args[0])
        nodes += [unsqueezed, half]
    rows: Any = halves[0].args[0]
    if halves[1] is not halves[0] or halves[0].target not in (_aten.split.Tensor, _aten.split_with_sizes.default):
        return None
    cos_sin, positions = _indexed(rows)
    value = x.meta["val"]
    if cos_sin is None or value.dim() != 3 or not _is_int(value.shape[-1]):
        return None
    width = 2 * match.kwargs["cos"].meta["val"].shape[-1]
    if not _is_cos_sin(cos_sin, value) or cos_sin.meta["val"].shape[1] != width:
        return None
    result: Any = match.output_nodes()[0]
    return _Rotation(result, positions, cos_sin, value.shape[-1], interleaved, (*nodes, halves[0], rows))


def _indexed(rows: Any) -> tuple[Any, Any]:
    """Return matrix and indices of a node that takes rows of a matrix; (None, None) for another node."""
    if rows.target is _aten.index.Tensor and len(rows.args[1]) == 1:
        return rows.args[0], rows.args[1][0]
    if rows.target is _aten.index_select.default and rows.args[1] == 0:
        return rows.args[0], rows.args[2]
    return None, None


def _rotation_of_vllm(call: Any, x: Node, place: int) -> _Rotation | None:
    """Return the rotation of q (``place`` 0) or k (1), ``x``, by vLLM's operator; None if ``call`` is no such one."""
    given = call.kwargs
    if call.args[0] is not torch.ops._C.rotary_embedding.default or given[("query", "key")[place]] is not x:
        return None
    if given.get("rope_dim_offset") or given.get("inverse"):
        return None
    results = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    if len(results) != len(call.users) or sorted(results) != [1, 2] or not _is_cos_sin(given["cos_sin_cache"], x):
        return None
    # Item 0 is the call's own result, None. The next are q and k.
    result = results[place + 1]
    return _Rotation(
        result, given["positions"], given["cos_sin_cache"], given["head_size"], not given["is_neox"], (result, call)
    )


def _scattered(split: Any, q: Node, k: Node) -> Node | None:
    """Return the node of a layer's result with ``q`` and ``k`` written into it. None: something else takes the result,
    or either of them."""
    y, (q_size, k_size, _) = split.args[0], split.args[1]
    # Arguments: tensor, values, dimension, first and last element.
    scatters = [user for user in y.users if user is not split]
    wanted = [(q, (1, 0, q_size)), (k, (1, q_size, q_size + k_size))]
    before = y
    for values, place in wanted:
        if len(scatters) != 1 or set(values.users) != set(scatters):
            return None
        (scatter,) = scatters
        if scatter.target is not _aten.slice_scatter.default or scatter.args != (before, values, *place):
            return None
        before, scatters = scatter, list(scatter.users)
    return before  # type: ignore[no-any-return]


def _is_cos_sin(cos_sin: Any, x: Any) -> bool:
    """Return whether ``cos_sin`` is an input of the graph like vLLM's ``cos_sin_cache``, of the dtype of ``x``."""
    if not isinstance(cos_sin, Node) or cos_sin.op != "placeholder":
        return False
    value, like = cos_sin.meta["val"], x.meta["val"] if isinstance(x, Node) else x
    return value.dim() == 2 and _is_int(value.shape[1]) and value.dtype == like.dtype and value.is_contiguous()


def _norm_of(node: Any) -> tuple[Node, float] | None:
    """Return weight and epsilon of a norm of heads; None if it is another norm."""
    if len(node.args) != 3 or node.kwargs:
        return None
    x, weight, epsilon = node.args
    if not isinstance(weight, Node) or weight.op != "placeholder":
        return None
    value, heads = weight.meta["val"], x.meta["val"]
    is_of_heads = heads.dim() == 3 and value.shape == heads.shape[-1:] and value.is_contiguous()
    return (weight, epsilon) if is_of_heads and value.dtype == heads.dtype else None


def _is_int(size: Any) -> bool:
    return isinstance(size, int)


def _is_served(qkv: _Qkv) -> bool:
    """Return whether the operator computes a layer: checks of shapes, dtypes, and of q and k against each other."""
    q, k, layer, split = qkv.q, qkv.k, qkv.layer, qkv.split
    first, second = q.rotation, k.rotation
    size, sizes = first.head_size, split.args[1]
    if not all(map(_is_int, sizes)) or sizes[1] != sizes[2] or any(one % size for one in sizes):
        return False
    if split.args[2:] not in ((-1,), (1,)) or split.kwargs or layer.scales is not None:
        return False
    if (first.positions, first.cos_sin, *first[3:5]) != (second.positions, second.cos_sin, *second[3:5]):
        return False
    if (q.norm is None) != (k.norm is None):
        return False
    if q.norm is not None and k.norm is not None:
        (weight, epsilon), (_, of_k) = q.norm, k.norm
        if epsilon != of_k or weight.meta["val"].shape != (size,):
            return False
    rotary_size = first.cos_sin.meta["val"].shape[1]
    if size > _core.rope_max_head_size or rotary_size % _core.rope_rotary_multiple or size % rotary_size:
        return False
    tokens, positions = layer.x.meta["val"].shape[0], first.positions.meta["val"]
    if positions.dim() != 1 or positions.dtype not in (torch.int64, torch.int32):
        return False
    if not statically_known_true(positions.shape[0] == tokens) or layer.x.meta["val"].dim() != 2:
        return False
    return qkv.rotated is not None or all(
        _go_to_attention(part.rotation.result, sizes[i] // size, size) for i, part in enumerate((q, k))
    )


def _go_to_attention(heads: Node, count: int, size: int) -> bool:
    """Return whether only vLLM's attention takes the rotated heads, or a later graph as [tokens, ``count``, ``size``].

    An interleaved rotation leaves [tokens, heads, pairs, 2], which a reshape follows.
    """
    for user in heads.users:
        if user.op == "output":
            shape = heads.meta["val"].shape
            if len(shape) != 3 or tuple(shape[1:]) != (count, size):
                return False
        elif user.target in RESHAPES:
            if not _go_to_attention(user, count, size):
                return False
        else:
            called: Any = user.args[0] if user.target is auto_functionalized else user.target
            if getattr(called, "namespace", "") != "vllm" or called._opname not in _ATTENTION:
                return False
    return True


def _replace(graph: torch.fx.Graph, qkv: _Qkv, group: str) -> None:
    layer, split, q, k, rotated = qkv
    rotation = q.rotation
    y = split.args[0]
    size = rotation.head_size
    weights = (None, None) if q.norm is None or k.norm is None else (q.norm[0], k.norm[0])
    epsilon = 0.0 if q.norm is None else q.norm[1]
    kv_heads = split.args[1][1] // size
    operands = (layer.x, layer.weight, layer.bias, rotation.positions, rotation.cos_sin, *weights, epsilon)
    with graph.inserting_before(split):
        ours = graph.call_function(linear_rope, (*operands, size, kv_heads, rotation.interleaved, group))
    ours.meta.update(y.meta)
    split.replace_input_with(y, ours)
    dead = {*layer.nodes(), split, *split.users}
    if rotated is not None:
        rotated.replace_all_uses_with(ours)
        dead |= {rotated, *rotated.all_input_nodes}
    for part in (q, k):
        result = part.rotation.result
        dead |= {*part.nodes, *part.rotation.nodes}
        if rotated is not None:
            continue
        heads = part.source
        if result.meta["val"].dim() > 2:  # the heads of torch operators; vLLM's operator leaves rows
            with graph.inserting_before(result):
                heads = graph.call_function(_aten.reshape.default, (part.source, [-1, *result.meta["val"].shape[1:]]))
            heads.meta.update(result.meta)
            heads.meta["val"] = part.source.meta["val"].unflatten(-1, tuple(result.meta["val"].shape[1:]))
        result.replace_all_uses_with(heads)
        _refresh(heads)
    for node in reversed(list(graph.nodes)):
        if node in dead and not node.users:
            graph.erase_node(node)
    pm.stable_topological_sort(graph)  # positions may be computed after the layer


def _refresh(heads: Node) -> None:
    """Compute the strides of reshapes of ``heads`` anew."""
    for user in heads.users:
        if user.target in RESHAPES:
            user.meta["val"] = heads.meta["val"].reshape(user.meta["val"].shape)
            _refresh(user)
