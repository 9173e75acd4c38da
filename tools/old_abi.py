"""Lets libraries that are linked here run with the older glibc and libstdc++ of manylinux_2_28.

    python tools/old_abi.py DIRECTORY

Makes stand-ins for the C and C++ libraries of this machine: shared libraries of the same names that hold nothing but
the symbols, and of each symbol the newest version that manylinux_2_28 knows (glibc 2.28, the libstdc++ of GCC 8). What
is linked against them asks for those versions, which the libraries of this machine and all newer ones have too. What is
newer altogether comes from two archives: ``libstdc++.a``, and ``libold_abi.a``, which has the few names of glibc that
the headers of this machine bring in.

In the containers of manylinux_2_28 none of this is needed. Needs gcc, ar and objdump. ``linker_options()`` says what
CMake is to be given.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, ...]

#: The newest versions that manylinux_2_28 allows, by family.
NEWEST: Mapping[str, Version] = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 24),
    "CXXABI": (1, 3, 11),
}
#: What is linked with: the name for ``-l``, the file of this machine.
LIBRARIES: Mapping[str, str] = {
    "c": "libc.so.6",
    "m": "libm.so.6",
    "pthread": "libpthread.so.0",
    "dl": "libdl.so.2",
    "rt": "librt.so.1",
    "stdc++": "libstdc++.so.6",
}
#: File name of the dynamic loader, by ``platform.machine()``.
LOADERS: Mapping[str, str] = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
#: Names that headers of glibc 2.32 and newer bring in. Before 2.33 the C library had no stat() but only what it is made
#: of here: version 0 is the kernel's own struct, the only one on aarch64 and one of two on x86-64.
#: ``__libc_single_threaded`` is a hint, and 0 is always right.
_NEWER_THAN_HEADERS = """\
struct stat;
extern int __xstat(int version, const char* path, struct stat* result);
extern int __fxstat(int version, int file, struct stat* result);
extern int __lxstat(int version, const char* path, struct stat* result);
char __libc_single_threaded = 0;
int stat(const char* path, struct stat* result) { return __xstat(0, path, result); }
int fstat(int file, struct stat* result) { return __fxstat(0, file, result); }
int lstat(const char* path, struct stat* result) { return __lxstat(0, path, result); }
"""


#: Where the stand-in of a symbol lies, by the kind that the assembler knows it as.
_SECTIONS = {"function": ".text", "object": ".data", "tls_object": '.section .tbss,"awT",@nobits'}


@dataclass(frozen=True)
class Symbol:
    """A symbol of a shared library, in one of its versions."""

    name: str
    version: str  # "GLIBC_2.2.5"
    kind: str  # a key of _SECTIONS
    size: int  # in bytes


def version_of(text: str) -> tuple[str, Version] | None:
    """``("GLIBC", (2, 2, 5))`` for ``"GLIBC_2.2.5"``; None for what is no version that programs may ask for."""
    parts = re.fullmatch(r"([A-Z]+)_([0-9.]+)", text)
    return None if parts is None else (parts[1], tuple(map(int, parts[2].split("."))))


def is_old(version: str) -> bool:
    """Whether manylinux_2_28 has this version."""
    known = version_of(version)
    return known is not None and known[0] in NEWEST and known[1] <= NEWEST[known[0]]


def defined_symbols(objdump_output: str) -> Iterator[Symbol]:
    """What ``objdump -T`` lists as defined and versioned."""
    line = re.compile(r"^[0-9a-f]+ (.{7}) (\S+)\s+([0-9a-f]+) +\(?([A-Za-z]+_[0-9.]+)\)? +(?:\.hidden )?(\S+)$")
    for text in objdump_output.splitlines():
        found = line.match(text)
        if found is None or found[2] in ("*UND*", "*ABS*"):
            continue
        kind = (
            "function" if set("Fi") & set(found[1]) else "tls_object" if found[2] in (".tbss", ".tdata") else "object"
        )
        yield Symbol(found[5], found[4], kind, int(found[3], 16))


def newest_old(symbols: Iterable[Symbol]) -> list[Symbol]:
    """Of each name the newest version that is old enough."""
    best: dict[str, Symbol] = {}
    for symbol in symbols:
        if not is_old(symbol.version):
            continue
        other = best.get(symbol.name)
        if other is None or version_of(symbol.version) > version_of(other.version):  # type: ignore[operator]
            best[symbol.name] = symbol
    return sorted(best.values(), key=lambda symbol: symbol.name)


def assembly(symbols: Iterable[Symbol]) -> str:
    """Definitions of all symbols, in the right version, in the language of the GNU assembler."""
    lines = []
    for number, symbol in enumerate(symbols):
        here = f"stand_in_{number}"
        size = max(symbol.size, 1)
        lines += [_SECTIONS[symbol.kind], f".globl {here}", f".type {here}, @{symbol.kind}", f".size {here}, {size}"]
        lines += [f"{here}:", f".zero {size}"]
        lines.append(f".symver {here}, {symbol.name}@@{symbol.version}")
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def version_script(symbols: Iterable[Symbol]) -> str:
    """The versions as the linker wants them declared."""
    versions = sorted({symbol.version for symbol in symbols})
    return "".join(f"{version} {{}};\n" for version in versions)


def make(directory: Path) -> None:
    """Writes the stand-ins and ``libold_abi.a``.

    Raises:
        subprocess.CalledProcessError: gcc, ar or objdump is missing something or fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, file in LIBRARIES.items():
        listed = _output("objdump", "-T", _place_of(file))
        symbols = newest_old(defined_symbols(listed))
        source, script = directory / f"{name}.s", directory / f"{name}.map"
        source.write_text(assembly(symbols))
        script.write_text(version_script(symbols))
        options = [f"-Wl,-soname,{file}", f"-Wl,--version-script,{script}"] if symbols else [f"-Wl,-soname,{file}"]
        _output("gcc", "-shared", "-nostdlib", *options, str(source), "-o", str(directory / file))
        if name != "c":
            (directory / f"lib{name}.so").unlink(missing_ok=True)
            (directory / f"lib{name}.so").symlink_to(file)
    # As the C library's own: what every shared library has of its own, such as atexit(), is in an archive beside it.
    shared_part = _place_of("libc_nonshared.a")
    loader = _place_of(LOADERS[platform.machine()])
    (directory / "libc.so").write_text(f"GROUP ( {directory / 'libc.so.6'} {shared_part} AS_NEEDED ( {loader} ) )\n")
    source, compiled = directory / "old_abi.c", directory / "old_abi.o"
    source.write_text(_NEWER_THAN_HEADERS)
    _output("gcc", "-O2", "-fPIC", "-fvisibility=hidden", "-c", str(source), "-o", str(compiled))
    _output("ar", "rcs", str(directory / "libold_abi.a"), str(compiled))


def linker_options(directory: Path) -> dict[str, str]:
    """CMake variables with which the libraries of a build are linked against what ``make(directory)`` has written."""
    # The stand-in goes before the archive, so that nothing comes from the archive that the shared library has. What was
    # a library of its own before glibc 2.34 has to be loaded with an older one.
    libraries = f"{directory / 'libstdc++.so'} {_place_of('libstdc++.a')} {directory / 'libold_abi.a'}"
    parts = "-Wl,--no-as-needed -lpthread -ldl -lrt -Wl,--as-needed"
    flags = f"-L{directory} -Wl,--allow-shlib-undefined -Wl,--exclude-libs,ALL"
    return {
        "CMAKE_SHARED_LINKER_FLAGS": flags,
        "CMAKE_MODULE_LINKER_FLAGS": flags,
        "CMAKE_CXX_STANDARD_LIBRARIES": f"{libraries} {parts}",
        "CMAKE_CUDA_STANDARD_LIBRARIES": f"{libraries} {parts}",
    }


def _place_of(file: str) -> str:
    """The path by which gcc finds a library."""
    return _output("gcc", f"-print-file-name={file}").strip()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    make(Path(sys.argv[1]).absolute())
