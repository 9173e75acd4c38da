"""User kernels on emulated GPUs: compiled by a C++ compiler, called like kernels of cupy.

A kernel is written with ``llm_comm/platform.cuh``, whose names work on both kinds of GPU::

    kernel = llm_comm.emulated.RawKernel(SOURCE, "all_gather")   # on a GPU: cupy.RawKernel(SOURCE, "all_gather", ...)
    kernel((blocks,), (threads,), (channels.handle, nbytes))
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llm_comm.installation import get_include, get_library_dir

#: Maximum number of parameters of a kernel.
_MAX_PARAMETERS = 64
_ERROR_BYTES = 512
_COMPILE_LIMIT_S = 300


class Driver(NamedTuple):
    """Emulator that runs a kernel from its compiled library.

    Attributes:
        header: Header included after the kernel's source.
        macro: Macro of that header, without the prefix ``LLM_COMM_``. Expanded with the kernel's name, it defines the
            exported functions.
        archive: Static library in ``get_library_dir()`` to link with.
        defines: Macros, without the prefix, that select the emulator in the headers.
    """

    header: str
    macro: str
    archive: str
    defines: tuple[str, ...]


#: Emulator in which each rank is a process or thread of its own, in CPU memory.
PROCESSES = Driver("llm_comm/emulator/loaded_kernel.h", "LOADED_KERNEL", "libllm_comm_emulator.a", ("EMULATOR",))


class RawKernel:
    """Kernel of an emulated GPU, with the interface of ``cupy.RawKernel``.

    A call returns when the grid has ended. The calling thread executes the GPU: it blocks while it waits for other
    ranks, which must be other processes or threads.

    Args:
        code: C++ source with ``extern "C" LLM_COMM_KERNEL(max_threads) name(...)``.
        name: Name of the kernel: an ASCII identifier of C++.
        options: Further compiler options such as ``-I`` and ``-D``.
        library: Result of ``compile_library`` for the same source, name and options. None: compile now.

    Raises:
        RuntimeError: No compiler was found (``CXX``, or g++ by default), or it rejects the source. The text holds its
            output.
        ValueError: The name is no identifier.
    """

    def __init__(
        self, code: str, name: str, options: Sequence[str] = (), *, library: str | os.PathLike[str] | None = None
    ) -> None:
        self.name = name
        loaded = _compile(code, name, options) if library is None else _load(Path(library))
        self._launch = loaded.llm_comm_launch
        self._launch.restype = ctypes.c_bool
        self._launch.argtypes = [
            ctypes.c_uint32,
            ctypes.c_uint32,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_uint64,
        ]
        sizes = (ctypes.c_uint32 * _MAX_PARAMETERS)()
        count = loaded.llm_comm_parameters(sizes, _MAX_PARAMETERS)
        if count > _MAX_PARAMETERS:
            raise RuntimeError(f"kernel {name} has {count} parameters; {_MAX_PARAMETERS} are the most")
        self._sizes = list(sizes[:count])

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        """Run the grid.

        Args:
            grid: Number of blocks, in one dimension.
            block: Number of threads of a block, in one dimension.
            args: Arguments of the kernel: addresses and other integers, floats (double), bools, or numpy scalars, which
                are passed with their own type.
            shared_mem: Bytes of dynamic shared memory.

        Raises:
            ValueError: Grid or arguments do not fit the kernel.
        """
        if any(n != 1 for n in (*grid[1:], *block[1:])):
            raise ValueError(
                f"kernel {self.name}: grid {tuple(grid)} of blocks {tuple(block)} has more than 1 dimension"
            )
        if len(args) != len(self._sizes):
            raise ValueError(f"kernel {self.name} takes {len(self._sizes)} arguments; {len(args)} given")
        values = [_bytes_of(value) for value in args]
        for i, (value, size) in enumerate(zip(values, self._sizes, strict=True)):
            if len(value) < size:
                raise ValueError(
                    f"kernel {self.name}: argument {i} is {len(value)} bytes long; the kernel's has {size}"
                )
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        addresses = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if not self._launch(grid[0], block[0], shared_mem, addresses, error, _ERROR_BYTES):
            raise ValueError(f"kernel {self.name}: {error.value.decode()}")


def _bytes_of(value: Any) -> bytes:
    """Convert an argument to bytes as cupy does."""
    if isinstance(value, bool):
        return bytes(ctypes.c_bool(value))
    if isinstance(value, int):
        return (value % (1 << 64)).to_bytes(8, "little")
    if isinstance(value, float):
        return bytes(ctypes.c_double(value))
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
        return bytes(value.tobytes())
    raise ValueError(f"a kernel takes numbers and addresses (tensor.data_ptr()), not a {type(value).__name__}")


def compiler() -> list[str]:
    """Return the command of the C++ compiler for emulated kernels: ``CXX`` split into words as by a shell, or g++.

    Raises:
        RuntimeError: A quotation in ``CXX`` is not closed.
    """
    chosen = os.environ.get("CXX", "")
    try:
        return shlex.split(chosen) or ["g++"]
    except ValueError as error:
        raise RuntimeError(f"CXX is {chosen!r}, which is no command: {error}") from None


def why_no_compiler() -> str:
    """Return why ``compiler`` cannot be run, or ""."""
    try:
        command = compiler()
    except RuntimeError as error:
        return str(error)
    if shutil.which(command[0]) is not None:
        return ""
    return f"there is no C++ compiler {shlex.join(command)!r}; CXX names another"


def compile_library(code: str, name: str, options: Sequence[str], library: Path, driver: Driver = PROCESSES) -> None:
    """Compile a kernel to a shared library.

    Args:
        code, name, options: See ``RawKernel``.
        library: File to write. The source file is written next to it, so concurrent calls need different directories.
        driver: Emulator to run the kernel. ``RawKernel`` loads libraries for ``PROCESSES``.

    Raises:
        RuntimeError, ValueError: See ``RawKernel``.
    """
    if not re.fullmatch(r"(?a:[A-Za-z_]\w*)", name):
        raise ValueError(f"a kernel is called {name!r}, which is no identifier of C++ in ASCII")
    why = why_no_compiler()
    if why:
        raise RuntimeError(f"kernel {name}: {why}")
    # Symbols bind within the library: a kernel may have the name of a libc function ("wait") or of another kernel.
    alone = ["-Wl,-Bsymbolic", "-fno-gnu-unique"]
    defines = [f"-DLLM_COMM_{define}" for define in driver.defines]
    # Without contraction to fused multiply-adds, results are the same bits on all CPUs.
    language = ["-std=c++20", "-O1", "-ffp-contract=off"]
    flags = [*language, "-shared", "-fPIC", *alone, *defines, "-I", get_include(), *options]
    source = library.with_suffix(".cpp")
    source.write_text(f'{code}\n#include "{driver.header}"\nLLM_COMM_{driver.macro}({name})\n', encoding="utf-8")
    archive = Path(get_library_dir(), driver.archive)
    command = [*compiler(), *flags, str(source), "-o", str(library), str(archive), "-pthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"kernel {name}: {command[0]} has not ended within {_COMPILE_LIMIT_S} s") from None
    except OSError as error:
        raise RuntimeError(f"kernel {name}: {shlex.join(compiler())!r} (CXX) cannot be run: {error}") from None
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(compiler())} does not compile kernel {name}:\n{done.stderr}")


def _compile(code: str, name: str, options: Sequence[str]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="llm_comm_kernel_") as directory:
        library = Path(directory, "kernel.so")
        compile_library(code, name, options, library)
        # The file may be deleted: the process keeps the library mapped.
        return _load(library)


def _load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
