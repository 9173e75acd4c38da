"""Checks of a command before it starts ranks, and the start: N cooperating ranks of this host.

A command that needs ranks calls ``spawn`` in the process that the user started. ``spawn`` starts N copies of the same
command line, each with the environment of ``torchrun``. The copies, and processes that ``torchrun`` itself started,
find ``in_rank`` true and open the process group with ``process_group``.

``torchrun`` is not used to start the copies: its ranks outlive a launcher that is killed, its exit status is 1 whatever
a rank returned, it stops the other ranks before they have printed their reports, and it looks up the name of the host.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from llm_comm.config import Config
from llm_comm.dsl import programs
from llm_comm.errors import ConfigError
from llm_comm.installation import cuda_compiled
from llm_comm.planning.catalogue import check_table_option

#: Numbers of ranks that commands run. (A communicator can also have one rank, which has nothing to sum.)
WORLDS = range(2, 9)
DEFAULT_EMULATED_WORLD = 4

# Starts a rank that the kernel kills when its launcher is gone, however that ended: a launcher that is killed can stop
# nobody. It stays in force across execv; the launcher may have gone before it came into force. (1: PR_SET_PDEATHSIG)
_DIE_WITH_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("llm-comm: the launcher has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
_POLL_S = 0.05
# A rank that failed a check exits together with the others: let them finish their own reports first.
_GRACE_S = 3.0
_TERMINATE_S = 5.0
#: Bound of waits in torch's collectives.
GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Placement:
    """Where the ranks run.

    Attributes:
        world: number of ranks.
        on_gpu: True when every rank owns a GPU, False when the ranks are emulated devices.
        reason: why the ranks are emulated; empty on GPUs.
    """

    world: int
    on_gpu: bool
    reason: str = ""

    @property
    def device(self) -> torch.device:
        """This rank's device: its own GPU, or the CPU that stands for an emulated one."""
        return torch.device("cuda", local_rank()) if self.on_gpu else torch.device("cpu")

    def describe(self) -> str:
        """One phrase for people: ``8 GPUs (NVIDIA H200)`` or ``4 emulated GPUs on the CPU (<why>)``."""
        if self.on_gpu:
            return f"{self.world} GPUs ({torch.cuda.get_device_name(local_rank())})"
        return f"{self.world} emulated GPUs on the CPU ({self.reason})"


# What torchrun gives each rank. Kubeflow and other schedulers set RANK and WORLD_SIZE of *containers*, in which nobody
# has launched a rank yet: LOCAL_RANK tells the two apart.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def in_rank() -> bool:
    """True when this process is one rank of a launched group (by ``torchrun`` or by :func:`spawn`)."""
    return all(name in os.environ for name in _RANK_VARIABLES)


def rank() -> int:
    """Rank of this process in the launched group; 0 outside of one."""
    return int(os.environ["RANK"]) if in_rank() else 0


def local_rank() -> int:
    """Index of this process among the ranks of its host; 0 outside a launched group."""
    return int(os.environ["LOCAL_RANK"]) if in_rank() else 0


def usable_gpus() -> tuple[int, str]:
    """Number of GPUs that llm_comm can run on, and why it is 0 (or 1, too few for a group).

    Does not create a CUDA context.
    """
    if not torch.cuda.is_available():
        return 0, "no GPU that torch can use" if torch.version.cuda else "this torch is built without CUDA"
    if not cuda_compiled():
        return 0, "llm_comm was built without nvcc"
    count = torch.cuda.device_count()
    return count, "only one GPU" if count == 1 else ""


def place(
    world: int | None,
    device: str,
    preferred: Sequence[int] = WORLDS,
    *,
    least: int = WORLDS[0],
    over_nodes: bool = False,
) -> Placement:
    """Decides how many ranks run, and on what. The same on every rank of a host.

    Args:
        world: the number of ranks asked for; None takes one rank a GPU, or ``DEFAULT_EMULATED_WORLD``
            emulated ranks. Inside a launched group the group's size decides.
        device: "cuda", "emulated", or "auto" for GPUs where there are enough of them.
        preferred: the numbers of ranks to choose a default from.
        least: the fewest ranks that the command runs.
        over_nodes: whether a launched group may have more ranks, on several machines.

    Raises:
        ConfigError: ``world`` is too small or too large, contradicts the launched group, or needs missing GPUs.
    """
    asked = f"--world {world}"
    if in_rank():
        launched = int(os.environ["WORLD_SIZE"])
        if world not in (None, launched):
            raise ConfigError(f"--world {world} contradicts the {launched} ranks that were launched: leave it out")
        world, asked = launched, f"WORLD_SIZE={launched}"
    gpus, why_none = usable_gpus()
    if world is None:
        world = _default_world(gpus if device != "emulated" else 0, preferred, least)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world))) if in_rank() else world
    if not least <= world <= WORLDS[-1] and not (over_nodes and ranks_here < world and ranks_here <= WORLDS[-1]):
        raise ConfigError(f"{asked}: a command runs {least} to {WORLDS[-1]} ranks")
    if device == "emulated":
        return Placement(world, on_gpu=False, reason="as asked")
    if gpus >= ranks_here:
        return Placement(world, on_gpu=True)
    why = why_none or f"{ranks_here} ranks, but only {gpus} GPUs"
    if device == "cuda":
        raise ConfigError(f"cannot run {'on a GPU' if world == 1 else f'{world} ranks on GPUs'}: {why}")
    return Placement(world, on_gpu=False, reason=why)


