"""How an engine's ranks join: whether each uses llm_comm, and a communicator on all of them or on none."""

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
from llm_comm.nodes.topology import find_topology
from llm_comm.planning.catalogue import check_table_option
from llm_comm.runtime.rank_names import RankNames
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")

#: Bound of waits in seconds where the operator set none. Longer than the library's own: the ranks of an engine compile
#: and tune kernels at different speeds, and whoever is first waits in an all-reduce. torch gives NCCL as long.
ENGINE_TIMEOUT_S = 600.0

#: Bound in seconds of the wait for the other ranks to say whether they use llm_comm. They make the group together: just
#: before, gloo has connected all of them and the engine's own communicators have talked to each other, so what is
#: waited for is an import and the reading of a file. Who is not there by then has no llm_comm, or it is switched off.
JOIN_TIMEOUT_S = 120.0

_HOW_TO_SPAN_NODES = "LLM_COMM_MULTI_NODE=1 on all ranks serves groups over several nodes, docs/operate/nodes.md"

# ASCII characters of what a rank can say in a vote: they fit in a message of the rendezvous, also if all are escaped.
_MAX_WORD = 600


class NotJoinedError(LlmCommError):
    """The ranks of a group agreed to do without llm_comm. The text says why and is the same on all of them."""


class SwitchedOffError(NotJoinedError):
    """They do without it because the operator wants it so."""


class AbsentRanksError(LlmCommError):
    """Some ranks of a group never asked for llm_comm. The engine cannot go on: an operation that they have no part in
    is pending in its group of CPU ranks, and the next one of the engine's own would be matched with that."""


def switched_off() -> bool:
    """Whether ``LLM_COMM_ENABLE`` says that the engine is to be left alone, whatever the other options are."""
    name = "LLM_COMM_ENABLE"
    try:
        return name in os.environ and not EngineOptions.load({name: os.environ[name]}).enable
    except ConfigError:
        return False  # told when the ranks join


def served_device(device: torch.device) -> torch.device:
    """An engine's device as llm_comm takes it: where torch has no CUDA, an emulated GPU."""
    return device if torch.cuda.is_available() else torch.device("cpu")


def join(group: dist.ProcessGroup, device: torch.device, load_config: Callable[[], EngineOptions]) -> Communicator:
    """A communicator for ``group``, on all of its ranks or on none. Collective.

    Args:
        group: gloo group of the ranks.
        device: CUDA device of this rank; emulated GPUs take its place where torch has no CUDA.
        load_config: Returns the options of this rank.

    Raises:
        ConfigError: A rank has a wrong option. Raised on all ranks.
        NotJoinedError: A rank does without llm_comm, cannot use it, or failed to set it up. Raised on all ranks.
        AbsentRanksError: A rank did not come. Raised on those that did.
    """
    device = served_device(device)
    rendezvous = Rendezvous(group, JOIN_TIMEOUT_S)
    config, objection = None, None
    try:
        config = load_config()
        _check(config, device, rendezvous.world_size)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        objection = error
    _vote(rendezvous, objection)
    assert config is not None
    _vote(rendezvous, _objection_to_nodes(rendezvous, config))

    communicator = None
    try:
        communicator = Communicator(group, device, config)
    except MissingRankError as error:  # it has voted, and is lost since: there is nobody to vote with
        raise AbsentRanksError(f"a rank of the engine was lost while llm_comm was set up: {error}") from error
    except Exception as error:
        logger.debug("set-up failed", exc_info=True)
        objection = error
    try:
        # Communicator fails on all ranks or on none. If it ever did not, the others would wait in an all-reduce for a
        # rank that takes the engine's own way. A rank may have waited for others in there, as long as an engine waits.
        _vote(Rendezvous(group, ENGINE_TIMEOUT_S), objection)
    except LlmCommError:
        if communicator is not None:
            communicator.close()
        raise
    assert communicator is not None
    return communicator


def _check(config: EngineOptions, device: torch.device, world_size: int) -> None:
    """Raises if this rank does without llm_comm, as far as it can tell alone."""
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


def _objection_to_nodes(rendezvous: Rendezvous, config: EngineOptions) -> Exception | None:
    """What this rank has against where the ranks are. Collective.

    Raises:
        AbsentRanksError: A rank is lost.
    """
    try:
        topology = find_topology(rendezvous, config)
    except MissingRankError as error:
        raise AbsentRanksError(f"a rank of the engine was lost while llm_comm was set up: {error}") from error
    except LlmCommError as error:
        return error
    if topology is None or config.multi_node:
        return None
    origin = config.origins.get("multi_node", "default")
    return NotJoinedError(
        f"the ranks are on {len(topology.nodes)} nodes ({', '.join(topology.hosts)}), and multi_node is false "
        f"({origin}); {_HOW_TO_SPAN_NODES}"
    )


# What a rank can object with, most important first: an error of the operator is not to hide behind anything else.
_OBJECTIONS: tuple[type[LlmCommError], ...] = (ConfigError, SwitchedOffError, NotJoinedError)


def _vote(rendezvous: Rendezvous, objection: Exception | None) -> None:
    """Raises one of ``_OBJECTIONS``, the same on all ranks, if a rank has an objection.

    Raises:
        AbsentRanksError: A rank did not come.
    """
    word = None
    if objection is not None:
        kind = next((i for i, error in enumerate(_OBJECTIONS) if isinstance(objection, error)), len(_OBJECTIONS) - 1)
        word = [kind, _fit(_in_words(objection))]
    try:
        words = rendezvous.gather("vote on llm_comm", word)
    except LlmCommError as missing:
        text = str(missing).replace(" (LLM_COMM_TIMEOUT_S)", "")  # which does not bound this wait
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
    """What the ranks of ``group`` have against going on, in words; None if nobody has anything. Collective.

    Args:
        group: gloo group of the ranks.
        objection: Of this rank.
        about: What they vote on.

    Raises:
        RendezvousError: A rank is gone.
    """
    word = None if objection is None else _fit(objection)
    rendezvous = Rendezvous(group, ENGINE_TIMEOUT_S)
    words = rendezvous.gather(f"vote on {about}", word)
    said = {rank: word for rank, word in enumerate(words) if word is not None}
    return _together(said, rendezvous.names) if said else None


def _together(texts: Mapping[int, str], names: RankNames) -> str:
    """What some ranks say, in one line; once, if all say the same."""
    if len(texts) == names.size and len(set(texts.values())) == 1:
        return texts[0]
    return "; ".join(f"{names.full(rank)}: {text}" for rank, text in texts.items())


def _fit(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()[:_MAX_WORD]


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, LlmCommError) else f"{type(error).__name__}: {error}"
