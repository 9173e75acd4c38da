"""How a program is launched where a row of a table says so: which numbers can be, what comes of them, and which are
worth measuring."""

from __future__ import annotations

import pytest
import torch

from llm_comm.dsl.compiler.grid import Limits, candidates, narrowed, why_not
from llm_comm.planning.programs import DEFAULT_LAUNCH, LaunchParameters

GPU, EMULATED = torch.device("cuda", 0), torch.device("cpu")
ON_GPU = Limits(instances=66, few_instances=66, threads=512, few_threads=64, synchronizes=True)
ON_EMULATOR = Limits(instances=4, few_instances=4, threads=16, few_threads=16, synchronizes=True)
GROUPS = 2


@pytest.mark.parametrize("blocks", [2, 64, 132, None])
@pytest.mark.parametrize("threads", [32, 480, 512, None])
def test_what_a_program_can_be_launched_with(blocks: int | None, threads: int | None) -> None:
    assert why_not(LaunchParameters(blocks, threads), ON_GPU, GROUPS, GPU) == ""


@pytest.mark.parametrize(
    ("choice", "complaint"),
    [
        (
            LaunchParameters(blocks=134),
            "blocks is 134; the program has 2 group(s) and was compiled for 132 block(s), so",
        ),
        (LaunchParameters(blocks=65), "blocks is 65; the program has 2 group(s)"),
        (LaunchParameters(blocks=1), "blocks is 1; the program has 2 group(s)"),
        (LaunchParameters(blocks=0), "blocks is 0; the program has 2 group(s)"),
        (LaunchParameters(threads=48), "threads is 48; a block has 8 to 512, on a GPU a multiple of 32"),
        (LaunchParameters(threads=544), "threads is 544; a block has 8 to 512"),
        (LaunchParameters(132, 0), "threads is 0; a block has 8 to 512"),
    ],
)
def test_what_it_cannot(choice: LaunchParameters, complaint: str) -> None:
    assert why_not(choice, ON_GPU, GROUPS, GPU).startswith(complaint)


def test_threads_of_emulated_gpus() -> None:
    assert why_not(LaunchParameters(threads=12), ON_EMULATOR, 1, EMULATED) == ""
    assert "a block has 8 to 16" in why_not(LaunchParameters(threads=32), ON_EMULATOR, 1, EMULATED)


@pytest.mark.parametrize(
    ("choice", "lines", "grid"),
    [
        (DEFAULT_LAUNCH, 10, (1, 64)),
        (DEFAULT_LAUNCH, 66 * 64, (66, 64)),
        (DEFAULT_LAUNCH, 66 * 96 + 1, (50, 128)),  # 128 threads serve what is left by fewer blocks
        (LaunchParameters(blocks=8), 66 * 64, (4, 512)),
        (LaunchParameters(blocks=8), 200, (4, 64)),
        (LaunchParameters(threads=256), 66 * 64, (17, 256)),
        (LaunchParameters(threads=32), 66 * 64, (66, 32)),
        (LaunchParameters(blocks=8, threads=32), 1 << 20, (4, 32)),
        (LaunchParameters(blocks=8, threads=32), 33, (2, 32)),
        (LaunchParameters(blocks=8, threads=32), 1, (1, 32)),
    ],
)
def test_the_grid_of_a_choice(choice: LaunchParameters, lines: int, grid: tuple[int, int]) -> None:
    assert narrowed(ON_GPU, choice, GROUPS).of_call(lines) == grid


@pytest.mark.parametrize("lines", [1, 100, 5000, 1 << 20])
@pytest.mark.parametrize(("limits", "device"), [(ON_GPU, GPU), (ON_EMULATOR, EMULATED)])
def test_candidates_can_be_launched_and_differ(limits: Limits, device: torch.device, lines: int) -> None:
    found = candidates(limits, GROUPS, lines)
    assert found[0] == DEFAULT_LAUNCH
    assert [why_not(choice, limits, GROUPS, device) for choice in found] == [""] * len(found)
    grids = [narrowed(limits, choice, GROUPS).of_call(lines) for choice in found]
    assert len(set(grids)) == len(grids)


def test_large_messages_have_candidates_of_fewer_blocks_and_of_fewer_threads() -> None:
    found = candidates(ON_GPU, GROUPS, 1 << 20)
    # The program's own is that of all blocks and threads.
    assert {choice.blocks for choice in found} == {None, 132, 66, 32, 16}
    assert {choice.threads for choice in found} == {None, 512, 256, 128, 64}
    assert LaunchParameters(132, 512) not in found
    assert len(found) == 16
