"""The headers and kernels of one's own, compiled as cupy does it: by NVRTC, which has no standard headers and takes no
function of the host. It needs no GPU; torch for CUDA and the toolkit bring it."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import llm_comm
from llm_comm import installation
from llm_comm.dsl.compiler.layout import lay_out
from llm_comm.dsl.compiler.runs import runs_of
from llm_comm.dsl.compiler.source import MAX_THREADS, generate, is_moved, kernel_name
from llm_comm.dsl.compiler.text import element_of
from llm_comm.dsl.library import PROGRAMS, all_gather_hb, two_shot_hb, two_shot_ll
from llm_comm.dsl.programs import ProgramDefinition

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "tests" / "gpu"))

from raw_kernel import compile_by_nvcc, compile_by_nvrtc, find_nvrtc  # noqa: E402
from user_kernels import nvcc_path  # noqa: E402

ARCH = "sm_90"
#: Those that docs/reference/own_kernels.md names.
HEADERS = (
    "channels.cuh",
    "line.cuh",
    "ll_session.cuh",
    "memory_channel.cuh",
    "operation.cuh",
    "port_channel.cuh",
    "reduce.cuh",
    "semaphore.cuh",
    "symmetric.cuh",
    "wait.cuh",
    "workspace_layout.h",
)


needs_nvrtc = pytest.mark.skipif(find_nvrtc() is None, reason="no libnvrtc")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def kernels() -> dict[str, str]:
    """Sources, by the kernel's name behind the last colon."""
    example = load(REPOSITORY / "examples" / "all_gather_channels.py")
    program = load(REPOSITORY / "tests" / "gpu" / "channels.py")
    return {
        "by stores: all_gather": example.BY_STORES,
        "by copy engines: all_gather": example.BY_COPY_ENGINES,
        "exchange": program.EXCHANGE,
        "wait": program.WAIT,
    }


def name_of(kernel: str) -> str:
    return kernel.rpartition(": ")[2]


@needs_nvrtc
@pytest.mark.parametrize("header", HEADERS)
def test_headers(header: str) -> None:
    compile_by_nvrtc(f'#include "llm_comm/{header}"\n', ARCH)


@needs_nvrtc
@pytest.mark.parametrize("name", kernels())
def test_kernels(name: str) -> None:
    assert name_of(name).encode() in compile_by_nvrtc(kernels()[name], ARCH)


def source_of(text: ProgramDefinition, world: int) -> str:
    """That of a program of the DSL's library, as for the blocks and threads of a GPU."""
    program = text.build(world)
    groups = runs_of(program)
    layout = lay_out(program, groups, 1 << 20, 132, MAX_THREADS, masks=is_moved(program))
    return generate(program, groups, layout, element_of(torch.bfloat16))


@needs_nvrtc
@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("text", PROGRAMS, ids=lambda text: text.name)
def test_programs_of_the_dsl(text: ProgramDefinition, world: int) -> None:
    assert kernel_name(text.build(world)).encode() in compile_by_nvrtc(source_of(text, world), ARCH)


@pytest.mark.skipif(nvcc_path() is None, reason="no nvcc")
@pytest.mark.parametrize("text", [two_shot_ll, two_shot_hb, all_gather_hb], ids=lambda text: text.name)
def test_programs_of_the_dsl_by_nvcc(text: ProgramDefinition) -> None:
    assert kernel_name(text.build(4)).encode() in compile_by_nvcc(source_of(text, 4), ARCH)


@needs_nvrtc
def test_errors_are_seen() -> None:
    with pytest.raises(RuntimeError, match="error"):
        compile_by_nvrtc('#include "llm_comm/line.cuh"\nconstexpr int of_the_host() { return 1; }\n', ARCH)


def test_options_change_with_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy looks up what it has compiled by source and options alone."""
    headers = shutil.copytree(llm_comm.get_include(), tmp_path / "include")
    monkeypatch.setattr(installation, "get_include", lambda: str(headers))
    found = installation.get_nvrtc_options.__wrapped__()
    assert found[2] == llm_comm.get_nvrtc_options()[2]
    with (headers / "llm_comm" / "channels.cuh").open("a", encoding="utf-8") as file:
        file.write("// changed\n")
    changed = installation.get_nvrtc_options.__wrapped__()
    assert changed[:2] == found[:2]
    assert changed[2] != found[2]


@pytest.mark.skipif(nvcc_path() is None, reason="no nvcc")
@pytest.mark.parametrize("name", kernels())
def test_kernels_by_nvcc(name: str) -> None:
    assert name_of(name).encode() in compile_by_nvcc(kernels()[name], ARCH)
