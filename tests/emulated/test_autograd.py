"""Nothing is differentiated, and torch is told so: no gradient is wrong without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool, make_communicator
from torch.autograd import forward_ad

from llm_comm import Communicator, UnsupportedInputError

BF16 = torch.bfloat16
WEIGHT = torch.ones(64, dtype=BF16)


def reduce_right(comm: Communicator) -> None:
    assert comm.all_reduce(torch.ones(30)).eq(comm.world_size).all()


def sum_what_requires_grad(compiled: bool) -> None:
    """The gradient of ``h`` by the sum would be missing, and no one would be told."""
    with make_communicator() as comm:
        layer = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.ones_(layer.weight)

        def loss(x: torch.Tensor) -> torch.Tensor:
            h = layer(x)
            return comm.all_reduce(h).sum() + 2 * h.sum()

        x = torch.ones(1, 4)
        call = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
        errors = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.TorchRuntimeError, UnsupportedInputError)
        with pytest.raises(errors, match=r"requires grad.*torch\.no_grad\(\).*detach\(\)"):
            call(x)
        with torch.no_grad():
            assert call(x).eq(4 * 4 * (comm.world_size + 2)).all()
        reduce_right(comm)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_is_an_error(ranks: RankPool, compiled: bool) -> None:
    ranks.run(2, sum_what_requires_grad, compiled)


def ask_for_what_requires_grad() -> None:
    leaf = torch.ones(64, requires_grad=True)
    reason = "the tensor requires grad, and nothing is differentiated: call under torch.no_grad(), or pass x.detach()"
    with make_communicator() as comm:
        comm.all_reduce(torch.ones(64))  # its size is known
        for x in (leaf, leaf * 2, torch.nn.Parameter(torch.ones(64))):
            assert not comm.accepts(x)
            assert comm.try_all_reduce(x) is None
            assert comm.plan(x).reason == reason
            with pytest.raises(UnsupportedInputError, match="requires grad"):
                comm.all_reduce(x)
            with pytest.raises(UnsupportedInputError, match="out: the tensor requires grad"):
                comm.all_reduce(torch.ones(64), out=x)
            for allowed in (torch.no_grad, torch.inference_mode):
                with allowed():
                    assert comm.accepts(x)
                    total = comm.all_reduce(x)
                    assert total.equal(comm.try_all_reduce(x))
                    assert total.equal(x * comm.world_size)
                    assert not total.requires_grad
            assert comm.all_reduce(x.detach()).equal(total)
        graph = torch.compile(comm.accepts, backend="eager")
        assert graph(leaf) is False
        with torch.no_grad():
            assert graph(leaf) is True


def test_what_requires_grad_is_declined_in_grad_mode(ranks: RankPool) -> None:
    ranks.run(2, ask_for_what_requires_grad)


def norm_what_requires_grad() -> None:
    with make_communicator() as comm:
        x = torch.ones(2, 64, dtype=BF16)
        parameter = torch.nn.Parameter(WEIGHT)
        given: dict[str, Any] = {"x": x, "residual": x, "weight": WEIGHT, "eps": 1e-5}
        comm.all_reduce_add_rms_norm(**given)  # its size is known
        assert not comm.accepts_all_reduce_add_rms_norm(x, parameter)
        assert not comm.accepts_all_reduce_add_rms_norm(x.clone().requires_grad_(), WEIGHT)
        options: list[tuple[str, Any, dict[str, Any]]] = [
            ("x", x.clone(), {}),
            ("residual", x.clone(), {}),
            ("weight", WEIGHT.clone(), {}),
            ("out", torch.empty_like(x), {}),
            ("residual_out", torch.empty_like(x), {}),
            ("scale", torch.ones(1), {"quantize": "static"}),
        ]
        for name, tensor, more in options:
            call = {**given, **more, name: tensor.requires_grad_()}
            with pytest.raises(UnsupportedInputError, match=f"{name}.* requires grad.*no_grad"):
                comm.all_reduce_add_rms_norm(**call)
            with torch.no_grad():
                comm.all_reduce_add_rms_norm(**call)
        with torch.no_grad():
            assert comm.accepts_all_reduce_add_rms_norm(x, parameter)
            normed, _ = comm.all_reduce_add_rms_norm(x, x, parameter, 1e-5)
            assert not normed.requires_grad
        reduce_right(comm)


def test_norms_of_what_requires_grad(ranks: RankPool) -> None:
    ranks.run(2, norm_what_requires_grad)


def lose_no_tangent() -> None:
    with make_communicator() as comm, forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(8), torch.full((8,), 5.0))
        with pytest.raises(UnsupportedInputError, match=r"tangent.*detach\(\)"):
            comm.all_reduce(dual)
        assert not comm.accepts(dual)
        assert comm.try_all_reduce(dual) is None
        rows = forward_ad.make_dual(torch.ones(2, 64).to(BF16), torch.ones(2, 64).to(BF16))
        for x, residual in ((rows, None), (rows.detach(), rows)):
            with pytest.raises(UnsupportedInputError, match=r"tangent.*detach\(\)"):
                comm.all_reduce_add_rms_norm(x, residual, WEIGHT, 1e-5)
        reduce_right(comm)


def test_forward_mode(ranks: RankPool) -> None:
    ranks.run(2, lose_no_tangent)


# ---- Tensors that are written ----------------------------------------------------------------------------------------


def sum_in_place(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce(x, out=x)


def sum_into(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce(torch.ones_like(x), out=x)


def norm_in_place(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce_add_rms_norm(x, None, WEIGHT, 1e-5, out=x)


def norm_into_residual(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce_add_rms_norm(torch.ones_like(x), x, WEIGHT, 1e-5, residual_out=x)


def norm_out(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce_add_rms_norm(torch.ones_like(x), None, WEIGHT, 1e-5, out=x)


def overwrite_what_is_saved(write: Callable[[Communicator, torch.Tensor], None]) -> None:
    with make_communicator() as comm:
        for without_grad in (torch.enable_grad, torch.no_grad):
            x = torch.full((1, 64), 3.0).to(BF16)
            weight = torch.ones(1, 64, dtype=BF16, requires_grad=True)
            product = weight * x  # saves x
            version = x._version
            with without_grad():
                write(comm, x)
            assert not x.eq(3).all(), "nothing was written"
            assert x._version > version
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
        with torch.inference_mode():
            x = torch.full((1, 64), 3.0).to(BF16)
            write(comm, x)  # such tensors have no version
        reduce_right(comm)


@pytest.mark.parametrize("write", [sum_in_place, sum_into, norm_in_place, norm_into_residual, norm_out])
def test_a_written_tensor_has_another_version(
    ranks: RankPool, write: Callable[[Communicator, torch.Tensor], None]
) -> None:
    ranks.run(2, overwrite_what_is_saved, write)


def overwrite_scales() -> None:
    with make_communicator() as comm:
        x, scale = torch.ones(2, 64, dtype=BF16), torch.zeros(2, 1)
        comm.all_reduce_add_rms_norm(x, None, WEIGHT, 1e-5, quantize="dynamic", scale=scale)
        assert scale._version == 1
        comm.all_reduce_add_rms_norm(x, None, WEIGHT, 1e-5, quantize="static", scale=scale[0])
        assert scale._version == 1, "static scales are read"


def test_scales_that_are_written(ranks: RankPool) -> None:
    ranks.run(2, overwrite_scales)