def _default_world(gpus: int, preferred: Sequence[int], least: int) -> int:
    wanted = DEFAULT_EMULATED_WORLD if gpus < least else min(gpus, WORLDS[-1])
    return max((world for world in preferred if world <= wanted), default=wanted)


def spawn(placement: Placement, argv: Sequence[str]) -> int:
    """Runs ``llm-comm <argv>`` once a rank; returns as :func:`run_ranks`."""
    # Whatever the working directory holds, the ranks must import what this process imported.
    boot = f"import sys; sys.path[:] = {sys.path!r}; from llm_comm.cli.commands import main; sys.exit(main())"
    return run_ranks(placement, [sys.executable, "-c", boot, *argv])


def run_ranks(placement: Placement, command: Sequence[str]) -> int:
    """Runs a command once a rank, in the environment that torchrun would give it, and waits for the ranks.

    When a rank fails, the others get a few seconds to end by themselves and are then stopped. No rank
    outlives this call, also when it is interrupted or this process is told to terminate or killed.

    Returns:
        0, or the exit status of the first rank seen to fail (128 + n where signal n killed it).
    """
    port = _free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    bound = [sys.executable, "-I", "-S", "-c", _DIE_WITH_LAUNCHER, str(os.getpid()), *command]
    try:
        for index in range(placement.world):
            ranks.append(subprocess.Popen(bound, env=_rank_environment(placement, index, port)))
        return _wait(ranks)
    finally:
        _stop(ranks)
        signal.signal(signal.SIGTERM, previous)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_environment(placement: Placement, index: int, port: int) -> dict[str, str]:
    environment = dict(
        os.environ,
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(placement.world),
        LOCAL_WORLD_SIZE=str(placement.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # All ranks are on this host. Without this gloo looks up the host's own name, which containers often
    # cannot resolve.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not placement.on_gpu:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        statuses = [process.poll() for process in ranks]
        for index, status in enumerate(statuses):
            if status:
                _wait_until_ended(ranks, _GRACE_S)
                left = sum(process.poll() is None for process in ranks)
                if left or status < 0:
                    print(
                        f"llm-comm: rank {index} {_how_it_ended(status)}; stopping {left} others",
                        file=sys.stderr,
                    )
                return status if status > 0 else 128 - status
        if all(status == 0 for status in statuses):
            return 0
        time.sleep(_POLL_S)


def _how_it_ended(status: int) -> str:
    return f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"


def _wait_until_ended(ranks: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        time.sleep(_POLL_S)


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.terminate()
    _wait_until_ended(running, _TERMINATE_S)
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def process_group(placement: Placement) -> Iterator[dist.ProcessGroup]:
    """Opens torch's default process group for this rank and makes its device current.

    The group has gloo for CPU tensors and, on GPUs, NCCL for CUDA tensors, so that objects travel without a
    GPU.
    """
    if placement.on_gpu:
        torch.cuda.set_device(placement.device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=GROUP_TIMEOUT)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    yield group
    # Reached on success only: after an error the peers may never come to a collective shutdown, and the
    # process ends.
    dist.destroy_process_group()


def barrier(group: dist.ProcessGroup) -> None:
    """Waits on the host until every rank of the group is here; leaves the GPU alone."""
    dist.all_reduce(torch.zeros(1), group=group)


def checked_config(outputs: Mapping[str, Path | None], **overrides: Any) -> Config:
    """Returns the configuration that communicators of this command will load.

    Args:
        outputs: By option, the files that the command is to write at its end; None where there is none.
        overrides: As of ``configuration``.

    Raises:
        ConfigError: An option, or the tuning table or a program that it names, is wrong, or a file cannot be written.
    """
    config = configuration(**overrides)
    check_table_option(config)
    programs.of_option(config)
    for option, path in outputs.items():
        if path is not None:
            _check_output(option, path)
    return config


def configuration(**overrides: Any) -> Config:
    """The options that hold for a command.

    Args:
        overrides: Options of ``Config`` from the command line; None where it has none.

    Raises:
        ConfigError: An option is wrong.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    config = Config.load(**given)
    origins = {name: f"--{name.replace('_', '-')}" for name in given}
    return dataclasses.replace(config, origins={**config.origins, **origins})


def _check_output(option: str, path: Path) -> None:
    directory = path.parent
    if not directory.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {directory}; make it, or name another")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory: name a file in it")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise ConfigError(f"{option} {path}: no permission to write there; name another file")
