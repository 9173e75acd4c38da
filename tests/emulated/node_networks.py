"""Nodes with a network of their own each: network namespaces, with a virtual cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Of node 0, which holds the store, and of node 1.
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29717

_TESTS = Path(__file__).parents[1]


def why_not() -> str:
    """Why there can be none here, or ""."""
    if any(shutil.which(tool) is None for tool in ("ip", "nsenter", "unshare")):
        return "needs ip, nsenter and unshare"
    command = ["unshare", "--net", "ip", "link", "add", "name", "a", "type", "veth"]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    return "" if made.returncode == 0 else f"network namespaces are not permitted: {made.stderr.strip()}"


class Networks:
    """Two nodes. ``with`` it."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:8]
        self._cables = (f"llm{name}0", f"llm{name}1")
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Networks:
        try:
            self._lay()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:  # the namespaces end with them, and the cable with these
            holder.kill()
            holder.wait()

    def start(self, node: int, arguments: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        """A Python process on a node, with its output in a pipe."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self._cables[node], "OMP_NUM_THREADS": "1", **variables}
        environment["PYTHONPATH"] = os.pathsep.join([str(_TESTS), environment.get("PYTHONPATH", "")])
        command = [*self._on(node), sys.executable, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    def cut(self) -> None:
        """Nothing goes from node to node any more, and nobody is told."""
        self._run(*self._on(1), "ip", "link", "set", self._cables[1], "down")

    def _lay(self) -> None:
        for _ in range(2):
            holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
            self._holders.append(holder)
            assert holder.stdout is not None
            holder.stdout.readline()  # it is in its namespace
        self._run(*self._on(0), "ip", "link", "add", self._cables[0], "type", "veth", "peer", "name", self._cables[1])
        self._run(*self._on(0), "ip", "link", "set", self._cables[1], "netns", str(self._holders[1].pid))
        for node, cable in enumerate(self._cables):
            self._run(*self._on(node), "ip", "address", "add", f"{ADDRESSES[node]}/24", "dev", cable)
            for device in (cable, "lo"):
                self._run(*self._on(node), "ip", "link", "set", device, "up")

    def _on(self, node: int) -> list[str]:
        return ["nsenter", "--target", str(self._holders[node].pid), "--net"]

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def ended(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """None of the processes outlives the block."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
