"""What may depend on what in the sources; the rules are those of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CSRC = REPOSITORY / "csrc"
INCLUDE = CSRC / "include"
HEADERS_FOR_THE_EMULATOR = sorted(p for p in (INCLUDE / "llm_comm").iterdir() if p.name != "platform_cuda.cuh")
PLATFORMS = {"platform_cuda.cuh", "platform_emulator.h", "platform_types.h", "platform.cuh"}

# Layer -> the first parts of "..." includes that it may have.
ALLOWED = {
    "include": {"llm_comm"},
    "kernels": {"llm_comm", "kernels"},
    "emulator": {"llm_comm", "emulator"},
    "host": {"llm_comm", "kernels", "emulator", "host"},
    "python": {"host"},
}
# <...> includes that are not of the C++ library: who may have them.
FOREIGN = {
    r"cuda.*": {"host/cuda", "include/llm_comm/platform"},
    r"pybind11/.*": {"python"},
    r"sys/.*|unistd\.h|sched\.h|time\.h|setjmp\.h|ucontext\.h": {"host", "emulator"},
}


def sources(layer: str = "") -> list[Path]:
    found = sorted(path for path in (CSRC / layer).rglob("*") if path.suffix in {".h", ".cuh", ".cpp", ".cu"})
    assert found
    return found


def code_of(path: Path) -> str:
    """The text of a C++ source without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def where(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


def offenders(pattern: str, files: list[Path]) -> list[str]:
    """``file: line`` of every line of code that has a match."""
    lines = ((path, line) for path in files for line in code_of(path).splitlines())
    return [f"{where(path)}: {line.strip()}" for path, line in lines if re.search(pattern, line)]


def includes(path: Path, quote: str) -> list[str]:
    opening, closing = quote
    return re.findall(rf"^\s*#\s*include\s*{opening}([^{closing}]+){closing}", code_of(path), flags=re.MULTILINE)


def test_every_source_is_in_a_layer() -> None:
    assert {path.relative_to(CSRC).parts[0] for path in sources()} == set(ALLOWED)


@pytest.mark.parametrize("layer", ALLOWED)
def test_dependencies_point_one_way(layer: str) -> None:
    wrong = [
        f"{where(path)} includes {name}"
        for path in sources(layer)
        for name in includes(path, '""')
        if name.partition("/")[0] not in ALLOWED[layer]
    ]
    assert wrong == []


def test_headers_of_other_projects() -> None:
    wrong = [
        f"{where(path)} includes <{name}>"
        for path in sources()
        for name in includes(path, "<>")
        for pattern, places in FOREIGN.items()
        if re.fullmatch(pattern, name) and not where(path).startswith(tuple(places))
    ]
    assert wrong == []


def test_cpu_code_does_not_include_cuda_headers() -> None:
    outside = [path for path in sources() if not where(path).startswith(("host/cuda", "include/llm_comm/platform"))]
    assert offenders(r"\bcuda_runtime\b|\bcuda\.h\b|\bcudaError|\bCUresult\b", outside) == []


def test_assembly_is_in_platform_headers_only() -> None:
    outside = [path for path in sources() if path.name not in PLATFORMS]
    assert offenders(r"\b(asm|__asm__)\b", outside) == []
    assert offenders(r"\basm\b", [INCLUDE / "llm_comm" / "platform_cuda.cuh"]), "the pattern finds what is there"


def test_kernels_do_not_know_the_target() -> None:
    neutral = [path for path in sources("kernels") + sources("include") if path.name not in PLATFORMS]
    assert offenders(r"__CUDA_ARCH__|__CUDACC|LLM_COMM_EMULATOR|\b(threadIdx|blockIdx|__syncthreads)\b", neutral) == []
    assert offenders(r"__global__|__device__|__shared__|<<<", neutral) == []


def test_multicast_is_in_one_file() -> None:
    """So that one place decides whether a machine that forbids it ever sees it."""
    pattern = r"multimem|cuMulticast(?!Granularity)"
    outside = [path for path in sources() if path.name != "platform_cuda.cuh"]
    assert offenders(pattern, outside) == []
    for path in (REPOSITORY / "llm_comm").rglob("*.py"):
        assert not re.search(r"cuMulticast|multimem\.", path.read_text(encoding="utf-8")), path


# ---- Headers stand alone -------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("header", HEADERS_FOR_THE_EMULATOR, ids=lambda path: path.name)
def test_header_stands_alone(header: Path, tmp_path: Path) -> None:
    user = tmp_path / "user.cpp"
    user.write_text(f'#include "llm_comm/{header.name}"\n', encoding="utf-8")
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-DLLM_COMM_EMULATOR"]
    done = subprocess.run([*command, "-I", str(INCLUDE), str(user)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- Python --------------------------------------------------------------------------------------------------------


def imported_by(module: str) -> Iterator[str]:
    """What the top level of a module imports; imports for type checkers do not count."""
    tree = ast.parse((REPOSITORY / "llm_comm" / f"{module}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", ["config", "errors", "selection"])
def test_pure_modules_need_neither_torch_nor_the_core(module: str) -> None:
    names = list(imported_by(module))
    assert names
    assert [name for name in names if name.startswith(("torch", "llm_comm._core", "llm_comm.comm"))] == []


@pytest.mark.parametrize("module", ["bootstrap", "ops", "arrays", "selection", "config"])
def test_parts_do_not_know_the_communicator(module: str) -> None:
    assert [name for name in imported_by(module) if "communicator" in name.lower()] == []
