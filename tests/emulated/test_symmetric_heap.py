"""``Communicator.empty``: tensors that every rank has at the same place in memory that all have mapped, or the same
error on all ranks."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, nothing_leaked, unnamed
from programs import run_as_ranks
from reference import assert_is_sum, contributions

from llm_comm import Communicator, RendezvousError, UnsupportedInputError, _core
from llm_comm.runtime import symmetric_heap
from llm_comm.runtime.heap_layout import MAX_GROWTH, WINDOW_MULTIPLE

FAULTY_RANK = 1
WORLDS = [2, 3, 5]


def core_of(comm: Communicator) -> _core.Core:
    return comm._handle.core()


def place_of(comm: Communicator, tensor: torch.Tensor) -> tuple[int, int] | None:
    return comm._heap.symmetric_offset_of(tensor)


def windows_of(comm: Communicator) -> dict[int, int]:
    return comm._heap._layout.windows()


def check_still_works(comm: Communicator, what: str) -> None:
    """The group, the communicator and its heap."""
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == comm.world_size
    inputs = contributions(comm.world_size, 100, torch.float16)
    assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, what)
    assert place_of(comm, comm.empty(7, torch.int8)) is not None


def same_on_all(found: list[Any]) -> Any:
    assert all(of_rank == found[0] for of_rank in found), found
    return found[0]


# ---- Tensors -------------------------------------------------------------------------------------------------------


def find_places() -> list[tuple[int, int] | None]:
    comm = make_communicator()
    tensor = comm.empty((4, 64), torch.float32)
    window, offset = comm._heap.symmetric_offset_of(tensor) or (-1, -1)
    assert comm._heap.symmetric_offset_of(tensor[1:]) == (window, offset + 256)
    whole = torch.empty(0).set_(tensor.untyped_storage(), 0, (256,))
    beyond = torch.frombuffer((ctypes.c_char * 4).from_address(tensor.data_ptr() - 4), dtype=torch.float32)
    assert comm._heap.symmetric_offset_of(whole) == (window, offset)
    assert [comm._heap.symmetric_offset_of(t) for t in (beyond, torch.ones(4), tensor[:0])] == [None] * 3
    dist.barrier()
    comm.close()
    with pytest.raises(RuntimeError, match="this communicator is closed"):
        comm._heap.symmetric_offset_of(tensor)
    return [(window, offset)]


def test_the_place_of_a_tensor(ranks: RankPool) -> None:
    ((_, offset),) = same_on_all(ranks.run(2, find_places))
    assert offset >= 0


def use_tensors() -> list[tuple[int, int] | None]:
    places = []
    with nothing_leaked(), make_communicator() as comm:
        assert windows_of(comm) == {}, "the heap is empty unless it is used"
        tensors = [
            comm.empty((3, 5), torch.bfloat16),
            comm.empty(1000, torch.float8_e4m3fn),
            comm.empty([2, 0, 4], torch.float32),
            comm.empty(torch.Size([]), torch.complex64),
            comm.empty((4, 4), torch.bool),
            comm.empty(17),
        ]
        assert [tuple(t.shape) for t in tensors] == [(3, 5), (1000,), (2, 0, 4), (), (4, 4), (17,)]
        assert tensors[-1].dtype is torch.get_default_dtype()
        for tensor in tensors:
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            assert tensor._base is None
            if tensor.numel():
                assert tensor.data_ptr() % 512 == 0
                places.append(place_of(comm, tensor))
        for number, tensor in enumerate(tensors):
            tensor.copy_(torch.full_like(tensor, number))
        for number, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full_like(tensor, number)), "tensors share memory"
        assert len(windows_of(comm)) == 1, "small tensors share a window"
        del tensor, tensors
    return places


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_tensors_lie_at_the_same_place_on_all_ranks(ranks: RankPool, world: int) -> None:
    places = same_on_all(ranks.run(world, use_tensors))
    assert None not in places
    assert len(set(places)) == len(places)


def look_into_peers() -> None:
    """Every rank writes, and reads by the core what the others have: the mappings are of the right memory."""
    with make_communicator() as comm:
        x = comm.empty((comm.world_size, 8), torch.int32)
        place = place_of(comm, x[1:])
        assert place == (0, x[0].nbytes), "views lie in the heap too"
        assert place_of(comm, torch.empty(8)) is None
        beyond = core_of(comm).find(x.data_ptr(), WINDOW_MULTIPLE + 1)
        assert beyond is None, "what ends behind the window is not in it"
        assert core_of(comm).find(x.data_ptr() - 1, 1) is None


def test_what_is_in_the_heap(ranks: RankPool) -> None:
    ranks.run(2, look_into_peers)


def as_output_of_layers() -> None:
    with make_communicator() as comm, torch.inference_mode():
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
        x = torch.randn(5, 32).to(torch.bfloat16)
        out = comm.empty((5, 48), torch.bfloat16)
        torch.mm(x, layer.weight.t(), out=out)
        assert torch.equal(out, layer(x))
        views = comm.empty((2, 5, 48), torch.bfloat16)
        torch.mm(x, layer.weight.t(), out=views[1])
        assert torch.equal(views[1], out)
        out.add_(1).mul_(2)
        assert torch.equal(out.view(-1)[::2].clone(), ((layer(x) + 1) * 2).view(-1)[::2])


def test_output_of_a_linear_layer(ranks: RankPool) -> None:
    ranks.run(2, as_output_of_layers)


# ---- Growth, and memory that is given back -------------------------------------------------------------------------


def grow() -> list[Any]:
    seen = []
    with nothing_leaked(), make_communicator() as comm:
        kept = []
        for size in (1000, WINDOW_MULTIPLE, 3 * WINDOW_MULTIPLE + 1, 10, MAX_GROWTH + 1):
            kept.append(comm.empty(size, torch.uint8))
            kept[-1].fill_(len(kept))
            seen.append((place_of(comm, kept[-1]), windows_of(comm)))
        for number, tensor in enumerate(kept, start=1):
            assert tensor.eq(number).all()
        del tensor, kept
    return seen


def test_the_heap_grows(ranks: RankPool) -> None:
    seen = same_on_all(ranks.run(3, grow))
    assert [place[0] for place, _ in seen] == [0, 1, 2, 0, 3]
    sizes = list(seen[-1][1].values())
    assert all(size % WINDOW_MULTIPLE == 0 for size in sizes)
    assert sizes[:3] == [WINDOW_MULTIPLE, WINDOW_MULTIPLE, 4 * WINDOW_MULTIPLE]


def many_small(count: int) -> list[tuple[int, int] | None]:
    with make_communicator() as comm:
        tensors = [comm.empty(1 + number % 5, torch.float32) for number in range(count)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        assert all(tensor.eq(number).all() for number, tensor in enumerate(tensors))
        assert len(windows_of(comm)) == 1
        return [place_of(comm, tensor) for tensor in tensors]


def test_many_small_tensors(ranks: RankPool) -> None:
    places = same_on_all(ranks.run(2, many_small, 300))
    assert len(set(places)) == 300


def free_at_different_times() -> list[Any]:
    """What has died on some ranks only is not given to anybody."""
    seen: list[Any] = []
    with nothing_leaked(), make_communicator() as comm:
        first, second, third = (comm.empty(1000, torch.uint8) for _ in range(3))
        place = place_of(comm, second)
        view = second[:1]
        if comm.rank != 0:
            del second
        seen.append(place_of(comm, comm.empty(500, torch.uint8)) == place)
        second = None
        seen.append(place_of(comm, comm.empty(500, torch.uint8)) == place)
        del view
        again = comm.empty(500, torch.uint8)
        seen.append(place_of(comm, again) == place)
        first.fill_(1)
        third.fill_(3)
        again.fill_(2)
        assert first.eq(1).all()
        assert third.eq(3).all()
        del first, third, again
    return seen


def test_memory_of_tensors_that_have_died_on_all_ranks_is_used_again(ranks: RankPool) -> None:
    # The first 500 bytes went behind the third, and died at once; the second found them free.
    assert same_on_all(ranks.run(3, free_at_different_times)) == [False, False, True]


def give_back() -> list[dict[int, int]]:
    seen = []
    with nothing_leaked(), make_communicator() as comm:
        small, large = comm.empty(10, torch.uint8), comm.empty(20 << 20, torch.uint8)
        seen.append(windows_of(comm))
        del large
        other = comm.empty(10, torch.uint8)
        seen.append(windows_of(comm))
        large = comm.empty(30 << 20, torch.uint8)
        seen.append(windows_of(comm))
        del small, large, other
    return seen


def test_empty_windows_go_back_to_the_device(ranks: RankPool) -> None:
    first, second, third = same_on_all(ranks.run(2, give_back))
    assert len(first) == 2
    assert list(second) == [0]
    assert third == {0: WINDOW_MULTIPLE, 1: 30 << 20}


# ---- What goes wrong -----------------------------------------------------------------------------------------------


def ask_for_different_ones(other: dict[str, Any]) -> str:
    with make_communicator() as comm:
        request = {"shape": (4, 8), "dtype": torch.bfloat16}
        if comm.rank == FAULTY_RANK:
            request.update(other)
        kept = comm.empty(3)
        with nothing_leaked(), pytest.raises(RendezvousError) as error:
            comm.empty(**request)
        check_still_works(comm, "after different requests")
        assert place_of(comm, kept) == (0, 0)
        return unnamed(str(error.value))


@pytest.mark.parametrize(
    ("other", "said"),
    [({"shape": (8, 4)}, "(8, 4) of torch.bfloat16"), ({"dtype": torch.float16}, "(4, 8) of torch.float16")],
    ids=["shape", "dtype"],
)
def test_another_tensor_on_one_rank(ranks: RankPool, other: dict[str, Any], said: str) -> None:
    text = same_on_all(ranks.run(3, ask_for_different_ones, other))
    assert "ask for different tensors of symmetric memory" in text
    assert f"{said} on rank {FAULTY_RANK}, " in text


def ask_for_none(request: dict[str, Any], is_everybody: bool) -> tuple[str, str]:
    with make_communicator() as comm:
        with nothing_leaked(), pytest.raises((UnsupportedInputError, RendezvousError)) as error:
            comm.empty(**(request if is_everybody or comm.rank == FAULTY_RANK else {"shape": 8}))
        check_still_works(comm, "after a request for no tensor")
        return type(error.value).__name__, unnamed(str(error.value))


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"shape": (3, -1)}, "shape is [3, -1]: no memory has that"),
        ({"shape": 1 << 60}, "no memory has that"),
        ({"shape": (2.5,)}, "shape is (2.5,); it must be whole numbers"),
        ({"shape": "wide"}, "it must be whole numbers"),
        ({"shape": 2, "dtype": "bf16"}, "dtype is 'bf16'; it must be a torch.dtype"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
@pytest.mark.parametrize("is_everybody", [True, False], ids=["all", "one"])
def test_what_is_no_tensor(ranks: RankPool, request_: dict[str, Any], says: str, is_everybody: bool) -> None:
    kind, text = same_on_all(ranks.run(2, ask_for_none, request_, is_everybody))
    assert kind == "UnsupportedInputError"
    assert says in text
    assert is_everybody or f"rank {FAULTY_RANK}: " in text


@contextmanager
def failing(what: str, is_here: bool) -> Iterator[None]:
    """A step of this rank fails as it does where memory has run out."""

    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("cuMemCreate: out of memory")

    with pytest.MonkeyPatch.context() as patch:
        if is_here and what == "tensor":
            patch.setattr(symmetric_heap.SymmetricHeap, "_take", fail)
        elif is_here:
            patch.setattr(_core.Core, what, fail)
        yield


def run_out_of_memory(what: str) -> str:
    with make_communicator() as comm:
        kept = comm.empty(100, torch.uint8).fill_(7)
        before = windows_of(comm)
        with nothing_leaked():
            with failing(what, comm.rank == FAULTY_RANK), pytest.raises(RendezvousError) as error:
                comm.empty(4 << 20, torch.uint8)
            gc.collect()
        assert windows_of(comm) == before
        check_still_works(comm, f"after a failure of {what}")
        assert kept.eq(7).all()
        assert place_of(comm, comm.empty(4 << 20, torch.uint8)) == (1, 0)
        return unnamed(str(error.value))


@pytest.mark.parametrize("what", ["create_window", "map_window", "tensor"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_without_memory(ranks: RankPool, world: int, what: str) -> None:
    text = same_on_all(ranks.run(world, run_out_of_memory, what))
    assert f"failed on 1 of {world} ranks: rank {FAULTY_RANK}: RuntimeError: cuMemCreate: out of memory" in text


def ask_for_too_much() -> str:
    with make_communicator() as comm:
        with nothing_leaked(), pytest.raises(RendezvousError) as error:
            comm.empty(1 << 47, torch.uint8)
        check_still_works(comm, "after too large a request")
        return unnamed(str(error.value))


def test_more_than_there_is(ranks: RankPool) -> None:
    text = same_on_all(ranks.run(2, ask_for_too_much))
    assert f"{1 << 47} bytes of symmetric memory failed on 2 of 2 ranks" in text


def fill_all_windows() -> str:
    with make_communicator() as comm:
        kept = [comm.empty(MAX_GROWTH + 1, torch.uint8) for _ in range(_core.max_windows)]
        with nothing_leaked(), pytest.raises(UnsupportedInputError) as error:
            comm.empty(MAX_GROWTH + 1, torch.uint8)
        del kept
        check_still_works(comm, "after too many windows")
        return unnamed(str(error.value))


def test_too_many_windows(ranks: RankPool) -> None:
    text = same_on_all(ranks.run(2, fill_all_windows))
    assert "ask for fewer, larger tensors" in text


def capture_alone() -> str:
    """As where a stream is captured on one rank."""
    with make_communicator() as comm:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(symmetric_heap, "is_capturing", lambda _: comm.rank == FAULTY_RANK)
            with pytest.raises(UnsupportedInputError) as error:
                comm.empty(8)
        check_still_works(comm, "after a capture")
        return unnamed(str(error.value))


def test_not_while_a_graph_is_captured(ranks: RankPool) -> None:
    text = same_on_all(ranks.run(2, capture_alone))
    assert f"rank {FAULTY_RANK}: empty: a CUDA graph is being captured" in text


def free_what_graphs_use() -> list[tuple[int, int] | None]:
    with make_communicator() as comm:
        first = comm.empty(10)
        with pytest.MonkeyPatch.context() as patch:
            # On one rank it is enough.
            patch.setattr(_core.Core, "has_been_captured", lambda _: comm.rank == FAULTY_RANK)
            places = [place_of(comm, first)]
            del first
            places.append(place_of(comm, comm.empty(10)))
        places.append(place_of(comm, comm.empty(10)))
        return places


def test_memory_that_graphs_may_use_is_not_given_to_others(ranks: RankPool) -> None:
    assert same_on_all(ranks.run(2, free_what_graphs_use)) == [(0, 0), (0, 512), (0, 0)]


# ---- The program for GPUs -----------------------------------------------------------------------------------------


def test_the_program_for_gpus(tmp_path: Path) -> None:
    """On emulated ones."""
    results = tmp_path / "results.json"
    program = Path(__file__).parents[1] / "gpu" / "symmetric_heap.py"
    run_as_ranks(program, "--device", "emulated", "--largest", "65536", "--json", str(results))
    made = json.loads(results.read_text())["figures"]["results"]
    assert all(made[f"{part} shared"] > 0 for part in ("tensors", "sums", "layers", "gathers", "memory", "mismatch"))


# ---- The end -------------------------------------------------------------------------------------------------------


def outlive() -> None:
    with nothing_leaked():
        comm = make_communicator()
        x, gone = comm.empty(1000, torch.int32), comm.empty(1000, torch.int32)
        view = x[500:].fill_(5)
        del x, gone
        comm.close()
        with pytest.raises(RuntimeError, match="this communicator is closed"):
            comm.empty(3)
        assert view.eq(5).all()
        view.add_(1)
        assert view.eq(6).all()
        del view


def drop() -> None:
    with nothing_leaked():
        comm = make_communicator()
        x = comm.empty(1000, torch.int32)
        del comm
        gc.collect()
        x.fill_(5)
        assert x.eq(5).all()
        del x


@pytest.mark.parametrize("end", [outlive, drop])
@pytest.mark.parametrize("world", [1, 2])
def test_tensors_outlive_the_communicator(ranks: RankPool, world: int, end: Callable[[], None]) -> None:
    ranks.run(world, end)
