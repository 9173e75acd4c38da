"""What is accepted, and that what is not is declined alike on all ranks, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator
from reference import assert_is_sum, contributions
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

from llm_comm import Communicator, UnsupportedInputError

LIMIT = 4096
DECLINED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "transposed": (lambda: torch.ones(4, 6).t(), "not contiguous: shape (6, 4), strides (1, 6)"),
    "strided": (lambda: torch.ones(20)[::2], "not contiguous"),
    "expanded": (lambda: torch.ones(1).expand(8), "not contiguous"),
    "int32": (lambda: torch.ones(8, dtype=torch.int32), "torch.int32 is not one of torch.bfloat16"),
    "bool": (lambda: torch.ones(8, dtype=torch.bool), "torch.bool is not one of"),
    "float64": (lambda: torch.ones(8, dtype=torch.float64), "torch.float64 is not one of"),
    "complex64": (lambda: torch.ones(8, dtype=torch.complex64), "torch.complex64 is not one of"),
    "other device": (lambda: torch.ones(8, device="meta"), "the tensor is on meta, the communicator on cpu"),
    "negated view": (lambda: torch.tensor([1 + 2j]).conj().imag, "negated view of another's memory"),
    "sparse": (lambda: torch.ones(8).to_sparse(), "the tensor is torch.sparse_coo"),
    "too large": (lambda: torch.ones(LIMIT // 4 + 1), f"more than max_message_bytes={LIMIT}"),
}


def reduce_right(comm: Communicator) -> None:
    inputs = contributions(comm.world_size, 50, torch.float32)
    assert_is_sum(comm.all_reduce(inputs[comm.rank].clone()), inputs, "a call after an error")


def decline(name: str) -> str:
    with make_communicator(max_message_bytes=LIMIT) as comm:
        x = DECLINED[name][0]()
        like_x = torch.ones(x.shape, dtype=x.dtype)
        if comm.accepts(like_x):  # a plan for its size and type is known
            comm.all_reduce(like_x)
        assert not comm.accepts(x)
        plan = comm.plan(x)
        assert plan.algorithm == "declined"
        with pytest.raises(UnsupportedInputError) as error:
            comm.all_reduce(x)
        assert plan.reason in str(error.value)
        assert comm.try_all_reduce(x) is None
        reduce_right(comm)
        return plan.reason


@pytest.mark.parametrize("name", DECLINED)
def test_declined_input(ranks: RankPool, name: str) -> None:
    (reason,) = set(ranks.run(2, decline, name))
    assert DECLINED[name][1] in reason


def decline_layouts() -> None:
    with make_communicator() as comm:
        rows = [torch.ones(3), torch.ones(5)]
        for x, what in (
            (torch.ones(2, 3).to_sparse_csr(), "torch.sparse_csr"),
            (torch.ones(2, 3).to_mkldnn(), "torch._mkldnn"),
            (torch.nested.nested_tensor(rows), "nested"),
            (torch.nested.nested_tensor(rows, layout=torch.jagged), "nested"),
        ):
            for _ in range(2):  # the second time with a size that is prepared
                assert not comm.accepts(x)
                assert comm.plan(x).reason == f"the tensor is {what}"
                assert comm.try_all_reduce(x) is None
                if type(x) is torch.Tensor:
                    with pytest.raises(UnsupportedInputError, match=what):
                        comm.all_reduce(x)
                comm.all_reduce(torch.ones(x.numel()))
        reduce_right(comm)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_layouts_without_one_block_of_memory_are_declined(ranks: RankPool) -> None:
    ranks.run(2, decline_layouts)


def accept() -> None:
    with make_communicator(max_message_bytes=LIMIT) as comm:
        for x in (
            torch.ones(LIMIT // 4),
            torch.ones(3, 5, dtype=torch.bfloat16),
            torch.ones(7, dtype=torch.float16)[1:],
            torch.ones(0),
            torch.tensor(1.0),
            torch.ones(1, 5).t(),  # one column: its strides do not matter
        ):
            assert comm.accepts(x)
            plan = comm.plan(x)
            assert plan.algorithm == ("none" if x.numel() == 0 else "one_shot")
            assert plan.message_bytes == x.numel() * x.element_size()
            assert comm.all_reduce(x).eq(comm.world_size).all()
            total = comm.try_all_reduce(x)
            assert total is not None
            assert total is not x
            assert total.eq(comm.world_size).all()


def test_accepted_input(ranks: RankPool) -> None:
    ranks.run(2, accept)


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def sum_wrappers() -> None:
    """What stands for other tensors goes by torch's dispatcher, which knows where the values are."""
    with make_communicator() as comm:
        world = comm.world_size
        for x in (torch.nn.Parameter(torch.ones(6), requires_grad=False), torch.ones(6).as_subclass(Named)):
            assert comm.accepts(x)
            assert comm.all_reduce(x).eq(world).all()
            assert comm.try_all_reduce(x).eq(world).all()
            assert comm.all_reduce(x, out=x) is x
            assert x.eq(world).all()
        gathered = all_gather_tensor(torch.ones(4), 0, dist.group.WORLD)  # may still be on its way
        assert type(gathered) is not torch.Tensor
        assert comm.all_reduce(gathered).tolist() == [world] * 4 * world
        with FakeTensorMode():
            fake = torch.empty(3, 5, dtype=torch.bfloat16)
            assert comm.accepts(fake)
            assert isinstance(comm.all_reduce(fake), FakeTensor)
            assert isinstance(comm.try_all_reduce(fake), FakeTensor)
            assert comm.try_all_reduce(fake.t()) is None
            normed, _ = comm.all_reduce_add_rms_norm(torch.empty(2, 64).half(), None, torch.empty(64).half(), 1e-5)
            assert isinstance(normed, FakeTensor)
        reduce_right(comm)


