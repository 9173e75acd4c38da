"""The two FP8 formats e4m3 (csrc/include/llm_comm/fp8.cuh) beside torch's: all codes, and values between them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

CSRC = Path(__file__).parents[2] / "csrc"
#: Shared library of both directions, for codes and for the bits of floats.
SOURCE = """
#include "llm_comm/fp8.cuh"
using namespace llm_comm;
template <E4m3 Format>
void convert(const uint32_t* bits, uint64_t count, uint8_t* codes, float* values) {
  for (uint64_t i = 0; i < count; ++i) codes[i] = e4m3_from_bits<Format>(bits[i]);
  for (uint32_t code = 0; code < 256; ++code) values[code] = e4m3_to_float<Format>(static_cast<uint8_t>(code));
}
extern "C" void ocp(const uint32_t* b, uint64_t n, uint8_t* c, float* v) { convert<E4m3::kOcp>(b, n, c, v); }
extern "C" void fnuz(const uint32_t* b, uint64_t n, uint8_t* c, float* v) { convert<E4m3::kFnuz>(b, n, c, v); }
"""
FORMATS = {"ocp": (torch.float8_e4m3fn, 448.0, 0x7F), "fnuz": (torch.float8_e4m3fnuz, 240.0, 0x80)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("fp8")
    (directory / "fp8.cpp").write_text(SOURCE)
    flags = ["-std=c++20", "-O1", "-DLLM_COMM_EMULATOR", f"-I{CSRC / 'include'}", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "fp8.cpp", "-o", "fp8.so"], cwd=directory, check=True, timeout=120)
    return str(directory / "fp8.so")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("name", FORMATS)
def test_conversions_are_those_of_torch(library: str, name: str) -> None:
    dtype, largest, nan = FORMATS[name]
    of_codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = of_codes[of_codes.isfinite()].sort().values
    between = (finite[1:].double() + finite[:-1].double()).div(2).float()  # ties, all of them floats
    drawn = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 2, 100_000)
    values = torch.cat([finite, between, between.nextafter(finite[1:]), between.nextafter(finite[:-1]), drawn])
    values = values[values.abs() <= largest].contiguous()
    beyond = torch.tensor([largest * 1.01, -largest * 1.01, torch.inf, -torch.inf, torch.nan, -torch.nan])
    given = torch.cat([values, beyond])

    codes = torch.empty(given.numel(), dtype=torch.uint8)
    back = torch.empty(256)
    convert = getattr(ctypes.CDLL(library), name)
    pointer = ctypes.c_void_p
    convert(
        pointer(given.data_ptr()), ctypes.c_uint64(given.numel()), pointer(codes.data_ptr()), pointer(back.data_ptr())
    )

    assert torch.equal(codes[: values.numel()], values.to(dtype).view(torch.uint8))
    ends = torch.tensor([largest, -largest]).to(dtype).view(torch.uint8).tolist()  # saturation
    assert codes[values.numel() :].tolist() == [*ends, *ends, nan, nan]
    assert torch.equal(back.isnan(), of_codes.isnan())
    assert torch.equal(back.nan_to_num(), of_codes.nan_to_num())
