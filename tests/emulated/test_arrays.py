"""Arrays of other libraries, of which NumPy stands for all that have DLPack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator
from reference import assert_is_sum, contributions

from llm_comm import UnsupportedInputError


def reduce_arrays(dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        inputs = contributions(comm.world_size, 300, dtype)
        x = inputs[comm.rank].numpy().reshape(3, 100).copy()
        assert comm.accepts(x)
        assert comm.plan(x).message_bytes == x.nbytes

        new = comm.all_reduce(x)
        assert type(new) is np.ndarray
        assert new.shape == x.shape
        assert_is_sum(torch.from_numpy(new.ravel().copy()), inputs, "a new array")
        new += 1  # it is the caller's

        out = np.zeros_like(x)
        assert comm.all_reduce(x, out=out) is out
        assert_is_sum(torch.from_numpy(out.ravel()), inputs, "out")
        assert comm.all_reduce(x, out=x) is x
        assert_is_sum(torch.from_numpy(x.ravel()), inputs, "in place")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_arrays(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(2, reduce_arrays, dtype)


def reduce_read_only_array() -> None:
    x = np.ones(20, dtype=np.float32)
    x.flags.writeable = False
    with make_communicator() as comm:
        assert (comm.all_reduce(x) == comm.world_size).all()
        assert (x == 1).all()


def test_read_only_input(ranks: RankPool) -> None:
    """Only ``out`` is written."""
    ranks.run(2, reduce_read_only_array)


class Immutable:
    """Like an array of JAX: hands out its memory, but nobody is to write it."""

    __module__ = "jaxlib.fake"

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def decline_outputs(directory: Path) -> None:
    read_only = np.ones(4, dtype=np.float32)
    read_only.flags.writeable = False
    path = directory / f"numbers{dist.get_rank()}"
    path.write_bytes(np.ones(4, dtype=np.float32).tobytes())
    x = np.ones(4, dtype=np.float32)
    with make_communicator() as comm:
        for out in (read_only, np.memmap(path, dtype=np.float32, mode="r"), Immutable(x.copy())):
            with pytest.raises(UnsupportedInputError, match="read-only"):
                comm.all_reduce(x, out=out)
            with pytest.raises(UnsupportedInputError, match="read-only"):
                comm.all_reduce(out, out=out)
            with pytest.raises(UnsupportedInputError, match="read-only"):
                comm.all_gather(x[:2], out=out)
        assert (read_only == 1).all()
        with pytest.raises(UnsupportedInputError, match="x is a tensor, out a ndarray"):
            comm.all_reduce(torch.from_numpy(x), out=x)
        out = torch.empty(4)
        assert comm.all_reduce(x, out=out) is out
        assert out.eq(comm.world_size).all()


def test_outputs_that_cannot_be_written(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, decline_outputs, tmp_path)


def decline_arrays() -> None:
    with make_communicator() as comm:
        for array, reason in (
            (np.ones((4, 6), dtype=np.float32).T, "not contiguous"),
            (np.ones(4, dtype=np.int64), "torch.int64 is not one of"),
        ):
            assert not comm.accepts(array)
            assert reason in comm.plan(array).reason
            with pytest.raises(UnsupportedInputError, match=reason):
                comm.all_reduce(array)
        # Not even tensors.
        big_endian = np.ones(4, dtype=">f4")
        for array, reason in ((np.ones(4, "f4")[::-1], "negative strides"), (big_endian, "cannot use the ndarray")):
            with pytest.raises(UnsupportedInputError, match=reason):
                comm.accepts(array)
        with pytest.raises(UnsupportedInputError, match="cannot use a list"):
            comm.all_reduce([1.0, 2.0])


def test_declined_arrays(ranks: RankPool) -> None:
    ranks.run(2, decline_arrays)
