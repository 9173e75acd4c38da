"""The torch operators of all-gather and reduce-scatter: graphs, modes, transforms, and what is not differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator
from shards_reference import assert_same_bits
from test_compile import Recorder
from test_modes import TRACES, Watcher
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from llm_comm import Communicator, UnsupportedInputError

GATHER = torch.ops.llm_comm.all_gather.default
SCATTER = torch.ops.llm_comm.reduce_scatter.default
WORLD = 2
FEATURES = 6
Sizes = tuple[int, ...] | None
Layer = Callable[[Communicator, torch.Tensor], torch.Tensor]


def operator_calls(targets: list[Any]) -> tuple[int, int]:
    """Of all-gather and of reduce-scatter."""
    packets = torch.ops.llm_comm.all_gather, torch.ops.llm_comm.reduce_scatter
    gathers, scatters = (sum(t in (packet, packet.default) for t in targets) for packet in packets)
    return gathers, scatters


def check_right(comm: Communicator) -> None:
    rank = torch.full((2, 3), float(comm.rank))
    assert comm.all_gather(rank).equal(torch.arange(float(comm.world_size)).repeat_interleave(2)[:, None].expand(-1, 3))
    assert comm.reduce_scatter(torch.ones(comm.world_size)).equal(torch.full((1,), float(comm.world_size)))


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def even(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    """As sequence parallelism has it: tokens are gathered before a layer and scattered after it."""
    tokens = comm.all_gather(x + 1)
    return comm.reduce_scatter(tokens * 2) + comm.all_gather(tokens, -1).sum()


def uneven(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Sizes that follow from that of the input."""
    rows = x.shape[0]
    sizes = [rows + rank for rank in range(comm.world_size)]
    mine = torch.cat([x, x[: comm.rank]])
    tokens = comm.all_gather(mine, sizes=sizes)
    return comm.reduce_scatter(tokens.clone(), 0, tuple(sizes)) - mine


def into_outputs(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    tokens = x.new_empty(x.shape[0] * comm.world_size, x.shape[1])
    comm.all_gather(x * 3, out=tokens)
    part = torch.empty_like(x)
    assert comm.reduce_scatter(tokens, out=part) is part
    return part + tokens.sum()


def where_accepted(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    tokens = comm.try_all_gather(x, -1)
    if tokens is None or not comm.accepts_reduce_scatter(tokens, 1):
        return x
    return comm.reduce_scatter(tokens, 1)


LAYERS = {"even": even, "uneven": uneven, "outputs": into_outputs, "where accepted": where_accepted}
every_layer = pytest.mark.parametrize("name", LAYERS)


def compile_layer(name: str, backend: str) -> None:
    layer = LAYERS[name]
    with make_communicator() as comm, torch.inference_mode():
        torch._dynamo.reset()
        recorder = Recorder(backend)
        compiled = torch.compile(lambda x: layer(comm, x), fullgraph=True, backend=recorder)
        for rows in (2, 5, 9):  # the second makes the number of rows dynamic
            x = torch.arange(float(rows * FEATURES)).view(rows, FEATURES) * (comm.rank + 1)
            assert_same_bits(compiled(x), layer(comm, x), f"{name}, {backend}, {rows} rows")
        for targets in recorder.calls:
            assert operator_calls(targets) == {"even": (2, 1)}.get(name, (1, 1))
        assert len(recorder.calls) == 2, "one graph does for all sizes but the first"


@every_layer
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_model_compiles_as_one_graph(ranks: RankPool, name: str, backend: str) -> None:
    ranks.run(WORLD, compile_layer, name, backend)


def ask_first_for_many_sizes(dynamic: bool | None) -> None:
    """The graph declines what eager calls decline, at the same size."""
    with make_communicator(max_message_bytes=4096) as comm:

        def layer(x: torch.Tensor) -> torch.Tensor:
            if comm.accepts_all_gather(x):
                return comm.all_gather(x)[: x.shape[0]] + comm.reduce_scatter(x.repeat(comm.world_size, 1))
            return x

        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counter)
        for rows in range(2, 40):
            x = torch.ones(rows, 32)
            assert comm.accepts_all_gather(x) == (rows <= 16)
            assert compiled(x).eq(1 + comm.world_size if rows <= 16 else 1).all()
        assert counter.frame_count <= 3


def ask_for_sizes_beside_the_bound_of_a_table() -> None:
    """A table bounds the largest shard, of which the whole tensor has several."""
    with make_communicator() as comm:
        comm.use_table(comm.table._replace(max_message_bytes=4096))
        world = comm.world_size
        for rows in (16, 32, 33):
            shard, whole = torch.ones(rows, 32), torch.ones(world * rows, 32)
            for ask, x in ((comm.accepts_all_gather, shard), (comm.accepts_reduce_scatter, whole)):
                torch._dynamo.reset()
                assert ask(x) == (rows <= 32)
                assert torch.compile(lambda x, ask=ask: ask(x), backend="eager")(x) == (rows <= 32)
        uneven = torch.ones(40, 32)
        for sizes in ((39, 1), (20, 20)):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x, sizes=sizes: comm.accepts_reduce_scatter(x, 0, sizes), backend="eager")
            assert compiled(uneven) == comm.accepts_reduce_scatter(uneven, 0, sizes) == (max(sizes) <= 32)


