"""Compiled emulated kernels on disk, shared by all processes of a user.

A file's name is a hash of all that it was made of: source, headers, the emulator's library, compiler, options. So
nothing in the cache is ever out of date, and it can be deleted at any time. (cupy keeps what it compiles for GPUs.)
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
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
    directory = cache_directory() / "kernels"
    library = directory / f"{name}_{_key(code, name, options)}.so"
    if library.is_file():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(library.with_suffix(".lock")):
        if not library.is_file():
            with tempfile.TemporaryDirectory(prefix="compiling_", dir=directory) as work:
                made = Path(work, "kernel.so")
                emulated.compile_library(code, name, options, made)
                # Others see the whole file or none.
                made.replace(library)
    return library


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock ends with the process at the latest. The file stays: who waits for it has it open."""
    with path.open("w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(code: str, name: str, options: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (code, name, "\0".join(options), _installed(), _version(emulated.compiler())):
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
