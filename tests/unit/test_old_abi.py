"""``tools/old_abi.py``: what is linked against its stand-ins asks for nothing that manylinux_2_28 lacks, and runs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tool_modules import tool

#: Threads, dlopen and stat, which are in glibc under newer versions since 2.33 and 2.34; what GCC 11 and newer have put
#: into libstdc++; and a thread-local variable of it.
SOURCE = """\
#include <charconv>
#include <dlfcn.h>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <sys/stat.h>
#include <thread>

extern "C" __attribute__((visibility("default"))) int sum_of_parts(double value) {
  int parts = 0;
  std::once_flag once;
  std::call_once(once, [&] { parts += 1; });
  std::thread([&] { parts += 2; }).join();
  struct stat status;
  if (stat("/", &status) == 0 && S_ISDIR(status.st_mode)) parts += 4;
  try {
    std::rethrow_exception(std::make_exception_ptr(std::runtime_error("thrown")));
  } catch (const std::runtime_error&) {
    parts += 8;
  }
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  if (std::string_view(text, end - text) == "2.25") parts += 16;
  const auto shared = std::make_shared<int>(32);
  std::thread([shared, &parts] { parts += *shared; }).join();
  if (void* self = dlopen(nullptr, RTLD_NOW)) parts += 64 + dlclose(self);
  return parts;
}
"""

MACHINE = platform.machine()
CROSS = "aarch64-linux-gnu-"

pytestmark = pytest.mark.skipif(
    any(shutil.which(program) is None for program in ("gcc", "g++", "ar", "objdump")), reason="needs gcc and binutils"
)


@pytest.fixture(scope="module")
def old_abi() -> Iterator[ModuleType]:
    yield from tool("old_abi")


@pytest.fixture(scope="module", params=["native", "aarch64"])
def library(
    request: pytest.FixtureRequest, old_abi: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """``SOURCE``, linked as libraries of a wheel are: with the compiler of this machine, or a cross compiler under the
    names of the tools."""
    directory = tmp_path_factory.mktemp("old_abi")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "aarch64":
            if shutil.which(f"{CROSS}g++") is None:
                pytest.skip(f"no {CROSS}g++")
            for program in ("gcc", "g++", "ar", "objdump"):
                (directory / program).symlink_to(str(shutil.which(CROSS + program)))
            patch.setenv("PATH", str(directory), prepend=os.pathsep)
            patch.setattr(platform, "machine", lambda: "aarch64")
        yield linked(old_abi, directory)


def linked(old_abi: ModuleType, directory: Path) -> Path:
    old_abi.make(directory)
    options = old_abi.linker_options(directory)
    source, compiled, built = (directory / name for name in ("parts.cpp", "parts.o", "built/parts.so"))
    built.parent.mkdir()  # without the stand-ins, which a program would load
    source.write_text(SOURCE)
    subprocess.run(["g++", "-std=c++20", "-O2", "-fPIC", "-c", str(source), "-o", str(compiled)], check=True)
    flags = options["CMAKE_SHARED_LINKER_FLAGS"].split()
    libraries = options["CMAKE_CXX_STANDARD_LIBRARIES"].split()
    command = ["g++", "-shared", "-Wl,-z,defs", *flags, str(compiled), *libraries, "-o", str(built)]
    subprocess.run(command, check=True)
    return built


def test_every_version_that_it_asks_for_is_old(old_abi: ModuleType, library: Path) -> None:
    listed = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    asked = set(re.findall(r"\*UND\*\s+\S+\s+\(?((?:GLIBC|GLIBCXX|CXXABI)_[0-9.]+)", listed))
    assert asked
    assert [version for version in asked if not old_abi.is_old(version)] == []


def test_what_was_a_library_of_its_own_is_loaded_with_it(library: Path) -> None:
    listed = subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True, check=True).stdout
    assert {"libpthread.so.0", "libdl.so.2", "librt.so.1"} <= set(re.findall(r"NEEDED\s+(\S+)", listed))


def test_it_runs(library: Path) -> None:
    program = library.with_name("program")
    source = "int sum_of_parts(double); int main() { return sum_of_parts(2.25); }"
    flags = ["-x", "c", "-", "-x", "none", str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(["gcc", *flags], input=source, text=True, check=True)
    emulated = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"] if platform.machine() != MACHINE else []
    if emulated and shutil.which(emulated[0]) is None:
        pytest.skip(f"no {emulated[0]}")
    assert subprocess.run([*emulated, str(program)], check=False).returncode == 127


def test_the_newest_version_that_is_old_enough_is_taken(old_abi: ModuleType) -> None:
    listed = """\
0000000000001000 g    DF .text\t0000000000000010 (GLIBC_2.2.5) pow
0000000000001000 g    DF .text\t0000000000000010  GLIBC_2.29  pow
0000000000001000 g   iD  .text\t0000000000000010 (GLIBC_2.2.5) memcpy
0000000000001000 g   iD  .text\t0000000000000010  GLIBC_2.14  memcpy
0000000000000008 g    D  .tbss\t0000000000000008  GLIBCXX_3.4.11 once
0000000000002000  w   DO .bss\t0000000000000008  GLIBC_2.2.5 environ
0000000000000000  w   DF *UND*\t0000000000000000 (GLIBC_2.2.5) missing
0000000000000010 g    D  .tbss\t0000000000000004  GLIBC_PRIVATE errno
0000000000003000 g    DF .text\t0000000000000010  GLIBC_2.34  new
"""
    found = {s.name: (s.version, s.kind) for s in old_abi.newest_old(old_abi.defined_symbols(listed))}
    assert found == {
        "environ": ("GLIBC_2.2.5", "object"),
        "memcpy": ("GLIBC_2.14", "function"),
        "once": ("GLIBCXX_3.4.11", "tls_object"),
        "pow": ("GLIBC_2.2.5", "function"),
    }