def test_accepts_in_graphs_by_the_bound_of_a_table(ranks: RankPool) -> None:
    ranks.run(WORLD, ask_for_sizes_beside_the_bound_of_a_table)


@pytest.mark.parametrize("dynamic", [None, True])
def test_accepts_in_a_graph_for_all_sizes(ranks: RankPool, dynamic: bool | None) -> None:
    ranks.run(WORLD, ask_first_for_many_sizes, dynamic)


def ask_in_graphs() -> None:
    """What no graph can serve, and no eager call."""
    with make_communicator(max_message_bytes=4096) as comm:
        for x, dim, sizes in (
            (torch.ones(4, 6).t(), 0, None),
            (torch.ones(4, 6), 2, None),
            (torch.ones(4, 6), 0, (4, 4, 4)),
            (torch.ones(4, 6), 0, (4, -1)),
            (torch.ones(4, 6), 1, (5, 5)),
            (torch.ones(3, 6), 0, None),
            (torch.ones(4, 6), 0, (4, 4)),
            (torch.ones(4, 6), 1, (6, 6)),
            (torch.ones(8, 6), 0, (4, 4)),
            (torch.ones(4, 6, dtype=torch.int64), 0, None),
            (torch.ones(4, 6, requires_grad=True), 0, None),
            (torch.ones(4, 512), 0, None),
        ):
            for ask in (comm.accepts_all_gather, comm.accepts_reduce_scatter):
                torch._dynamo.reset()
                compiled = torch.compile(lambda x, ask=ask, dim=dim, sizes=sizes: ask(x, dim, sizes), backend="eager")
                assert compiled(x) is ask(x, dim, sizes), (x.shape, dim, sizes, ask.__name__)


def test_accepts_in_graphs_is_what_it_is_outside(ranks: RankPool) -> None:
    ranks.run(WORLD, ask_in_graphs)


def give_what_does_not_fit() -> None:
    x = torch.ones(4, 6)
    with make_communicator() as comm:
        calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            r"all_gather: dim is 2; x has 2 dimensions": lambda x: comm.all_gather(x, 2),
            r"reduce_scatter: sizes has 3 numbers": lambda x: comm.reduce_scatter(x, 0, [1, 1, 2]),
            r"all_gather: out .* must be like what goes there": lambda x: comm.all_gather(x, out=torch.empty(4, 6)),
            r"reduce_scatter: out .* must be like what goes there": (
                lambda x: comm.reduce_scatter(x, out=torch.empty(12, dtype=torch.float16))
            ),
            r"reduce_scatter: x has 5 along dim 0, of which 2 ranks cannot": lambda x: comm.reduce_scatter(
                x[:, :5].t()
            ),
            r"all_gather: out is a list; it must be a tensor": lambda x: comm.all_gather(x, out=[1.0]),
        }
        for message, call in calls.items():
            torch._dynamo.reset()
            with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
                torch.compile(call, fullgraph=True, backend="aot_eager")(x)
        for message, call in {
            r"all_gather: x has 4 along dim 0; sizes\[\d\], of this rank, is 5": lambda x: comm.all_gather(
                x, 0, [5, 5]
            ),
            r"reduce_scatter: x has 4 along dim 0; sizes, \[1, 2\], add up to 3": (
                lambda x: comm.reduce_scatter(x, 0, [1, 2])
            ),
        }.items():
            torch._dynamo.reset()
            with pytest.raises(UnsupportedInputError, match=message):
                torch.compile(call, fullgraph=True, backend="aot_eager")(x)
        check_right(comm)


