"""Compiled kernels on disk, shared by all processes of a user.

A file's name is a hash of all that it was made of: source, headers, compiler, options, and for emulated GPUs the
emulator's library. So nothing in the cache is ever out of date, and it can be deleted at any time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from llm_comm import emulated
from llm_comm.installation import digest_of_headers, get_library_dir
from llm_comm.locks import locked


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``LLM_COMM_CACHE_DIR``, else ``llm_comm`` in ``XDG_CACHE_HOME`` or
    ``~/.cache``."""
    chosen = os.environ.get("LLM_COMM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base, "llm_comm") if base else Path.home() / ".cache" / "llm_comm"


def cached_library(
    code: str, name: str, options: Sequence[str] = (), driver: emulated.Driver = emulated.PROCESSES
) -> Path:
    """The shared library of an emulated kernel: compiled now, or by an earlier call of any process.

    Of processes that ask for one kernel at the same time one compiles, and the others wait for it.

    Raises:
        RuntimeError: There is no compiler, or it does not take the source.
        OSError: The directory of the cache cannot be written.
    """
    parts = _parts_of_library(code, name, options, driver)
    return _cached(name, "so", parts, lambda path: emulated.compile_library(code, name, options, path, driver))


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
    file = _path(name, suffix, parts)
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_suffix(".lock")):
        if not file.is_file():
            with tempfile.TemporaryDirectory(prefix="compiling_", dir=file.parent) as work:
                made = Path(work, f"kernel.{suffix}")
                make(made)
                # Others see the whole file or none.
                made.replace(file)
    return file


def library_path(
    code: str, name: str, options: Sequence[str] = (), driver: emulated.Driver = emulated.PROCESSES
) -> Path:
    """Where ``cached_library`` has it, or will have it."""
    return _path(name, "so", _parts_of_library(code, name, options, driver))


def _parts_of_library(code: str, name: str, options: Sequence[str], driver: emulated.Driver) -> tuple[str, ...]:
    of_driver = (driver.macro, *driver.defines, _installed(driver.archive))
    return (code, name, "\0".join(options), *of_driver, _version(emulated.compiler()))


def _path(name: str, suffix: str, parts: Sequence[str]) -> Path:
    return cache_directory() / "kernels" / f"{name}_{_key(parts)}.{suffix}"


def _key(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()[:32]


@functools.cache
def _installed(archive: str) -> str:
    """Of all headers, and of the library that kernels are linked with."""
    digest = hashlib.sha256(digest_of_headers().encode())
    digest.update(Path(get_library_dir(), archive).read_bytes())
    return digest.hexdigest()


@functools.cache
def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return f"{compiler}: none"  # compiling will say so
    return f"{compiler}: {done.stdout}"
