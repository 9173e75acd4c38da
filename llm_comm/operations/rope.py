"""Layer of q, k and v of attention, with norms of heads, rotary position embedding, and the write to the cache, on one
rank alone."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from llm_comm import _core
from llm_comm.errors import quoted
from llm_comm.operations.one_rank import FewTokens, aligned
from llm_comm.operations.operands import Operands, attempt, count_write, why_not_operand
from llm_comm.planning.layers import is_measured, takes_features

#: Tokens, and outputs of a layer, up to which the kernel was faster on H200 than others for the layer alone and
#: an engine's kernels for the rest (docs/experiments/linear.md, "Layers of q, k and v"). With more outputs a
#: multiprocessor has more than one block of 32.
_FASTER_TOKENS, _FASTER_OUTPUTS = 16, 4224
_NUMBERS = (torch.int64, torch.int32)
_READS = ("x", "weight", "positions", "cos_sin", "bias", "q_norm_weight", "k_norm_weight", "slots")
_Tensors = tuple[torch.Tensor | None, ...]
_NO_NORMS: _Tensors = (None, None)
_NO_CACHE: _Tensors = (None, None, None)


class Options(NamedTuple):
    """Options of ``Communicator.linear_rope``."""

    head_size: int
    kv_heads: int
    bias: torch.Tensor | None = None
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None
    eps: float = 1e-6
    interleaved: bool = False
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class LinearRope(FewTokens):
    """Layers of q, k and v of one communicator."""

    name = "linear_rope"
    algorithm = "linear"

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Run ``Communicator.linear_rope``."""
        why, run = self._look_up(x, weight, positions, cos_sin, options)
        norms, (key_cache, value_cache, slots) = _NO_NORMS, _NO_CACHE
        if not why:
            norms, (key_cache, value_cache, slots) = options.norm_weights or _NO_NORMS, options.cache or _NO_CACHE
        bias, reads = options.bias, (x, weight, positions, cos_sin, options.bias, *norms, slots)
        self._check(why, dict(zip(_READS, reads, strict=True)), weights=("weight",))
        for name, written in (("key_cache", key_cache), ("value_cache", value_cache)):
            if written is None:
                continue
            # Both may be parts of one tensor, each between the other's rows.
            Operands(self.name, _READS, (name,)).check_written(*reads, written)
        x = aligned(x)
        out = x.new_empty((len(x), len(weight)))
        operands = x, weight, bias, out, positions, cos_sin, *norms, key_cache, value_cache, slots
        self._enqueue(run, *(0 if tensor is None else tensor.data_ptr() for tensor in operands))
        count_write(tuple(cache for cache in (key_cache, value_cache) if cache is not None))
        return out

    def prefers(self, outputs: int, inputs: int, tokens: int) -> bool:
        """Return the answer of ``Communicator.prefers_linear_rope``."""
        if not (1 <= tokens <= self.max_preferred_tokens() and takes_features(outputs) and takes_features(inputs)):
            return False
        return self._planner.config.fuse_linear is True or outputs <= _FASTER_OUTPUTS

    def max_preferred_tokens(self) -> int:
        """Return the value of ``Communicator.max_preferred_rope_tokens``."""
        config = self._planner.config
        if config.fuse_linear != "auto":
            return _core.rope_max_tokens if config.fuse_linear else 0
        return _FASTER_TOKENS if config.pdl and is_measured(self._planner.limits) else 0

    def _find(
        self, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, options: Options
    ) -> Any:
        """Return the function of the core for operands that passed ``_why_not_operands``.

        Raises:
            ValueError: The kernels or the device do not support them.
        """
        (tokens, inputs), cache = x.shape, None
        if options.cache is not None:
            keys, values, slots = options.cache
            strides = keys.stride()[:3], values.stride()[:3]
            cache = (*keys.shape[:2], len(slots), slots.dtype is torch.int64, *strides)
        problem: dict[str, Any] = {
            "tokens": tokens,
            "inputs": inputs,
            "outputs": len(weight),
            "data_type": self._data_types[x.dtype],
            "head_size": options.head_size,
            "kv_heads": options.kv_heads,
            "rotary_size": cos_sin.shape[1],
            "is_interleaved": options.interleaved,
            "has_norms": options.norm_weights is not None,
            "epsilon": float(options.eps),
            "positions": len(cos_sin),
            "has_fp32_angles": cos_sin.dtype is torch.float32,
            "has_64_bit_positions": positions.dtype is torch.int64,
            "cache": cache,
        }

        def prepare(counter: _core.Counter) -> Any:
            return self._handle.core().prepare_rope(_core.RopeProblem(**problem), counter=counter)

        return self._known(tuple(problem.values()), x.nbytes, prepare)

    def why_not(
        self, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, options: Options
    ) -> str:
        """Return why the operands are not supported, or "". The answer ignores addresses."""
        return self._look_up(x, weight, positions, cos_sin, options)[0]

    def _look_up(
        self, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, options: Options
    ) -> tuple[str, Any]:
        """Return the answer of ``why_not``, and the function of the core if it is ""."""
        why = self._why_not_operands(x, weight, positions, cos_sin, options)
        if why:
            return why, None
        try:
            return "", self._find(x, weight, positions, cos_sin, options)
        except ValueError as error:
            return str(error), None

    def _why_not_operands(
        self, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, options: Options
    ) -> str:
        """Return why the operands do not go together, or ""."""
        given: dict[str, Any] = {"x": x, "weight": weight, "cos_sin": cos_sin}
        vectors: dict[str, Any] = {"positions": positions, "bias": options.bias}
        for name, parts in (("norm_weights", options.norm_weights), ("cache", options.cache)):
            size = 2 if name == "norm_weights" else 3
            if parts is not None and (not isinstance(parts, tuple) or len(parts) != size):
                return f"{name} is {quoted(parts)}; it must be None or a tuple of {size} tensors"
        norms, (keys, values, vectors["slots"]) = options.norm_weights or _NO_NORMS, options.cache or _NO_CACHE
        vectors |= dict(zip(("q_norm_weight", "k_norm_weight"), norms, strict=True))
        if (norms[0] is None) != (norms[1] is None) or (options.norm_weights is not None and norms[0] is None):
            return "norm_weights has a None; q and k both have norms, or neither has"
        vectors = {name: tensor for name, tensor in vectors.items() if tensor is not None}
        like_x = ("weight", "bias", "q_norm_weight", "k_norm_weight")
        why = self._why_not_tensors(given | vectors, dict.fromkeys(vectors, 1), like_x, {})
        if why:
            return why
        tokens, inputs = x.shape
        if not 1 <= tokens <= _core.rope_max_tokens or not takes_features(inputs) or not takes_features(len(weight)):
            return (
                f"{tokens} tokens, {inputs} inputs and {len(weight)} outputs: it takes 1 to {_core.rope_max_tokens} "
                f"tokens, and multiples of {_core.linear_multiple} of the others"
            )
        for name in ("head_size", "kv_heads"):
            number: Any = getattr(options, name)
            if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= len(weight):
                return f"{name} is {quoted(number)}; it must be a number from 1 to {len(weight)}"
        interleaved: Any = options.interleaved
        if not isinstance(interleaved, bool):
            return f"interleaved is {quoted(interleaved)}; it must be true or false"
        if not isinstance(options.eps, (int, float)) or isinstance(options.eps, bool) or not 0 <= options.eps < 1:
            return f"eps is {quoted(options.eps)}; it must be a number from 0 to 1"
        if weight.shape[1] != inputs:
            return f"columns of weight: {weight.shape[1]}, it must be {inputs}"
        lengths = {"positions": tokens, "bias": len(weight)}
        lengths |= dict.fromkeys(("q_norm_weight", "k_norm_weight"), options.head_size)
        for name, wanted in lengths.items():
            if name in vectors and len(vectors[name]) != wanted:
                return f"{name}: {len(vectors[name])}, it must be {wanted}"
        for name in ("positions", "slots"):
            if name in vectors and vectors[name].dtype not in _NUMBERS:
                return f"{name} has dtype {vectors[name].dtype}; it must be {' or '.join(map(str, _NUMBERS))}"
        if cos_sin.dtype not in (x.dtype, torch.float32):
            return f"cos_sin is {cos_sin.dtype}; it must be {x.dtype} or {torch.float32}"
        return "" if options.cache is None else self._why_not_cache(x, keys, values, vectors.get("slots"), options)

    def _why_not_cache(self, x: torch.Tensor, keys: Any, values: Any, slots: Any, options: Options) -> str:
        if slots is None:
            return "cache has no slots"
        if len(slots) == 0:
            return "slots is empty: give no cache"
        for name, part in (("key_cache", keys), ("value_cache", values)):
            if not isinstance(part, torch.Tensor):
                return f"{name} is a {type(part).__name__}, not a tensor"
            why = why_not_operand(part, self._device, strided=True)
            if why:
                return f"{name}: {why}"
            if part.dim() != 4 or part.shape[2:] != (options.kv_heads, options.head_size) or part.stride(3) != 1:
                return (
                    f"{name} has shape {tuple(part.shape)} and strides {part.stride()}; it must be [blocks, slots of a "
                    f"block, {options.kv_heads}, {options.head_size}] with stride 1 of the last"
                )
            if part.dtype is not x.dtype:
                return f"{name} is {part.dtype}; it must be {x.dtype}"
            if part.numel() == 0:
                return f"{name} is empty"
        if keys.shape != values.shape:
            return f"key_cache has shape {tuple(keys.shape)}, value_cache {tuple(values.shape)}; they must be equal"
        return ""


