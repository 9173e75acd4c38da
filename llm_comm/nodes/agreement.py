"""Whether the ranks of different nodes make the same call, which kernels compare within a node alone."""

from __future__ import annotations

import hashlib

import torch

from llm_comm.nodes.placement import Placement
from llm_comm.nodes.transport import Transport
from llm_comm.runtime.devices import is_capturing

_BYTES = 256
_DIGEST = 8


class Agreement:
    """Of one communicator. It costs an exchange for each call, for which the host waits.

    Args:
        transport: Between the ranks with the same place in their nodes.
        placement: Of the ranks.
        device: Of the communicator.
    """

    def __init__(self, transport: Transport, placement: Placement, device: torch.device) -> None:
        self._transport = transport
        self._placement = placement
        self._device = device

    def differences(self, call: str) -> str:
        """What each partner calls, in words, if not all call the same; else "", as in a capture, where nothing runs.

        Args:
            call: What this rank calls, with everything in which calls can differ.

        Raises:
            RuntimeError: As of the transport.
        """
        if is_capturing(self._device):
            return ""
        text = call.encode("ascii", "replace")
        mine = hashlib.sha256(text).digest()[:_DIGEST] + text[: _BYTES - _DIGEST]
        sent = torch.frombuffer(bytearray(mine.ljust(_BYTES)), dtype=torch.uint8).to(self._device)
        received = torch.empty(len(self._placement.nodes), _BYTES, dtype=torch.uint8, device=self._device)
        self._transport.all_gather(received.view(-1), sent)
        calls = [bytes(of_node.tolist()) for of_node in received.cpu()]
        if all(each == calls[0] for each in calls):
            return ""
        return "; ".join(
            f"{self._placement.names.full(rank)}: {each[_DIGEST:].decode(errors='replace').rstrip()}"
            for rank, each in zip(self._placement.partners, calls, strict=True)
        )
