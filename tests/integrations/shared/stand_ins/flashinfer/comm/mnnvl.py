"""What sets workspaces up."""

from __future__ import annotations

import torch.distributed as dist


class CommBackend:
    pass


class TorchDistBackend(CommBackend):
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
