"""Compiled kernels on disk: made once, found by what they are made of, and never seen half-written."""

from __future__ import annotations

import concurrent.futures
import errno
import multiprocessing
import os
import re
import shutil
import stat
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_comm import emulated
from llm_comm.dsl.compiler import cache, code_files
from llm_comm.dsl.compiler.cache import cache_directory, cached_file, cached_library
from llm_comm.errors import ConfigError
from llm_comm.files import locked

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

SOURCE = """
#include "llm_comm/platform.cuh"
extern "C" LLM_COMM_KERNEL(1) answer(uint32_t* out) { *out = 42; }
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_COMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_COMM_CACHE_DIR", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert cache_directory() == Path("/one")
    monkeypatch.delenv("LLM_COMM_CACHE_DIR")
    assert cache_directory() == Path("/two/llm_comm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/three/.cache/llm_comm")


@needs_compiler
def test_a_kernel_is_compiled_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cached_library(SOURCE, "answer")
    assert library.is_relative_to(directory)
    kernel = emulated.RawKernel(SOURCE, "answer", library=library)
    out = torch.zeros(1, dtype=torch.int32)
    kernel((1,), (1,), (out.data_ptr(),))
    assert out.item() == 42

    def refuse(*arguments: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(emulated, "compile_library", refuse)
    assert cached_library(SOURCE, "answer") == library
    for other in ((SOURCE + "\n", "answer"), (SOURCE, "answer2")):
        with pytest.raises(AssertionError, match="compiled again"):
            cached_library(*other)
    monkeypatch.setattr(cache, "_digest_of_installation", lambda archive: "other headers")
    with pytest.raises(AssertionError, match="compiled again"):
        cached_library(SOURCE, "answer")


# ---- Files that are not whole, and directories of others ------------------------------------------------------------


def made(times: list[str], content: bytes = b"code") -> bytes:
    """A file of the cache; ``times`` grows when it is made."""

    def make() -> bytes:
        times.append("made")
        return content

    return cached_file("kernel", "cubin", ("source", "options"), make)


def the_file(directory: Path) -> Path:
    (found,) = directory.glob("kernels/*.cubin")
    return found


def test_a_file_that_is_not_whole_is_made_anew(directory: Path) -> None:
    times: list[str] = []
    made(times)
    file = the_file(directory)
    whole = file.read_bytes()
    assert cached_file("other", "bin", ("other",), lambda: b"code") == b"code"
    (other,) = directory.glob("kernels/*.bin")
    flipped = bytes([whole[0] ^ 1]) + whole[1:]
    broken = [b"", b"code", whole[:-1], whole[1:], flipped, whole + b"0", b"x" + whole, other.read_bytes()]
    for content in broken:
        file.write_bytes(content)
        made(times)
        assert file.read_bytes() == whole, content
    for instead in (lambda: os.mkfifo(file), lambda: file.symlink_to(other), lambda: os.link(other, file)):
        file.unlink()
        instead()
        made(times)
        assert file.read_bytes() == whole
        assert not file.is_symlink()
    file.chmod(0o666)  # others may have written to it
    assert made(times) == b"code"
    assert len(times) == 1 + len(broken) + 3 + 1
    assert made(times) == b"code"
    assert len(times) == 1 + len(broken) + 3 + 1
    assert not list(directory.rglob(".*")), "nothing is left beside"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the file of another user, and of no other file."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        return
    own = os.stat(path).st_uid
    monkeypatch.setattr(
        code_files, "_is_own", lambda status: status.st_uid == own and status.st_ino != path.stat().st_ino
    )


@pytest.mark.parametrize("of_whom", ["file", "kernels", "above"])
def test_code_of_another_user_is_refused(directory: Path, of_whom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made([])
    given = {"file": the_file(directory), "kernels": directory / "kernels", "above": directory}[of_whom]
    give_away(given, monkeypatch)
    with pytest.raises(ConfigError, match=r"not loaded from .*kernels: .* belongs to user .*: set LLM_COMM_CACHE_DIR"):
        made([])
    # In a user namespace, root of the host is a stranger: above the directory, and only there, such is taken for root.
    monkeypatch.setattr(code_files, "_unmapped_user", lambda: given.stat().st_uid)
    with nullcontext() if of_whom == "above" else pytest.raises(ConfigError):
        made([])


def test_nobody_else_can_write_code(directory: Path) -> None:
    before = os.umask(0)
    try:
        made([])
    finally:
        os.umask(before)
    kernels = directory / "kernels"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (directory, kernels)] == [0o700, 0o700]
    assert stat.S_IMODE(the_file(directory).stat().st_mode) & 0o022 == 0
    kernels.chmod(0o777)  # of an earlier version: what is in it is looked at
    made([])
    assert stat.S_IMODE(kernels.stat().st_mode) == 0o755
    for mode in (0o1777, 0o775):
        directory.chmod(mode)
        made([])
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match=r"cache has mode 777, so others may write to it"):
        made([])


def test_a_directory_that_cannot_be_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    real = tempfile.mkstemp
    monkeypatch.setattr(tempfile, "mkstemp", lambda **options: refuse_in(directory, full, options) or real(**options))
    times: list[str] = []
    for _ in range(2):
        assert made(times) == b"code"
    assert len(times) == 2
    monkeypatch.setattr(emulated, "compile_library", lambda *arguments: arguments[3].write_bytes(b"library"))
    library = cached_library(SOURCE, "answer")
    assert library.read_bytes() == b"library"
    assert not library.is_relative_to(directory)
    monkeypatch.setenv("LLM_COMM_CACHE_DIR", "/proc/no/such")
    assert made(times) == b"code"
    said = [record.getMessage() for record in caplog.records]
    assert ["No space left on device" in text for text in said] == [True, False], "once for each directory"
    assert "/proc/no/such/kernels cannot be used" in said[1]


def refuse_in(directory: Path, error: OSError, options: dict[str, Any]) -> None:
    if Path(options["dir"]).is_relative_to(directory):
        raise error


def test_a_process_that_does_not_end_is_not_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made([])
    the_file(directory).unlink()
    monkeypatch.setattr(cache, "_LOCK_WAIT_S", 0.1)
    (lock,) = directory.rglob("*.lock")
    with locked(lock):
        assert made([]) == b"code"


# ---- The compiler ----------------------------------------------------------------------------------------------------


@needs_compiler
def test_another_compiler_has_kernels_of_its_own(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = cached_library(SOURCE, "answer")
    compiler = tmp_path / "other"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo other || exec g++ "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"env -- '{compiler}'")  # a command with arguments, as "ccache g++" is
    other = cached_library(SOURCE, "answer")
    assert other != library
    assert other.is_file()


@needs_compiler
def test_what_does_not_compile_leaves_nothing(directory: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"g\+\+ does not compile kernel answer:"):
            cached_library("nonsense", "answer")
    assert not [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("no-such-compiler", "there is no C++ compiler 'no-such-compiler'; CXX names another"),
        ("no-such-compiler -m64", "there is no C++ compiler 'no-such-compiler -m64'; CXX names another"),
        ("/", "there is no C++ compiler '/'; CXX names another"),
        ("g++ 'x", 'CXX is "g++ \'x", which is no command: No closing quotation'),
    ],
)
def test_no_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, variable: str, why: str) -> None:
    monkeypatch.setenv("CXX", variable)
    with pytest.raises(RuntimeError, match=re.escape(why)):
        cached_library(SOURCE, "answer")


def test_the_command_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, command in (("", ["g++"]), (" ", ["g++"]), ("ccache g++ -m64", ["ccache", "g++", "-m64"])):
        monkeypatch.setenv("CXX", variable)
        assert emulated.compiler() == command
    monkeypatch.delenv("CXX")
    assert emulated.compiler() == ["g++"]


def compile_with_log(log: str) -> str:
    """In a process of its own: the compiler writes a line each time that it compiles."""
    compiler = Path(log).with_name("logging")
    os.environ["CXX"] = str(compiler)
    os.environ["LLM_COMM_CACHE_DIR"] = str(Path(log).with_name("shared"))
    return str(cached_library(SOURCE, "answer"))


@needs_compiler
def test_processes_compile_a_kernel_once_together(tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "logging"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo compiles >> {log}\nexec g++ "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(4, mp_context=context) as pool:
        libraries = list(pool.map(compile_with_log, [str(log)] * 4))
    assert len(set(libraries)) == 1
    assert Path(libraries[0]).is_file()
    assert log.read_text(encoding="utf-8").splitlines() == ["compiles"]
