"""Makes communicators while other processes flood every socket of llm_comm in this network namespace, which has to be
one of its own: ``unshare --net --map-root-user python flooded_ranks.py --kind silent``."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import multiprocessing
import os
import random
import resource
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

FLOODERS = 2
SET_UPS = 3
#: Connections that a process keeps at a time, of those that it keeps.
KEPT = 400
#: Connections without which this was no flood: the queue of set-up once had as many places as there are ranks.
ENOUGH = 50
TIMEOUT_S = 60.0
_SIOCSIFFLAGS, _IFF_UP, _IFF_LOOPBACK = 0x8914, 0x1, 0x8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("silent", "hello", "bytes", "hang-up"), required=True)
    parser.add_argument("--user", type=int, default=os.geteuid(), help="of the processes that flood")
    parser.add_argument("--world", type=int, default=2)
    args = parser.parse_args()
    refuse_to_run_among_others()
    raise_loopback()
    processes = multiprocessing.get_context("fork")
    connected = processes.Array("L", FLOODERS)
    flooders = [
        processes.Process(target=flood, args=(args.kind, args.user, connected, n), daemon=True) for n in range(FLOODERS)
    ]
    for flooder in flooders:
        flooder.start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # torch is imported in the ranks alone: it does not like to be forked.
    ranks = [processes.Process(target=be_rank, args=(rank, args.world, port)) for rank in range(args.world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    alive = [flooder.is_alive() for flooder in flooders]
    for flooder in flooders:
        flooder.kill()
    print(f"flooded by {sum(connected)} connections; ranks ended with {[rank.exitcode for rank in ranks]}")
    return int(any(rank.exitcode for rank in ranks) or not all(alive) or sum(connected) < ENOUGH)


def refuse_to_run_among_others() -> None:
    if os.stat("/proc/self/ns/net").st_ino == os.stat(f"/proc/{os.getppid()}/ns/net").st_ino:
        sys.exit("this network namespace is that of others too: run it with unshare --net")


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH", b"lo", _IFF_UP | _IFF_LOOPBACK)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request.ljust(40, b"\0"))


# ---- Those who flood -----------------------------------------------------------------------------------------------


def flood(kind: str, user: int, connected: Any, number: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * KEPT), hard))
    if user != os.geteuid():
        os.setgroups([])
        os.setresuid(user, user, user)
    kept: list[socket.socket] = []
    while True:
        for name in names():
            for _ in range(50):
                if (connection := connect(name)) is None:
                    break
                connected[number] += 1
                speak(connection, kind)
                kept.append(connection)
                if kind == "hang-up" or len(kept) > KEPT:
                    kept.pop(0).close()


def names() -> list[bytes]:
    """Of the sockets of llm_comm that listen."""
    found = Path("/proc/net/unix").read_bytes().splitlines()
    return [b"\0" + line.rpartition(b"@")[2] for line in found if b"@llm_comm-" in line and b" 00010000 " in line]


def connect(name: bytes) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(name)
    except OSError:  # the queue is full, or the socket is gone
        connection.close()
        return None
    return connection


def speak(connection: socket.socket, kind: str) -> None:
    words = {
        "hello": f"{'0' * 32} 1".encode(),
        "bytes": random.randbytes(random.randrange(1, 4096)),
        "hang-up": b"0",
    }
    with contextlib.suppress(OSError):
        if kind in words:
            socket.send_fds(connection, [words[kind]], [1, 1])


# ---- The ranks -----------------------------------------------------------------------------------------------------


def be_rank(rank: int, world: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    import llm_comm

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    config = llm_comm.Config.load({}, workspace_bytes=4 << 20, timeout_s=TIMEOUT_S)
    open_before = 0
    for _ in range(SET_UPS):
        with llm_comm.Communicator(dist.group.WORLD, "cpu", config) as comm:
            assert comm.all_reduce(torch.ones(100)).eq(world).all()
        open_now = len(os.listdir("/proc/self/fd"))
        assert open_before in (0, open_now), "descriptors of strangers are left open"
        open_before = open_now
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(world)])
    time.sleep(0.2 * (rank == 0))  # rank 0 holds the store, which the others have heard from by then
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
