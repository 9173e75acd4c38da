"""Arrays of other libraries, of which NumPy stands for all that have DLPack."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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
        with pytest.raises(UnsupportedInputError, match="cannot use a list"):
            comm.all_reduce([1.0, 2.0])


def test_declined_arrays(ranks: RankPool) -> None:
    ranks.run(2, decline_arrays)
