"""What may depend on what in the sources; the rules are those of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import graphlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CSRC = REPOSITORY / "csrc"
INCLUDE = CSRC / "include"
FOR_CUDA = {"platform_cuda.cuh", "platform_cuda_multicast.cuh", "platform_cuda_tiles.cuh"}
FOR_HIP = {"platform_hip.cuh"}
HEADERS_FOR_THE_EMULATOR = sorted(p for p in (INCLUDE / "llm_comm").iterdir() if p.name not in FOR_CUDA | FOR_HIP)
OF_EMULATOR = {"platform_emulator.h", "platform_emulator_multicast.h", "platform_emulator_tiles.h"}
#: Those that define the target, and those that choose it.
PLATFORMS = {*FOR_CUDA, *FOR_HIP, *OF_EMULATOR, "platform_types.h", "platform.cuh", "tiles.cuh"}
#: The one that holds instructions of multicast.
MULTIMEM = "platform_cuda_multicast.cuh"

# Layer -> the first parts of "..." includes that it may have.
ALLOWED = {
    "include": {"llm_comm"},
    "algorithms": {"llm_comm", "algorithms"},
    "optional": {"llm_comm", "algorithms", "optional"},
    "emulator": {"llm_comm", "emulator"},
    "host": {"llm_comm", "algorithms", "emulator", "host"},
    "schedules": {"llm_comm", "algorithms", "emulator", "host", "schedules"},
    "nccl": {"llm_comm", "algorithms", "host", "nccl"},
    "python": {"host", "python"},
}
# <...> includes that are not of the C++ library: who may have them.
FOREIGN = {
    r"cuda.*": {"host/cuda", "include/llm_comm/platform", "nccl/cuda"},
    r"hip/.*": {"host/hip"},
    r"pybind11/.*": {"python"},
    r"sys/.*|unistd\.h|sched\.h|time\.h|setjmp\.h|ucontext\.h": {"host", "emulator", "nccl"},
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
    outside = [path for path in sources() if not where(path).startswith(tuple(FOREIGN[r"cuda.*"]))]
    assert offenders(r"\bcuda_runtime\b|\bcuda\.h\b|\bcudaError|\bCUresult\b", outside) == []


def test_assembly_is_in_platform_headers_only() -> None:
    outside = [path for path in sources() if path.name not in PLATFORMS]
    assert offenders(r"\b(asm|__asm__)\b", outside) == []
    assert offenders(r"\basm\b", [INCLUDE / "llm_comm" / "platform_cuda.cuh"]), "the pattern finds what is there"


def test_kernels_do_not_know_the_target() -> None:
    layers = ("algorithms", "optional", "include")
    neutral = [path for layer in layers for path in sources(layer) if path.name not in PLATFORMS]
    assert offenders(r"__CUDA_ARCH__|__CUDACC|__HIP|__gfx|LLM_COMM_EMULATOR", neutral) == []
    assert offenders(r"\b(threadIdx|blockIdx|__syncthreads)\b", neutral) == []
    assert offenders(r"__global__|__device__|__shared__|<<<", neutral) == []


def test_multicast_is_in_one_file() -> None:
    """So that one place decides whether a machine that forbids it ever sees it: the driver's functions are looked up in
    one file, which asks the environment first, and the instructions stand in one other."""
    of_driver = CSRC / "host" / "cuda" / "multicast_memory.cpp"
    instruction = r"\bmultimem\.(?!h\b)"
    assert offenders(instruction, [path for path in sources() if path.name != MULTIMEM]) == []
    assert offenders(instruction, [INCLUDE / "llm_comm" / MULTIMEM]), "the pattern finds what is there"
    named = r"\bcuMulticast|\"cuMulticast"
    assert offenders(named, [path for path in sources() if path != of_driver]) == []
    assert offenders(named, [of_driver]), "the pattern finds what is there"
    text = of_driver.read_text(encoding="utf-8")
    constructor = text[text.index("MulticastMemory::MulticastMemory(") :]
    assert constructor.index("require_multicast_permitted") < constructor.index("load(")
    reads_machine_code = REPOSITORY / "tools" / "check_multicast.py"
    for directory in ("llm_comm", "bench_serving", "examples", "tools"):
        for path in {*(REPOSITORY / directory).rglob("*.py")} - {reads_machine_code}:
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

PACKAGE = REPOSITORY / "llm_comm"
CORE = "llm_comm._core"  # a compiled module
# What a part imports stands in its own row or above it.
PYTHON_LAYERS = (
    {"bare_sources", "errors"},
    {"arrays", "emulated", "files", "installation"},
    {"registry"},
    {"options"},
    {"config"},
    {"planning"},
    {"runtime"},
    {"operations"},
    {"nodes"},
    {"communicator"},
    {"dsl"},
    {"cli", "cli.launch"},
    {"bench"},
    {"integrations"},
    {"demo", "cli.contents", "cli.doctor", "cli.engine_verdicts", "cli.model_verdicts"},
    {"cli.commands"},
    {"__main__"},
)


def python_sources() -> dict[str, str]:
    """The sources of the package by the names of their modules; of ``__init__.py`` it is the package's."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    assert len(found) > 40
    return found


