"""The library that stands in for NCCL, over emulated GPUs: programs (tests/nccl) that are linked to it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llm_comm
from llm_comm.cli import commands

REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "tests" / "nccl"
sys.path.insert(0, str(SOURCES))

import newest_nccl  # noqa: E402

CSRC = REPOSITORY / "csrc"
LIBRARY = Path(llm_comm.nccl_library(emulated=True))
SCENARIOS = re.findall(
    r'\{"(\w+)", \{\w+, "\d+", (true|false),', (SOURCES / "lifecycle.cpp").read_text(encoding="utf-8")
)
BY_KIND = [
    (name, kind)
    for name, threads in SCENARIOS
    for kind in ("threads", "processes")
    if threads == "true" or kind != "threads"
]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

#: Rows of all algorithms that there may be, so that small messages take each of them, written as `llm-comm tune` does.
ROWS = (
    "all_reduce, up_to: 64, algorithm: one_shot, protocol: LL, blocks: 2, tile_lines: 16, depth: 0",
    "all_reduce, up_to: 4096, algorithm: two_shot_hb, protocol: HB, blocks: 2, tile_lines: 16, depth: 2, us: 3.5",
    "all_reduce, up_to: 1048576, algorithm: two_shot, protocol: LL, blocks: 3, tile_lines: 16, depth: 1",
    "all_gather, up_to: 64, algorithm: push_hb, protocol: HB, blocks: 2, tile_lines: 16, depth: 2",
    "all_gather, up_to: 1048576, algorithm: one_shot, protocol: LL, blocks: 2, tile_lines: 16, "
    "runner_up: {algorithm: push_hb, protocol: HB, us: 3}",
    "all_to_all, up_to: 64, algorithm: push_hb, protocol: HB, blocks: 2, tile_lines: 16, depth: 2",
    "all_to_all, up_to: 1048576, algorithm: one_shot, protocol: LL, blocks: 2, tile_lines: 16",
    "reduce_scatter, up_to: 64, algorithm: push_hb, protocol: HB, blocks: 2, tile_lines: 16, depth: 2",
    "reduce_scatter, up_to: 1048576, algorithm: one_shot, protocol: LL, blocks: 2, tile_lines: 16",
)


def table_for(world: int) -> str:
    rows = "".join(f"  - {{operation: {row}}}\n" for row in ROWS)
    return f"device: emulated\nworld_size: {world}\nmax_message_bytes: 1048576\nrows:\n{rows}"


def compiled(directory: Path, name: str, *sources: str, flags: tuple[str, ...] = ()) -> Path:
    """A program that is linked to the library."""
    built = directory / name
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", *flags, "-o", str(built)]
    subprocess.run([*command, *(str(SOURCES / source) for source in sources), *link_flags(), "-pthread"], check=True)
    return built


def compiled_stand_in(directory: Path, name: str) -> Path:
    """A library that stands in for NCCL's own."""
    built = directory / name
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-shared", "-fPIC"]
    command += [f"-Wl,-soname,{name}", str(SOURCES / "stand_in_nccl.cpp"), "-o", str(built)]
    subprocess.run(command, check=True)
    return built


