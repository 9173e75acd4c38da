"""Kernels compile for GPUs of AMD, and their machine code follows the rules of ``tools/check_gcn.py``. Each rule finds
what it is there for, in kernels of a platform header that lacks one line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hip_build import REPOSITORY, assembly, needs_compiler
from tool_modules import tool

sys.path.append(str(REPOSITORY / "tests" / "deterministic"))

from edits import Edit

#: Tests take turns in a build directory.
pytestmark = [needs_compiler, pytest.mark.long, pytest.mark.timeout(1800)]

PLATFORM = "csrc/include/llm_comm/platform_hip.cuh"
#: One of each kind: LL and HB, sums and copies, one phase and two.
SAMPLE = (
    "AllReduceOneShot",
    "AllReduceTwoShot",
    "AllReduceTwoShotHB",
    "AllGatherOneShot",
    "ReduceScatterOneShot",
    "AllToAllOneShot",
)
#: Rule, algorithm, and what a first port would have in its place.
CONTROLS = {
    "fences": (
        "AllGatherDirectPushHB",
        Edit(PLATFORM, "complete_stores(); store_relaxed(address, value);", "store_relaxed(address, value);"),
    ),
    "release": (
        "AllGatherDirectPushHB",
        Edit(
            PLATFORM,
            "complete_stores(); store_relaxed(address, value);",
            "__hip_atomic_store(amdgcn::global(address), value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);",
        ),
    ),
    "barrier": (
        "AllGatherDirectPushHB",
        Edit(PLATFORM, 'asm volatile("s_waitcnt vmcnt(0) lgkmcnt(0)" ::: "memory"); __builtin', "__builtin"),
    ),
    "acquire": ("AllGatherDirectPushHB", Edit(PLATFORM, r'"s_waitcnt vmcnt(0)\n\tbuffer_inv', '"buffer_inv')),
    "poll": (
        "AllGatherOneShot",
        Edit(
            PLATFORM,
            "LLM_COMM_DEVICE Line load_line_relaxed(const void* address) { return load_packet_relaxed(address); }",
            "LLM_COMM_DEVICE Line load_line_relaxed(const void* address) { return __builtin_bit_cast(Line, "
            "__builtin_nontemporal_load(amdgcn::global(static_cast<const amdgcn::Words4*>(address)))); }",
        ),
    ),
    "line": (
        "AllGatherOneShot",
        Edit(
            PLATFORM,
            "void store_line_relaxed(void* address, Line line) { store_packet_relaxed(address, line); }",
            "void store_line_relaxed(void* address, Line line) { store_line(address, line); }",
        ),
    ),
    "call": (
        "AllGatherOneShot",
        Edit(
            PLATFORM,
            "#define LLM_COMM_DEVICE_CALL LLM_COMM_DEVICE",
            "#define LLM_COMM_DEVICE_CALL inline __attribute__((device, noinline))",
        ),
    ),
    "scratch": (
        "AllGatherOneShot",
        Edit(
            PLATFORM,
            "LLM_COMM_UNROLL(4) for (uint32_t word = 0; word < 4; ++word) line.word[word] |= word == i ? bits : 0;",
            "line.word[i] |= bits;",
        ),
    ),
}


@pytest.fixture(scope="module")
def check_gcn() -> Iterator[ModuleType]:
    yield from tool("check_gcn")


def rules_broken(check_gcn: ModuleType, files: list[Path]) -> set[str]:
    kernels = [kernel for file in files for kernel in check_gcn.kernels_of(file.read_text(encoding="utf-8"))]
    assert len(kernels) >= len(files)
    return {rule for kernel in kernels for _, rule in check_gcn.findings(kernel)}


def test_machine_code_follows_the_rules(check_gcn: ModuleType) -> None:
    assert rules_broken(check_gcn, assembly(SAMPLE)) == set()


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_machine_code_of_all_kernels_follows_the_rules(check_gcn: ModuleType, arch: str) -> None:
    assert rules_broken(check_gcn, assembly(["all"], arch)) == set()


def test_kernels_compile_for_gfx950(check_gcn: ModuleType) -> None:
    assert rules_broken(check_gcn, assembly(["AllReduceTwoShot", "AllToAllOneShot"], "gfx950")) == set()


@pytest.mark.parametrize("rule", CONTROLS)
def test_each_rule_finds_what_it_is_there_for(check_gcn: ModuleType, tmp_path: Path, rule: str) -> None:
    algorithm, edit = CONTROLS[rule]
    header = tmp_path / "include" / "llm_comm" / Path(PLATFORM).name
    header.parent.mkdir(parents=True)
    header.write_text(edit.applied((REPOSITORY / PLATFORM).read_text(encoding="utf-8")), encoding="utf-8")
    files = assembly([algorithm], directory=tmp_path / "build", flags=f"-I;{tmp_path / 'include'}")
    assert rule in rules_broken(check_gcn, files)


STORES = """
_ZN1kEv:
\tglobal_store_dwordx4 v[0:1], v[8:11], off sc0 sc1
\t{following}
\ts_endpgm
"""


@pytest.mark.parametrize(
    ("following", "rules"),
    [
        ("s_nop 0", set()),
        ("v_mov_b32_e32 v12, 0", set()),
        ("v_add_u32_e32 v2, v8, v9", set()),
        ("v_mov_b32_e32 v9, 0", {"hazard"}),
        ("v_lshl_add_u64 v[10:11], v[2:3], 0, v[4:5]", {"hazard"}),
    ],
)
def test_the_data_of_a_store_are_left_alone(check_gcn: ModuleType, following: str, rules: set[str]) -> None:
    (kernel,) = check_gcn.kernels_of(STORES.format(following=following))
    assert {rule for _, rule in check_gcn.findings(kernel)} == rules
