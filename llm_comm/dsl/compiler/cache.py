"""Compilation of kernels, with a cache on disk that all processes of a user share.

A file name contains a hash of everything that determines the file: source, headers, compiler, options, and for emulated
GPUs the emulator's library. Entries therefore never become stale, and the cache can be deleted at any time. A damaged
file is compiled again. Code that another user could have written is rejected (``code_files``).
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

#: Longest wait in seconds for another process that compiles the same kernel. That process may have been stopped.
_LOCK_WAIT_S = 20.0
#: Temporary directories of libraries that could not be cached.
_private: list[tempfile.TemporaryDirectory[str]] = []


def cache_directory() -> Path:
    """Return the directory of compiled kernels: ``LLM_COMM_CACHE_DIR``, or ``llm_comm`` in ``XDG_CACHE_HOME`` or
    ``~/.cache``."""
    chosen = os.environ.get("LLM_COMM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base, "llm_comm") if base else Path.home() / ".cache" / "llm_comm"


def cached_library(code: str, name: str, driver: emulated.Driver = emulated.PROCESSES) -> Path:
    """Return the shared library of an emulated kernel, from the cache or newly compiled.

    If several processes ask for one kernel at the same time, one compiles and the others wait. If the cache cannot be
    written, the library is in a temporary directory until this process ends.

    Raises:
        RuntimeError: There is no compiler, or it rejects the source.
        ConfigError: Another user could have put code into the cache directory.
        OSError: No temporary file can be written either.
    """
    of_driver = (driver.macro, *driver.defines, _digest_of_installation(driver.archive))
    parts = (code, name, *of_driver, _version(*emulated.compiler()))

    def make() -> bytes:
        with _work_directory() as work:
            library = Path(work, "kernel.so")
            emulated.compile_library(code, name, (), library, driver)
            return library.read_bytes()

    content, file = _cached(name, "so", parts, make)
    return _private_file(name, content) if file is None else file


def cached_file(name: str, suffix: str, parts: Sequence[str], make: Callable[[], bytes]) -> bytes:
    """Return the content of a compiled file, from the cache or by ``make``.

    Args:
        name: File name, without the hash.
        suffix: Suffix of the file name.
        parts: Everything that the content depends on.
        make: Compiles.

    Raises:
        ConfigError: See ``cached_library``.
    """
    return _cached(name, suffix, parts, make)[0]


def _cached(name: str, suffix: str, parts: Sequence[str], make: Callable[[], bytes]) -> tuple[bytes, Path | None]:
    """Return content and file. The file is None if the cache directory cannot be written."""
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
    """Hold the lock of a cache file if possible. Without the lock two processes only duplicate work."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(locked(file.with_suffix(".lock"), _LOCK_WAIT_S))
        yield


def _work_directory() -> tempfile.TemporaryDirectory[str]:
    """Create a directory to compile in: in the system's temporary directory, or else in the cache."""
    try:
        return tempfile.TemporaryDirectory(prefix="llm_comm_kernel_")
    except OSError:
        return tempfile.TemporaryDirectory(prefix="compiling_", dir=cache_directory() / "kernels")


def _private_file(name: str, content: bytes) -> Path:
    """Write a library to a temporary directory that is deleted when this process ends."""
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
def _digest_of_installation(archive: str) -> str:
    """Return a digest of all headers and of the library that kernels are linked with."""
    digest = hashlib.sha256(digest_of_headers().encode())
    digest.update(Path(get_library_dir(), archive).read_bytes())
    return digest.hexdigest()


@functools.cache
def _version(*compiler: str) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"{compiler}: none"  # the compilation reports the missing compiler
    return f"{compiler}: {done.stdout}"


def compile_image(code: str, name: str, device: torch.device) -> bytes:
    """Return the compiled kernel in the form that ``Core.load_program`` takes, from the cache or newly compiled.

    Args:
        code: C++ source.
        name: Name of the kernel.
        device: A GPU: NVRTC compiles, through cupy, and the result is a cubin. The CPU stands for an emulated GPU: the
            C++ compiler compiles, and the result is the path of a library.

    Raises:
        ModuleNotFoundError: cupy is not installed.
        RuntimeError: The compiler rejects the source.
        ConfigError: Another user could have put code into the cache directory.
        OSError: An emulated kernel cannot be written to any file.
    """
    if device.type == "cpu":
        return os.fsencode(cached_library(code, name))
    options = (*get_nvrtc_options(), f"-arch=sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}")
    nvrtc = _nvrtc()
    version = ".".join(map(str, nvrtc.getVersion()))
    parts = (code, name, *options, f"NVRTC {version}")  # the options have a digest of the headers
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
    """Return cupy's binding of NVRTC."""
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
    """Return the name of cupy's package for the CUDA version of this torch."""
    major = (torch.version.cuda or "12").partition(".")[0]
    return f"cupy-cuda{major}x"
