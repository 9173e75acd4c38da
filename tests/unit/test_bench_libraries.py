"""A benchmark compares the same libraries on all ranks, also where one rank cannot use one of them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, unnamed

from llm_comm.bench import fused
from llm_comm.bench.collectives import COLLECTIVES

#: What is always there, and what symmetric memory of torch adds.
ALWAYS = {
    "all-reduce": ["llm_comm", "nccl"],
    "all-gather": ["llm_comm", "llm_comm symm", "nccl"],
    "reduce-scatter": ["llm_comm", "nccl"],
}
SYMMETRIC = {
    "all-reduce": ["symm 1-shot", "symm 2-shot"],
    "all-gather": ["symm copies"],
    "reduce-scatter": ["symm 1-shot"],
}
FUSED = ["llm_comm", "plain + norm", "nccl + norm"]


def comm() -> Any:
    """Stands for a communicator on GPUs."""
    return SimpleNamespace(
        is_emulated=False,
        device=torch.device("cpu"),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        empty=lambda count, dtype: torch.empty(count, dtype=dtype),
    )


def refuse_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        raise RuntimeError(f"no handles on rank {dist.get_rank()}\nand a long explanation")


def libraries_of(step: str, ranks: list[int], title: str) -> tuple[list[str], list[str]]:
    """What a rank compares if a step of torch's symmetric memory fails on some."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        refuse_on(ranks if step == "empty" else [])
        return torch.empty(count, dtype=dtype, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "empty", empty)
        patch.setattr(symmetric_memory, "rendezvous", lambda *_: refuse_on(ranks if step == "rendezvous" else []))
        libraries, remarks = COLLECTIVES[title].libraries(comm(), torch.bfloat16, 1024, dist.group.WORLD)  # type: ignore[arg-type]
    return [library.name for library in libraries], remarks


def fused_libraries(step: str, ranks: list[int], title: str = "fused") -> tuple[list[str], list[str]]:
    """The same, of FlashInfer: its import, or its workspaces from the first or the second on."""
    assert title == "fused"
    made = []

    def create(*_: object, **__: object) -> tuple[None, None]:
        made.append(None)
        refuse_on(ranks if step == f"workspace {len(made)}" else [])
        dist.barrier()  # as the real one, it needs all ranks
        return None, None

    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.comm")
    module.trtllm_create_ipc_workspace_for_all_reduce_fusion = create  # type: ignore[attr-defined]
    package.comm = module  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, dynamic: function)
        absent = step == "import" and dist.get_rank() in ranks
        patch.setitem(sys.modules, "flashinfer", package)
        patch.setitem(sys.modules, "flashinfer.comm", None if absent else module)
        libraries, remarks = fused.libraries_of(64, comm(), torch.bfloat16, 1024, dist.group.WORLD)  # type: ignore[arg-type]
    return [library.name for library in libraries], remarks[1:]


@pytest.mark.parametrize(
    ("bench", "step", "title", "expected"),
    [
        *((libraries_of, step, title, names) for title, names in ALWAYS.items() for step in ("empty", "rendezvous")),
        (fused_libraries, "import", "fused", FUSED),
    ],
)
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
def test_a_library_that_fails_somewhere_is_compared_nowhere(
    bench: Any, step: str, title: str, expected: list[str], failing: list[int], ranks: RankPool
) -> None:
    found = ranks.run(2, bench, step, failing, title)
    names, (remark,) = found[0]
    assert found == [found[0]] * 2
    assert names == expected
    assert f"failed on {len(failing)} of 2 ranks: rank {failing[0]}: " in unnamed(remark)
    assert "long explanation" not in remark


def test_what_was_set_up_before_a_failure_is_compared(ranks: RankPool) -> None:
    (names, (remark,)), _ = ranks.run(2, fused_libraries, "workspace 2", [0, 1])
    assert names == [*FUSED, "flashinfer 1-shot"]
    assert unnamed(remark).startswith(
        "FlashInfer is not usable here: set-up of its workspace failed on 2 of 2 ranks: rank 0: no "
    )


def test_libraries_that_work_everywhere_are_compared(ranks: RankPool) -> None:
    for title in COLLECTIVES:
        expected = ALWAYS.get(title, ["llm_comm", "nccl"]) + SYMMETRIC.get(title, [])
        assert ranks.run(2, libraries_of, "", [], title) == [(expected, [])] * 2
    expected = [*FUSED, "flashinfer 1-shot", "flashinfer 2-shot"]
    assert ranks.run(2, fused_libraries, "", []) == [(expected, [])] * 2