class RopeLayers:
    """Mixin of ``Communicator``: layers of q, k and v."""

    _linear_rope: LinearRope

    def linear_rope(
        self,
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
        """Compute q, k and v of up to 32 tokens on this rank alone, with rotary position embedding of q and k (RoPE,
        arXiv 2104.09864), and write k and v to the cache, by one kernel.

        The result is that of separate kernels which compute in fp32 and round once each: ``x @ weight.T + bias``, the
        norm of each head, the rotation. The order of additions is not that of ``linear``. The bits of a token do not
        depend on other tokens. Ranks with GPUs of one kind get the same bits.

        Args:
            x: [tokens, inputs], contiguous, bfloat16 or float16, 1 to 32 tokens; ``inputs`` is a multiple of 64.
            weight: [outputs, inputs], contiguous, of the dtype of ``x``: rows of the heads of q, then of ``kv_heads``
                heads of k and as many of v. It begins at a multiple of 16 bytes, as new tensors do. The kernel reads
                it, ``bias`` and ``norm_weights`` before earlier kernels of the stream have ended: none of them may
                write these.
            positions: [tokens], contiguous, int64 or int32. A token whose position is no row of ``cos_sin`` gets NaN.
            cos_sin: [rows, rotary_size], contiguous, of the dtype of ``x`` or float32: cosines, then sines of a
                position's ``rotary_size / 2`` angles, as in vLLM and SGLang. ``rotary_size`` is a multiple of 16 that
                divides ``head_size``. The first ``rotary_size`` outputs of a head are rotated.
            head_size: Outputs of a head, up to 512.
            kv_heads: Heads of k, and of v.
            bias: [outputs], contiguous, of the dtype of ``x``. None: no bias.
            norm_weights: Weights of RMSNorm of each head of q, and of k, [head_size] each, contiguous, of the dtype of
                ``x``. None: no norms. They need a GPU with thread block clusters, sm_90 or later. With them heads of
                more than 128 outputs take up to 16 tokens, and of more than 256 none.
            eps: Added to the mean square in the norms.
            interleaved: Pairs are neighbours (GPT-J), not halves (GPT-NeoX).
            cache: Caches of keys and of values, [blocks, slots of a block, kv_heads, head_size] each, of the dtype of
                ``x``, of any strides that are multiples of 8, the last one 1; and slots, [tokens or fewer], contiguous,
                int64 or int32. Token t is written to slot ``slots[t]``, counted over all blocks. Tokens without a slot,
                with a negative one or with one beyond the cache are not written. None: no cache.

        Returns:
            q, k and v, [tokens, outputs], of the dtype of ``x``: q and k are normed and rotated.

        Raises:
            UnsupportedInputError: ``accepts_linear_rope`` of the arguments is False, or an operand is not aligned or
                cannot be written.
            CommunicatorError: An earlier call has failed, as in ``all_reduce``.
            RuntimeError: The kernel could not be launched. No rank waits for it.
        """
        options = Options(head_size, kv_heads, bias, norm_weights, eps, interleaved, cache)
        return self._linear_rope.run(x, weight, positions, cos_sin, options)

    def try_linear_rope(
        self,
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
    ) -> torch.Tensor | None:
        """Run ``linear_rope``. Return None where it would raise UnsupportedInputError."""
        options = Options(head_size, kv_heads, bias, norm_weights, eps, interleaved, cache)
        operands = x, weight, positions, cos_sin, options
        return attempt(partial(self._linear_rope.accepts, *operands), partial(self._linear_rope.run, *operands))

    def accepts_linear_rope(
        self,
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
    ) -> bool:
        """Return whether ``linear_rope`` supports the arguments. The answer ignores addresses."""
        options = Options(head_size, kv_heads, bias, norm_weights, eps, interleaved, cache)
        return self._linear_rope.accepts(x, weight, positions, cos_sin, options)

    def prefers_linear_rope(self, outputs: int, inputs: int, tokens: int) -> bool:
        """Return whether an engine should use ``linear_rope`` in place of its own kernels.

        The answer follows ``Config.fuse_linear`` and is the same on all ranks. ``"auto"``: layers and GPUs on which it
        was measured to be faster (docs/reference/linear.md). True: every layer. False: none.

        Args:
            outputs, inputs: Shape of this rank's weight.
            tokens: Rows of ``x``.
        """
        return self._linear_rope.prefers(outputs, inputs, tokens)

    @property
    def max_preferred_rope_tokens(self) -> int:
        """Largest number of tokens for which ``prefers_linear_rope`` may be true; 0 if it never is."""
        return self._linear_rope.max_preferred_tokens()
