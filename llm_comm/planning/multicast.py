"""NVLink multicast: whether a rank wants it, and which of the algorithms that need it may be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from llm_comm import registry
from llm_comm.config import Config, multicast_state
from llm_comm.planning.tables import TuningTable

#: Driver version of emulated devices.
EMULATED = "emulated"

#: Advice in logs.
HOW_TO_GET_IT = "`llm-comm tune --multicast` makes a table that uses it, where the machine permits it"


class Multicast(NamedTuple):
    """State of multicast, equal on all ranks, and the reason for it."""

    is_up: bool
    why: str

    def describe(self, config: Config) -> str:
        """Return, for logs, in which order sums are computed, and whether multicast is on."""
        if not self.is_up:
            return f"sums in rank order; NVLink multicast is off: {self.why}"
        order = "in any order" if config.sums_in_any_order else "in rank order"
        return f"sums {order}; NVLink multicast is on: {self.why}"


NO_MULTICAST = Multicast(False, "it has not been set up")


def wish(
    config: Config,
    table: TuningTable,
    device: str,
    driver: str,
    world_size: int,
    environ: Mapping[str, str] | None = None,
) -> Multicast:
    """Return whether this rank wants multicast, and why. It is set up only if all ranks want it.

    Args:
        config: Options of the rank.
        table: Tuning table of the rank.
        device: Name of the GPU, as in tables.
        driver: Version of the driver, as in ``MulticastEntry``.
        world_size: Number of ranks.
        environ: Environment variables; None: those of the process.
    """
    may, why = multicast_state(config, environ)
    if not may or world_size < 2:
        return Multicast(False, why if not may else "one rank: nothing to exchange")
    if config.share_gpu and driver != EMULATED:
        return Multicast(False, "share_gpu is on: a multicast object takes a GPU once")
    if config.multicast == "1":
        return Multicast(True, why)
    made_on = table.multicast
    if made_on is None:
        return Multicast(False, f"{why}, and {table.name} was not made with it; {HOW_TO_GET_IT}")
    here = {"device": device, "driver": driver, "world_size": world_size}
    other = [
        f"{name} {getattr(made_on, name)}, not {value}"
        for name, value in here.items()
        if getattr(made_on, name) != value
    ]
    if other:
        return Multicast(False, f"{table.name} was made with it on {', '.join(other)}; {HOW_TO_GET_IT}")
    return Multicast(True, f"{table.name} was made with it on {made_on.date}")


def why_not(algorithm: registry.Algorithm, config: Config, multicast: Multicast, *, is_forced: bool = False) -> str:
    """Return why the options or the state of multicast do not permit an algorithm, or "".

    Args:
        algorithm: Algorithm in question.
        config: Options.
        multicast: State of multicast.
        is_forced: An option names the algorithm.
    """
    if algorithm.wire and algorithm.wire != config.wire:
        return f"option wire is {config.wire!r} ({config.origins.get('wire', 'default')})"
    if not algorithm.uses_multimem:
        return ""
    if not multicast.is_up:
        return f"NVLink multicast is off: {multicast.why}"
    if algorithm.sums_in_switch and not config.sums_in_any_order:
        because = "deterministic is on" if config.sum == "any" else "sum is 'rank_order'"
        return f"its sums are made in the switch, and {because} ({_origin(config)})"
    if algorithm.ranks_may_differ and not is_forced:
        return "ranks may get other bits: only option algorithm chooses it"
    return ""


def _origin(config: Config) -> str:
    return config.origins.get("deterministic" if config.sum == "any" else "sum", "default")