def link_flags() -> list[str]:
    return [f"-L{LIBRARY.parent}", "-l" + LIBRARY.stem.removeprefix("lib"), f"-Wl,-rpath,{LIBRARY.parent}"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nccl")
    for name in ("collectives", "lifecycle", "forwarding", "disturbed"):
        compiled(directory, name, f"{name}.cpp", "ranks.cpp")
    compiled_stand_in(directory, "libstand_in.so")
    return directory


def run(program: Path, *arguments: object, **environment: str) -> str:
    command = [str(program), *map(str, arguments)]
    settings = {"LLM_COMM_TIMEOUT_S": "60", **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **settings}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("kind", ["threads", "processes", "one"])
def test_collectives(programs: Path, kind: str, world: int) -> None:
    """Ranks that are threads, processes, or communicators of one thread."""
    run(programs / "collectives", kind, world, 12)


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_by_a_table(programs: Path, world: int, tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    table.write_text(table_for(world), encoding="utf-8")
    said = run(programs / "collectives", "processes", world, 40, LLM_COMM_TABLE=str(table), LLM_COMM_NCCL_DEBUG="INFO")
    for algorithm in ("one_shot LL", "two_shot LL", "two_shot_hb HB", "push_hb HB"):
        assert f"llm_comm, {algorithm} ({table.name})" in said


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("scenario", "kind"), BY_KIND)
def test_lifecycle(programs: Path, scenario: str, kind: str, world: int) -> None:
    run(programs / "lifecycle", scenario, kind, world, LLM_COMM_NCCL_DEBUG="NONE")


def test_a_rank_of_another_container_dies(programs: Path) -> None:
    """Numbers of processes mean nothing there: each rank has a PID namespace of its own."""
    if subprocess.run(["unshare", "--pid", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("PID namespaces are not permitted")
    run(programs / "lifecycle", "killed", "containers", 2, LLM_COMM_NCCL_DEBUG="NONE")


@pytest.mark.parametrize(
    "scenario", ["pause_before_hello", "pause_before_descriptor", "flood_after_hello", "death_before_descriptor"]
)
def test_set_up_is_disturbed(programs: Path, scenario: str) -> None:
    run(programs / "disturbed", scenario, LLM_COMM_NCCL_DEBUG="NONE")


def test_all_scenarios_are_run(programs: Path) -> None:
    listed = subprocess.run([programs / "lifecycle", "--list"], capture_output=True, text=True, check=True)
    assert sorted(tuple(line.split()) for line in listed.stdout.splitlines()) == sorted(BY_KIND)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_what_is_not_served_goes_to_the_library_behind(programs: Path, kind: str, world: int) -> None:
    stand_in = str(programs / "libstand_in.so")
    run(programs / "forwarding", kind, world, LLM_COMM_NCCL_LIBRARY=stand_in, LLM_COMM_NCCL_DEBUG="NONE")


def compiled_c(directory: Path, name: str, *link: str) -> Path:
    built = directory / name
    command = ["gcc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", str(SOURCES / "plain.c")]
    subprocess.run([*command, "-o", str(built), *link], check=True)
    return built


def test_a_program_in_c(programs: Path) -> None:
    run(compiled_c(programs, "plain", *link_flags()))


def test_a_program_that_has_nccl(programs: Path) -> None:
    """It is linked to a library of NCCL's name, which moves nothing here; preloaded, this one takes its place."""
    nccl = compiled_stand_in(programs, "libnccl.so.2")
    program = compiled_c(programs, "with_nccl", str(nccl), f"-Wl,-rpath,{programs}")
    alone = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert "numbers are wrong" in alone.stderr
    said = run(program, LD_PRELOAD=str(LIBRARY), LLM_COMM_NCCL_LIBRARY=str(nccl), LLM_COMM_NCCL_DEBUG="INFO")
    assert "at exit: 4 calls by llm_comm, 0 by the NCCL library" in said
    assert "with an NCCL communicator beside it" in said


def test_more_ranks_than_are_served(programs: Path) -> None:
    """With a library behind there is a communicator for them; without one an error that says why."""
    source = programs / "many.cpp"
    source.write_text(
        """
        #include "ranks.h"
        int main() {
          return nccl_test::run_ranks(nccl_test::Ranks::kThreads, 17, [](nccl_test::Rank& self) {
            ncclComm_t comm = nullptr;
            EXPECT_OK(ncclCommInitRank(&comm, 17, self.next_id(), self.rank()));
            float one = 1;
            EXPECT_OK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr));
            EXPECT_OK(ncclCommDestroy(comm));
          });
        }
        """,
        encoding="utf-8",
    )
    built = compiled(programs, "many", str(source), "ranks.cpp", flags=(f"-I{SOURCES}",))
    said = run(built, LLM_COMM_NCCL_LIBRARY=str(programs / "libstand_in.so"), LLM_COMM_NCCL_DEBUG="INFO")
    assert "not served: 17 ranks; llm_comm serves up to 16" in said
    failed = subprocess.run([built], capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode != 0
    assert "17 ranks; llm_comm serves up to 16), and there is no NCCL library" in failed.stderr


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("LLM_COMM_TIMEOUT_S", "soon", "LLM_COMM_TIMEOUT_S=soon is not allowed; valid: a number of seconds"),
        ("LLM_COMM_WORKSPACE_BYTES", "1K", "LLM_COMM_WORKSPACE_BYTES=1K is not allowed; valid: bytes, 1 MiB"),
        ("LLM_COMM_SHARE_GPU", "perhaps", "LLM_COMM_SHARE_GPU=perhaps is not allowed; valid: 1 or 0"),
        ("LLM_COMM_TABLE", "/nowhere/table.yaml", "(LLM_COMM_TABLE): tuning table /nowhere/table.yaml: No such file"),
        ("LLM_COMM_TABLE", "{bad}", "line 5: row 1, {operation: 'all_reduce'"),
    ],
)
def test_wrong_options(programs: Path, tmp_path: Path, name: str, value: str, text: str) -> None:
    """All ranks say the same, and at once."""
    bad = tmp_path / "bad.yaml"
    row = "{operation: all_reduce, up_to: 8, algorithm: fastest, protocol: LL}"
    bad.write_text(f"device: x\nworld_size: 2\nmax_message_bytes: 8\nrows:\n  - {row}\n", encoding="utf-8")
    command = [str(programs / "collectives"), "processes", "2", "1"]
    environment = {**os.environ, name: value.format(bad=bad)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode != 0
    assert done.stderr.count(text) >= 2


def test_exported_symbols_are_those_of_the_newest_nccl() -> None:
    """A program, or an engine's wrapper, finds every function of that release under both of its names; of the library
    nothing else is seen. ``tests/nccl/newest_nccl.py --write`` makes the list."""
    names, known = newest_nccl.exported(LIBRARY), newest_nccl.listed()
    assert len(known) > 190
    assert names - known == {"llm_comm_nccl_library", "llm_comm_nccl_choice", "LLM_COMM_NCCL_2.28"}
    assert known <= names


def test_it_can_be_closed_and_the_process_ends(programs: Path) -> None:
    """By ctypes, as vLLM loads it, with a hub that is open."""
    program = f"""
import ctypes, _ctypes
library = ctypes.CDLL({str(LIBRARY)!r})
unique_id = (ctypes.c_byte * 128)()
assert library.ncclGetUniqueId(unique_id) == 0
_ctypes.dlclose(library._handle)
_ctypes.dlclose(library._handle)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_path_on_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands.main(["nccl-path", "--emulated"]) == 0
    path = capsys.readouterr().out.strip()
    assert path == str(LIBRARY)
    version = ctypes.c_int()
    assert ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version)) == 0
    assert version.value == 23203
    if not llm_comm.cuda_compiled():
        assert commands.main(["nccl-path"]) == 1
        assert "libllm_comm_nccl.so" in capsys.readouterr().err
