"""llm_comm inside published releases of vLLM, the oldest and the newest supported: gloo ranks, emulated GPUs.

What is checked is in ``scenarios.py``. It runs under the Python of an environment of its own, kept in ``.cache/`` and
made by ``setup_vllm.py`` in about a minute when a release is first met.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

VERSIONS = ("0.26.0", "0.33.0")

_HERE = Path(__file__).parent
_CACHE = _HERE.parents[2] / ".cache"
_SCENARIOS = _HERE / "scenarios.py"
# What pip says then. That a registry which can be reached lacks the release is not among it.
_UNREACHABLE = ("connection broken by", "from versions: none", "ReadTimeout", "ConnectionError")


def _names() -> list[str]:
    """The functions marked as scenarios. Importing them would take vLLM."""
    functions = (node for node in ast.parse(_SCENARIOS.read_text()).body if isinstance(node, ast.FunctionDef))
    return [f.name for f in functions if any("scenario(" in ast.unparse(mark) for mark in f.decorator_list)]


class _Runner:
    """A process that has imported one version of vLLM and forks the ranks of each scenario."""

    def __init__(self, python: Path, log: Path) -> None:
        self._log = log
        ours, theirs = os.pipe()
        # Options of whoever runs the tests are not to reach them.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLM_COMM_", "VLLM_", "RANK"))}
        environment["CUDA_VISIBLE_DEVICES"] = ""  # emulated GPUs, also where there are others
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, _SCENARIOS, str(theirs)],
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
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        line = self._results.readline()
        if not line:
            return [f"the process with vLLM has ended:\n{self._log.read_text(errors='replace')[-4000:]}"]
        result = json.loads(line)
        assert result["name"] == name
        errors: list[str] = result["errors"]
        return errors

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._results.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Runner]:
    version: str = request.param
    directory = _CACHE / f"vllm-{version}-py{sys.version_info[0]}.{sys.version_info[1]}"
    setup = [sys.executable, _HERE.parent / "setup_vllm.py", version, directory]
    done = subprocess.run(setup, check=False, capture_output=True, text=True)
    if done.returncode != 0 and any(sign in done.stderr for sign in _UNREACHABLE):
        pytest.skip(f"vLLM {version} cannot be had from the package registry: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr
    runner = _Runner(Path(done.stdout.strip()), tmp_path_factory.mktemp("vllm") / f"{version}.log")
    yield runner
    runner.stop()


@pytest.mark.parametrize("name", _names())
@pytest.mark.parametrize("runner", VERSIONS, indirect=True, scope="module")
def test_vllm_contract(runner: _Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
