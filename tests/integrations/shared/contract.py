"""Runs the scenarios of an engine under the Python of its environment, for the tests named ``test_*_contract.py``."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_environment import Engine, InstallError

# What pip says then. That a registry which can be reached lacks the release is not among it.
_UNREACHABLE = ("connection broken by", "from versions: none", "ReadTimeout", "ConnectionError")


class Contract(NamedTuple):
    """What is to hold in each of the versions of an engine.

    `make test` runs all scenarios in the newest version and those of the smoke in the oldest; `make nightly` runs all
    scenarios in all versions.
    """

    engine: Engine
    versions: tuple[str, ...]
    #: A script of functions marked as scenarios, which ``rank_processes.serve`` runs.
    scenarios: Path
    #: One that serves them with those of other files, each as ``file.function``: the engine is imported once for all.
    served_by: Path | None = None

    def parametrized(self) -> Callable[[Any], Any]:
        """Makes a test that takes ``runner`` and ``name`` one test for each version and scenario."""
        runners = [pytest.param((self, version), id=version) for version in self.versions]
        prefix = "" if self.served_by is None else f"{self.scenarios.stem}."
        names = [pytest.param(prefix + name, id=name) for name in _marks(self.scenarios)]

        def mark(test: Any) -> Any:
            by_name = pytest.mark.parametrize("name", names)(test)
            return pytest.mark.parametrize("runner", runners, indirect=True, scope="module")(by_name)

        return mark

    def is_nightly(self, version: str, name: str) -> bool:
        """Whether `make test` leaves a scenario out in a version."""
        ordered = sorted(self.versions, key=lambda version: [int(part) for part in version.split(".")])
        is_smoke = "smoke=True" in _marks(self.scenarios)[name.rpartition(".")[2]]
        return version in ordered[1:-1] or (version != ordered[-1] and not is_smoke)


@functools.cache
def _marks(path: Path) -> dict[str, str]:
    """The decorators of each scenario in a file, by name. Read rather than imported, which would take the engine."""
    functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    marks = {function.name: " ".join(map(ast.unparse, function.decorator_list)) for function in functions}
    return {name: mark for name, mark in marks.items() if "scenario(" in mark}


class Runner:
    """A process that has imported one version of an engine and forks the ranks of each scenario."""

    def __init__(self, python: Path, scenarios: Path, log: Path, own_variables: str) -> None:
        self._log = log
        ours, theirs = os.pipe()
        # Options of whoever runs the tests are not to reach them.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLM_COMM_", "RANK", own_variables))}
        environment["CUDA_VISIBLE_DEVICES"] = ""  # emulated GPUs, also where there are others
        environment["PYTHONPATH"] = str(Path(__file__).parent)
        environment["VLLM_RPC_BASE_PATH"] = str(log.parent)  # where vLLM leaves the sockets of its message queues
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, scenarios, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                env=environment,
                text=True,
            )
        os.close(theirs)
        self._results = os.fdopen(ours)

    def run(self, name: str) -> list[str]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # that it has ended is said below
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
        result = None
        while result is None or result["name"] != name:  # results of tests that were stopped come late
            line = self._results.readline()
            if not line:
                return [f"the process with the engine has ended:\n{self._log.read_text(errors='replace')[-4000:]}"]
            result = json.loads(line)
        if not result["applies"]:
            pytest.skip("this version has nothing of the kind")
        errors: list[str] = result["errors"]
        return errors

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._results.close()
        self._process.wait(timeout=60)


@contextmanager
def running(contract: Contract, version: str, logs: Path) -> Iterator[Runner]:
    """A runner for ``version``. Skips the test where the package registry cannot be reached."""
    name = contract.engine.name
    try:
        python = contract.engine.install(version)
    except InstallError as error:
        if any(sign in str(error) for sign in _UNREACHABLE):
            pytest.skip(f"{name} {version} cannot be had from the package registry: {str(error)[-300:]}")
        raise
    script = contract.served_by or contract.scenarios
    runner = Runner(python, script, logs / f"{name}-{version}.log", f"{name.upper()}_")
    try:
        yield runner
    finally:
        runner.stop()


class SharedRunners:
    """Runners whose process serves several files: each is started for the first of them, and stopped with ``stack``."""

    def __init__(self, stack: ExitStack, logs: Path) -> None:
        self._stack = stack
        self._logs = logs
        self._runners: dict[tuple[str, str, Path | None], Runner] = {}

    def get(self, contract: Contract, version: str) -> Runner:
        """As ``running``. One that a scenario has ended does not fail those of the next file."""
        key = (contract.engine.name, version, contract.served_by)
        if key not in self._runners or self._runners[key].has_ended():
            self._runners[key] = self._stack.enter_context(running(contract, version, self._logs))
        return self._runners[key]