def test_what_does_not_fit_in_a_graph(ranks: RankPool) -> None:
    ranks.run(WORLD, give_what_does_not_fit)


# ---- The operators ---------------------------------------------------------------------------------------------------


def check_operators() -> None:
    with make_communicator() as comm:
        rank = comm.rank
        x, sizes = torch.full((2 + rank, 3), float(rank)), [2, 3]
        whole = torch.arange(10.0).view(5, 2)
        place = (rank, WORLD, comm.name)
        torch.library.opcheck(GATHER, (x, 0, sizes, *place))
        torch.library.opcheck(GATHER, (whole, 1, None, *place))
        torch.library.opcheck(SCATTER, (whole, -2, sizes, *place))
        torch.library.opcheck(SCATTER, (whole, -1, None, *place))
        assert torch.ops.llm_comm.all_gather(x, 0, sizes, *place).equal(comm.all_gather(x, 0, sizes))
        part = torch.ops.llm_comm.reduce_scatter(whole, 0, sizes, *place)
        assert part.equal(comm.reduce_scatter(whole, 0, sizes))
        with pytest.raises(UnsupportedInputError, match="not contiguous"):
            torch.ops.llm_comm.all_gather(whole.t(), 0, None, *place)
        # A graph that another rank, or one of another world, has compiled.
        for other in ((1 - rank, WORLD), (rank, 4)):
            for operator in (torch.ops.llm_comm.all_gather, torch.ops.llm_comm.reduce_scatter):
                with pytest.raises(
                    UnsupportedInputError, match=f"is that of rank {other[0]} of {other[1]}; this is rank"
                ):
                    operator(whole, 1, None, *other, comm.name)
        check_right(comm)
        name = comm.name
    del comm
    with pytest.raises(RuntimeError, match=f"no communicator '{name}'"):
        torch.ops.llm_comm.all_gather(x, 0, sizes, *place)


def test_operators(ranks: RankPool) -> None:
    ranks.run(WORLD, check_operators)


@pytest.mark.parametrize(("shape", "dim"), [((3,), 0), ((3, 5), 0), ((2, 3), -1), ((4, 3, 2), 1)])
def test_fake_results(shape: tuple[int, ...], dim: int) -> None:
    """They follow from what stands in a graph: no communicator is asked."""
    with FakeTensorMode():
        x = torch.empty(shape, dtype=torch.float16)
        gathered = torch.ops.llm_comm.all_gather(x, dim, [3, 0, 4], 0, 3, "any")
        alike = torch.ops.llm_comm.all_gather(x, dim, None, 1, 3, "any")
        part = torch.ops.llm_comm.reduce_scatter(x, dim, [1, 0, 2], 2, 3, "any")
        third = torch.ops.llm_comm.reduce_scatter(x, dim, None, 2, 3, "any")
    for result, length in ((gathered, 7), (alike, 9), (part, 2), (third, 1)):
        expected = list(shape)
        expected[dim] = length
        assert (tuple(result.shape), result.dtype, result.is_contiguous()) == (tuple(expected), x.dtype, True)


# ---- Modes, tracers and transforms -----------------------------------------------------------------------------------


