"""``llm_comm.emulated.RawKernel``: source in, a kernel that is called as one of cupy."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from llm_comm.emulated import RawKernel

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

SOURCE = """
#include "llm_comm/platform.cuh"
using namespace llm_comm;
extern "C" LLM_COMM_KERNEL(64) scale(float* out, uint32_t count, double factor, bool negate) {
  auto* const shared = shared_memory<float>();
  for (uint32_t i = block_index() * block_threads() + thread_index(); i < count; i += block_count() * block_threads()) {
    shared[thread_index()] = static_cast<float>(i * factor);
    out[i] = negate ? -shared[thread_index()] : shared[thread_index()];
  }
}
"""


@pytest.fixture(scope="module")
def kernel() -> RawKernel:
    return RawKernel(SOURCE, "scale", options=("-DUNUSED=1",))


def test_arguments_and_grid(kernel: RawKernel) -> None:
    out = torch.zeros(100)
    kernel((2,), (16,), (out.data_ptr(), 90, 0.5, False), shared_mem=64)
    assert out[:90].tolist() == [i / 2 for i in range(90)]
    assert out[90:].eq(0).all()
    kernel((1, 1, 1), (8, 1, 1), (out.data_ptr(), 10, 2.0, True), shared_mem=32)
    assert out[:10].tolist() == [-2.0 * i for i in range(10)]


def test_scalars_of_numpy_have_their_own_size(kernel: RawKernel) -> None:
    numpy = pytest.importorskip("numpy")
    out = torch.zeros(4)
    kernel(
        (1,), (4,), (numpy.uint64(out.data_ptr()), numpy.uint32(4), numpy.float64(1), numpy.bool_(False)), shared_mem=16
    )
    assert out.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="argument 2 is 4 bytes long; the kernel's has 8"):
        kernel((1,), (4,), (out.data_ptr(), 4, numpy.float32(1), False), shared_mem=16)


@pytest.mark.parametrize(
    ("grid", "block", "arguments", "message"),
    [
        ((1,), (1,), (0, 0, 1.0), "takes 4 arguments; 3 given"),
        ((1, 2), (1,), (0, 0, 1.0, False), "more than 1 dimension"),
        ((1,), (4, 2), (0, 0, 1.0, False), "more than 1 dimension"),
        ((0,), (1,), (0, 0, 1.0, False), "kernel scale: "),
        ((1,), (2048,), (0, 0, 1.0, False), "kernel scale: .*1024"),
        ((1,), (1,), (torch.zeros(1), 0, 1.0, False), "not a Tensor"),
    ],
)
def test_what_does_not_fit_is_refused(kernel: RawKernel, grid: Any, block: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel(grid, block, arguments, shared_mem=64)


def test_errors_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)does not compile kernel nothing:.*not declared"):
        RawKernel(SOURCE, "nothing")
    for name in ("a\n#error", "größe", "a b", "2a", ""):
        with pytest.raises(ValueError, match="is no identifier"):
            RawKernel(SOURCE, name)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="there is no C\\+\\+ compiler 'no-such-compiler'"):
        RawKernel(SOURCE, "scale")
