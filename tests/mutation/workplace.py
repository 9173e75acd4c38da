"""Where mutants are made and checked: below ``build/mutation``, never in the checkout.

All C++ mutants are in one copy of the tree, each behind a switch, so one build serves them all. A Python mutant is
written into a copy of the worker that checks it, which runs on the core that the checkout has built. The Python of a
copy is a virtual environment that finds the copy, and then the packages of the Python that runs this.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import driver
import edits
from mutant import REPOSITORY, Mutant, changes_of

from llm_comm import _core

DIRECTORY = REPOSITORY / "build" / "mutation"
#: Of a check. What hangs is noticed by that.
LIMIT_S = 300.0
#: Whether a limit was reached, in the place of a test's name.
TIME_LIMIT = "the time limit"


def run(command: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def must_run(command: Sequence[str | Path]) -> None:
    done = run(command)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(map(str, command))} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


def files() -> list[str]:
    """What git knows of, and new files that it does not ignore."""
    listed = run(["git", "-C", REPOSITORY, "ls-files", "--cached", "--others", "--exclude-standard"]).stdout
    return [name for name in listed.splitlines() if (REPOSITORY / name).is_file()]


class Tree:
    """A copy of the tree, and a Python that finds it.

    Args:
        directory: Of the copy; the Python lies beside it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._environment = directory.with_name(f"{directory.name}-python")
        self.python = self._environment / "bin" / "python"

    def make(self, texts: dict[str, bytes], compiled: Path) -> None:
        """Writes the copy, and links what is ``compiled`` of the package."""
        edits.write(self.directory, texts)
        for built in compiled.iterdir():
            place = self.directory / "llm_comm" / built.name
            if built.suffix == ".py" or built.name == "__pycache__":
                continue
            if place.is_symlink():
                place.unlink()
            place.symlink_to(built)
        if not self.python.exists():
            must_run([sys.executable, "-m", "venv", "--without-pip", self._environment])
        (packages,) = (self._environment / "lib").glob("python*/site-packages")
        # Directories that are named so have no .pth file heeded: not that of the checkout's editable install.
        found = [str(self.directory), *(path for path in sys.path if path.endswith("-packages"))]
        (packages / "tree.pth").write_text("\n".join(found) + "\n", encoding="utf-8")


