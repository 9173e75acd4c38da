"""Algorithms that access the symmetric tensors of peers themselves: whole results, wherever the tensors lie; and where
one of them is not symmetric, the same error on all ranks."""

from __future__ import annotations

import pytest
import torch
from cores import (
    connected,
    gather_problem,
    number_of,
    parts_of,
    problem_of,
    symmetric,
    tiling_of,
    together,
    with_window,
)
from harness import names_of_world, unnamed
from reference import DTYPES, assert_is_sum, contributions

from llm_comm import _core
from llm_comm.runtime.failures import explain

PUSH, COPY, IN_STREAM = "direct_push_hb", "direct_port", "direct_ce"
PULL, COPIED_SUMS, SUMS_IN_STREAM = "two_shot_pull_hb", "two_shot_port", "two_shot_ce"
TITLES = {
    PUSH: "all-gather of symmetric tensors by push (HB)",
    COPY: "all-gather of symmetric tensors by copy engines",
    IN_STREAM: "all-gather of symmetric tensors by copies in the stream",
    COPIED_SUMS: "two-shot all-reduce with copy engines",
    SUMS_IN_STREAM: "two-shot all-reduce with copies in the stream",
}
#: How far blocks are ahead, where that is to be said.
DEPTHS = {"two_shot": 1, "two_shot_hb": 2, "port": 1, COPIED_SUMS: 2, SUMS_IN_STREAM: 2}
WORLDS = [2, 3, 5, 8]
LINE = 16


def gather(algorithm: str) -> int:
    return number_of("all_gather", algorithm)


def reduce(algorithm: str) -> int:
    return number_of("all_reduce", algorithm)


# ---- Results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "rows", "unit"),
    [(PUSH, 1, LINE), (PUSH, 3, LINE), (COPY, 1, LINE), (COPY, 1, 5), (IN_STREAM, 1, LINE), (IN_STREAM, 1, 5)],
)
def test_all_gather(world: int, is_even: bool, algorithm: str, rows: int, unit: int) -> None:
    """Of inputs at any address, with parts of no bytes, into outputs that lie elsewhere on each rank where they may."""
    cores = with_window(connected(world))
    sizes = [unit * (200 if is_even else [200, 0, 1, 37][rank % 4]) for rank in range(world)]
    problem = gather_problem(world, rows, sizes)
    for seed in range(3):
        parts = parts_of(rows, sizes, seed)
        expected = torch.cat(parts, dim=1)
        calls, outputs = [], []
        for rank, core in enumerate(cores):
            run = core.prepare(gather(algorithm), problem, tiling_of(rows * max(sizes), blocks=3, depth=0))
            place = seed if algorithm == IN_STREAM else (rank + seed) % 3
            output = symmetric(core, 512 * place, torch.zeros_like(expected))
            unaligned = torch.empty(parts[rank].nbytes + 1, dtype=torch.uint8)
            unaligned[1:].copy_(parts[rank].flatten())
            outputs.append(output)
            calls.append(lambda run=run, x=unaligned, y=output: run(x.data_ptr() + 1, y.data_ptr(), 0))
        assert together(*calls) == [True] * world, [core.error() for core in cores]
        for rank, output in enumerate(outputs):
            assert torch.equal(output, expected), f"rank {rank}, call {seed}"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", [PUSH, COPY, IN_STREAM])
