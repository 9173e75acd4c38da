"""The operations with a linear layer among what torch makes of tensors: gradients, versions, wrappers; and launches of
them that fail."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fused_reference import EPS
from harness import RankPool, make_communicator, unnamed
from linear_calls import INPUTS, NORM, OUTPUTS, RESIDUAL, TOKENS, WEIGHT, X, accept_all, call_all, compute_right, ones
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from llm_comm import Communicator, LaunchError, UnsupportedInputError

BF16 = torch.bfloat16


# ---- Launches that fail ----------------------------------------------------------------------------------------------


def fail_to_launch(*_: int) -> bool:
    raise RuntimeError("launch of a layer: invalid device context")


def break_layers(comm: Communicator) -> None:
    prepared = comm._operations.linear._prepared
    prepared.update({key: entry._replace(run=fail_to_launch) for key, entry in prepared.items()})


def lose_a_layer(with_norm: bool) -> str:
    """On rank 1 a layer is not launched, so the sum behind it is not either, which the others launch."""
    with make_communicator(timeout_s=30.0) as comm:
        call = call_all(comm, X, WEIGHT)[1 + with_norm]
        call()
        if comm.rank == 1:
            break_layers(comm)
        with pytest.raises(LaunchError) as caught:
            call()
        assert caught.value.peer == 1
        comm._operations.linear.forget()  # what is broken
        for other in call_all(comm, X, WEIGHT):
            with pytest.raises(LaunchError):
                other()
        out = torch.zeros_like(RESIDUAL)
        with pytest.raises(LaunchError):
            comm.linear(X, WEIGHT, out=out)
        assert out.eq(0).all(), "a failed communicator has run a layer"
        return str(caught.value)


@pytest.mark.parametrize("with_norm", [False, True])
def test_a_sum_without_its_layer_ends_the_communicator(ranks: RankPool, with_norm: bool) -> None:
    why = "rank 1: an operation could not be launched (launch of a layer: invalid device context)"
    texts = ranks.run(3, lose_a_layer, with_norm)
    assert unnamed(texts[1]).startswith(why)
    assert all(unnamed(texts[rank]).startswith(f"rank {rank} was notified: {why}") for rank in (0, 2))


def lose_memory(with_norm: bool) -> None:
    """The same where there is none for what the layer makes."""
    with make_communicator(timeout_s=30.0) as comm:
        call = call_all(comm, X, WEIGHT)[1 + with_norm]
        call()
        if comm.rank == 1:
            with (
                mock.patch.object(torch.Tensor, "new_empty", side_effect=torch.OutOfMemoryError("no memory")),
                pytest.raises(LaunchError, match="no memory"),
            ):
                call()
        else:
            with pytest.raises(LaunchError):
                call()


@pytest.mark.parametrize("with_norm", [False, True])
def test_a_sum_without_memory_ends_the_communicator(ranks: RankPool, with_norm: bool) -> None:
    ranks.run(2, lose_memory, with_norm)


def lose_a_layer_alone() -> None:
    """Nobody waits for it."""
    with make_communicator() as comm:
        comm.linear(X, WEIGHT)
        if comm.rank == 1:
            break_layers(comm)
            with pytest.raises(RuntimeError, match="launch of a layer") as caught:
                comm.linear(X, WEIGHT)
            assert not isinstance(caught.value, LaunchError)
            comm._operations.linear.forget()
        compute_right(comm)


def test_a_layer_alone_does_not_end_the_communicator(ranks: RankPool) -> None:
    ranks.run(2, lose_a_layer_alone)


# ---- Gradients and wrappers --------------------------------------------------------------------------------------


def require_grad() -> None:
    leaf, parameter = X.clone().requires_grad_(), torch.nn.Parameter(WEIGHT)
    with make_communicator() as comm:
        compute_right(comm)  # sizes are known
        for x, weight, name in ((leaf, WEIGHT, "x"), (X, parameter, "weight"), (leaf * 2, WEIGHT, "x")):
            assert accept_all(comm, x, weight) == [False] * 3
            for call in call_all(comm, x, weight):
                with pytest.raises(UnsupportedInputError, match=rf"{name}: the tensor requires grad.*no_grad.*detach"):
                    call()
            for allowed in (torch.no_grad, torch.inference_mode):
                with allowed():
                    assert accept_all(comm, x, weight) == [True] * 3
                    assert not any(
                        result.requires_grad for result in (comm.linear(x, weight), *call_all(comm, x, weight)[2]())
                    )
        options: dict[str, Any] = {"out": torch.empty_like(RESIDUAL), "residual_out": torch.empty_like(RESIDUAL)}
        usual = {"x": X, "linear_weight": WEIGHT, "residual": RESIDUAL, "norm_weight": NORM, "eps": EPS}
        for name in ("residual", "norm_weight", "out", "residual_out"):
            wrong = {**usual, **options}[name].clone().requires_grad_()
            found = name.replace("norm_", "")
            with pytest.raises(UnsupportedInputError, match=f"{found}: the tensor requires grad"):
                comm.linear_all_reduce_add_rms_norm(**{**usual, name: wrong})
        assert not comm.accepts_linear_all_reduce_add_rms_norm(X, WEIGHT, NORM.clone().requires_grad_())
        for operation in (comm.linear, comm.linear_all_reduce):
            with pytest.raises(UnsupportedInputError, match="out: the tensor requires grad"):
                operation(X, WEIGHT, out=RESIDUAL.clone().requires_grad_())
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(X, X)
            assert accept_all(comm, dual, WEIGHT) == [False] * 3
            for call in call_all(comm, dual, WEIGHT):
                with pytest.raises(UnsupportedInputError, match=r"tangent.*detach\(\)"):
                    call()
        compute_right(comm)


def test_what_requires_grad(ranks: RankPool) -> None:
    ranks.run(2, require_grad)


def write_versions() -> None:
    with make_communicator() as comm:
        outs = [torch.empty_like(RESIDUAL), torch.empty(TOKENS * OUTPUTS + 1, dtype=BF16)[1:].view(TOKENS, OUTPUTS)]
        for out in outs:  # the second one is not aligned
            for operation in (comm.linear, comm.linear_all_reduce):
                version = out._version
                operation(X, WEIGHT, out=out)
                assert out._version == version + 1
        out, residual = torch.empty_like(RESIDUAL), RESIDUAL.clone()
        versions = out._version, residual._version
        comm.linear_all_reduce_add_rms_norm(X, WEIGHT, residual, NORM, EPS, out=out, residual_out=residual)
        assert (out._version, residual._version) == (versions[0] + 1, versions[1] + 1)
        with torch.inference_mode():  # tensors without versions
            comm.linear(X, WEIGHT, out=torch.empty_like(RESIDUAL))
            comm.linear_all_reduce(X, WEIGHT, out=torch.empty_like(RESIDUAL))


def test_a_written_tensor_has_another_version(ranks: RankPool) -> None:
    ranks.run(2, write_versions)


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def use_wrappers() -> None:
    with make_communicator() as comm:
        total = INPUTS * comm.world_size
        parameter = torch.nn.Parameter(WEIGHT, requires_grad=False)
        for x, weight in (
            (X, parameter),
            (torch.nn.Parameter(X, requires_grad=False), parameter),
            (X.as_subclass(Named), WEIGHT),
        ):
            assert accept_all(comm, x, weight) == [True] * 3
            assert comm.linear(x, weight).eq(INPUTS).all()
            out = torch.empty_like(RESIDUAL)
            assert comm.linear(x, weight, out=out) is out
            assert out.eq(INPUTS).all()
            assert comm.linear_all_reduce(x, weight, out=out) is out
            assert out.eq(total).all()
            normed, new_residual = comm.linear_all_reduce_add_rms_norm(x, weight, None, NORM, EPS, residual_out=out)
            assert normed.eq(1).all()
            assert new_residual is out
        gathered = all_gather_tensor(X[:1].contiguous(), 0, dist.group.WORLD)  # may still be on its way
        assert type(gathered) is not torch.Tensor
        assert comm.linear_all_reduce(gathered, WEIGHT).eq(total).all()
        norm = comm.linear_all_reduce_add_rms_norm
        rows = all_gather_tensor(RESIDUAL[:1].contiguous(), 0, dist.group.WORLD)
        assert norm(X, WEIGHT, rows, NORM, EPS)[1].eq(total + 1).all()
        for name, wrong in (("residual", [1.0]), ("norm_weight", None), ("scale", 1.0)):
            call = {"residual": None, "norm_weight": NORM, "quantize": "static", "scale": torch.ones(1), name: wrong}
            with pytest.raises(UnsupportedInputError, match=f"{name} is a {type(wrong).__name__}, not a tensor"):
                norm(X, WEIGHT, eps=EPS, **call)
        mesh = init_device_mesh("cpu", (comm.world_size,))
        wrapper = DTensor.from_local(WEIGHT, mesh, [Replicate()])
        assert accept_all(comm, X, wrapper) == [False] * 3
        for call in call_all(comm, X, wrapper):
            with pytest.raises((RuntimeError, NotImplementedError)):
                call()
        with FakeTensorMode():
            fake = torch.empty(3, 5, INPUTS, dtype=BF16)
            weight = torch.empty(OUTPUTS, INPUTS, dtype=BF16)
            assert comm.accepts_linear(fake, weight)
            for result in (comm.linear(fake, weight), comm.linear_all_reduce(fake, weight)):
                assert isinstance(result, FakeTensor)
                assert result.shape == (3, 5, OUTPUTS)
        compute_right(comm)


def test_tensors_that_stand_for_others(ranks: RankPool) -> None:
    ranks.run(2, use_wrappers)


def use_an_escaped_wrapper() -> None:
    """A tensor of a transform that has ended: torch does not tell its address. The call ends, not the communicator."""
    with make_communicator() as comm:
        compute_right(comm)
        kept: list[torch.Tensor] = []
        for shape in ((3, TOKENS, INPUTS), (3, OUTPUTS, INPUTS), (3, TOKENS, OUTPUTS)):
            torch.vmap(lambda row: kept.append(row) or row)(ones(*shape))
        x, weight, out = kept
        for call in (*call_all(comm, x, WEIGHT), *call_all(comm, X, weight)):
            with pytest.raises(UnsupportedInputError, match=r"(x|weight) has no memory of its own"):
                call()
        usual = {"x": X, "linear_weight": WEIGHT, "residual": None, "norm_weight": NORM, "eps": EPS}
        for name in ("residual", "out", "residual_out"):
            with pytest.raises(UnsupportedInputError, match=f"{name} has no memory of its own"):
                comm.linear_all_reduce_add_rms_norm(**{**usual, name: out})
        for operation in (comm.linear, comm.linear_all_reduce):
            with pytest.raises(UnsupportedInputError, match="out has no memory of its own"):
                operation(X, WEIGHT, out=out)
        compute_right(comm)


def test_escaped_wrapper(ranks: RankPool) -> None:
    ranks.run(2, use_an_escaped_wrapper)