def test_tensors_that_stand_for_others(ranks: RankPool) -> None:
    ranks.run(2, sum_wrappers)


def norm_with_wrappers() -> None:
    """Operands and outputs of a fused call. A residual without memory would be taken for none."""
    with make_communicator() as comm:
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        call = partial(comm.all_reduce_add_rms_norm, x, weight=x[0], eps=1e-5)
        _, total = call(residual=x)
        on_its_way = all_gather_tensor(torch.ones(2 // comm.world_size, 64).bfloat16(), 0, dist.group.WORLD)
        assert type(on_its_way) is not torch.Tensor
        assert torch.equal(call(residual=on_its_way)[1], total)
        mesh = init_device_mesh("cpu", (comm.world_size,))
        wrapper = DTensor.from_local(torch.ones(2, 64).bfloat16(), mesh, [Replicate()])
        for _ in range(2):  # the second time with sizes that are prepared
            with pytest.raises((RuntimeError, NotImplementedError, UnsupportedInputError)):
                call(residual=wrapper)
            for quantize, count in (("static", 1), ("dynamic", 2)):
                scale = DTensor.from_local(torch.ones(count), mesh, [Replicate()])
                with pytest.raises((RuntimeError, NotImplementedError, UnsupportedInputError)):
                    call(residual=None, quantize=quantize, scale=scale)
            for output in ("out", "residual_out"):
                with pytest.raises(UnsupportedInputError, match=f"{output}: the tensor is a DTensor"):
                    call(residual=None, **{output: wrapper})
            call(residual=None)
        for operand, wrong in (("residual", [1.0]), ("weight", None), ("scale", 1.0)):
            operands = {"residual": None, "weight": x[0], "scale": torch.ones(1), operand: wrong}
            with pytest.raises(UnsupportedInputError, match=f"{operand} is a {type(wrong).__name__}, not a tensor"):
                comm.all_reduce_add_rms_norm(x.as_subclass(Named), eps=1e-5, quantize="static", **operands)
        for output in ("out", "residual_out"):
            with pytest.raises(UnsupportedInputError, match=f"{output} is a list, not a tensor"):
                call(residual=None, **{output: [1.0]})
        subclass = x.as_subclass(Named)
        with pytest.raises(UnsupportedInputError, match="quantize is 'fp4'"):
            comm.all_reduce_add_rms_norm(subclass, None, x[0], 1e-5, quantize="fp4")
        with pytest.raises(UnsupportedInputError, match="scale without quantize"):
            comm.all_reduce_add_rms_norm(subclass, None, x[0], 1e-5, scale=torch.ones(1))
        reduce_right(comm)


def test_fused_operands_that_stand_for_others(ranks: RankPool) -> None:
    ranks.run(2, norm_with_wrappers)


def decline_without_memory() -> None:
    with make_communicator() as comm:
        mesh = init_device_mesh("cpu", (comm.world_size,))
        partial = DTensor.from_local(torch.ones(64), mesh, [Partial()])
        assert not comm.accepts(partial)
        assert "to_local" in comm.plan(partial).reason
        assert comm.try_all_reduce(partial) is None
        with pytest.raises(NotImplementedError, match="llm_comm"):
            comm.all_reduce(partial)
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        weight = DTensor.from_local(x[0], mesh)
        assert not comm.accepts_all_reduce_add_rms_norm(x, weight)
        for _ in range(2):  # the second time with sizes that have been prepared
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                comm.all_reduce_add_rms_norm(x, None, weight, 1e-5)
            comm.all_reduce_add_rms_norm(x, None, x[0], 1e-5)
        reduce_right(comm)


def decline_negated_views() -> None:
    """Whose memory holds the values of another tensor, with the other sign."""
    with make_communicator() as comm:
        plain = [torch.ones(2, 64, dtype=torch.bfloat16) for _ in range(2)] + [torch.ones(64, dtype=torch.bfloat16)]
        for is_prepared in (False, True):
            for place, name in enumerate(("x", "residual", "weight")):
                given = [torch._neg_view(tensor) if i == place else tensor for i, tensor in enumerate(plain)]
                assert comm.accepts_all_reduce_add_rms_norm(given[0], given[2]) == (name == "residual"), is_prepared
                with pytest.raises(UnsupportedInputError, match=f"{name}: the tensor is a negated view"):
                    comm.all_reduce_add_rms_norm(*given, 1e-5)
            comm.all_reduce_add_rms_norm(*plain, 1e-5)
        for quantize, scale in (("static", torch.ones(1)), ("dynamic", torch.ones(2))):
            with pytest.raises(UnsupportedInputError, match="scale: the tensor is a negated view"):
                comm.all_reduce_add_rms_norm(*plain, 1e-5, quantize=quantize, scale=torch._neg_view(scale))
        assert not comm.accepts(torch._neg_view(plain[0]))
        assert comm.try_all_reduce(torch._neg_view(plain[0])) is None
        reduce_right(comm)


def test_negated_views(ranks: RankPool) -> None:
    ranks.run(2, decline_negated_views)


def test_tensors_without_memory(ranks: RankPool) -> None:
    ranks.run(2, decline_without_memory)


BUFFER = torch.ones(40)
MISMATCHES: dict[str, tuple[torch.Tensor, torch.Tensor, str]] = {
    "shorter": (
        BUFFER[:10],
        torch.ones(9),
        r"out \(\(9,\), torch.float32, cpu\) must be contiguous and like the result",
    ),
    "longer": (BUFFER[:10], torch.ones(11), "like the result"),
    "other dtype": (BUFFER[:10], torch.ones(10, dtype=torch.float16), "like the result"),
    "strided": (BUFFER[:10], torch.ones(20)[::2], "like the result"),
    "other device": (BUFFER[:10], torch.ones(10, device="meta"), "like the result"),
    "one element on": (BUFFER[:10], BUFFER[1:11], "out overlaps x"),
    "one element back": (BUFFER[1:11], BUFFER[:10], "out overlaps x"),
    "negated view": (BUFFER[:1], torch.tensor([1 + 2j]).conj().imag, "out: the tensor is a negated view"),
    "last element": (BUFFER[:10], BUFFER[9:19], "out overlaps x"),
}


def reject_out(name: str) -> None:
    x, out, message = MISMATCHES[name]
    with make_communicator() as comm:
        with pytest.raises(UnsupportedInputError, match=message):
            comm.all_reduce(x, out=out)
        reduce_right(comm)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", MISMATCHES)
def test_out_that_does_not_fit(ranks: RankPool, name: str, world: int) -> None:
    ranks.run(world, reject_out, name)


def write_next_to_input() -> None:
    with make_communicator() as comm:
        inputs = contributions(comm.world_size, 100, torch.float32)
        buffer = torch.empty(200)
        x, out = buffer[:100], buffer[100:]
        x.copy_(inputs[comm.rank])
        assert_is_sum(comm.all_reduce(x, out=out), inputs, "out beside x")
        same_memory = x.view(10, 10)
        assert_is_sum(comm.all_reduce(x, out=same_memory).view(-1), inputs, "out a view of x")


def test_out_beside_the_input_or_a_view_of_it(ranks: RankPool) -> None:
    ranks.run(2, write_next_to_input)
