"""tools/check_multicast.py, on canned texts, and on kernels where there is a CUDA toolkit to compile them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llm_comm.registry import operations

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "tools"))

import check_multicast  # noqa: E402

SUMS = "        /*0050*/  LDGMC.E.F32ADD.BF16x8.RN.STRONG.SYS R4, [UR4] ;"
STORE = "        /*0060*/  STG.E.128.STRONG.SYS desc[UR8][R10.64], R4 ;"
SPILL = "        /*0070*/  STL.64 [R1], R2 ;"
PTX = """.func  (.param .b32 retval) helper(
// .visible .entry no_entry(
.visible .entry {name}(
{body}
ret;
"""
ST = "\tmultimem.st.relaxed.sys.global.v4.f32 [%rd1], {%f1,%f2,%f3,%f4};\n"
LD = "\tmultimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%r1,%r2,%r3,%r4}, [%rd1];\n"
RED = "\tmultimem.red.release.sys.global.add.u32 [%rd1], 1;\n"
FENCE = "\tfence.proxy.alias;\n"


def test_what_is_expected_is_what_the_registry_says() -> None:
    algorithms = [algorithm for operation in operations().values() for algorithm in operation.algorithms]
    by_switch = {f"{a.operation}_{a.name}": a for a in algorithms if a.uses_multimem}
    assert set(check_multicast.EXPECTED) == set(by_switch)
    for kernel, (sums, _) in check_multicast.EXPECTED.items():
        assert sums == by_switch[kernel].sums_in_switch


@pytest.mark.parametrize(
    ("kernel", "lines", "wrong"),
    [
        ("all_reduce_two_shot_ld_reduce<0, 2>", [SUMS, STORE], ""),
        ("all_reduce_two_shot_ld_reduce<0, 2>", [STORE], "0 sums by the switch"),
        ("all_reduce_two_shot_switch<0, 2>", [STORE], ""),
        ("all_reduce_two_shot_switch<0, 2>", [STORE, SUMS], "1 sums by the switch"),
        ("all_reduce_two_shot<0, 2>", [SUMS, SUMS], "2 sums by the switch"),
        ("all_reduce_two_shot<0, 2>", [STORE, SPILL], ""),
        ("all_gather_push_switch<3, 8>", [STORE, SPILL], "1 accesses to local memory"),
    ],
)
def test_machine_code(kernel: str, lines: list[str], wrong: str) -> None:
    assert check_multicast.check_sass({kernel: lines}) == ([f"{kernel}: {wrong}"] if wrong else [])


@pytest.mark.parametrize(
    ("kernel", "body", "wrong"),
    [
        ("all_reduce_two_shot_ld_reduce", LD + ST + FENCE, ""),
        ("all_reduce_two_shot_ld_reduce", LD + FENCE, "1 sums, 0 stores and 0 additions by the switch"),
        ("all_reduce_two_shot_ld_reduce", LD + ST, "no fence of aliases"),
        ("all_reduce_one_shot_ld_reduce", LD + ST + FENCE, "1 sums, 1 stores and 0 additions by the switch"),
        ("all_gather_push_switch", ST + RED + FENCE, "0 sums, 1 stores and 1 additions by the switch"),
        ("all_gather_push_hb", "\t// " + ST.strip() + "\n", ""),
        ("all_gather_push_hb", ST, "1 of multimem.st"),
        ("all_gather_push_hb", FENCE, "1 of fence.proxy.alias"),
    ],
)
def test_ptx(kernel: str, body: str, wrong: str) -> None:
    counts = check_multicast.ptx_counts(PTX.format(name=kernel, body=body))
    assert set(counts) == {"helper", kernel}
    assert check_multicast.check_ptx(counts) == ([f"{kernel}: {wrong}"] if wrong else [])


def compiled(directory: Path, header: str, kernel: str, *options: str) -> None:
    source = directory / "kernel.cu"
    source.write_text(
        f'#include "optional/all_reduce/{header}.cuh"\nnamespace llm_comm {{\n'
        f"void (*kernel)(cuda::AllReduceArgs) = &cuda::{kernel}<DataType::kBFloat16, 2>;\n}}\n",
        encoding="utf-8",
    )
    includes = [f"-I{REPOSITORY / 'csrc'}", f"-I{REPOSITORY / 'csrc' / 'include'}"]
    command = ["nvcc", "-std=c++20", "--expt-relaxed-constexpr", *includes, *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not all(map(shutil.which, ("nvcc", "c++filt"))), reason="needs nvcc and c++filt")
@pytest.mark.parametrize("name", ["two_shot_ld_reduce", "one_shot_hb"])
def test_ptx_of_the_compiler(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ptx = tmp_path / "kernel.ptx"
    compiled(tmp_path, name, f"all_reduce_{name}", "-arch=compute_90", "-ptx", "-o", str(ptx))
    monkeypatch.setattr(sys, "argv", ["check_multicast.py", "--ptx", str(ptx)])
    assert check_multicast.main() == 0
    count = 1 if name == "two_shot_ld_reduce" else 0
    assert f"{count} of them kernels by SwitchChannel: 0 wrong" in capsys.readouterr().out
    ptx.write_text(ptx.read_text(encoding="utf-8").replace("all_reduce_two", "all_reduce_new"), encoding="utf-8")
    assert check_multicast.main() == count  # whose name is not that of one


@pytest.mark.skipif(
    not all(map(shutil.which, ("nvcc", "cuobjdump", "nvdisasm", "c++filt"))), reason="needs a whole CUDA toolkit"
)
def test_machine_code_of_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cubin = tmp_path / "kernel.cubin"
    compiled(tmp_path, "one_shot_ld_reduce", "all_reduce_one_shot_ld_reduce", "-arch=sm_90", "-cubin", "-o", str(cubin))
    monkeypatch.setattr(sys, "argv", ["check_multicast.py", str(cubin)])
    assert check_multicast.main() == 0
    assert "1 functions, 1 of them kernels by SwitchChannel: 0 wrong" in capsys.readouterr().out
