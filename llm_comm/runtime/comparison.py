"""Comparison of versions, devices, options and tuning tables between ranks, before the ranks share memory."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from llm_comm import _core, registry
from llm_comm.config import Config
from llm_comm.errors import RendezvousError
from llm_comm.options import OPTIONS, Alike
from llm_comm.planning.tables import TuningTable
from llm_comm.runtime import devices
from llm_comm.runtime.devices import gpu_name
from llm_comm.runtime.rank_names import RankNames
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")

#: Options that must have the same value on all ranks.
_COMPARED = tuple(name for name, option in OPTIONS.items() if option.alike is Alike.YES)

_LIMITS_OF_A_DEVICE = ("sm_count", "max_cluster", "compute_capability")


def compare_ranks(rendezvous: Rendezvous, device: torch.device, config: Config) -> _core.Limits:
    """Compare GPUs, versions, devices and options of all ranks. Return the launch limits of this rank.

    Raises:
        RendezvousError: The ranks differ, or a rank could not read its properties. Raised on all ranks alike.
    """
    limits: list[_core.Limits] = []

    def introduction() -> dict[str, Any]:
        limits.append(devices.limits_of(device, config.workspace_bytes))
        return {
            "version": _core.version,
            "algorithms": _digest_of_algorithms(),
            "device": device.type,
            "gpu": gpu_name(device),
            "limits": {name: getattr(limits[0], name) for name in _LIMITS_OF_A_DEVICE},
            "config": {name: getattr(config, name) for name in _COMPARED if hasattr(config, name)},
        }

    everyone = rendezvous.collect("comparison of ranks", introduction)
    shared = _shared_gpus(rendezvous.names, [other["gpu"] for other in everyone])
    # If only some ranks have the option share_gpu, the comparison of options below reports it.
    if shared and not any(other["config"].get("share_gpu") for other in everyone):
        raise RendezvousError(
            f"ranks of {rendezvous.names.of_group} share a GPU, each needs one of its own (torch.cuda.set_device): "
            f"{shared}. For tests only, LLM_COMM_SHARE_GPU=1 permits it"
        )
    names = rendezvous.names
    check_alike(names, "have different versions of llm_comm", [other["version"] for other in everyone])
    check_alike(
        names,
        "have builds of llm_comm with different algorithms",
        [other["algorithms"] for other in everyone],
        to_do="install the same build for all of them (llm-comm algorithms lists what a build has)",
    )
    check_alike(names, "have different device types", [other["device"] for other in everyone])
    check_alike(names, "have GPUs with different limits", [other["limits"] for other in everyone])
    check_alike(
        names,
        "have different options",
        [other["config"] for other in everyone],
        to_do="give all ranks the same LLM_COMM_* variables, file and arguments (docs/options.md)",
    )
    if config.share_gpu and rendezvous.rank == 0:
        logger.warning(
            "llm_comm: %s: share_gpu is on (%s), for tests only: %s",
            rendezvous.names.of_group,
            config.origins.get("share_gpu", "Python"),
            f"{shared}. They take turns, so that an operation takes milliseconds" if shared else "no ranks share a GPU",
        )
    return limits[0]


def compare_tables(rendezvous: Rendezvous, table: TuningTable) -> None:
    """Compare the tuning tables. Ranks with different tables would launch different grids and hang or compute wrong
    results.

    Raises:
        RendezvousError: The tables differ. Raised on all ranks alike.
    """
    found = rendezvous.collect("comparison of tuning tables", lambda: (table.digest(), table.origin.describe()))
    check_alike(
        rendezvous.names,
        "have different tuning tables",
        [digest for digest, _ in found],
        shown=[f"{digest}, {origin}" for digest, origin in found],
        to_do="give all ranks the same option table, or the same home or LLM_COMM_TABLE_DIR (docs/operate/tuning.md)",
    )


def _shared_gpus(names: RankNames, gpus: list[str | None]) -> str:
    """Return in words which ranks use the same GPU, or "". Emulated GPUs (None) are never shared."""
    users = {gpu: [rank for rank, of in enumerate(gpus) if of == gpu] for gpu in gpus if gpu}
    return "; ".join(f"{names.several(ranks)} use {gpu}" for gpu, ranks in users.items() if len(ranks) > 1)


def check_alike(
    names: RankNames, what: str, values: list[Any], shown: list[Any] | None = None, to_do: str = ""
) -> None:
    """Raise RendezvousError, on all ranks alike, unless all values are equal.

    Args:
        names: Names of the ranks.
        what: Predicate of the error, such as "have different options".
        values: JSON-able, by rank. For dictionaries with equal keys, the error names the keys that differ.
        shown: Text of each value in the error, if not the value itself.
        to_do: Advice at the end of the error.
    """
    if all(value == values[0] for value in values):
        return
    found = shown or values
    if all(isinstance(value, dict) and value.keys() == found[0].keys() for value in found):
        words = "; ".join(
            f"{key} is {_by_rank(names, [repr(value[key]) for value in found])}"
            for key in found[0]
            if any(value[key] != found[0][key] for value in found)
        )
    else:
        words = _by_rank(names, [str(value) for value in found])
    raise RendezvousError(f"the ranks of {names.of_group} {what}: {words}{to_do and f'; {to_do}'}")


def _by_rank(names: RankNames, words: list[str]) -> str:
    """ "8 on rank 1 (...), None on ranks 0, 2 (...)": the value with fewer ranks first."""
    ranks = {each: [rank for rank, said in enumerate(words) if said == each] for each in words}
    return ", ".join(
        f"{each} on {names.several(who)}" for each, who in sorted(ranks.items(), key=lambda at: len(at[1]))
    )


def _digest_of_algorithms() -> str:
    """Digest of this build's registry. Ranks name kernels by their numbers in it, so it must be equal on all ranks."""
    algorithms = [algorithm for operation in registry.operations().values() for algorithm in operation.algorithms]
    return digest_of("\n".join(str(algorithm) for algorithm in algorithms))


def digest_of(code: str | bytes) -> str:
    """Short digest of code, for comparison between ranks."""
    return hashlib.sha256(code.encode() if isinstance(code, str) else code).hexdigest()[:12]
