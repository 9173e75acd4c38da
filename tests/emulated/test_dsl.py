"""Compiled programs of the DSL between emulated ranks: bitwise what the library's own operations return."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, nothing_leaked, unnamed
from reference import assert_bitwise_equal, assert_is_sum, contributions, from_bits, special_patterns

from llm_comm import Communicator, LlmCommError, PeerTimeout, dsl
from llm_comm.dsl import ir
from llm_comm.dsl.compiled import Compiled
from llm_comm.dsl.compiled import compile as compile_program
from llm_comm.dsl.compiler.layout import sentinel_ranges
from llm_comm.dsl.errors import CompileError
from llm_comm.dsl.kernel import Kernel
from llm_comm.dsl.library import all_gather_ll, all_to_all_ll, reduce_scatter_ll, two_shot_hb, two_shot_ll
from llm_comm.dsl.programs import ProgramDefinition

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

MAX_BYTES = 24 << 10
#: In elements: less than a line, less than a line for each rank, odd, whole lines, several lines for each thread, all.
COUNTS = (1, 7, 37, 515, 2048, 6001, MAX_BYTES // 4)


ALL_REDUCE, BROADCAST, ALL_GATHER = ir.Operation.ALL_REDUCE, ir.Operation.BROADCAST, ir.Operation.ALL_GATHER


# ---- Programs --------------------------------------------------------------------------------------------------------


@dsl.program("all_reduce")
def one_shot(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(p.world, like=x)
    own = p.load(x[0])
    for peer in p.peers:
        p.put_packets(own, peer, received[p.rank])
    p.store(p.sum({p.rank: own, **{peer: p.read_packets(received[peer]) for peer in p.peers}}), y[0])


@dsl.program("all_reduce")
def packets_in_a_loop(p: dsl.Builder) -> None:
    """Each piece to its owner and back; packets of two pieces in turn, and a signal that says when they are free."""
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    scattered, gathered = p.packets(p.world, like=x, stages=2), p.packets(p.world, like=x, stages=2)
    with p.loop():
        for peer in p.peers:
            p.put_packets(x[peer], peer, scattered[p.rank])
        total = p.sum({p.rank: p.load(x[p.rank]), **{peer: p.read_packets(scattered[peer]) for peer in p.peers}})
        p.store(total, y[p.rank])
        for peer in p.peers:
            p.put_packets(total, peer, gathered[p.rank])
        for peer in p.peers:
            p.store(p.read_packets(gathered[peer]), y[peer])
        for peer in p.peers:
            p.signal(peer)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer)


@dsl.program("all_reduce")
def kept_in_a_loop(p: dsl.Builder) -> None:
    """Sums of a piece wait in registers until all peers have read theirs."""
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(p.world, like=x)
    with p.loop():
        own = p.load(x[0])
        for peer in p.peers:
            p.put_packets(own, peer, received[p.rank])
        total = p.sum({p.rank: own, **{peer: p.read_packets(received[peer]) for peer in p.peers}})
        for peer in p.peers:
            p.signal(peer)
        for peer in p.peers:
            p.wait(peer)
        p.store(total, y[0])


@dsl.program("all_reduce")
def through_rank_0(p: dsl.Builder) -> None:
    """Ranks by their numbers: rank 0 gets what the others have from their memory, and stores the sum to them."""
    x, y = p.input.chunks(1, symmetric=True), p.output.chunks(1, symmetric=True)
    others = p.ranks[1:]
    with p.only(*others):
        p.signal(p.ranks[0])
        p.wait(p.ranks[0], semaphore=1)
    with p.only(p.ranks[0]):
        for rank in others:
            p.wait(rank)
        total = p.sum({p.ranks[0]: p.load(x[0]), **{rank: p.get(rank, x[0]) for rank in others}})
        p.store(total, y[0])
        for rank in others:
            p.put(total, rank, y[0])
        for rank in others:
            p.signal(rank, semaphore=1)


@dsl.program("all_reduce")
def two_groups(p: dsl.Builder) -> None:
    """One half of the message is summed by each group of blocks."""
    x, y = p.input.chunks(2), p.output.chunks(2)
    received = p.packets(2 * p.world, like=x)
    for half in range(2):
        with p.group(f"half {half}"):
            own = p.load(x[half])
            for i, peer in enumerate(p.peers):
                p.put_packets(own, peer, received[half * p.world + i])
            # What the peer before this one by i + 1 has sent.
            of_peers: dict[dsl.Rank, ir.Value | ir.Chunk] = {
                p.rank + (p.world - 1 - i): p.read_packets(received[half * p.world + i]) for i in range(p.world - 1)
            }
            p.store(p.sum({p.rank: own, **of_peers}), y[half])


@dsl.program("all_gather", instances=3)
def gather_by_puts(p: dsl.Builder) -> None:
    """Straight to the tensors of the peers, which have to be there and unused: the first signals say so."""
    x, y = p.input.chunks(2), p.output.chunks(2 * p.world, symmetric=True)
    mine = [y[2 * rank + i] for rank in range(p.world) for i in range(2)]
    for peer in p.peers:
        p.signal(peer)
    for peer in p.peers:
        p.wait(peer)
    for rank in range(p.world):
        with p.only(rank):
            for i in range(2):
                p.copy(x[i], mine[2 * rank + i])
                for peer in p.peers:
                    p.put(x[i], peer, mine[2 * rank + i])
    for peer in p.peers:
        p.signal(peer)
    for peer in p.peers:
        p.wait(peer)


@dsl.program("all_gather")
def gather_by_ports(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(2 * p.world, symmetric=True)
    for peer in p.peers:
        p.signal(peer, through_port=True)
    for rank in p.ranks:
        with p.only(rank):
            for i in range(2):
                p.copy(x[i], y[2 * rank.rank + i])
    for peer in p.peers:
        p.wait(peer, through_port=True)
    for rank in p.ranks:
        with p.only(rank):
            for i in range(2):
                for peer in p.peers:
                    p.port_put(x[i], peer, y[2 * rank.rank + i])
    for peer in p.peers:
        p.signal(peer, semaphore=1, through_port=True)
    for peer in p.peers:
        p.wait(peer, semaphore=1, through_port=True)
    for peer in p.peers:
        p.flush(peer)


@dsl.program("all_reduce")
def two_shot_by_ports(p: dsl.Builder) -> None:
    """Sums are kept in scratch until the proxy has taken them."""
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    scattered, gathered = p.scratch(p.world, like=x, stages=3), p.scratch(p.world, like=x, stages=3)
    sums = p.scratch(1, like=x, stages=2)
    with p.loop():
        for peer in p.peers:
            p.port_put(x[peer], peer, scattered[p.rank])
            p.signal(peer, through_port=True)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer, through_port=True)
            total = p.sum({p.rank: p.load(x[p.rank]), **{peer: p.load(scattered[peer]) for peer in p.peers}})
            p.store(total, y[p.rank])
            p.store(total, sums[0])
            for peer in p.peers:
                p.port_put(sums[0], peer, gathered[p.rank])
                p.signal(peer, semaphore=1, through_port=True)
        with p.behind(2):
            for peer in p.peers:
                p.wait(peer, semaphore=1, through_port=True)
            for peer in p.peers:
                p.copy(gathered[peer], y[peer])
            for peer in p.peers:
                p.flush(peer)


@dsl.program("broadcast", root=1)
def broadcast(p: dsl.Builder) -> None:
    """The root begins when it has heard from all, so who hears from it knows that all have begun."""
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(1, like=x)
    others = [rank for rank in p.ranks if rank != p.root]
    with p.only(*others):
        p.signal(p.root)
        p.store(p.read_packets(received[0]), y[0])
    with p.only(p.root):
        for rank in others:
            p.wait(rank)
        own = p.load(x[0])
        for rank in others:
            p.put_packets(own, rank, received[0])
        p.store(own, y[0])


# ---- What each returns -----------------------------------------------------------------------------------------------


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element behind a line."""
    memory = torch.empty(tensor.numel() + 1 + 16 // tensor.element_size(), dtype=tensor.dtype)
    skipped = -memory.data_ptr() % 16 // memory.element_size() + 1
    copy = memory[skipped : skipped + tensor.numel()].view(tensor.shape)
    copy.copy_(tensor)
    return copy


def assert_reset(compiled: Compiled) -> None:
    """When all ranks have ended their calls, no packet is left, in either half of the workspace."""
    for begin, end in sentinel_ranges(compiled.program, compiled._kernel._layout):
        assert compiled._kernel._workspace.memory[begin:end].eq(0xFF).all()


def calls_by_algorithm(comm: Communicator) -> Counter[str]:
    called: Counter[str] = Counter()
    for each in comm.stats().calls:
        called[each.algorithm] += each.calls
    return called


def use_cache(directory: str) -> None:
    os.environ["LLM_COMM_CACHE_DIR"] = directory


def sum_in_every_way(text: ProgramDefinition, directory: str, dtypes: list[torch.dtype]) -> None:
    use_cache(directory)
    with make_communicator() as comm:
        for dtype in dtypes:
            compiled = compile_program(text, comm, dtype=dtype, max_bytes=MAX_BYTES, threads=8)
            for call, count in enumerate(COUNTS):
                inputs = contributions(comm.world_size, count, dtype, seed=call)
                x = inputs[comm.rank]
                native = comm.all_reduce(x.clone())
                assert_is_sum(native, inputs, "the library's")
                what = f"{text.name}, {count} of {dtype}"
                for attempt in range(3):
                    assert_bitwise_equal(compiled(x), native, f"{what}, call {attempt}")
                out = misaligned(torch.zeros_like(x))
                assert compiled(misaligned(x), out) is out
                assert_bitwise_equal(out, native, f"{what}, not aligned")
                in_place = x.clone()
                if text in (two_groups, two_shot_by_ports):
                    with pytest.raises(ValueError, match="loads x after it has stored to out"):
                        compiled(in_place, in_place)
                    continue
                assert compiled(in_place, in_place) is in_place
                assert_bitwise_equal(in_place, native, f"{what}, in place")
            dist.barrier()
            assert_reset(compiled)
        comm.check()
        dist.barrier()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Kernels that the tests of this file compile."""
    directory = tmp_path_factory.mktemp("kernels")
    yield str(directory)
    assert not list(directory.rglob("compiling_*"))


@pytest.mark.parametrize(
    ("text", "world", "dtypes"),
    [
        (one_shot, 2, [torch.bfloat16, torch.float16]),
        (one_shot, 5, [torch.float32]),
        (two_shot_ll, 3, [torch.float16, torch.float32]),
        (two_shot_ll, 8, [torch.bfloat16]),
        (two_shot_hb, 3, [torch.float32]),
        (two_shot_hb, 4, [torch.bfloat16]),
        (packets_in_a_loop, 3, [torch.bfloat16]),
        (kept_in_a_loop, 2, [torch.bfloat16]),
        (two_groups, 3, [torch.float16]),
        (two_shot_by_ports, 3, [torch.float32]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_sums(ranks: RankPool, cache: str, text: ProgramDefinition, world: int, dtypes: list[torch.dtype]) -> None:
    ranks.run(world, call_by_name, sum_in_every_way.__name__, text.name, cache, dtypes)


TEXTS = [value for value in vars().values() if isinstance(value, ProgramDefinition)]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
def test_programs_are_correct(text: ProgramDefinition) -> None:
    for world in (2, 3, 5):
        dsl.check(text.build(world))


def call_by_name(function: str, text: str, *arguments: Any) -> None:
    """Programs cannot be pickled: they go to the ranks by name."""
    globals()[function](globals()[text], *arguments)


def sum_special_values(text: ProgramDefinition, directory: str) -> None:
    """Among them the sentinel of packets, which is a NaN; -0.0 stays where all ranks have it."""
    use_cache(directory)
    dtype = torch.bfloat16
    with make_communicator() as comm:
        compiled = compile_program(text, comm, dtype=dtype, max_bytes=MAX_BYTES, threads=8)
        patterns = special_patterns(dtype)
        x = from_bits(patterns.repeat_interleave(8).roll(8 * comm.rank), dtype)
        assert_bitwise_equal(compiled(x), comm.all_reduce(x), text.name)
        x = torch.full((40,), -0.0, dtype=dtype)
        assert_bitwise_equal(compiled(x), x, text.name)
        comm.check()
        dist.barrier()


@pytest.mark.parametrize("text", [one_shot, two_shot_ll, two_shot_hb], ids=lambda text: text.name)
def test_special_values(ranks: RankPool, cache: str, text: ProgramDefinition) -> None:
    ranks.run(2, call_by_name, sum_special_values.__name__, text.name, cache)


def sum_in_symmetric_memory(text: ProgramDefinition, directory: str) -> None:
    use_cache(directory)
    with make_communicator() as comm:
        dtype = torch.float32
        compiled = compile_program(text, comm, dtype=dtype, max_bytes=MAX_BYTES, threads=8)
        x, out = comm.empty(6001, dtype), comm.empty(6001, dtype)
        for call, (first, last) in enumerate([(0, 1), (0, 6001), (3, 100), (4, 4004)]):
            inputs = contributions(comm.world_size, last - first, dtype, seed=call)
            x[first:last] = inputs[comm.rank]
            out.zero_()
            for _ in range(3):
                compiled(x[first:last], out[first:last])
            assert_is_sum(out[first:last], inputs, f"{first} to {last}")
            assert out[:first].eq(0).all()
            assert out[last:].eq(0).all()
        with pytest.raises(ValueError, match=r"peers use the input, so it must be a tensor of Communicator\.empty"):
            compiled(x.clone(), out)
        with pytest.raises(ValueError, match=r"peers store to the output: pass out="):
            compiled(x)
        dist.barrier()


def test_sums_in_symmetric_memory(ranks: RankPool, cache: str) -> None:
    ranks.run(4, call_by_name, sum_in_symmetric_memory.__name__, through_rank_0.name, cache)


# ---- Operations that move data ---------------------------------------------------------------------------------------


def any_bytes(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of any pattern; every fourth word is the sentinel of packets, or what is sent in its place."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = count * dtype.itemsize
    words = torch.randint(0, 256, (-(-nbytes // 4), 4), generator=generator, dtype=torch.uint8)
    words[::4] = 0xFF
    words[::8, 0] = 0xFE
    return words.flatten()[:nbytes].clone().view(dtype)


def move(text: ProgramDefinition, directory: str, dtype: torch.dtype) -> None:
    use_cache(directory)
    with make_communicator() as comm:
        world, rank = comm.world_size, comm.rank
        compiled = compile_program(text, comm, dtype=dtype, max_bytes=MAX_BYTES, threads=8)
        parted = text.operation.value in ("all_to_all", "all_gather")
        longest = MAX_BYTES // dtype.itemsize // (world if parted else 1)
        symmetric = comm.empty(longest * world, dtype)
        for call, count in enumerate((1, 7, 37, 515, longest)):
            parts = [
                any_bytes(count * (world if text is all_to_all_ll else 1), dtype, 100 * call + r) for r in range(world)
            ]
            x = parts[rank]
            if text is all_to_all_ll:
                expected = torch.cat([part.view(torch.uint8).chunk(world)[rank] for part in parts]).view(dtype)
            elif text is broadcast:
                expected = parts[text.root]
            else:
                expected = torch.cat(parts)
                assert torch.equal(comm.all_gather(x).view(torch.uint8), expected.view(torch.uint8))
            for _ in range(3):
                out = symmetric[: expected.numel()].fill_(0) if text in (gather_by_puts, gather_by_ports) else None
                found = compiled(x, out)
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), f"{count} of {dtype}"
            if text not in (gather_by_puts, gather_by_ports):
                found = compiled(misaligned(x), misaligned(torch.zeros_like(expected)))
                assert torch.equal(found.clone().view(torch.uint8), expected.view(torch.uint8)), f"{count}, not aligned"
        comm.check()
        dist.barrier()
        assert_reset(compiled)


@pytest.mark.parametrize(
    ("text", "world", "dtype"),
    [
        (all_gather_ll, 3, torch.uint8),
        (all_gather_ll, 8, torch.float32),
        (gather_by_puts, 4, torch.bfloat16),
        (gather_by_ports, 3, torch.int64),
        (all_to_all_ll, 5, torch.float32),
        (broadcast, 4, torch.uint8),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_moves(ranks: RankPool, cache: str, text: ProgramDefinition, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, call_by_name, move.__name__, text.name, cache, dtype)


def sum_parts(text: ProgramDefinition, directory: str) -> None:
    use_cache(directory)
    with make_communicator() as comm:
        world, dtype = comm.world_size, torch.bfloat16
        compiled = compile_program(text, comm, dtype=dtype, max_bytes=MAX_BYTES, threads=8)
        for call, rows in enumerate((1, 5, 64)):
            inputs = contributions(world, rows * world * 13, dtype, seed=call)
            x = inputs[comm.rank].view(rows * world, 13)
            native = comm.reduce_scatter(x)
            for _ in range(3):
                assert_bitwise_equal(compiled(x), native, f"{rows} rows")
        nbytes: Counter[bool] = Counter()
        for each in comm.stats().calls:
            nbytes[each.protocol == "DSL"] += each.bytes
        assert nbytes[True] == 3 * nbytes[False] == 3 * 70 * 13 * dtype.itemsize, "of parts, as an algorithm's"
        assert compiled(x[:0]).numel() == 0
        assert calls_by_algorithm(comm)["none"] == 1
        with pytest.raises(ValueError, match=f"first dimension of x is {world + 1}; it must be a multiple of {world}"):
            compiled(torch.zeros(world + 1, dtype=dtype))
        dist.barrier()


def test_reduce_scatter(ranks: RankPool, cache: str) -> None:
    ranks.run(3, call_by_name, sum_parts.__name__, reduce_scatter_ll.name, cache)


# ---- Sequences -------------------------------------------------------------------------------------------------------


def call_in_turn(texts: str, directory: str) -> None:
    """Programs, sizes and the library's own operations, mixed: each knows the number of its own call."""
    use_cache(directory)
    with nothing_leaked():
        comm = make_communicator()
        dtype = torch.bfloat16
        compiled = [
            compile_program(globals()[name], comm, dtype=dtype, max_bytes=MAX_BYTES, threads=8)
            for name in texts.split()
        ]
        compiled.append(compile_program(one_shot, comm, dtype=dtype, max_bytes=4096, blocks=1, threads=8))
        called: Counter[str] = Counter()
        for call in range(30):
            count = (call * 577) % 2000 + 1
            inputs = contributions(comm.world_size, count, dtype, seed=call)
            run = [*compiled, comm.all_reduce][call * 7 % (len(compiled) + 1)]
            assert_is_sum(run(inputs[comm.rank].clone()), inputs, f"call {call}")
            called[f"dsl:{run.program.name}" if isinstance(run, Compiled) else comm.plan(inputs[0]).algorithm] += 1
        assert calls_by_algorithm(comm) == called
        assert comm.stats().progress.launches == called.total()
        dist.barrier()
        comm.close()
        with pytest.raises(RuntimeError, match="closed"):
            compiled[0](torch.zeros(3, dtype=dtype))
        del run, compiled, comm


def test_calls_in_turn(ranks: RankPool, cache: str) -> None:
    ranks.run(3, call_in_turn, "one_shot two_shot_ll two_shot_hb", cache)


# ---- What goes wrong -------------------------------------------------------------------------------------------------


def pass_what_does_not_fit(directory: str) -> None:
    use_cache(directory)
    with make_communicator() as comm:
        compiled = compile_program(one_shot, comm, dtype=torch.bfloat16, max_bytes=MAX_BYTES, threads=8)
        x = torch.ones(64, dtype=torch.bfloat16)
        wrong: list[tuple[Any, Any, str]] = [
            (x.float(), None, "x is of torch.float32; it was compiled for dtype=torch.bfloat16"),
            ("x", None, "x: a str is not a tensor"),
            (x.to("meta"), None, "x: the tensor is on meta, the communicator on cpu"),
            (x[::2], None, "x: the tensor is not contiguous"),
            (
                x.repeat(MAX_BYTES // 128 + 1),
                None,
                f"{MAX_BYTES + 128} bytes; it was compiled for max_bytes={MAX_BYTES}",
            ),
            (x, x[:32], r"out has shape \(32,\); it must have \(64,\)"),
            (x, x.float(), "out is of torch.float32"),
            (x[:32], x[16:48], "out overlaps x"),
        ]
        for tensor, out, message in wrong:
            with pytest.raises(ValueError, match=message):
                compiled(tensor, out)
        # Nothing was launched: the ranks still agree on the number of the next call.
        if comm.rank == 0:
            with pytest.raises(ValueError, match="str"):
                compiled("x")  # type: ignore[arg-type]
        assert compiled(x[:0]).numel() == 0
        assert compiled(x).eq(comm.world_size).all()
        with pytest.raises(ValueError, match="is for 3 ranks; there are 2"):
            compile_program(one_shot.build(3), comm, dtype=torch.bfloat16, max_bytes=64)
        with pytest.raises(ValueError, match="max_bytes is 0"):
            compile_program(one_shot, comm, dtype=torch.bfloat16, max_bytes=0)
        with pytest.raises(
            ValueError, match=r"has 2 group\(s\), so it takes a multiple of 2 block\(s\), at most 65535; blocks is 3"
        ):
            compile_program(two_groups, comm, dtype=torch.bfloat16, max_bytes=64, blocks=3)
        with pytest.raises(ValueError, match="threads is 4"):
            compile_program(one_shot, comm, dtype=torch.bfloat16, max_bytes=64, threads=4)
        with pytest.raises(CompileError, match=r"elements of torch\.int32 are moved, never summed"):
            compile_program(one_shot, comm, dtype=torch.int32, max_bytes=64)
        dist.barrier()


def test_what_does_not_fit_is_refused(ranks: RankPool, cache: str) -> None:
    ranks.run(2, pass_what_does_not_fit, cache)


def compile_what_differs(directory: str) -> None:
    """Each case differs on the last rank alone. Ends with a good kernel, whose calls are right: so all ranks count as
    many loads, those that have failed on one of them included."""
    use_cache(directory)
    with make_communicator() as comm:
        is_odd = comm.rank == comm.world_size - 1
        options: dict[str, Any] = {"dtype": torch.float32, "max_bytes": MAX_BYTES, "threads": 8}

        def error(text: ProgramDefinition = one_shot, **changed: Any) -> str:
            with pytest.raises(LlmCommError) as caught:
                compile_program(text, comm, **{**options, **changed})
            texts: list[str] = [""] * comm.world_size
            dist.all_gather_object(texts, f"{type(caught.value).__name__}: {caught.value}")
            assert len(set(texts)) == 1, texts
            return unnamed(texts[0])

        with mock.patch("llm_comm.dsl.kernel.compile_image", return_value=b"none"):
            for name, other in (("dtype", torch.bfloat16), ("max_bytes", 1 << 14), ("blocks", 2), ("threads", 16)):
                said = error(**{name: other} if is_odd else {}).replace("'", "")
                found = "RendezvousError: the ranks have different kernels of llm_comm.dsl: "
                assert said.startswith(f"{found}{name} is {other} on rank {comm.world_size - 1}, ")
            said = error(through_rank_0 if is_odd else one_shot)
            assert "program is 'through_rank_0' on rank 2, 'one_shot' on ranks 0, 1; digest is " in said
            said = error(renamed if is_odd else one_shot)
            assert "digest is " in said
            assert "program is " not in said
            # Of one rank what it says, of all alike the error itself.
            assert "failed on 1 of 3 ranks: rank 2: ValueError: max_bytes is 0;" in error(max_bytes=0 if is_odd else 9)
            with pytest.raises(ValueError, match=r"^max_bytes is 0; it must be a positive whole number"):
                compile_program(one_shot, comm, dtype=torch.float32, max_bytes=0)
            with pytest.raises(CompileError, match=r"torch\.int32 are moved, never summed"):
                compile_program(one_shot, comm, dtype=torch.int32, max_bytes=9)
        missing = mock.patch("llm_comm.dsl.kernel.compile_image", return_value=b"/there/is/no/library")
        with missing if is_odd else nullcontext():
            said = error()
        assert said.startswith(
            "RendezvousError: loading of program one_shot failed on 1 of 3 ranks: rank 2: RuntimeError"
        )
        broken = mock.patch.object(Kernel, "_arm", side_effect=RuntimeError("no memory"))
        with broken if is_odd else nullcontext():
            assert "preparation of the workspace of one_shot failed on 1 of 3 ranks: rank 2: Runt" in error()
        x = torch.arange(100.0)
        assert compile_program(one_shot, comm, **options)(x).eq(3 * x).all()
        assert comm.all_reduce(x).eq(3 * x).all()
        comm.check()
        dist.barrier()


renamed = dsl.program("all_reduce")(through_rank_0._text)
renamed.name = "one_shot"


def test_ranks_compile_the_same_or_none_does(ranks: RankPool, cache: str) -> None:
    ranks.run(3, compile_what_differs, cache)


def wait_for_a_silent_rank(text: ProgramDefinition, directory: str) -> None:
    use_cache(directory)
    comm = make_communicator(timeout_s=2.0)
    compiled = compile_program(text, comm, dtype=torch.bfloat16, max_bytes=MAX_BYTES, threads=8)
    x = torch.ones(3000, dtype=torch.bfloat16)
    assert compiled(x).eq(comm.world_size).all()
    dist.barrier()
    if comm.rank != 1:
        for use in (lambda: compiled(x), comm.check, lambda: compiled(x), lambda: comm.all_reduce(x)):
            with pytest.raises(PeerTimeout, match=rf"nothing came from rank 1 .* program {text.name}"):
                use()
        assert comm.stats().by_operation() == {"all_reduce": (1, x.nbytes, 0, 0)}, "nothing that failed is counted"
    dist.barrier()
    comm.close()


@pytest.mark.parametrize("text", [two_shot_ll, two_shot_hb, two_shot_by_ports], ids=lambda text: text.name)
def test_a_silent_rank_is_named(ranks: RankPool, cache: str, text: ProgramDefinition) -> None:
    ranks.run(3, call_by_name, wait_for_a_silent_rank.__name__, text.name, cache)
