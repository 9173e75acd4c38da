"""Compilation of kernels, and compiled kernels on disk, shared by all processes of a user.

A file's name is a hash of all that it was made of: source, headers, compiler, options, and for emulated GPUs the
emulator's library. So nothing in the cache is ever out of date, and it can be deleted at any time. A
damaged file is compiled again, and code that another user could have put there is refused (``code_files``).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from llm_comm import emulated
from llm_comm.dsl.compiler import code_files
from llm_comm.files import locked
from llm_comm.installation import digest_of_headers, get_library_dir, get_nvrtc_options

logger = logging.getLogger("llm_comm")

#: Longest wait in seconds for another process that compiles the same kernel: it may have been stopped.
_PATIENCE_S = 20.0
#: Directories of libraries that could not be kept.
_private: list[tempfile.TemporaryDirectory[str]] = []


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``LLM_COMM_CACHE_DIR``, else ``llm_comm`` in ``XDG_CACHE_HOME`` or
    ``~/.cache``."""
    chosen = os.environ.get("LLM_COMM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base, "llm_comm") if base else Path.home() / ".cache" / "llm_comm"


def cached_library(code: str, name: str, driver: emulated.Driver = emulated.PROCESSES) -> Path:
    """The shared library of an emulated kernel: compiled now, or by an earlier call of any process.

    Of processes that ask for one kernel at the same time one compiles, and the others wait for it. Where the directory
    cannot be written, the library lies in a temporary one until this process ends.

    Raises:
        RuntimeError: There is no compiler, or it does not take the source.
        ConfigError: Another user could have put code into the directory of the cache.
        OSError: No temporary file can be written either.
    """
    of_driver = (driver.macro, *driver.defines, _installed(driver.archive))
    parts = (code, name, *of_driver, _version(*emulated.compiler()))

    def make() -> bytes:
        with _work_directory() as work:
            library = Path(work, "kernel.so")
            emulated.compile_library(code, name, (), library, driver)
            return library.read_bytes()

    content, file = _cached(name, "so", parts, make)
    return _private_file(name, content) if file is None else file


def cached_file(name: str, suffix: str, parts: Sequence[str], make: Callable[[], bytes]) -> bytes:
    """What a compiler has made of all that ``parts`` tell, now or in an earlier call of any process.

    Args:
        name, suffix: Of the file, beside the hash of the parts.
        parts: What the content depends on.
        make: Compiles.

    Raises:
        ConfigError: As of ``cached_library``.
    """
    return _cached(name, suffix, parts, make)[0]


def _cached(name: str, suffix: str, parts: Sequence[str], make: Callable[[], bytes]) -> tuple[bytes, Path | None]:
    """Return the content and its file; the file is None where the directory of the cache cannot be written."""
    key, file = _key(parts), _path(name, suffix, parts)
    try:
        code_files.prepare(file.parent)
    except OSError as error:
        _warn_once(file.parent, str(error))
        return make(), None
    found = code_files.read(file, key)
    if found is not None:
        return found, file
    with _one_at_a_time(file):
        found = code_files.read(file, key)
        if found is not None:
            return found, file
        made = make()
        try:
            code_files.write(file, key, made)
        except OSError as error:
            _warn_once(file.parent, str(error))
            return made, None
    return made, file


@contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Lock a file of the cache where that is possible. Two processes without the lock only do the same work twice."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(locked(file.with_suffix(".lock"), _PATIENCE_S))
        yield


def _work_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a directory to compile in: in the system's directory of temporary files, else in the cache."""
    try:
        return tempfile.TemporaryDirectory(prefix="llm_comm_kernel_")
    except OSError:
        return tempfile.TemporaryDirectory(prefix="compiling_", dir=cache_directory() / "kernels")


def _private_file(name: str, content: bytes) -> Path:
    """Write a library that lasts as long as this process."""
    directory = tempfile.TemporaryDirectory(prefix="llm_comm_kernel_")
    _private.append(directory)
    file = Path(directory.name, f"{name}.so")
    file.write_bytes(content)
    return file


@functools.cache
def _warn_once(directory: Path, why: str) -> None:
    logger.warning(
        "compiled kernels are not kept, so each start compiles them: %s cannot be used: %s (LLM_COMM_CACHE_DIR names "
        "another directory)",
        directory,
        why,
    )


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
def _version(*compiler: str) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"{compiler}: none"  # compiling will say so
    return f"{compiler}: {done.stdout}"


def compile_image(code: str, name: str, device: torch.device) -> bytes:
    """What ``Core.load_program`` takes, compiled now or by an earlier call of any process.

    Args:
        code: C++ source.
        name: Of the kernel.
        device: A GPU, for which NVRTC compiles, by cupy; the CPU stands for an emulated one, for which g++ does.

    Raises:
        ModuleNotFoundError: cupy is not installed.
        RuntimeError: The compiler does not take the source.
        ConfigError: Another user could have put code into the directory of the cache.
        OSError: An emulated kernel cannot be written to any file.
    """
    if device.type == "cpu":
        return os.fsencode(cached_library(code, name))
    options = (*get_nvrtc_options(), f"-arch=sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}")
    nvrtc = _nvrtc()
    version = ".".join(map(str, nvrtc.getVersion()))
    parts = (code, name, *options, f"NVRTC {version}")
    return cached_file(name, "cubin", parts, lambda: _cubin(nvrtc, code, name, options))


def _cubin(nvrtc: Any, code: str, name: str, options: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(code, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC does not compile kernel {name}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def _nvrtc() -> Any:
    """cupy's binding of NVRTC."""
    try:
        return importlib.import_module("cupy").cuda.nvrtc
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        raise ModuleNotFoundError(
            "programs of llm_comm.dsl are compiled for GPUs by cupy, which is not installed: pip install "
            f"{cupy_package()}",
            name="cupy",
        ) from error


def cupy_package() -> str:
    """The package of cupy for the CUDA that this torch is built for."""
    major = (torch.version.cuda or "12").partition(".")[0]
    return f"cupy-cuda{major}x"