def test_all_gather_in_place(world: int, algorithm: str) -> None:
    """Of parts that are where they belong."""
    cores = with_window(connected(world))
    sizes = [LINE * (30 + rank) for rank in range(world)]
    parts = parts_of(1, sizes)
    expected = torch.cat(parts, dim=1)
    calls, outputs = [], []
    for rank, core in enumerate(cores):
        run = core.prepare(gather(algorithm), gather_problem(world, 1, sizes), tiling_of(max(sizes), depth=0))
        output = symmetric(core, 0 if algorithm == IN_STREAM else 64 * rank, torch.zeros_like(expected))
        own = output[:, sum(sizes[:rank]) :][:, : sizes[rank]].copy_(parts[rank])
        outputs.append(output)
        calls.append(lambda run=run, x=own, y=output: run(x.data_ptr(), y.data_ptr(), 0))
    assert together(*calls) == [True] * world, [core.error() for core in cores]
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", [PULL, COPIED_SUMS, SUMS_IN_STREAM])
def test_all_reduce(world: int, dtype: torch.dtype, algorithm: str) -> None:
    """Bitwise the sum of the others, in place on no rank, on all and on some; of symmetric inputs, or of any. What all
    goes by copies has no sums in place, and of few lines where there are more than two ranks; in pieces of which some
    are empty."""
    cores = with_window(connected(world), 1 << 20)
    of_any = algorithm != PULL
    by_copies = algorithm == SUMS_IN_STREAM
    few = (1 if world == 2 else world, 2 * world) if by_copies else (1, world - 1)
    for seed, lines in enumerate((*few, 7 * world, 501)):
        depth = 4 - seed if by_copies else 2 if of_any else 0
        count = lines * LINE // dtype.itemsize - (1 if of_any and seed % 2 else 0)
        inputs = contributions(world, count, dtype, seed)
        for in_place in (0,) if by_copies else (0, world, 1):
            calls, outputs = [], []
            for rank, core in enumerate(cores):
                is_in_place = rank < in_place
                x = inputs[rank].clone()
                elsewhere = 0 if by_copies else rank
                if is_in_place or not of_any:
                    x = symmetric(core, 512 * (elsewhere + seed), x)
                # Behind the output lies what nobody may write.
                marked = torch.full((count + 64,), 1.0 + rank, dtype=dtype)
                behind = x if is_in_place else symmetric(core, (1 << 18) + 64 * elsewhere, marked)
                y = behind[:count]
                run = core.prepare(reduce(algorithm), problem_of(x, world), tiling_of(count, blocks=3, depth=depth))
                outputs.append(behind)
                calls.append(lambda run=run, x=x, y=y: run(x.data_ptr(), y.data_ptr(), 0))
            assert together(*calls) == [True] * world, [core.error() for core in cores]
            for rank, output in enumerate(outputs):
                assert_is_sum(output[:count], inputs, f"rank {rank}, {count} elements, in place on {in_place}")
                assert output[count:].eq(1 + rank).all()


# ---- Ranks that disagree -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "other"),
    [
        (PULL, "two_shot_hb"),
        (PULL, "two_shot"),
        (PULL, "one_shot"),
        (COPIED_SUMS, PULL),
        (COPIED_SUMS, "two_shot_hb"),
        (COPIED_SUMS, "port"),
        (COPIED_SUMS, "one_shot"),
        (SUMS_IN_STREAM, "two_shot"),
        (SUMS_IN_STREAM, "two_shot_hb"),
        (SUMS_IN_STREAM, "port"),
        (SUMS_IN_STREAM, "one_shot"),
    ],
)
def test_ranks_that_run_different_algorithms_do_not_meet(algorithm: str, other: str) -> None:
    """Where calls are not compared: a rank whose tensor is symmetric, and one whose is not, wait in vain and say so."""
    cores = with_window(connected(2, timeout_s=0.5), 1 << 20)
    x = torch.ones(4096)
    tensors = [symmetric(cores[0], 0, x), x.clone()]
    outputs = [symmetric(cores[0], 1 << 18, x), x] if algorithm == SUMS_IN_STREAM else tensors
    names = [algorithm, other]
    calls = []
    for core, name, tensor, output in zip(cores, names, tensors, outputs, strict=True):
        run = core.prepare(reduce(name), problem_of(x, 2), tiling_of(x.numel(), blocks=4, depth=DEPTHS.get(name, 0)))
        calls.append(lambda run=run, x=tensor, y=output: run(x.data_ptr(), y.data_ptr(), 0))
    together(*calls)
    for rank, core in enumerate(cores):
        error = core.error()
        assert error is not None, rank
        assert (error.cause, error.peer) == ("timeout", 1 - rank)


