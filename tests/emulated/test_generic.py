"""Operations of the registry that have no method: what `Communicator.run` checks, and that it runs them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankPool, make_communicator
from reference import DTYPES, assert_is_sum, contributions
from tables import plain_row

from llm_comm import Communicator, LaunchError, UnsupportedInputError, registry
from llm_comm.operations.generic import GenericOperation

OPERATION = "stand_in"


def stand_in(**changes: Any) -> registry.Operation:
    """The all-reduce under another name, as if somebody had added it."""
    plain = registry.operations()["all_reduce"]
    return plain._replace(name=OPERATION, **changes)


def with_stand_in(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    known = {**registry.operations(), OPERATION: stand_in(**changes)}
    patch.setattr(registry, "operations", lambda: known)


def check_sums() -> None:
    with pytest.MonkeyPatch.context() as patch, make_communicator() as comm:
        with_stand_in(patch)
        for count in (1, 7, 1000, 300_007):
            for dtype in DTYPES:
                inputs = contributions(comm.world_size, count, dtype)
                for _ in range(2):
                    out = torch.empty_like(inputs[0])
                    assert comm.run(OPERATION, {"output": out, "input": inputs[comm.rank]}) is None
                    assert_is_sum(out, inputs, f"{count} elements of {dtype}")
                plan = comm.plan_for(OPERATION, out)
                assert (plan.operation, plan.algorithm, plan.chunk_rows) == (OPERATION, "one_shot", 0)
                assert "has no row for stand_in: the first candidate" in plan.reason
        row = plain_row(1 << 30, "two_shot", 3, 4, 1)._replace(operation=OPERATION)
        comm.use_table(comm.table.with_rows(row))
        comm.run(OPERATION, {"input": inputs[comm.rank], "output": out})
        assert_is_sum(out, inputs, "by a row")
        assert comm.plan_for(OPERATION, out).algorithm == "two_shot"
        (prepared,) = comm._other_operations._operations[OPERATION]._prepared.values()
        assert prepared.plan.algorithm == "two_shot"
        empty = torch.empty(0)
        comm.run(OPERATION, {"input": empty, "output": torch.empty(0)})


def test_an_operation_by_name(ranks: RankPool) -> None:
    ranks.run(3, check_sums)


X = torch.ones(64)
#: Buffers, and what the error says.
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "no output": ({"input": X}, "stand_in: it needs buffer output"),
    "no input": ({"output": X}, "stand_in: it needs buffer input"),
    "input None": ({"input": None, "output": X}, "it needs buffer input"),
    "misspelt": (
        {"input": X, "outputs": X.clone()},
        r"buffer is 'outputs' \(did you mean output\?\); valid: input, output",
    ),
    "no tensor": ({"input": [1.0], "output": X}, "input: a list is not a tensor"),
    "other size": ({"input": X, "output": X[:32]}, "output has 32 elements of torch.float32, input 64"),
    "other type": ({"input": X, "output": X.half()}, "output has 64 elements of torch.float16, input 64"),
    "type without kernels": ({"input": X.int(), "output": X.int()}, "input: torch.int32 is not one of torch.bfloat16"),
    "not contiguous": (
        {"input": torch.ones(8, 8).t(), "output": X.clone()},
        r"input: the tensor is not contiguous: shape \(8, 8\)",
    ),
    "elsewhere": ({"input": X, "output": X.to("meta")}, "output: the tensor is on meta, the communicator on cpu"),
    "sparse": ({"input": X.to_sparse(), "output": X}, "sparse"),
}


def refuse(name: str) -> None:
    buffers, message = MISFITS[name]
    with pytest.MonkeyPatch.context() as patch, make_communicator() as comm:
        with_stand_in(patch)
        with pytest.raises(UnsupportedInputError, match=message):
            comm.run(OPERATION, buffers)
        check_one(comm)


def check_one(comm: Communicator) -> None:
    inputs = contributions(comm.world_size, 64, torch.float32)
    out = torch.empty_like(inputs[0])
    comm.run(OPERATION, {"input": inputs[comm.rank], "output": out})
    assert_is_sum(out, inputs, "after an error")


@pytest.mark.parametrize("name", MISFITS)
def test_buffers_that_do_not_fit(ranks: RankPool, name: str) -> None:
    ranks.run(2, refuse, name)


def refuse_calls() -> None:
    with pytest.MonkeyPatch.context() as patch, make_communicator(max_message_bytes=4096) as comm:
        with_stand_in(patch)
        buffers = {"input": X, "output": X.clone()}
        for call, message in (
            (lambda: comm.run("stand_inn", buffers), r"operation is 'stand_inn' \(did you mean stand_in\?\)"),
            (lambda: comm.plan_for("ring", X), "operation is 'ring'; valid: stand_in"),
            (lambda: comm.run("all_reduce", buffers), r"call Communicator\.all_reduce$"),
            (lambda: comm.run("all_reduce_add_rms_norm", buffers), r"call Communicator\.all_reduce_add_rms_norm"),
            (lambda: comm.run(OPERATION, buffers, row=8), "rows of 8 elements: stand_in knows no rows"),
            (lambda: comm.run(OPERATION, buffers, root=1), "parameter is 'root'; valid: none"),
            (
                lambda: comm.run(OPERATION, {"input": torch.ones(2000), "output": torch.ones(2000)}),
                "more than max_message_bytes=4096",
            ),
        ):
            with pytest.raises(UnsupportedInputError, match=message):
                call()
        assert comm.plan_for(OPERATION, X.t()).algorithm == "one_shot"
        assert "int32" in comm.plan_for(OPERATION, X.int()).reason
        check_one(comm)
    with pytest.raises(RuntimeError, match="closed"):
        comm._other_operations._operations[OPERATION].plan(X, 0, {})


def test_calls_that_are_refused(ranks: RankPool) -> None:
    ranks.run(2, refuse_calls)


def check_parameters_and_rows() -> None:
    """Of an operation that has them; whether its kernels want them is not asked here."""
    with pytest.MonkeyPatch.context() as patch, make_communicator() as comm:
        fused = registry.operations()["all_reduce_add_rms_norm"]
        known = {**registry.operations(), OPERATION: fused._replace(name=OPERATION)}
        patch.setattr(registry, "operations", lambda: known)
        x = torch.ones(4, 64, dtype=torch.bfloat16)
        operation = GenericOperation(OPERATION, comm._handle, comm._planner)
        right = {"epsilon": 1e-5, "quantization": 0, "weight_bias": 0}
        plan = operation.plan(x, 64, right)
        assert (plan.algorithm, plan.row, plan.chunks) == ("one_shot", 64, 1)
        assert plan.chunk_rows * 64 == plan.chunk_elements
        assert "rows of 60 elements" in operation.plan(x, 60, right).reason
        assert "are not rows of 96" in operation.plan(x, 96, right).reason
        assert "weight_bias is inf" in operation.plan(x, 64, {**right, "weight_bias": float("inf")}).reason
        assert "no quantization 17" in operation.plan(x, 64, {**right, "quantization": 17}).reason
        for parameters, message in (
            ({}, "it needs parameter epsilon, quantization, weight_bias"),
            ({"epsilon": 1, "weight_bias": 1}, "it needs parameter quantization"),
            ({**right, "eps": 1}, r"parameter is 'eps' \(did you mean"),
            ({**right, "epsilon": "1"}, "parameter epsilon is '1'; it must be a number"),
        ):
            with pytest.raises(UnsupportedInputError, match=message):
                operation.plan(x, 64, parameters)
        buffers = {name: x.clone() for name in fused.buffers}
        with pytest.raises(UnsupportedInputError, match="are not rows of 96"):
            operation.run(buffers, 96, right)
        del buffers["residual"], buffers["scale"]  # both may be left out
        operation.run(buffers, 64, right)
        assert buffers["new_residual"].eq(comm.world_size).all()
        for epsilon in (0.0, 12.0, 0.0):  # of a call that is kept, each its own
            operation.run(buffers, 64, {**right, "epsilon": epsilon})
            assert buffers["normed"].eq(2 / (4 + epsilon) ** 0.5).all()
        operation.run(buffers, 128, right)
        assert {kept.plan.row for kept in operation._prepared.values()} == {64, 128}


def test_parameters_and_rows(ranks: RankPool) -> None:
    ranks.run(2, check_parameters_and_rows)


def lose_a_launch() -> None:
    """And make another call behind it, which is not enqueued."""
    with pytest.MonkeyPatch.context() as patch, make_communicator() as comm:
        with_stand_in(patch)
        check_one(comm)
        prepared = comm._other_operations._operations[OPERATION]._prepared
        ((key, kept),) = prepared.items()
        for run in (mock.Mock(side_effect=RuntimeError("no memory for a launch")), lambda *_: False):
            prepared[key] = kept._replace(run=run)
            with pytest.raises(LaunchError, match=r"could not be launched \(no memory for a launch"):
                check_one(comm)


def test_a_call_that_is_not_launched(ranks: RankPool) -> None:
    ranks.run(2, lose_a_launch)


def check_one_rank() -> None:
    with pytest.MonkeyPatch.context() as patch, make_communicator() as comm:
        with_stand_in(patch)
        assert comm.plan_for(OPERATION, X).reason == "one rank: nothing to exchange"
        with pytest.raises(UnsupportedInputError, match="one rank"):
            comm.run(OPERATION, {"input": X, "output": X.clone()})


def test_one_rank(ranks: RankPool) -> None:
    ranks.run(1, check_one_rank)
