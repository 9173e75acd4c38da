"""Router of experts: logits of few tokens, and the experts that each token gets, on one rank alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from llm_comm.errors import quoted
from llm_comm.operations.one_rank import FewTokens, aligned, why_not_sizes
from llm_comm.operations.operands import attempt


class Router(FewTokens):
    """Routers of one communicator."""

    name = "moe_route"
    algorithm = "router"

    def run(
        self,
        x: torch.Tensor,
        router_weight: torch.Tensor,
        top_k: int,
        bias: torch.Tensor | None = None,
        renormalize: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run ``Communicator.moe_route``."""
        self._check(
            self.why_not(x, router_weight, top_k, bias, renormalize),
            _operands(x, router_weight, bias),
            weights=("router_weight",),
        )
        (tokens, hidden), experts = x.shape, len(router_weight)
        run = self._prepare(
            (x.shape, experts, top_k, x.dtype, renormalize),
            x.nbytes,
            lambda counter: self._handle.core().prepare_router(
                tokens=tokens,
                experts=experts,
                top_k=top_k,
                hidden=hidden,
                data_type=self._data_types[x.dtype],
                renormalize=renormalize,
                counter=counter,
            ),
        )
        x = aligned(x)
        logits = x.new_empty((tokens, experts))
        weights = x.new_empty((tokens, top_k), dtype=torch.float32)
        ids = x.new_empty((tokens, top_k), dtype=torch.int32)
        read = x.data_ptr(), router_weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        self._enqueue(run, *read, logits.data_ptr(), weights.data_ptr(), ids.data_ptr())
        return weights, ids, logits

    def why_not(
        self,
        x: torch.Tensor,
        router_weight: torch.Tensor,
        top_k: int,
        bias: torch.Tensor | None = None,
        renormalize: Any = True,
    ) -> str:
        """Return why the operands are not supported, or "". The answer ignores addresses."""
        given = _operands(x, router_weight, bias)
        why = self._why_not_tensors(given, {"bias": 1}, ("router_weight", "bias"), {})
        if why:
            return why
        (tokens, hidden), (experts, inputs) = x.shape, router_weight.shape
        if inputs != hidden or (bias is not None and len(bias) != experts):
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in given.items())
            return f"{shapes}: x and router_weight must have as many columns, and bias an element for each expert"
        if not isinstance(renormalize, bool):
            return f"renormalize is {quoted(renormalize)}; it must be true or false"
        why = why_not_sizes(tokens, experts, top_k, {"x": hidden})
        return why or (f"{top_k} experts of a token, of {experts}" if top_k > experts else "")


def _operands(x: Any, router_weight: Any, bias: Any) -> dict[str, Any]:
    given = {"x": x, "router_weight": router_weight}
    return given if bias is None else given | {"bias": bias}


class RouterLayers:
    """Mixin of ``Communicator``: routers of experts."""

    _router: Router

    def moe_route(
        self,
        x: torch.Tensor,
        router_weight: torch.Tensor,
        top_k: int,
        *,
        bias: torch.Tensor | None = None,
        renormalize: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose the experts of up to 64 tokens on this rank alone, by one kernel.

        Logits are ``x @ router_weight.T + bias``, summed in fp32 and rounded to the dtype of ``x``. A token gets the
        ``top_k`` experts with the largest rounded logits, in descending order; of equal ones those with lower numbers
        come first, and NaN counts as largest. The bits of a token do not depend on other tokens. Ranks with GPUs of one
        kind get the same bits.

        Args:
            x: [tokens, hidden], contiguous, bfloat16 or float16, 1 to 64 tokens; ``hidden`` is a multiple of 64 up to
                2**24.
            router_weight: [experts, hidden], contiguous, of the dtype of ``x``, 1 to 512 experts. It begins at a
                multiple of 16 bytes, as new tensors do. The kernel reads it before earlier kernels of the stream have
                ended: none of them may write it.
            top_k: Experts of a token, 1 to 16, and no more than there are.
            bias: [experts], contiguous, of the dtype of ``x``. None: no bias.
            renormalize: The factors of a token are the softmax of its chosen logits, so they add up to 1. False: of all
                its logits.

        Returns:
            ``topk_weights`` [tokens, top_k], float32, and ``topk_ids`` [tokens, top_k], int32, as ``fused_experts``
            takes them; and the logits [tokens, experts], of the dtype of ``x``.

        Raises:
            UnsupportedInputError: ``accepts_moe_route`` of the arguments is False, ``router_weight`` is not aligned, or
                the device has too little shared memory for a block.
            CommunicatorError: An earlier call has failed, as in ``all_reduce``.
            RuntimeError: The kernel could not be launched. No rank waits for it.
        """
        return self._router.run(x, router_weight, top_k, bias, renormalize)

    def try_moe_route(
        self,
        x: torch.Tensor,
        router_weight: torch.Tensor,
        top_k: int,
        *,
        bias: torch.Tensor | None = None,
        renormalize: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Run ``moe_route``. Return None where it would raise UnsupportedInputError."""
        options: dict[str, Any] = {"bias": bias, "renormalize": renormalize}
        return attempt(
            partial(self.accepts_moe_route, x, router_weight, top_k, **options),
            partial(self.moe_route, x, router_weight, top_k, **options),
        )

    def accepts_moe_route(
        self,
        x: torch.Tensor,
        router_weight: torch.Tensor,
        top_k: int,
        *,
        bias: torch.Tensor | None = None,
        renormalize: bool = True,
    ) -> bool:
        """Return whether ``moe_route`` supports the arguments. The answer ignores addresses."""
        return self._router.accepts(x, router_weight, top_k, bias, renormalize)