@pytest.mark.parametrize("algorithm", [PUSH, COPY])
def test_tensors_in_several_windows(algorithm: str) -> None:
    """One of them on each rank: a place says in which."""
    world, sizes = 3, [LINE * 20] * 3
    cores = with_window(connected(world))
    parts = parts_of(1, sizes, 7)
    expected = torch.cat(parts, dim=1)
    for number in (1, 2):
        handles = [core.create_window(number, 1 << 16) for core in cores]
        for rank, core in enumerate(cores):
            for peer, handle in enumerate(handles):
                if peer != rank:
                    core.map_window(number, peer, *handle)
    calls, outputs = [], []
    for rank, core in enumerate(cores):
        capsule, _ = core.lend(rank, 64, expected.nbytes, -1)
        output = torch.utils.dlpack.from_dlpack(capsule).view(expected.shape).zero_()
        assert core.find(output.data_ptr(), output.nbytes) == (rank, 64)
        run = core.prepare(gather(algorithm), gather_problem(world, 1, sizes), tiling_of(sizes[0], blocks=2, depth=0))
        outputs.append(output)
        calls.append(lambda run=run, x=parts[rank], y=output: run(x.data_ptr(), y.data_ptr(), 0))
    assert together(*calls) == [True] * world
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["ordinary", "unaligned", "cut off"])
@pytest.mark.parametrize("algorithm", [PUSH, COPY, IN_STREAM])
def test_a_tensor_that_is_not_symmetric(world: int, kind: str, algorithm: str) -> None:
    """On one rank. All ranks end with an error that names it, and none has waited for its time-out."""
    faulty_rank, nbytes = 1, LINE * 40
    cores = with_window(connected(world), 1 << 16)
    problem = gather_problem(world, 1, [nbytes] * world)
    end = (1 << 16) - world * nbytes
    calls, outputs = [], []
    for rank, core in enumerate(cores):
        like = torch.full((world * nbytes,), 7, dtype=torch.uint8)
        output = symmetric(core, end, like)
        address = output.data_ptr()
        if rank == faulty_rank:
            ordinary = torch.full_like(like, 7)
            address = {"ordinary": ordinary.data_ptr(), "unaligned": address - 1, "cut off": address + LINE}[kind]
            outputs.append(ordinary)
        outputs.append(output)
        run = core.prepare(gather(algorithm), problem, tiling_of(nbytes, blocks=2, depth=0))
        x = torch.zeros(nbytes, dtype=torch.uint8)
        calls.append(lambda run=run, x=x, address=address: run(x.data_ptr(), address, 0))
    together(*calls)
    for rank, core in enumerate(cores):
        error = core.error()
        assert error is not None
        assert (error.cause, error.rank, error.peer, error.phase) == ("not symmetric", rank, faulty_rank, 0)
        said = explain(error, 1.0, names_of_world(world))
        assert said.kind == "MismatchError"
        assert f"a tensor of rank {faulty_rank} is not in symmetric memory" in unnamed(said.text)
        assert TITLES[algorithm] in said.text
    if algorithm == IN_STREAM:  # its copies have been enqueued: into the heap of the faulty_rank, but not where it says
        outputs = outputs[faulty_rank : faulty_rank + 1]
    assert all(output.eq(7).all() for output in outputs), "nothing has been written"


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("algorithm", [IN_STREAM, SUMS_IN_STREAM])
def test_a_tensor_at_another_place(world: int, algorithm: str) -> None:
    """On one rank, which may be the first one. All ranks end with an error that names one that differs from rank 0."""
    nbytes = LINE * 20
    gathers = algorithm == IN_STREAM
    for faulty_rank in (0, world - 1):
        cores = with_window(connected(world))
        calls = []
        for rank, core in enumerate(cores):
            output = symmetric(core, 64 if rank == faulty_rank else 0, torch.zeros(world * nbytes // 4))
            if gathers:
                x = torch.ones(nbytes // 4)
                run = core.prepare(gather(algorithm), gather_problem(world, 1, [nbytes] * world), tiling_of(nbytes))
            else:
                x = torch.ones_like(output)
                run = core.prepare(reduce(algorithm), problem_of(x, world), tiling_of(x.numel(), blocks=2, depth=2))
            calls.append(lambda run=run, x=x, y=output: run(x.data_ptr(), y.data_ptr(), 0))
        together(*calls)
        named = faulty_rank or 1
        for rank, core in enumerate(cores):
            error = core.error()
            assert error is not None
            assert (error.cause, error.rank, error.peer, error.phase) == ("other symmetric offset", rank, named, 0)
            said = explain(error, 1.0, names_of_world(world))
            assert said.kind == "MismatchError"
            assert f"a tensor of rank {named} lies elsewhere in symmetric memory than that of rank 0" in unnamed(
                said.text
            )
            assert TITLES[algorithm] in said.text


@pytest.mark.parametrize("world", [2, 3])
def test_sums_behind_each_other_by_copies(world: int) -> None:
    """Of one input into one output, which each rank reads in between: what comes early destroys a sum that is still to
    be read, and what goes late sends the input of the next call. At times the output is the input of the next call."""
    cores = with_window(connected(world))
    count = 4001
    inputs = [contributions(world, count, torch.bfloat16, seed) for seed in range(20)]
    tensors = [
        [symmetric(core, place, torch.zeros(count, dtype=torch.bfloat16)) for place in (0, 1 << 14)] for core in cores
    ]
    problem = problem_of(tensors[0][0], world)
    runs = [core.prepare(reduce(SUMS_IN_STREAM), problem, tiling_of(count, blocks=3, depth=3)) for core in cores]
    sums: list[list[torch.Tensor]] = [[] for _ in cores]

    def work(rank: int) -> bool:
        for seed, of_call in enumerate(inputs):
            x, y = tensors[rank] if seed % 3 else reversed(tensors[rank])
            x.copy_(of_call[rank])
            if not runs[rank](x.data_ptr(), y.data_ptr(), 0):
                return False
            sums[rank].append(y.clone())
        return True

    assert together(*(lambda rank=rank: work(rank) for rank in range(world))) == [True] * world
    for rank in range(world):
        for seed, of_call in enumerate(inputs):
            assert_is_sum(sums[rank][seed], of_call, f"rank {rank}, call {seed}")


@pytest.mark.parametrize("world", [2, 3])
def test_sums_in_place_go_another_way(world: int) -> None:
    """What comes would destroy the input. Where there is no other way, all ranks end with an error."""
    cores = with_window(connected(world))
    count = 3000
    inputs = contributions(world, count, torch.float32, 5)
    problem = problem_of(inputs[0], world)
    direct = (reduce(SUMS_IN_STREAM), problem, tiling_of(count, blocks=2, depth=2))
    ordinary = (reduce("two_shot_hb"), problem, tiling_of(count, blocks=2, depth=2))
    prepared = [core.prepare(*ordinary, direct) for core in cores]
    x = [symmetric(core, 0, inputs[rank]) for rank, core in enumerate(cores)]
    y = [symmetric(core, 1 << 14, torch.zeros_like(inputs[0])) for core in cores]
    for outputs, title in ((y, TITLES[SUMS_IN_STREAM]), (x, "two-shot all-reduce (HB)")):
        calls = [
            lambda run=run, x=a, y=b: run(x.data_ptr(), y.data_ptr(), 0)
            for run, a, b in zip(prepared, x, outputs, strict=True)
        ]
        assert together(*calls) == [True] * world
        for rank, core in enumerate(cores):
            assert_is_sum(outputs[rank], inputs, title)
            assert core.last_call().operation == title
    alone = [core.prepare(*direct) for core in cores]
    together(*(lambda run=run, x=a: run(x.data_ptr(), x.data_ptr(), 0) for run, a in zip(alone, x, strict=True)))
    for rank, core in enumerate(cores):
        error = core.error()
        assert error is not None
        assert (error.cause, error.rank, error.peer, error.phase) == ("not symmetric", rank, 0, 0)
        assert "or is input and output of one call" in explain(error, 1.0, names_of_world(world)).text


@pytest.mark.parametrize("world", [2, 3])
def test_calls_behind_each_other_by_copies(world: int) -> None:
    """Into the same tensor, which each rank reads in between: no copy comes early, and none late."""
    sizes = [LINE * (10 + rank) for rank in range(world)]
    cores = with_window(connected(world))
    problem = gather_problem(world, 1, sizes)
    runs = [core.prepare(gather(IN_STREAM), problem, tiling_of(max(sizes))) for core in cores]
    expected = [torch.cat(parts_of(1, sizes, seed), dim=1) for seed in range(20)]
    outputs = [symmetric(core, 0, torch.zeros_like(expected[0])) for core in cores]

    def work(rank: int) -> bool:
        for seed, whole in enumerate(expected):
            x = parts_of(1, sizes, seed)[rank]
            if not runs[rank](x.data_ptr(), outputs[rank].data_ptr(), 0) or not torch.equal(outputs[rank], whole):
                return False
        return True

    assert together(*(lambda rank=rank: work(rank) for rank in range(world))) == [True] * world


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("algorithm", [COPIED_SUMS, SUMS_IN_STREAM])
def test_an_output_of_sums_that_is_not_symmetric(world: int, algorithm: str) -> None:
    """On one rank: the same, but that ranks may have stored sums to outputs of their own."""
    faulty_rank = 1
    cores = with_window(connected(world), 1 << 16)
    x = torch.ones(2000)
    calls, outputs = [], []
    for rank, core in enumerate(cores):
        place = 512 if algorithm == SUMS_IN_STREAM else 512 * rank
        output = torch.zeros_like(x) if rank == faulty_rank else symmetric(core, place, torch.zeros_like(x))
        outputs.append(output)
        run = core.prepare(reduce(algorithm), problem_of(x, world), tiling_of(x.numel(), blocks=2, depth=2))
        calls.append(lambda run=run, y=output: run(x.data_ptr(), y.data_ptr(), 0))
    together(*calls)
    for rank, core in enumerate(cores):
        error = core.error()
        assert error is not None
        assert (error.cause, error.rank, error.peer) == ("not symmetric", rank, faulty_rank)
        text = explain(error, 1.0, names_of_world(world)).text
        assert f"a tensor of rank {faulty_rank} is not in symmetric memory" in unnamed(text)
        assert TITLES[algorithm] in text


def test_shapes_that_peers_cannot_access_line_by_line() -> None:
    limits = _core.Limits(slot_bytes=1 << 20, sm_count=4, max_cluster=1, compute_capability=0, staging_bytes=1 << 16)
    choice = _core.TuningParameters(blocks=2, tile_lines=4)
    assert _core.shape(gather(PUSH), gather_problem(2, 1, [32, 16]), choice, limits).launches == 1
    with pytest.raises(ValueError, match="a multiple of 16 bytes"):
        _core.shape(gather(PUSH), gather_problem(2, 1, [32, 17]), choice, limits)
    with pytest.raises(ValueError, match="blocks is 161; it must be 1 to 160"):
        _core.shape(
            gather(PUSH), gather_problem(2, 1, [32, 16]), _core.TuningParameters(blocks=161, tile_lines=4), limits
        )
    assert _core.shape(gather(COPY), gather_problem(2, 1, [32, 17]), choice, limits).launches == 1
    for algorithm in (COPY, IN_STREAM):
        with pytest.raises(ValueError, match="in one piece: dim must be 0"):
            _core.shape(gather(algorithm), gather_problem(2, 2, [32, 16]), choice, limits)
    assert (
        _core.shape(
            gather(IN_STREAM), gather_problem(2, 1, [32, 17]), _core.TuningParameters(blocks=0), limits
        ).launches
        == 1
    )


def test_shapes_of_sums_by_copies() -> None:
    limits = _core.Limits(slot_bytes=1 << 20, sm_count=4, max_cluster=1, compute_capability=0, staging_bytes=1 << 16)

    def shape(world: int, nbytes: int, **tunables: int) -> _core.Shape:
        problem = problem_of(torch.empty(nbytes // 2, dtype=torch.bfloat16), world)
        return _core.shape(reduce(SUMS_IN_STREAM), problem, _core.TuningParameters(tile_lines=4, **tunables), limits)

    assert shape(2, 2, blocks=3, depth=8).whole.blocks == 1
    assert shape(2, 96 * LINE, blocks=9, depth=3).whole.blocks == 4, "a piece of 16 lines"
    assert shape(4, 6 * LINE, blocks=1, depth=1).launches == 1
    for world, nbytes in ((3, LINE), (4, 5 * LINE), (8, 13 * LINE), (3, 2 * LINE - 2)):
        with pytest.raises(ValueError, match="too few lines of 16 bytes"):
            shape(world, nbytes, blocks=1, depth=1)
    with pytest.raises(ValueError, match="depth is 9; it must be 1 to 8"):
        shape(2, LINE, blocks=1, depth=9)
    with pytest.raises(ValueError, match="blocks is 161; it must be 1 to 160"):
        shape(2, LINE, blocks=161, depth=2)


@pytest.mark.parametrize("algorithm", [PUSH, COPY, IN_STREAM])
def test_what_takes_its_place_where_tensors_are_not_symmetric(algorithm: str) -> None:
    """One call prepared for both; what runs follows from the tensors, and from whether there is a heap at all."""
    world, nbytes = 2, LINE * 30
    cores = connected(world)
    problem = gather_problem(world, 1, [nbytes] * world)
    ordinary = number_of("all_gather", "one_shot")
    direct = (gather(algorithm), problem, tiling_of(nbytes, blocks=2, depth=0))
    prepared = [core.prepare(ordinary, problem, tiling_of(nbytes), direct) for core in cores]
    parts = parts_of(1, [nbytes] * world, 3)
    expected = torch.cat(parts, dim=1)

    def run(outputs: list[torch.Tensor]) -> str:
        calls = [
            lambda run=run, x=x, y=y: run(x.data_ptr(), y.data_ptr(), 0)
            for run, x, y in zip(prepared, parts, outputs, strict=True)
        ]
        assert together(*calls) == [True] * world
        assert all(torch.equal(output, expected) for output in outputs)
        return cores[0].last_call().operation

    outputs = [torch.zeros_like(expected) for _ in cores]
    assert run(outputs) == "one-shot all-gather"
    with_window(cores)
    assert run(outputs) == "one-shot all-gather"
    assert run([symmetric(core, 0, expected * 0) for core in cores]) == TITLES[algorithm]
    assert run([symmetric(core, 8, expected * 0) for core in cores]) == "one-shot all-gather"