def imported_by(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of all imports wherever they stand, in functions and for type checkers too; "" is no name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their modules in full"
            assert node.module is not None
            yield from ((node.module, alias.name) for alias in node.names)


def imports_within(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules of ``sources`` that each of them imports by name; the packages around those do not count."""

    def resolve(module: str, name: str) -> str:
        full_name = f"{module}.{name}"
        return full_name if full_name in sources or full_name == CORE else module

    return {
        importer: {resolve(*found) for found in imported_by(source)} & sources.keys()
        for importer, source in sources.items()
    }


def circle_in(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in turn, the first one also at the end; none where there is no circle."""
    try:
        graphlib.TopologicalSorter(imports_within(sources)).prepare()
    except graphlib.CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def importers_of_the_root(sources: dict[str, str]) -> set[str]:
    """Modules that take something from ``llm_comm/__init__.py``."""
    return {
        importer
        for importer, source in sources.items()
        for module, name in imported_by(source)
        if module == "llm_comm" and f"llm_comm.{name}" not in {CORE, *sources}
    }


def test_no_imports_go_in_a_circle() -> None:
    assert circle_in(python_sources()) == []


def test_nothing_in_the_package_imports_its_root() -> None:
    assert importers_of_the_root(python_sources()) == set()


@pytest.mark.parametrize("hidden", ["def f():\n    {}", "if TYPE_CHECKING:\n    {}", "try:\n    {}\nfinally: pass"])
def test_hidden_imports_are_found(hidden: str) -> None:
    made_up = {
        "llm_comm": "from llm_comm.a import A",
        "llm_comm.a": hidden.format("from llm_comm.rooms import b"),
        "llm_comm.rooms": "",
        "llm_comm.rooms.b": hidden.format("import llm_comm.c"),
        "llm_comm.c": hidden.format("from llm_comm.a import A"),
    }
    assert set(circle_in(made_up)) == {"llm_comm.a", "llm_comm.rooms.b", "llm_comm.c"}
    assert importers_of_the_root(made_up) == set()
    made_up["llm_comm.c"] = hidden.format("from llm_comm import _core, rooms")
    assert circle_in(made_up) == []
    assert importers_of_the_root(made_up) == set()
    for of_the_root in ("from llm_comm import A", "import llm_comm"):
        made_up["llm_comm.c"] = hidden.format(of_the_root)
        assert importers_of_the_root(made_up) == {"llm_comm.c"}


def test_python_layers() -> None:
    rows = {part: row for row, parts in enumerate(PYTHON_LAYERS) for part in parts}

    def part_of(module: str) -> str:
        """Part of the package; a module of ``cli``, which starts ranks for ``bench`` and hands commands to it."""
        parts = module.split(".")[1:]
        return ".".join(parts) if parts[0] == "cli" else parts[0]

    imports = imports_within(python_sources())
    del imports["llm_comm"]
    assert {part_of(importer) for importer in imports} == rows.keys()
    wrong = [
        f"{importer} imports {found}"
        for importer, all_found in imports.items()
        for found in all_found
        if rows[part_of(found)] > rows[part_of(importer)]
    ]
    assert wrong == []


def test_planning_needs_no_torch() -> None:
    pure = ("llm_comm.registry", "llm_comm.option", "llm_comm.config", "llm_comm.errors", "llm_comm.planning")
    checked = {module: source for module, source in python_sources().items() if module.startswith(pure)}
    assert len(checked) >= 9
    imports = {module: {found.split(".")[0] for found, _ in imported_by(source)} for module, source in checked.items()}
    assert [module for module, found in imports.items() if "torch" in found] == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """Processes of ranks import the module of a test by its name alone."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert [name for name in names if names.count(name) > 1] == []
