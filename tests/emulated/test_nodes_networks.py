"""Two nodes of two ranks in network namespaces of their own: what is exchanged, and a cable that is cut."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import node_networks
import node_ranks
import pytest

pytestmark = pytest.mark.skipif(bool(node_networks.why_not()), reason=node_networks.why_not() or "-")

RANKS = str(Path(__file__).with_name("node_ranks.py"))
SLACK_S = 15.0


def start(networks: node_networks.Networks, task: str) -> list[subprocess.Popen[str]]:
    layout = node_ranks.LAYOUT
    return [networks.start(layout.node_of(rank), [RANKS, task], RANK=str(rank)) for rank in range(layout.world)]


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    """The first line of a process that begins with a word."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        if line.startswith(word):
            return line
        said.append(line)
    raise AssertionError(f"the process ended without {word}:\n{''.join(said)}")


@pytest.mark.parametrize("task", ["calls", "idle"])
def test_a_cable_that_is_cut_is_told_on_both_sides(task: str) -> None:
    """After random calls, which are right."""
    layout = node_ranks.LAYOUT
    with node_networks.Networks() as networks:
        processes = start(networks, task)
        with node_networks.ended(processes):
            for process in processes:
                wait_for(process, node_ranks.READY)
            networks.cut()
            begin = time.monotonic()
            told = [wait_for(process, "TOLD") for process in processes]
            assert time.monotonic() - begin < node_ranks.TIMEOUT_S + SLACK_S
    for rank, text in enumerate(told):
        elsewhere = 1 - layout.node_of(rank)
        named = [
            f"no sign of life from node {elsewhere}",
            *(f"waits for rank {r} " for r in layout.ranks_of(elsewhere)),
        ]
        assert text.startswith("TOLD PeerTimeout: "), text
        assert any(words in text for words in named), text
