"""A rank of ``test_nodes_networks.py``: python node_ranks.py calls|idle. It says what it is told on its output."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import harness
import torch
import torch.distributed as dist
from node_networks import ADDRESSES, PORT
from nodes_cases import Layout, run_random_cases

import llm_comm

LAYOUT = Layout(2, 2)
TIMEOUT_S = 4.0
CASES = 12
READY = "READY"


def wait_to_be_cut(makes_calls: bool) -> None:
    """What this rank is told when the cable is cut, after random calls that are right."""
    assert sum(run_random_cases(LAYOUT, 3, CASES, 20_000).values()) == CASES
    comm = harness.make_communicator(node=f"n{LAYOUT.node_of(dist.get_rank())}", timeout_s=TIMEOUT_S)
    x = torch.ones(1000)
    comm.all_reduce(x)
    has_failed = threading.Event()
    said: list[str] = []

    def hear(error: llm_comm.CommunicatorError) -> None:
        said.append(" ".join(f"{type(error).__name__}: {error}".split()))
        has_failed.set()

    comm.on_error(hear)
    print(READY, flush=True)
    begin = time.monotonic()
    while not has_failed.is_set() and time.monotonic() - begin < 60:
        if makes_calls:
            try:
                comm.all_reduce(x)
            except llm_comm.CommunicatorError:
                break
        has_failed.wait(0.01)
    has_failed.wait(5)
    print(f"TOLD {said[0] if said else 'nothing'}", flush=True)
    os._exit(0)  # the store is out of reach: nothing can be closed


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    method = f"tcp://{ADDRESSES[0]}:{PORT}"
    dist.init_process_group("gloo", method, timedelta(seconds=60), LAYOUT.world, rank)
    wait_to_be_cut(makes_calls=sys.argv[1] == "calls")


if __name__ == "__main__":
    main()
