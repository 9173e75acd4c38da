"""Compiled kernels on disk: made once, found by what they are made of, and never seen half-written."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch

from llm_comm import emulated
from llm_comm.dsl.compiler import cache
from llm_comm.dsl.compiler.cache import cache_directory, cached_library

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

SOURCE = """
#include "llm_comm/platform.cuh"
extern "C" LLM_COMM_KERNEL(1) answer(uint32_t* out) { *out = 42; }
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_COMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_COMM_CACHE_DIR", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert cache_directory() == Path("/one")
    monkeypatch.delenv("LLM_COMM_CACHE_DIR")
    assert cache_directory() == Path("/two/llm_comm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/three/.cache/llm_comm")


@needs_compiler
def test_a_kernel_is_compiled_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cached_library(SOURCE, "answer")
    assert library.is_relative_to(directory)
    kernel = emulated.RawKernel(SOURCE, "answer", library=library)
    out = torch.zeros(1, dtype=torch.int32)
    kernel((1,), (1,), (out.data_ptr(),))
    assert out.item() == 42

    def refuse(*arguments: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(emulated, "compile_library", refuse)
    assert cached_library(SOURCE, "answer") == library
    for other in ((SOURCE + "\n", "answer", ()), (SOURCE, "answer2", ()), (SOURCE, "answer", ("-DX",))):
        with pytest.raises(AssertionError, match="compiled again"):
            cached_library(*other)
    monkeypatch.setattr(cache, "_installed", lambda archive: "other headers")
    with pytest.raises(AssertionError, match="compiled again"):
        cached_library(SOURCE, "answer")


@needs_compiler
def test_another_compiler_has_kernels_of_its_own(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = cached_library(SOURCE, "answer")
    compiler = tmp_path / "other"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo other || exec g++ "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    other = cached_library(SOURCE, "answer")
    assert other != library
    assert other.is_file()


@needs_compiler
def test_what_does_not_compile_leaves_nothing(directory: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"g\+\+ does not compile kernel answer:"):
            cached_library("nonsense", "answer")
    assert not [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_no_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="there is no compiler 'no-such-compiler'; CXX names another"):
        cached_library(SOURCE, "answer")


def compile_with_log(log: str) -> str:
    """In a process of its own: the compiler writes a line each time that it compiles."""
    compiler = Path(log).with_name("logging")
    os.environ["CXX"] = str(compiler)
    os.environ["LLM_COMM_CACHE_DIR"] = str(Path(log).with_name("shared"))
    return str(cached_library(SOURCE, "answer"))


@needs_compiler
def test_processes_compile_a_kernel_once_together(tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "logging"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo compiles >> {log}\nexec g++ "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(4, mp_context=context) as pool:
        libraries = list(pool.map(compile_with_log, [str(log)] * 4))
    assert len(set(libraries)) == 1
    assert Path(libraries[0]).is_file()
    assert log.read_text(encoding="utf-8").splitlines() == ["compiles"]
