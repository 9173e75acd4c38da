"""Whatever is wrong on one rank alone while a communicator is made: all ranks raise the same error, which names that
rank and what it found, and the group can be used after it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, nothing_leaked, unnamed
from reference import assert_is_sum, contributions

from llm_comm import Communicator, ConfigError, LlmCommError, RendezvousError, UnsupportedInputError
from llm_comm.config import EngineOptions
from llm_comm.integrations import joining
from llm_comm.runtime import rendezvous

FAULTY_RANK = 1
NO_CUDA_DEVICE = f"cuda:{torch.cuda.device_count() + 90}"


class Case(NamedTuple):
    """What is wrong on one rank, what all ranks raise, and what the error says of that rank."""

    kind: type[LlmCommError]
    says: str
    environ: Mapping[str, str] = MappingProxyType({})
    arguments: Mapping[str, Any] = MappingProxyType({})
    patch: tuple[str, Any] | None = None


def fail(*_: object) -> None:
    raise OSError("no such luck")


CASES = {
    "option": Case(ConfigError, "LLM_COMM_TIMEOUT_S='5s' is not allowed; valid: ", {"LLM_COMM_TIMEOUT_S": "5s"}),
    "option that is no option": Case(ConfigError, "unknown variable LLM_COMM_TIMEOUT ", {"LLM_COMM_TIMEOUT": "5"}),
    "algorithm": Case(ConfigError, "LLM_COMM_ALGORITHM='ring' is not", {"LLM_COMM_ALGORITHM": "ring"}),
    "missing file": Case(ConfigError, "LLM_COMM_CONFIG=/no/such/file: cannot", {"LLM_COMM_CONFIG": "/no/such/file"}),
    "file": Case(ConfigError, "bad.yaml: expected 'option: value'", {"LLM_COMM_CONFIG": "BAD_FILE"}),
    "missing table": Case(ConfigError, "tuning table /no/such/table: ", {"LLM_COMM_TABLE": "/no/such/table"}),
    "table": Case(ConfigError, "expected 'key: value' lines", {"LLM_COMM_TABLE": "BAD_FILE"}),
    "a table that is no path": Case(ConfigError, "LLM_COMM_TABLE='a\\x00b' is not", {"LLM_COMM_TABLE": "a\0b"}),
    "no configuration": Case(ConfigError, "config is {'timeout_s': 5}", arguments={"config": {"timeout_s": 5}}),
    "kind of device": Case(UnsupportedInputError, "device meta: ", arguments={"device": "meta"}),
    "missing device": Case(RendezvousError, "", arguments={"device": NO_CUDA_DEVICE}),
    "no device": Case(RendezvousError, "RuntimeError: ", arguments={"device": "emulated"}),
    "properties": Case(RendezvousError, "OSError: no such luck", patch=("llm_comm.runtime.devices.make_limits", fail)),
    "host": Case(RendezvousError, "OSError: no such", patch=("llm_comm.nodes.topology.host_identity", fail)),
    "long name": Case(
        RendezvousError,
        "ValueError: a rendezvous message has ",
        patch=("llm_comm.nodes.topology.host_identity", lambda: {"host": "x" * 5000, "boot_id": ""}),
    ),
    "version": Case(RendezvousError, "0.0.7", patch=("llm_comm._core.version", "0.0.7")),
    "core": Case(RendezvousError, "OSError: no such luck", patch=("llm_comm._core.make_emulated_core", fail)),
    "core that is not there": Case(RendezvousError, "TypeError: ", patch=("llm_comm._core.make_emulated_core", None)),
    "other messages": Case(
        RendezvousError,
        "this is no message of this version of llm_comm: b'hello",
        patch=("llm_comm.runtime.rendezvous.encode", lambda _: b"hello".ljust(rendezvous.MESSAGE_BYTES)),
    ),
}


@contextmanager
def wrong(case: Case, bad_file: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Not by setenv: a real environment takes no NUL.
        texts = {name: text.replace("BAD_FILE", bad_file) for name, text in case.environ.items()}
        patch.setattr(os, "environ", {**os.environ, **texts})
        if case.patch is not None:
            patch.setattr(*case.patch)
        yield


def come(name: str, bad_file: str, make: Callable[..., Any]) -> tuple[str, str]:
    """What this rank raises. Afterwards the group still works."""
    case = CASES[name]
    make_communicator().close()
    is_faulty_rank = dist.get_rank() == FAULTY_RANK
    with (
        nothing_leaked(),
        wrong(case, bad_file) if is_faulty_rank else nullcontext(),
        pytest.raises(LlmCommError) as error,
    ):
        make(**case.arguments if is_faulty_rank else {})
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size()
    with make_communicator() as comm:
        inputs = contributions(comm.world_size, 100, torch.float16)
        assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, f"after {name}")
    return type(error.value).__name__, str(error.value)


def by_the_environment(**arguments: Any) -> None:
    """As an application makes one that leaves options to the environment."""
    Communicator(dist.group.WORLD, **{"device": "cpu", **arguments})


def by_an_engine(**arguments: Any) -> None:
    joining.join(dist.group.WORLD, torch.device("cpu"), EngineOptions.load, **arguments)


@pytest.fixture
def bad_file(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text("just words\n")
    return str(path)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_raise_the_same(ranks: RankPool, world: int, name: str, bad_file: str) -> None:
    found = ranks.run(world, come, name, bad_file, by_the_environment)
    assert len(set(found)) == 1, found
    kind, text = found[0]
    assert kind == CASES[name].kind.__name__
    assert re.search(rf"rank {FAULTY_RANK}\b", unnamed(text)), text
    assert CASES[name].says in text, text


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.arguments])
def test_in_an_engine_too(ranks: RankPool, name: str, bad_file: str) -> None:
    found = ranks.run(2, come, name, bad_file, by_an_engine)
    assert len(set(found)) == 1, found
    kind, text = found[0]
    expected: type[LlmCommError] = CASES[name].kind if CASES[name].environ else joining.NotJoinedError
    if name == "other messages":  # it may have been the engine's, which waits for an answer then
        expected = joining.AbsentRanksError
    assert kind == expected.__name__
    assert re.search(rf"rank {FAULTY_RANK}\b", unnamed(text)), text
    assert CASES[name].says in text, text


def all_wrong() -> str:
    with wrong(CASES["option"], ""), pytest.raises(ConfigError) as error:
        by_the_environment()
    return str(error.value)


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_wrong_on_all_ranks_is_said_once(ranks: RankPool, world: int) -> None:
    for text in ranks.run(world, all_wrong):
        assert text.startswith("LLM_COMM_TIMEOUT_S='5s' is not allowed; ")
