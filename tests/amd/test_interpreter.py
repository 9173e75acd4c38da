"""Machine code of AMD GPUs, interpreted by the deterministic driver: bit for bit the results of the emulator."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from faults import FAULTS, Fault
from hip_build import BUILD, REPOSITORY, assembly, needs_compiler

sys.path.append(str(REPOSITORY / "tests" / "deterministic"))

import driver
from edits import Edit

pytestmark = [
    needs_compiler,
    pytest.mark.long,
    pytest.mark.timeout(1800),  # minutes of compilation, beside other tests
]

#: Classes of the registry by the name of an algorithm of all-reduce.
CLASSES = {"one_shot": "AllReduceOneShot", "two_shot": "AllReduceTwoShot", "two_shot_hb": "AllReduceTwoShotHB"}
#: Schedules of each kernel and number of ranks, of at least one message each: of `make test`, and of `make nightly`.
SCHEDULES, MORE_SCHEDULES = 50, 1000
#: Schedules of warps of 64 threads without machine code.
EMULATED_SCHEDULES = 300
#: Schedules within which a planted fault is noticed.
BUDGET = 1000


#: CMake options of a driver that has the shapes of AMD's GPUs.
OPTIONS = ("-DLLM_COMM_LIKE_AMD=ON", "-DLLM_COMM_OPTIMIZE_KERNELS=-O0")
#: A line goes to the rank before its owner.
WRONG_OWNER = Edit(
    "csrc/algorithms/step_pipeline.cuh", "shard_of(ranks_.after(rank_, ++i))", "shard_of(ranks_.after(rank_, ++i + 1))"
)


@pytest.fixture(scope="module")
def programs() -> Path:
    return driver.build(BUILD.with_name("deterministic-amd"), options=OPTIONS)


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """Assembly text by algorithm."""
    return dict(zip(CLASSES, assembly(CLASSES.values()), strict=True))


def test_instructions(programs: Path) -> None:
    """Single instructions give known values, and unknown ones are refused."""
    done = driver.run(programs / "gcn_check")
    assert done.returncode == 0, done.stdout


def test_emulated_kernels_with_warps_of_64_threads(programs: Path) -> None:
    done = driver.run(programs / driver.PROGRAM, "--cases", EMULATED_SCHEDULES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("schedules", [SCHEDULES, pytest.param(MORE_SCHEDULES, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("algorithm", CLASSES)
def test_machine_code(programs: Path, files: dict[str, Path], algorithm: str, ranks: int, schedules: int) -> None:
    """Random messages, all of whose grids run as machine code."""
    subject = ("--algorithm", f"all_reduce/{algorithm}", "--ranks", ranks, "--alone", "--cases", schedules)
    done = driver.run(programs / driver.PROGRAM, *subject, "--machine-code", files[algorithm])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{schedules} schedules" in done.stdout
    found = re.search(r"^(\d+) of (\d+) grids ran as machine code$", done.stdout, flags=re.MULTILINE)
    assert found is not None
    assert int(found[1]) == int(found[2]) > schedules


@pytest.mark.nightly
def test_machine_code_beside_emulated_kernels(programs: Path, files: dict[str, Path]) -> None:
    """All algorithms and worlds; some grids of a schedule run as machine code and others do not."""
    arguments = [argument for file in files.values() for argument in ("--machine-code", file)]
    done = driver.run(programs / driver.PROGRAM, "--cases", MORE_SCHEDULES, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}:{fault.algorithm}")
def test_a_planted_fault_is_noticed(programs: Path, files: dict[str, Path], fault: Fault, tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.s"
    faulty.write_text(fault.plant(files[fault.algorithm].read_text(encoding="utf-8")), encoding="utf-8")
    subject = ("--algorithm", f"all_reduce/{fault.algorithm}", "--alone", "--cases", BUDGET)
    done = driver.run(programs / driver.PROGRAM, *subject, "--machine-code", faulty)
    assert done.returncode == 1, done.stdout + done.stderr
    first = next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert re.search(fault.failure, first), first


@pytest.mark.nightly  # builds the driver once more
def test_a_line_for_another_owner_is_noticed(tmp_path: Path) -> None:
    """In the order of links: a line of each owner at a time."""
    sources = tmp_path / "sources"
    for tree in ("csrc", "cmake", "tests/deterministic", "tests/toy"):
        shutil.copytree(REPOSITORY / tree, sources / tree)
    edited = sources / WRONG_OWNER.file
    edited.write_text(WRONG_OWNER.applied(edited.read_text(encoding="utf-8")), encoding="utf-8")
    program = driver.build(tmp_path / "build", sources, OPTIONS) / driver.PROGRAM
    done = driver.run(program, "--algorithm", "all_reduce/two_shot_hb", "--alone", "--cases", 100)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "element" in done.stdout


def test_an_unknown_instruction_is_refused(programs: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """With its file and line."""
    lines = files["one_shot"].read_text(encoding="utf-8").splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if "s_memrealtime" in line)
    strange = tmp_path / "strange.s"
    strange.write_text("".join([*lines[:number], "\tv_strange_b32 v0, v1\n", *lines[number:]]), encoding="utf-8")
    done = driver.run(
        programs / driver.PROGRAM, "--algorithm", "all_reduce/one_shot", "--cases", 500, "--machine-code", strange
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{strange}:{number + 1}: unknown instruction: v_strange_b32" in done.stderr