def call_all(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Each call, with plain tensors."""
    tokens = call_even(comm, x)
    sizes = [0] * (comm.world_size - 1) + [tokens.shape[1]]
    return comm.reduce_scatter(tokens, -1, sizes).sum() + tokens


def call_even(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Those of even parts."""
    tokens = comm.all_gather(x) + 1
    tried = comm.try_reduce_scatter(tokens)
    assert tried is not None
    comm.all_gather(tried, out=tokens)
    wide = comm.try_all_gather(tokens, 1)
    assert wide is not None
    return comm.reduce_scatter(wide, -1) + tokens


def watch() -> None:
    with make_communicator() as comm:
        x = torch.full((2, 4), comm.rank + 1.0)
        expected = call_all(comm, x)
        with Watcher() as watcher:
            assert call_all(comm, x).equal(expected)
        assert [watcher.seen.count(operator) for operator in (GATHER, SCATTER)] == [3, 3]
        check_right(comm)


def test_dispatch_mode(ranks: RankPool) -> None:
    ranks.run(WORLD, watch)


def trace(kind: str) -> None:
    """The traced program works with what it is given, not with what was there when it was traced."""
    with make_communicator() as comm:
        first = torch.full((2, 4), comm.rank + 3.0)
        second = torch.arange(8.0).view(2, 4) * (comm.rank + 1)
        with torch.no_grad():
            if kind in TRACES:
                program: Any = make_fx(lambda x: call_all(comm, x), **TRACES[kind])(first)
                assert operator_calls([node.target for node in program.graph.nodes]) == (3, 3)
            else:
                program = torch.jit.trace(lambda x: call_even(comm, x), first, check_trace=False)
                assert str(program.graph).count("llm_comm::all_gather") == 3
                with pytest.raises(UnsupportedInputError, match=r"torch\.jit\.trace cannot record sizes"):
                    torch.jit.trace(lambda x: comm.all_gather(x, 0, [2, 2]), first, check_trace=False)
            for x in (first, second):
                assert program(x).equal((call_all if kind in TRACES else call_even)(comm, x))
        check_right(comm)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", [*TRACES, "torch.jit"])
def test_tracers_record_the_operators(ranks: RankPool, kind: str) -> None:
    ranks.run(WORLD, trace, kind)


def ask_with_symbolic_sizes() -> None:
    with make_communicator() as comm:

        def answers(x: torch.Tensor) -> torch.Tensor:
            assert comm.accepts_all_gather(x, -1)
            assert comm.accepts_all_gather(x.double())
            assert comm.accepts_reduce_scatter(x, 1)
            assert not comm.accepts_reduce_scatter(x.double())
            assert not comm.accepts_reduce_scatter(x)  # of 3
            assert not comm.accepts_all_gather(x, 0, [x.shape[0] + 1] * 2)
            return comm.all_gather(x)

        x = torch.ones(3, 4)
        assert make_fx(answers, tracing_mode="symbolic")(x)(x).equal(torch.ones(6, 4))


def test_what_is_served_while_sizes_are_symbols(ranks: RankPool) -> None:
    ranks.run(WORLD, ask_with_symbolic_sizes)


def map_over_batches() -> None:
    """Whatever dimension the batch is, and wherever the parts are: as without it, one by one."""
    with make_communicator() as comm:
        x = torch.arange(4.0 * 6 * 8).view(4, 6, 8) * (comm.rank + 1)
        for in_dim in (0, 1, 2, -1, -2):
            for dim in (0, 1, -1):
                for call in (
                    lambda row, dim=dim: comm.all_gather(row, dim),
                    lambda row, dim=dim: comm.reduce_scatter(row, dim),
                ):
                    expected = torch.stack([call(row.contiguous()) for row in x.unbind(in_dim)])
                    assert torch.vmap(call, in_dim)(x).equal(expected), (in_dim, dim)
        # What is the same for the whole batch.
        gathered = comm.all_gather(x[0])
        assert torch.vmap(lambda row: row.sum() + comm.all_gather(x[0]))(x).equal(
            x.sum((1, 2))[:, None, None] + gathered
        )
        check_right(comm)


def test_vmap(ranks: RankPool) -> None:
    ranks.run(WORLD, map_over_batches)


def use_an_escaped_wrapper() -> None:
    """A tensor of a transform that has ended: torch does not tell its address. The call ends, not the communicator."""
    with make_communicator() as comm:
        kept: list[torch.Tensor] = []
        torch.vmap(lambda row: kept.append(row) or row)(torch.ones(3, 1, 4))
        (wrapper,) = kept
        x = torch.ones(1, 4)
        whole = torch.ones(comm.world_size, 4)
        comm.all_gather(x)
        comm.reduce_scatter(whole)  # their sizes are known
        for operand, call in (
            ("x", lambda: comm.all_gather(wrapper)),
            ("x", lambda: comm.all_gather(wrapper, out=whole)),
            ("out", lambda: comm.reduce_scatter(whole, out=wrapper)),
            ("x", lambda: comm.reduce_scatter(wrapper, 1)),
        ):
            with pytest.raises(UnsupportedInputError, match=f"{operand} has no memory of its own.*have storage"):
                call()
        check_right(comm)


def test_escaped_wrapper(ranks: RankPool) -> None:
    ranks.run(WORLD, use_an_escaped_wrapper)


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def gather_wrappers() -> None:
    with make_communicator() as comm:
        world = comm.world_size
        for x in (torch.nn.Parameter(torch.ones(6), requires_grad=False), torch.ones(6).as_subclass(Named)):
            assert comm.accepts_all_gather(x)
            assert comm.all_gather(x).equal(torch.ones(6 * world))
            assert comm.reduce_scatter(x).equal(torch.full((6 // world,), float(world)))
            out = torch.empty(6 * world)
            assert comm.all_gather(x, out=out) is out
            assert out.eq(1).all()
        on_its_way = all_gather_tensor(torch.ones(2), 0, dist.group.WORLD)
        assert type(on_its_way) is not torch.Tensor
        assert comm.all_gather(on_its_way).tolist() == [1.0] * 2 * world * world
        # Views whose memory has other values: torch's dispatcher resolves them, for those whom it is asked.
        conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
        resolved = torch.ops.llm_comm.all_gather(conjugated, 0, None, comm.rank, world, comm.name)
        assert resolved.equal(conjugated.resolve_conj().repeat(world))
        with FakeTensorMode():
            fake = torch.empty(4, 6)
            assert comm.accepts_all_gather(fake)
            assert isinstance(comm.all_gather(fake, 1), FakeTensor)
            scattered = comm.try_reduce_scatter(fake)
            assert isinstance(scattered, FakeTensor)
            assert scattered.shape == (4 // world, 6)
            assert comm.try_all_gather(fake.t()) is None
        mesh = init_device_mesh("cpu", (world,))
        wrapper = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
        assert not comm.accepts_all_gather(wrapper)
        assert "to_local" in comm.plan_reduce_scatter(wrapper).reason
        for call in (comm.all_gather, comm.reduce_scatter):
            with pytest.raises(NotImplementedError, match="llm_comm"):
                call(wrapper)
        for call, count in ((comm.all_gather, 2), (comm.reduce_scatter, 8)):
            with pytest.raises(UnsupportedInputError, match=r"out: the tensor is a DTensor: pass tensor\.to_local\(\)"):
                call(torch.ones(count), out=wrapper)
        check_right(comm)


def test_tensors_that_stand_for_others(ranks: RankPool) -> None:
    ranks.run(WORLD, gather_wrappers)


# ---- Nothing is differentiated ---------------------------------------------------------------------------------------


def calls_of(comm: Communicator) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    return [
        comm.all_gather,
        comm.reduce_scatter,
        lambda x: comm.all_gather(torch.ones_like(x), out=torch.cat([x] * comm.world_size)),
        lambda x: comm.reduce_scatter(torch.ones(len(x) * comm.world_size), out=x),
    ]


def differentiate() -> None:
    x = torch.ones(6)
    with make_communicator() as comm:
        for call in calls_of(comm)[:2]:

            def loss(x: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor] = call) -> torch.Tensor:
                return call(x).sum() + x.sum()

            for transformed in (
                torch.func.grad(loss),
                lambda x, loss=loss: torch.func.jvp(loss, (x,), (x,)),
                lambda x, loss=loss: torch.func.vjp(loss, x),
                lambda x, loss=loss: torch.vmap(torch.func.grad(loss))(torch.stack([x, x])),
            ):
                with pytest.raises(UnsupportedInputError, match=r"detach\(\)"):
                    transformed(x)
            # Of what is no part of the function's argument no gradient is asked.
            assert torch.func.grad(lambda y, call=call: (y[0] * call(x)).sum())(x)[1:].eq(0).all()
        functional = torch.func.functionalize(lambda x: comm.all_gather(x, out=torch.cat([x] * comm.world_size)))
        assert functional(x).eq(1).all()
        for call in calls_of(comm):
            leaf = torch.ones(6, requires_grad=True)
            for needs_grad in (leaf, leaf * 2):
                with pytest.raises(UnsupportedInputError, match=r"requires grad.*no_grad.*detach\(\)"):
                    call(needs_grad)
            with torch.no_grad():
                assert not call(leaf).requires_grad or call(leaf) is leaf
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            torch._dynamo.reset()
            errors = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.TorchRuntimeError, UnsupportedInputError)
            with pytest.raises(errors, match=r"requires grad.*no_grad.*detach\(\)"):
                compiled(leaf * 2)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(6), torch.full((6,), 5.0))
            for call in (comm.all_gather, comm.reduce_scatter):
                with pytest.raises(UnsupportedInputError, match=r"tangent.*detach\(\)"):
                    call(dual)
            assert not comm.accepts_all_gather(dual)
            assert comm.try_reduce_scatter(dual) is None
        check_right(comm)


def test_a_gradient_is_an_error(ranks: RankPool) -> None:
    ranks.run(WORLD, differentiate)
