"""Set-up of a group: the ranks of an engine vote on using llm_comm, and make a communicator on all ranks or on none."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from llm_comm import _core
from llm_comm.communicator import Communicator
from llm_comm.config import EngineOptions
from llm_comm.errors import ConfigError, LlmCommError, MissingRankError
from llm_comm.nodes.topology import Topology, find_topology
from llm_comm.planning.catalogue import check_table_option
from llm_comm.runtime.devices import find_table, gpu_name
from llm_comm.runtime.links import is_unmeasured, why_too_slow
from llm_comm.runtime.rank_names import RankNames
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")

#: Default of ``timeout_s`` in engines, as long as torch's default for NCCL. The library's default is too short: an
#: engine's ranks compile and tune kernels at different speeds, and the first one waits in an all-reduce.
ENGINE_TIMEOUT_S = 600.0

#: Time limit in seconds for all ranks to vote on using llm_comm. A short limit is enough: the engine has just connected
#: the ranks, so a late rank only imports llm_comm and reads its options. A rank that does not vote in time has no
#: llm_comm installed, or has it switched off.
JOIN_TIMEOUT_S = 120.0

_HOW_TO_SPAN_NODES = "LLM_COMM_MULTI_NODE=1 on all ranks serves groups over several nodes, docs/operate/nodes.md"

# Maximum length of a rank's text in a vote. It fits into a message of the rendezvous even if every character is
# escaped.
_MAX_WORD = 600


class NotJoinedError(LlmCommError):
    """The ranks of a group agreed to run without llm_comm. The text has the reason and is equal on all ranks."""


class SwitchedOffError(NotJoinedError):
    """The ranks of a group run without llm_comm because an option switches it off."""


class AbsentRanksError(LlmCommError):
    """Some ranks of a group did not come to the vote, so the engine must stop.

    The vote is still pending in the engine's gloo group. The engine's next operation in that group would be matched
    with it.
    """


def switched_off() -> bool:
    """Return whether ``LLM_COMM_ENABLE`` switches llm_comm off. A wrong value does not: ``join`` reports it."""
    name = "LLM_COMM_ENABLE"
    try:
        return name in os.environ and not EngineOptions.load({name: os.environ[name]}).enable
    except ConfigError:
        return False


def served_device(device: torch.device) -> torch.device:
    """Return the device on which llm_comm serves an engine: the CPU (emulated GPUs) if torch has no CUDA."""
    return device if torch.cuda.is_available() else torch.device("cpu")


def join(group: dist.ProcessGroup, device: torch.device, load_config: Callable[[], EngineOptions]) -> Communicator:
    """Make a communicator for ``group``, on all ranks or on none. Collective.

    The ranks vote on their options and build, on the nodes that they run on, on the links between their GPUs, and on
    the set-up itself.

    Args:
        group: gloo group of the ranks.
        device: CUDA device of this rank. Emulated GPUs replace it if torch has no CUDA.
        load_config: Function that returns the options of this rank.

    Raises:
        ConfigError: A rank has a wrong option. Raised on all ranks.
        NotJoinedError: A rank has llm_comm switched off, cannot use it, or failed to set it up. Raised on all ranks.
        AbsentRanksError: A rank did not vote or was lost. Raised on the ranks that are left.
    """
    device = served_device(device)
    rendezvous = Rendezvous(group, JOIN_TIMEOUT_S)
    config, objection = None, None
    try:
        config = load_config()
        _check(config, device, rendezvous.world_size)
    except Exception as error:  # any error must reach the other ranks, which would wait for this one
        objection = error
    _vote(rendezvous, objection)
    assert config is not None
    topology, objection = _find_topology(rendezvous, device, config)
    _vote(rendezvous, objection)
    _vote(rendezvous, _objection_to_links(rendezvous, config, device, topology))

    communicator = None
    try:
        communicator = Communicator(group, device, config)
    except MissingRankError as error:  # no further vote is possible without the lost rank
        raise _lost(error) from error
    except Exception as error:
        logger.debug("set-up failed", exc_info=True)
        objection = error
    try:
        # The constructor fails on all ranks or on none. This vote guards that: otherwise ranks with a communicator
        # would wait in an all-reduce for a rank that uses the engine's own. The time limit is the engine's, because a
        # rank may come out of the constructor that much later than another.
        _vote(Rendezvous(group, ENGINE_TIMEOUT_S), objection)
    except LlmCommError:
        if communicator is not None:
            communicator.close()
        raise
    assert communicator is not None
    return communicator


def _check(config: EngineOptions, device: torch.device, world_size: int) -> None:
    """Check what this rank can check without its peers.

    Raises:
        ConfigError: Option ``table`` is wrong.
        NotJoinedError: llm_comm is switched off on this rank, or cannot serve the group.
    """
    if not config.enable:
        raise SwitchedOffError(f"enable is false ({config.origins.get('enable', 'Python')})")
    if world_size > _core.max_world_size and not config.multi_node:
        raise NotJoinedError(
            f"the group has {world_size} ranks, llm_comm serves up to {_core.max_world_size} of one machine "
            f"({_HOW_TO_SPAN_NODES})"
        )
    if device.type == "cuda" and not _core.cuda_archs:
        raise NotJoinedError("this build of llm_comm has no CUDA kernels; install it where nvcc is found")
    check_table_option(config)


def _find_topology(
    rendezvous: Rendezvous, device: torch.device, config: EngineOptions
) -> tuple[Topology | None, Exception | None]:
    """Return the nodes on which the ranks run, None if it is one, and this rank's objection to them. Collective.

    Raises:
        AbsentRanksError: A rank is lost.
    """
    try:
        topology = find_topology(rendezvous, device, config)
    except MissingRankError as error:
        raise _lost(error) from error
    except LlmCommError as error:
        return None, error
    if config.multi_node or not (topology or rendezvous.spans_hosts):
        return topology, None
    where = "several hosts of an NVLink domain"
    if topology is not None:
        where = f"{len(topology.nodes)} nodes ({', '.join(topology.hosts)})"
    origin = config.origins.get("multi_node", "default")
    objection = NotJoinedError(f"the ranks are on {where}, and multi_node is false ({origin}); {_HOW_TO_SPAN_NODES}")
    return topology, objection


def _objection_to_links(
    rendezvous: Rendezvous, config: EngineOptions, device: torch.device, topology: Topology | None
) -> Exception | None:
    """Return this rank's objection to the links between the GPUs of its node, or None. Collective.

    Raises:
        AbsentRanksError: A rank is lost.
    """
    ranks = range(rendezvous.world_size) if topology is None else topology.ranks_here
    gpu = None
    try:
        if is_unmeasured(find_table(device, len(ranks), config), config):
            gpu = gpu_name(device)
    except Exception as error:  # the set-up reports it on all ranks
        logger.debug("llm_comm: the links between the GPUs are not looked at: %s", error)
    try:
        gpus = rendezvous.gather("GPU", gpu)
    except MissingRankError as error:
        raise _lost(error) from error
    why = "" if None in gpus else why_too_slow({rank: gpus[rank] for rank in ranks})
    return NotJoinedError(why) if why else None


def _lost(error: MissingRankError) -> AbsentRanksError:
    return AbsentRanksError(f"a rank of the engine was lost while llm_comm was set up: {error}")


# Classes of objections, most important first. A wrong option of the operator must not be hidden by another objection.
_OBJECTIONS: tuple[type[LlmCommError], ...] = (ConfigError, SwitchedOffError, NotJoinedError)


def _vote(rendezvous: Rendezvous, objection: Exception | None) -> None:
    """Collect the objections of all ranks, and raise the same error on all ranks if there is one. Collective.

    Raises:
        ConfigError, SwitchedOffError, NotJoinedError: A rank objects. The class is the most important one.
        AbsentRanksError: A rank did not vote in time.
    """
    word = None
    if objection is not None:
        kind = next((i for i, error in enumerate(_OBJECTIONS) if isinstance(objection, error)), len(_OBJECTIONS) - 1)
        word = [kind, _fit(_in_words(objection))]
    try:
        words = rendezvous.gather("vote on llm_comm", word)
    except LlmCommError as missing:
        text = str(missing).replace(" (LLM_COMM_TIMEOUT_S)", "")  # another limit applies here
        raise AbsentRanksError(
            f"not every rank of the engine came to set up llm_comm ({text}). On each node, check that llm_comm is "
            "installed in the environment of the engine, and that LLM_COMM_ENABLE, VLLM_PLUGINS and SGLANG_PLUGINS are "
            "set as on the others. LLM_COMM_ENABLE=0 on all of them starts the engine without it."
        ) from missing
    said = {rank: word for rank, word in enumerate(words) if word is not None}
    if not said:
        return
    kind = min(kind for kind, _ in said.values())
    texts = {rank: text for rank, (its_kind, text) in said.items() if its_kind == kind}
    raise _OBJECTIONS[kind](_together(texts, rendezvous.names))


def objection_of_any(group: dist.ProcessGroup, objection: str | None, about: str = "norms") -> str | None:
    """Vote on a feature. Return the objections of all ranks as one text, equal on all ranks, or None. Collective.

    Args:
        group: gloo group of the ranks.
        objection: Objection of this rank, or None.
        about: Name of the feature, for errors.

    Raises:
        RendezvousError: A rank is lost.
    """
    word = None if objection is None else _fit(objection)
    rendezvous = Rendezvous(group, ENGINE_TIMEOUT_S)
    words = rendezvous.gather(f"vote on {about}", word)
    said = {rank: word for rank, word in enumerate(words) if word is not None}
    return _together(said, rendezvous.names) if said else None


def _together(texts: Mapping[int, str], names: RankNames) -> str:
    """Join the texts of ranks to one line, with the rank's name before each text. A text that all ranks share stands
    once and without names."""
    if len(texts) == names.size and len(set(texts.values())) == 1:
        return texts[0]
    return "; ".join(f"{names.full(rank)}: {text}" for rank, text in texts.items())


def _fit(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()[:_MAX_WORD]


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, LlmCommError) else f"{type(error).__name__}: {error}"