class Builds:
    """The C++ programs with all mutants, each built when it is first asked for."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self._tree = Tree(DIRECTORY / "sources")
        self._lock = threading.Lock()
        self._built: dict[str, Path] = {}
        self._texts = edits.switched(files(), changes_of(mutants))
        edits.write(self._tree.directory, self._texts)

    def tree(self) -> Tree:
        """The copy with all C++ mutants, in which their Python tests run."""
        self._build("core", self._build_core)
        return self._tree

    def driver(self) -> Path:
        """The deterministic driver."""
        return self._build("driver", self._build_driver)

    def sanitized(self) -> Path:
        """The directory of the programs of tests/sanitizers."""
        return self._build("sanitized", self._build_sanitized)

    def _build(self, name: str, build: object) -> Path:
        with self._lock:
            if name not in self._built:
                print(f"building {name} with all C++ mutants", flush=True)
                self._built[name] = build(DIRECTORY / name)  # type: ignore[operator]
            return self._built[name]

    def _build_driver(self, to: Path) -> Path:
        options = ["-DLLM_COMM_WERROR=OFF"]  # an edit may stand on one line that was two
        return driver.build(to, self._tree.directory, options) / driver.PROGRAM

    def _build_core(self, to: Path) -> Path:
        import pybind11

        options = ["-DLLM_COMM_CUDA=OFF", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        options += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_INSTALL_PREFIX={to / 'installed'}"]
        must_run(["cmake", "-S", self._tree.directory, "-B", to, *_generator(), *options])
        must_run(["cmake", "--build", to, "--parallel", str(os.cpu_count()), "--target", "install"])
        self._tree.make(self._texts, to / "installed" / "llm_comm")
        return self._tree.directory

    def _build_sanitized(self, to: Path) -> Path:
        options = ["-DLLM_COMM_SANITIZE=address", "-DCMAKE_CXX_FLAGS=-Wno-misleading-indentation"]  # as above
        must_run(["cmake", "-S", self._tree.directory / "tests" / "sanitizers", "-B", to, *_generator(), *options])
        must_run(
            ["cmake", "--build", to, "--parallel", str(os.cpu_count()), "--target", "kernels", "core", "node_exchange"]
        )
        return to


def _generator() -> list[str]:
    return ["-G", "Ninja"] if shutil.which("ninja") else []


@dataclass(frozen=True)
class Finding:
    """What a check says: "" where it passed, else the test that failed, or of a program its last line."""

    noticed_by: str


class Worker:
    """Runs checks, with at most one Python mutant in a tree of its own. One thread uses it."""

    def __init__(self, number: int, builds: Builds) -> None:
        self._builds = builds
        self._servers: dict[Tree, Server] = {}
        self._tree = Tree(DIRECTORY / f"tree-{number}")
        self._tree.make({file: (REPOSITORY / file).read_bytes() for file in files()}, Path(_core.__file__).parent)

    def check(self, mutant: Mutant, number: int, check: str) -> Finding:
        """Runs ``check`` with a mutant; ``number``: of the switch of C++ mutants. 0: without it.

        Raises:
            RuntimeError: The check could not be run.
        """
        if mutant.is_cpp:
            return self._run(check, number)
        try:
            self._write(mutant, mutated=number != 0)
            return self._run(check, None)
        finally:
            self._write(mutant, mutated=False)

    def _write(self, mutant: Mutant, mutated: bool) -> None:
        for file in {edit.file for edit in mutant.edits}:
            text = edits.source(file)
            for edit in mutant.edits:
                if mutated and edit.file == file:
                    text = edit.applied(text)
            (self._tree.directory / file).write_text(text, encoding="utf-8")

    def _run(self, check: str, switch: int | None) -> Finding:
        kind, *arguments = shlex.split(check)
        environment = {edits.SWITCH: str(switch or 0)}
        if kind == "driver":
            return _run_program(kind, [self._builds.driver(), *arguments], environment)
        if kind == "sanitized":
            return _run_program(kind, [self._builds.sanitized() / arguments[0], *arguments[1:]], environment)
        tree = self._tree if switch is None else self._builds.tree()
        if tree not in self._servers:
            self._servers[tree] = Server(tree)
        return self._servers[tree].run([kind, *arguments], environment)

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()


class Server:
    """A process that runs pytest in a tree (``server.py``)."""

    def __init__(self, tree: Tree) -> None:
        path = os.pathsep.join([str(tree.python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        self._output = Path(tempfile.mkstemp(suffix=".txt", dir=DIRECTORY)[1])
        self._process = subprocess.Popen(
            [str(tree.python), str(Path(__file__).with_name("server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree.directory,
            env={**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def run(self, check: Sequence[str], environment: dict[str, str]) -> Finding:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *check]
        request = {
            "arguments": arguments,
            "environment": environment,
            "output": str(self._output),
            "limit_s": LIMIT_S,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        if status == 0:
            return Finding("")
        if status == -1:
            return Finding(TIME_LIMIT)
        if status < 0:
            return Finding(f"{signal.Signals(-status).name} ended pytest {shlex.join(check)}")
        said = self._output.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", said, flags=re.MULTILINE)
        # 2 with a file named: a mutant may break what the file does when it is imported.
        if failed is None or status > 2:
            raise RuntimeError(f"pytest {shlex.join(check)} ended with {status}:\n{said[-4000:]}")
        return Finding(failed[1])

    def stop(self) -> None:
        self._process.communicate()
        self._output.unlink()


def _run_program(kind: str, command: Sequence[str | Path], environment: dict[str, str]) -> Finding:
    try:
        done = run(command, env={**os.environ, **environment}, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Finding(TIME_LIMIT)
    return Finding("" if done.returncode == 0 else _of_program(kind, done))


def _of_program(kind: str, done: subprocess.CompletedProcess[str]) -> str:
    """The line that says what is wrong, without what changes from run to run."""
    if kind == "driver" and done.returncode == 2:
        raise RuntimeError(f"the driver was misused: {done.stderr}")
    said = re.search(
        r"FAILED: .*|AddressSanitizer: [\w-]+|runtime error: .*|^rank .*", done.stdout + done.stderr, flags=re.MULTILINE
    )
    return f"{kind}: {said[0][:160] if said else f'ended with {done.returncode}'}"
