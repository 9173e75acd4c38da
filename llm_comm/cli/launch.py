"""Launcher: validation of a command before it starts ranks, and the start of N ranks on this host.

A command that needs ranks calls ``spawn`` in the process that the user started. ``spawn`` starts N copies of the same
command line, each with the environment of ``torchrun``. In the copies, and in processes started by ``torchrun`` itself,
``in_rank`` is true, and they open the process group with ``process_group``.

``torchrun`` is not used to start the copies. Its ranks outlive a killed launcher, and its exit status is always 1 on
failure. It also stops the other ranks before they have printed their reports, and resolves the host's name.
"""

from __future__ import annotations

import dataclasses
import os
import signal
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

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.dsl import programs
from llm_comm.errors import ConfigError
from llm_comm.installation import cuda_compiled
from llm_comm.planning.catalogue import check_table_option

#: Supported numbers of ranks for commands. A communicator may also have one rank, which exchanges nothing.
WORLDS = range(2, _core.max_world_size + 1)
DEFAULT_EMULATED_WORLD = 4

# Start code of a rank. The kernel kills the rank when its launcher ends in any way (1: PR_SET_PDEATHSIG); a killed
# launcher could not stop it. The setting survives execv. The parent is checked because the launcher may have ended
# earlier.
_DIE_WITH_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("llm-comm: the launcher has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
_POLL_S = 0.05
# Seconds for the other ranks to finish: ranks that fail a check exit together and print their reports first.
_GRACE_S = 3.0
_TERMINATE_S = 5.0
#: Time limit of waits in torch's collectives.
GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Placement:
    """Location of the ranks.

    Attributes:
        world: Number of ranks.
        on_gpu: True if every rank owns a GPU, false if the ranks are emulated devices.
        reason: Why the ranks are emulated; "" on GPUs.
    """

    world: int
    on_gpu: bool
    reason: str = ""

    @property
    def device(self) -> torch.device:
        """Device of this rank: its own GPU, or the CPU for an emulated one."""
        return torch.device("cuda", local_rank()) if self.on_gpu else torch.device("cpu")

    def describe(self) -> str:
        """Return a phrase such as ``8 GPUs (NVIDIA H200)`` or ``4 emulated GPUs on the CPU (<why>)``."""
        if self.on_gpu:
            return f"{self.world} GPUs ({torch.cuda.get_device_name(local_rank())})"
        return f"{self.world} emulated GPUs on the CPU ({self.reason})"


# Variables that torchrun gives each rank. Kubeflow and other schedulers set RANK and WORLD_SIZE of containers, in which
# no rank has been launched. LOCAL_RANK distinguishes the two cases.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def in_rank() -> bool:
    """Return whether this process is a rank of a launched group (by ``torchrun`` or by :func:`spawn`)."""
    return all(name in os.environ for name in _RANK_VARIABLES)


def rank() -> int:
    """Return the rank of this process in the launched group; 0 outside of one."""
    return int(os.environ["RANK"]) if in_rank() else 0


def local_rank() -> int:
    """Return the index of this process among the ranks of its host; 0 outside of a launched group."""
    return int(os.environ["LOCAL_RANK"]) if in_rank() else 0


def usable_gpus() -> tuple[int, str]:
    """Return the number of GPUs that llm_comm can use, and why it is 0 or 1, which is too few for a group.

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
    """Decide how many ranks run, and on what. Equal on every rank of a host.

    Args:
        world: Requested number of ranks; None: one for each GPU, or ``DEFAULT_EMULATED_WORLD`` emulated ranks. In a
            launched group its size decides.
        device: "cuda", "emulated", or "auto": GPUs if there are enough.
        preferred: Numbers of ranks to choose a default from.
        least: Smallest number of ranks that the command supports.
        over_nodes: A launched group may have more ranks, on several machines.

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
    """Run ``llm-comm <argv>`` in each rank. Return the status of :func:`run_ranks`."""
    # The ranks must import what this process has imported, whatever the working directory contains.
    boot = f"import sys; sys.path[:] = {sys.path!r}; from llm_comm.cli.commands import main; sys.exit(main())"
    return run_ranks(placement, [sys.executable, "-c", boot, *argv])


def run_ranks(placement: Placement, command: Sequence[str]) -> int:
    """Run a command in each rank, in the environment that torchrun would give it, and wait for the ranks.

    If a rank fails, the others get a few seconds to end and are then stopped. No rank outlives this call, even if it is
    interrupted or this process is terminated or killed.

    Returns:
        0, or the exit status of the first rank seen to fail (128 + n if signal n killed it).
    """
    # The ranks meet at a store of this process, as those of torchrun do. A free port that rank 0 opens seconds later
    # may be taken by then.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ranks: list[subprocess.Popen[bytes]] = []
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    bound = [sys.executable, "-I", "-S", "-c", _DIE_WITH_LAUNCHER, str(os.getpid()), *command]
    try:
        for index in range(placement.world):
            ranks.append(subprocess.Popen(bound, env=_rank_environment(placement, index, store.port)))
        return _wait(ranks)
    finally:
        _stop(ranks)
        signal.signal(signal.SIGTERM, previous)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _rank_environment(placement: Placement, index: int, port: int) -> dict[str, str]:
    environment = dict(
        os.environ,
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(placement.world),
        LOCAL_WORLD_SIZE=str(placement.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    # All ranks are on this host. Otherwise gloo would resolve the host's name, which often fails in containers.
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
    """Open torch's default process group for this rank, and make its device current.

    The group has gloo for CPU tensors and, on GPUs, NCCL for CUDA tensors. Objects thereby travel without a GPU.
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
    # Only after success: after an error the peers may never arrive at a collective shutdown, and the process ends.
    dist.destroy_process_group()


def barrier(group: dist.ProcessGroup) -> None:
    """Wait on the host until every rank of the group has arrived. The GPU is not used."""
    dist.all_reduce(torch.zeros(1), group=group)


def checked_config(outputs: Mapping[str, Path | None], **overrides: Any) -> Config:
    """Return the configuration that the communicators of this command will load.

    Args:
        outputs: Files that the command will write at its end, by option; None if the option is not set.
        overrides: See ``configuration``.

    Raises:
        ConfigError: An option, or a tuning table or program that it names, is invalid, or a file cannot be written.
    """
    config = configuration(**overrides)
    check_table_option(config)
    programs.of_option(config)
    for option, path in outputs.items():
        if path is not None:
            _check_output(option, path)
    return config


def configuration(**overrides: Any) -> Config:
    """Return the options in effect for a command.

    Args:
        overrides: Options of ``Config`` from the command line; None if not given.

    Raises:
        ConfigError: An option is invalid.
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
