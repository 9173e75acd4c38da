"""Stands in for the engines' own NCCL where there is none: what they fall back to, over gloo and CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Nccl:
    """Has the methods of vLLM's and SGLang's ``PyNcclCommunicator`` that gather and scatter, in their order of
    arguments (vllm/distributed/device_communicators/pynccl.py of 0.26.0 and 0.33.0,
    sglang/srt/distributed/device_communicators/pynccl.py of 0.5.17 and 0.5.23).

    Args:
        group: gloo group of the ranks.
    """

    #: Of the newest that vLLM 0.33 asks for.
    nccl_version = 22902

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.disabled = False
        #: Names of the calls so far.
        self.calls: list[str] = []

    def all_gather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, sizes: Any = None) -> None:
        self.calls.append("all_gather")
        whole = torch.cat([part.reshape(-1) for part in self._of_all(input_tensor)])
        output_tensor.copy_(whole.view(output_tensor.shape))

    def all_gatherv(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, sizes: Sequence[int]) -> None:
        self.all_gather(output_tensor, input_tensor)

    def reduce_scatter(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, sizes: Any = None) -> None:
        self.calls.append("reduce_scatter")
        sizes = [len(input_tensor) // self.world_size] * self.world_size if sizes is None else sizes
        # Sums of integers stay integers.
        wide = torch.float64 if input_tensor.is_floating_point() else torch.int64
        total = torch.stack([x.to(wide) for x in self._of_all(input_tensor)]).sum(0).to(input_tensor.dtype)
        output_tensor.copy_(total.split(list(sizes))[self.rank].view(output_tensor.shape))

    def reduce_scatterv(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, sizes: Sequence[int]) -> None:
        self.reduce_scatter(output_tensor, input_tensor, sizes)

    def group_start(self) -> None:
        self.calls.append("group")

    def group_end(self) -> None:
        pass

    @contextlib.contextmanager
    def change_state(self, enable: bool | None = None) -> Iterator[None]:
        yield

    def destroy(self) -> None:
        pass

    def _of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        told: list[Any] = [None] * self.world_size
        # As objects: gloo takes neither all types nor parts of different sizes. As bytes: nor does pickle take all.
        dist.all_gather_object(told, (x.reshape(-1).view(torch.uint8).tolist(), x.shape), group=self._group)
        return [torch.tensor(data, dtype=torch.uint8).view(x.dtype).view(shape) for data, shape in told]


def served(parts: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The methods of the engine, and shapes, that llm_comm's ``parts`` of a group serve from now on."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def recording(original: Any) -> Any:
        def call(method: str, x: torch.Tensor, *others: Any, **options: Any) -> Any:
            result = original(method, x, *others, **options)
            if result is not None:
                found.append((method, tuple(x.shape)))
            return result

        return call

    parts.all_gather, parts.reduce_scatter = recording(parts.all_gather), recording(parts.reduce_scatter)
    return found


def bits(x: torch.Tensor) -> tuple[Any, ...]:
    """All that there is to a contiguous tensor."""
    assert x.is_contiguous()
    return x.shape, x.dtype, x.reshape(-1).view(torch.uint8).tolist() if x.numel() else []
