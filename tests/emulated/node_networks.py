"""Nodes with a network of their own each: network namespaces, with a virtual cable from each to a switch."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import uuid
from typing import NamedTuple

#: A slow cable with a short queue: packets wait, and are dropped.
SLOW = ("root", "tbf", "rate", "20mbit", "burst", "8kb", "limit", "24kb")
#: A cable that delays packets, loses some, doubles some and lets some overtake others.
UNRULY = ("root", "netem", "delay", "3ms", "2ms", "loss", "2%", "duplicate", "1%", "reorder", "10%")

# As classic BPF, for kernels without netem: load a random number, jump if it is at least so large, drop (TC_ACT_SHOT)
# or go on (TC_ACT_UNSPEC). 4294963256 is SKF_AD_OFF + SKF_AD_RANDOM of linux/filter.h.
_DROP_SOME = "4,32 0 0 4294963256,53 0 1 {least},6 0 0 2,6 0 0 4294967295"
# linux/sched.h and linux/mount.h.
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19


def why_not() -> str:
    """Why there can be none here, or ""."""
    if any(shutil.which(tool) is None for tool in ("ip", "tc", "nsenter", "unshare")):
        return "needs ip, tc, nsenter and unshare"
    making = "ip link add name a type veth && ip link add name b type bridge && mount -t sysfs sysfs /sys"
    command = ["unshare", "--net", "--mount", "sh", "-c", making]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    return "" if made.returncode == 0 else f"network namespaces are not permitted: {made.stderr.strip()}"


def _call(function: str, *arguments: object) -> None:
    """A function of the C library that returns 0, or sets errno."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")


class Place(NamedTuple):
    """Where a node is: what a process needs to go there."""

    namespace: str
    cable: str
    address: str
    #: Of node 0, where the store of the ranks is to be.
    first_address: str

    def enter(self) -> None:
        """Takes the calling thread, and all threads and processes that it begins, to the network of the node.

        Raises:
            OSError: It is not permitted.
        """
        with open(self.namespace, "rb") as namespace:
            _call("setns", namespace.fileno(), _CLONE_NEWNET)  # os.setns is of Python 3.12
        # As `ip netns exec` does: UCX looks for its devices in /sys, which shows those of whoever has mounted it.
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
        _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)

    def cut(self, seconds: float | None = None) -> subprocess.Popen[bytes]:
        """Of a process that is there: nothing goes to other nodes and comes from them any more, and nobody is told.
        After ``seconds``, if given, the cable is back. Returns what does it, and ends with the cable back."""
        script = f"ip link set dev {self.cable} down"
        if seconds is not None:
            script += f" && sleep {seconds} && ip link set dev {self.cable} up"
        return subprocess.Popen(["sh", "-c", script])


class Networks:
    """So many nodes. ``with`` it."""

    def __init__(self, nodes: int) -> None:
        name = uuid.uuid4().hex[:8]
        self._cables = [f"llm{name}{node}" for node in range(nodes)]
        self._addresses = [f"10.213.77.{node + 1}" for node in range(nodes)]
        self._holders: list[subprocess.Popen[bytes]] = []  # of the nodes' namespaces, and of the switch's

    def __enter__(self) -> Networks:
        try:
            self._lay()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:  # the namespaces end with them and the last process there, the cables with these
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()

    def places(self) -> list[Place]:
        """Of each node."""
        return [
            Place(f"/proc/{holder.pid}/ns/net", cable, address, self._addresses[0])
            for holder, cable, address in zip(self._holders, self._cables, self._addresses, strict=False)
        ]

    def queue(self, discipline: tuple[str, ...]) -> str:
        """What each node sends goes through a queueing discipline of tc. Returns why it does not, or ""."""
        for node, cable in enumerate(self._cables):
            command = [*self._on(node), "tc", "qdisc", "add", "dev", cable, *discipline]
            added = subprocess.run(command, check=False, capture_output=True, text=True)
            if added.returncode != 0:
                return f"tc {' '.join(discipline)}: {added.stderr.strip()}"
        return ""

    def lose(self, part: float) -> str:
        """Of the packets that each node sends a random part is lost. Returns why not, or ""."""
        why = self.queue(("clsact",))
        if why:
            return why
        program = _DROP_SOME.format(least=int((1 - part) * 2**32))
        for node, cable in enumerate(self._cables):
            command = [*self._on(node), "tc", "filter", "add", "dev", cable, "egress", "bpf", "da", "bytecode", program]
            added = subprocess.run(command, check=False, capture_output=True, text=True)
            if added.returncode != 0:
                return f"{' '.join(command)}: {added.stderr.strip()}"
        return ""

    def counted(self, what: str) -> int:
        """What tc has counted on all cables: packets "dropped", or "overlimits", those that had to wait."""
        total = 0
        for node, cable in enumerate(self._cables):
            told = self._run(*self._on(node), "tc", "-s", "qdisc", "show", "dev", cable)
            total += sum(int(count) for count in re.findall(rf"{what} (\d+)", told))
        return total

    def _lay(self) -> None:
        for _ in [*self._cables, "the switch"]:
            holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
            self._holders.append(holder)
            assert holder.stdout is not None
            holder.stdout.readline()  # it is in its namespace
        switch = len(self._cables)
        self._run(*self._on(switch), "ip", "link", "add", "name", "switch", "type", "bridge")
        self._run(*self._on(switch), "ip", "link", "set", "dev", "switch", "up")
        for node, cable in enumerate(self._cables):
            port = f"port{node}"
            add = ("ip", "link", "add", "name", port, "type", "veth", "peer", "name", cable)
            self._run(*self._on(switch), *add)
            self._run(*self._on(switch), "ip", "link", "set", "dev", cable, "netns", str(self._holders[node].pid))
            self._run(*self._on(switch), "ip", "link", "set", "dev", port, "master", "switch", "up")
            self._run(*self._on(node), "ip", "address", "add", f"{self._addresses[node]}/24", "dev", cable)
            for device in (cable, "lo"):
                self._run(*self._on(node), "ip", "link", "set", "dev", device, "up")

    def _on(self, node: int) -> list[str]:
        return ["nsenter", "--target", str(self._holders[node].pid), "--net"]

    @staticmethod
    def _run(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
