"""Compiled kernels on disk, shared by all processes of a user.

A file's name is a hash of all that it was made of: source, headers, compiler, options, and for emulated GPUs the
emulator's library. So nothing in the cache is ever out of date, and it can be deleted at any time.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llm_comm import emulated
from llm_comm.installation import digest_of_headers, get_library_dir


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``LLM_COMM_CACHE_DIR``, else ``llm_comm`` in ``XDG_CACHE_HOME`` or
    ``~/.cache``."""
    chosen = os.environ.get("LLM_COMM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base, "llm_comm") if base else Path.home() / ".cache" / "llm_comm"


def cached_library(code: str, name: str, options: Sequence[str] = ()) -> Path:
    """The shared library of an emulated kernel: compiled now, or by an earlier call of any process.

    Of processes that ask for one kernel at the same time one compiles, and the others wait for it.

    Raises:
        RuntimeError: There is no compiler, or it does not take the source.
        OSError: The directory of the cache cannot be written.
    """
    parts = (code, name, "\0".join(options), _installed(), _version(emulated.compiler()))
    return _cached(name, "so", parts, lambda path: emulated.compile_library(code, name, options, path))


def cached_file(name: str, suffix: str, parts: Sequence[str], make: Callable[[Path], object]) -> bytes:
    """What a compiler has made of all that ``parts`` tell, now or in an earlier call of any process.

    Args:
        name, suffix: Of the file, beside the hash of the parts.
        parts: What the content depends on.
        make: Writes a file.

    Raises:
        OSError: The directory of the cache cannot be written.
    """
    return _cached(name, suffix, parts, make).read_bytes()


def _cached(name: str, suffix: str, parts: Sequence[str], make: Callable[[Path], object]) -> Path:
    directory = cache_directory() / "kernels"
    file = directory / f"{name}_{_key(parts)}.{suffix}"
    if file.is_file():
        return file
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(file.with_suffix(".lock")):
        if not file.is_file():
            with tempfile.TemporaryDirectory(prefix="compiling_", dir=directory) as work:
                made = Path(work, f"kernel.{suffix}")
                make(made)
                # Others see the whole file or none.
                made.replace(file)
    return file


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock ends with the process at the latest. The file stays: who waits for it has it open."""
    with path.open("w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()[:32]


@functools.cache
def _installed() -> str:
    """Of all headers, and of the library that kernels are linked with."""
    digest = hashlib.sha256(digest_of_headers().encode())
    digest.update(Path(get_library_dir(), "libllm_comm_emulator.a").read_bytes())
    return digest.hexdigest()


@functools.cache
def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return f"{compiler}: none"  # compiling will say so
    return f"{compiler}: {done.stdout}"
