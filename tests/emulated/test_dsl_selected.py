"""Programs of the DSL in the place of algorithms, between emulated ranks: the same call, the same bits, and one error
on all ranks where they do not agree."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, error_of_setup, make_communicator, nothing_leaked
from reference import assert_bitwise_equal, contributions, rank_order_sum

import llm_comm
from llm_comm import Communicator, Config, ConfigError, PeerTimeout, dsl
from llm_comm.dsl import library, programs
from llm_comm.planning.programs import LaunchParameters
from llm_comm.planning.tables import ALL_REDUCE, Row, by_operation

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

TWO_SHOT = "llm_comm.dsl.library:two_shot_ll"
MAX_BYTES = 24 << 10
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: What a communicator is given, as a user gives it.
ENVIRONMENT = {
    "LLM_COMM_DSL": TWO_SHOT,
    "LLM_COMM_DSL_MAX_BYTES": "24K",
    "LLM_COMM_ALGORITHM": "dsl:two_shot_ll",
    "LLM_COMM_WORKSPACE_BYTES": "4M",
    "LLM_COMM_TIMEOUT_S": "60",
}
SELECTED = {"dsl": TWO_SHOT, "dsl_max_bytes": MAX_BYTES, "algorithm": "dsl:two_shot_ll"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the kernels are that the tests of this file compile."""
    return str(tmp_path_factory.mktemp("kernels"))


def use_cache(directory: str) -> None:
    os.environ["LLM_COMM_CACHE_DIR"] = directory
    programs._registered.clear()  # what an earlier test has registered in this process


def last_was_a_program(comm: Communicator) -> bool:
    """Whether the core has launched a program last."""
    return comm._handle.core().last_call().operation.startswith("program ")


def is_by_program(comm: Communicator, call: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
    assert_bitwise_equal(call(), rank_order_sum(inputs), "the sum of a program")
    assert last_was_a_program(comm)


# ---- The call --------------------------------------------------------------------------------------------------------


def sum_by_a_program(directory: str) -> None:
    use_cache(directory)
    with Communicator(dist.group.WORLD, "cpu", Config.load(ENVIRONMENT)) as comm, make_communicator() as native:
        for dtype in DTYPES:
            largest = MAX_BYTES // dtype.itemsize
            for count in (1, 7, 515, 4099, largest):
                inputs = contributions(comm.world_size, count, dtype, seed=count)
                x = inputs[comm.rank]
                plan = comm.plan(x)
                assert (plan.algorithm, plan.protocol, plan.chunks) == ("dsl:two_shot_ll", "DSL", 1)
                assert comm.accepts(x)
                out, in_place = torch.zeros_like(x), x.clone()
                is_by_program(comm, lambda x=x: comm.all_reduce(x), inputs)
                is_by_program(comm, lambda x=x, out=out: comm.all_reduce(x, out=out), inputs)
                is_by_program(comm, lambda y=in_place: comm.all_reduce(y, out=y), inputs)
                is_by_program(comm, lambda x=x: comm.try_all_reduce(x), inputs)
                is_by_program(comm, lambda x=x: torch.ops.llm_comm.all_reduce(x, comm.name), inputs)
                assert_bitwise_equal(comm.all_reduce(x), native.all_reduce(x), "and that of an algorithm")
            run_larger_ones_as_before(comm, native, largest + 1, dtype)
        empty = torch.empty(0)
        assert comm.all_reduce(empty).shape == empty.shape
        assert comm.plan(empty).algorithm == "none"
        decline_as_before(comm)
        dist.barrier()


def run_larger_ones_as_before(comm: Communicator, native: Communicator, count: int, dtype: torch.dtype) -> None:
    inputs = contributions(comm.world_size, count, dtype)
    x = inputs[comm.rank]
    assert comm.plan(x).algorithm == native.plan(x).algorithm == "two_shot"
    assert comm.plan(x).reason.endswith(f"; dsl:two_shot_ll: more than dsl_max_bytes={MAX_BYTES}")
    assert_bitwise_equal(comm.all_reduce(x), rank_order_sum(inputs), "a sum that is too large for the program")
    assert not last_was_a_program(comm)


def decline_as_before(comm: Communicator) -> None:
    for x in (torch.ones(3, dtype=torch.float64), torch.ones(4, 4).t()):
        assert not comm.accepts(x)
        assert comm.try_all_reduce(x) is None
    x = torch.ones(64)
    with pytest.raises(llm_comm.UnsupportedInputError, match="out overlaps x"):
        comm.all_reduce(x[:32], out=x[16:48])


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_those_of_an_algorithm(ranks: RankPool, cache: str, world: int) -> None:
    ranks.run(world, sum_by_a_program, cache)


def run_other_operations(directory: str) -> None:
    use_cache(directory)
    with make_communicator(**SELECTED) as comm:
        x = torch.full((4, 64), float(comm.rank + 1), dtype=torch.bfloat16)
        normed, residual = comm.all_reduce_add_rms_norm(x, None, torch.ones(64, dtype=torch.bfloat16), 1e-5)
        assert residual.eq(3).all()
        assert normed.eq(1).all()
        assert comm.all_gather(x).shape == (8, 64)
        assert not last_was_a_program(comm)
        symmetric = comm.empty((4, 64), torch.bfloat16).copy_(x)
        is_by_program(comm, lambda: comm.all_reduce(symmetric), [x / x * n for n in (1, 2)])
        compiled = torch.compile(lambda t: comm.all_reduce(t + 1) * 2, fullgraph=True, backend="aot_eager")
        comm.all_gather(x)
        assert compiled(x).eq(10).all()
        assert last_was_a_program(comm)
        by_algorithm = [(each.algorithm, each.protocol, each.calls) for each in comm.stats().calls]
        assert by_algorithm.count(("dsl:two_shot_ll", "DSL", 2)) == 1, "the one of a compiled graph too, once"
        assert sum(calls for *_, calls in by_algorithm) == 5
        dist.barrier()


def test_other_operations_run_as_before(ranks: RankPool, cache: str) -> None:
    ranks.run(2, run_other_operations, cache)


def select_by_tables(directory: str) -> None:
    use_cache(directory)
    with make_communicator(dsl=f"{TWO_SHOT},llm_comm.dsl.library:ring_ll", dsl_max_bytes=MAX_BYTES) as comm:
        x = torch.ones(1000)
        assert comm.plan(x).algorithm == "one_shot", "nobody has selected the program yet"
        rows = [row for row in comm.table.rows[ALL_REDUCE] if row.algorithm in ("one_shot", "two_shot")]
        table = comm.table.with_rows(*rows, Row(2000, ALL_REDUCE, "dsl:two_shot_ll", "DSL"))
        comm.use_table(table)
        assert [comm.plan(x[:n]).algorithm for n in (500, 501, 1000)] == ["dsl:two_shot_ll", "one_shot", "one_shot"]
        is_by_program(comm, lambda: comm.all_reduce(x[:500]), [x[:500]] * comm.world_size)
        # Of three ranks the sums of a ring are in another order.
        with pytest.raises(ConfigError, match=r"no program dsl:ring_ll was compiled .*; compiled: dsl:two_shot_ll"):
            comm.use_table(table.with_rows(Row(2000, ALL_REDUCE, "dsl:ring_ll", "DSL")))
        assert comm.plan(x[:500]).algorithm == "dsl:two_shot_ll", "the table before still counts"
        dist.barrier()


def test_tables_select_programs(ranks: RankPool, cache: str) -> None:
    ranks.run(3, select_by_tables, cache)


def table_file(directory: Path, of_launch: str = "") -> str:
    """A table that selects a program. ``of_launch``: what its row says of that besides."""
    table = directory / "mine.yaml"
    table.write_text(
        "device: emulated\nworld_size: 2\nmax_message_bytes: 65536\nrows:\n"
        f"- {{operation: all_reduce, up_to: 4096, algorithm: 'dsl:two_shot_ll'{of_launch}}}\n",
        encoding="utf-8",
    )
    return str(table)


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """Lines that this process logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("llm_comm").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("llm_comm").removeHandler(handler)


def read_a_table(directory: str, path: str) -> None:
    use_cache(directory)
    with make_communicator(table=path, dsl=TWO_SHOT, dsl_max_bytes=MAX_BYTES) as comm:
        assert comm.plan(torch.ones(64)).algorithm == "dsl:two_shot_ll"
        dist.barrier()
    programs._registered.clear()
    with log_lines() as lines, make_communicator(table=path) as comm:
        assert comm.plan(torch.ones(64)).algorithm == "one_shot"
        assert_bitwise_equal(comm.all_reduce(torch.ones(64)), torch.full((64,), 2.0), "a sum without the program")
        dist.barrier()
    left_out = (
        "tuning table mine.yaml: its rows of dsl:two_shot_ll are left out: program is 'dsl:two_shot_ll'; valid: none"
    )
    assert [line for line in lines if line.startswith(left_out)]


def test_a_file_of_a_table_selects_programs(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    ranks.run(2, read_a_table, cache, table_file(tmp_path))


BY_LOOPS = "llm_comm.dsl.library:one_shot_hb,llm_comm.dsl.library:two_shot_hb"


def run_every_choice(directory: str) -> None:
    """Calls of other grids follow each other, as those of rows of a table do."""
    use_cache(directory)
    with make_communicator(dsl=f"{TWO_SHOT},{BY_LOOPS}", dsl_max_bytes=MAX_BYTES) as comm:
        assert list(comm.programs) == ["dsl:one_shot_hb", "dsl:two_shot_hb", "dsl:two_shot_ll"]
        for name, kernels in comm.programs.items():
            grids = set()
            for count in (MAX_BYTES // 2, 515, 7):
                inputs = contributions(comm.world_size, count, torch.bfloat16, seed=count)
                for choice in [
                    *kernels.candidates("bf16", 2 * count),
                    LaunchParameters(3, 12),
                    LaunchParameters(threads=9),
                ]:
                    assert kernels.why_not(choice) == ""
                    row = Row(1 << 20, ALL_REDUCE, name, "DSL", blocks=choice.blocks or 0, threads=choice.threads or 0)
                    comm.use_table(comm.table._replace(rows=by_operation([row])))
                    plan = comm.plan(inputs[0])
                    assert plan.algorithm == name
                    assert plan.blocks <= (choice.blocks or 4)
                    assert plan.threads == choice.threads or choice.threads is None
                    grids.add((plan.blocks, plan.threads))
                    for _ in range(2):
                        is_by_program(comm, lambda x=inputs[comm.rank]: comm.all_reduce(x), inputs)
            assert len(grids) > 4
        dist.barrier()


def test_rows_say_how_programs_are_launched(ranks: RankPool, cache: str) -> None:
    ranks.run(2, run_every_choice, cache)


def read_a_wrong_table(directory: str, path: str) -> str:
    use_cache(directory)
    return error_of_setup(table=path, dsl=TWO_SHOT, dsl_max_bytes=MAX_BYTES)


def test_a_launch_that_cannot_be_is_told_by_all_ranks(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    said = one_error(ranks.run(2, read_a_wrong_table, cache, table_file(tmp_path, ", blocks: 5")))
    assert said.startswith("ConfigError: ")
    assert "tuning table mine.yaml: the row of dsl:two_shot_ll up to 4096 bytes: blocks is 5; the progra" in said


def sum_alone() -> None:
    programs._registered.clear()
    with make_communicator(**SELECTED) as comm:
        assert comm.plan(torch.ones(3)).algorithm == "none"
        assert comm.all_reduce(torch.ones(3)).eq(1).all()


def test_one_rank_needs_no_program(ranks: RankPool) -> None:
    ranks.run(1, sum_alone)


def register_in_python(directory: str) -> None:
    use_cache(directory)
    dsl.register(library.two_shot_ll)
    options = {"algorithm": "dsl:two_shot_ll", "dsl_max_bytes": MAX_BYTES, "log": "info"}
    with log_lines() as lines, make_communicator(**options) as comm:
        is_by_program(comm, lambda: comm.all_reduce(torch.ones(9)), [torch.ones(9)] * 2)
        dist.barrier()
    told = [text for text in lines if "dsl:two_shot_ll serves all-reduces to 24576 bytes of bf16, fp16, fp32" in text]
    assert len(told) == 1
    # Two stages of two arrays of packets, each as large as the message.
    assert int(told[0].partition("with ")[2].split()[0]) >= 4 * MAX_BYTES


def test_programs_that_python_has_registered(ranks: RankPool, cache: str) -> None:
    ranks.run(2, register_in_python, cache)


# ---- Errors ----------------------------------------------------------------------------------------------------------


def one_error(said: list[str]) -> str:
    assert len(set(said)) == 1, said
    return said[0]


def name_an_unknown_program(directory: str) -> str:
    use_cache(directory)
    return error_of_setup(dsl=TWO_SHOT, algorithm="dsl:two_shot_hb")


def test_an_unknown_program(ranks: RankPool, cache: str) -> None:
    assert one_error(ranks.run(2, name_an_unknown_program, cache)) == (
        "ConfigError: option algorithm (Python): program is 'dsl:two_shot_hb' (did you mean dsl:two_shot_ll?); valid: "
        "dsl:two_shot_ll. Option dsl=module:program registers one, as does llm_comm.dsl.register"
    )


@dsl.program("all_reduce")
def forgets_a_rank(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    p.store(x[0], y[0])


def select_a_wrong_program(directory: str) -> str:
    use_cache(directory)
    dsl.register(forgets_a_rank)
    return error_of_setup(algorithm="dsl:forgets_a_rank")


def test_a_program_that_is_not_correct(ranks: RankPool, cache: str) -> None:
    said = one_error(ranks.run(2, select_a_wrong_program, cache))
    assert said.startswith("ConfigError: option algorithm (Python): dsl:forgets_a_rank for 2 ranks: ")
    assert "test_dsl_selected.py:" in said


def select_a_ring(directory: str) -> str:
    use_cache(directory)
    ring = {"dsl": "llm_comm.dsl.library:ring_ll", "algorithm": "dsl:ring_ll", "dsl_max_bytes": MAX_BYTES}
    with make_communicator(**ring, sum="any") as comm:
        x = torch.arange(4096).float().div(64).round()  # whole numbers, whose sums are exact
        is_by_program(comm, lambda: comm.all_reduce(x), [x] * comm.world_size)
        dist.barrier()
    return error_of_setup(**ring)


def test_sums_in_another_order_need_leave(ranks: RankPool, cache: str) -> None:
    said = one_error(ranks.run(3, select_a_ring, cache))
    assert said.startswith("ConfigError: option algorithm (Python): dsl:ring_ll cannot be selected: it adds up some")


MODULE = """
import os
from llm_comm import dsl

@dsl.program("all_reduce")
def of_this_rank(p):
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(p.world, like=x)
    peers = p.peers if os.environ["LLM_COMM_TEST_ORDER"] == "0" else p.peers[::-1]
    for peer in peers:
        p.put_packets(x[0], peer, received[p.rank])
    p.store(p.sum({p.rank: p.load(x[0]), **{q: p.read_packets(received[q]) for q in p.peers}}), y[0])
"""


def differ(directory: str, path: str) -> str:
    use_cache(directory)
    order = str(int(dist.get_rank() == 1))
    with mock.patch.object(sys, "path", [path, *sys.path]), mock.patch.dict(os.environ, LLM_COMM_TEST_ORDER=order):
        return error_of_setup(dsl="different_programs:of_this_rank")


def test_ranks_with_different_programs(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    (tmp_path / "different_programs.py").write_text(MODULE, encoding="utf-8")
    said = one_error(ranks.run(3, differ, cache, str(tmp_path)))
    assert said.startswith("RendezvousError: the ranks have different programs of llm_comm.dsl: dsl:of_this_rank (")
    assert re.search(r"\(\w{12}\) on rank 1, dsl:of_this_rank \(\w{12}\) on ranks 0, 2$", said)


def import_on_rank_0_alone(directory: str, path: str) -> str:
    use_cache(directory)
    os.environ["LLM_COMM_TEST_ORDER"] = "0"
    with mock.patch.object(sys, "path", [path, *sys.path] if dist.get_rank() == 0 else sys.path):
        return error_of_setup(dsl="programs_of_rank_0:of_this_rank")


def test_a_rank_that_cannot_import(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    (tmp_path / "programs_of_rank_0.py").write_text(MODULE, encoding="utf-8")
    said = one_error(ranks.run(3, import_on_rank_0_alone, cache, str(tmp_path)))
    assert said.startswith(
        "ConfigError: choice of programs failed on 2 of 3 ranks: rank 1: option dsl (Python): programs_of_"
    )
    assert "cannot import programs_of_rank_0: ModuleNotFoundError: No module named 'programs_of_rank_0'" in said


def compile_on_rank_0_alone(directory: str) -> str:
    rank = dist.get_rank()
    use_cache(directory if rank == 0 else f"{directory}/not_here/{rank}")
    with mock.patch.dict(os.environ, CXX="g++" if rank == 0 else "/there/is/no/compiler"):
        return error_of_setup(**SELECTED)


def load_on_rank_0_alone(directory: str) -> str:
    use_cache(directory)
    what = "llm_comm.dsl.kernel.compile_image"
    with mock.patch(what, return_value=b"/no/library") if dist.get_rank() else nullcontext():
        return error_of_setup(**SELECTED)


def test_a_rank_that_cannot_load(ranks: RankPool, cache: str) -> None:
    said = one_error(ranks.run(2, load_on_rank_0_alone, cache))
    assert said.startswith("RendezvousError: loading of program two_shot_ll failed on 1 of 2 ranks: rank 1: RuntimeErr")


def test_a_rank_that_cannot_compile(ranks: RankPool, cache: str) -> None:
    said = one_error(ranks.run(2, compile_on_rank_0_alone, cache))
    what = "RendezvousError: compilation of dsl:two_shot_ll for bf16 failed on 1 of 2 ranks: rank 1: RuntimeError: "
    assert said.startswith(what)
    assert "there is no C++ compiler '/there/is/no/compiler'" in said


@dsl.program("all_reduce")
def for_no_world(p: dsl.Builder) -> None:
    raise KeyError(f"not for {p.world}")


def build_what_raises(directory: str) -> str:
    use_cache(directory)
    dsl.register(for_no_world)
    return error_of_setup(algorithm="dsl:for_no_world")


def test_a_program_that_raises(ranks: RankPool, cache: str) -> None:
    assert one_error(ranks.run(3, build_what_raises, cache)) == (
        "ConfigError: option algorithm (Python): dsl:for_no_world for 3 ranks: KeyError: 'not for 3'"
    )


def give_different_sizes(directory: str) -> str:
    use_cache(directory)
    return error_of_setup(**{**SELECTED, "dsl_max_bytes": MAX_BYTES + dist.get_rank()})


def test_ranks_with_different_options(ranks: RankPool, cache: str) -> None:
    assert "RendezvousError: the ranks have different options: " in one_error(ranks.run(2, give_different_sizes, cache))


# ---- Lifetime --------------------------------------------------------------------------------------------------------


def wait_for_a_silent_rank(directory: str) -> None:
    use_cache(directory)
    comm = make_communicator(**SELECTED, timeout_s=5.0)
    x = torch.ones(100)
    assert comm.all_reduce(x).eq(2).all()
    dist.barrier()
    if comm.rank == 0:
        for _ in range(2):
            with pytest.raises(PeerTimeout, match="nothing came from rank 1"):
                comm.all_reduce(x)
    dist.barrier()
    comm.close()
    with pytest.raises(RuntimeError, match="this communicator is closed"):
        comm.all_reduce(x)


def test_a_peer_that_does_not_come(ranks: RankPool, cache: str) -> None:
    ranks.run(2, wait_for_a_silent_rank, cache)


def drop(directory: str) -> None:
    use_cache(directory)
    with nothing_leaked():
        comm = make_communicator(**SELECTED)
        comm.all_reduce(torch.ones(100))
        dist.barrier()
        handle = weakref.ref(comm._handle)
        gc.collect()
        gc.disable()
        try:
            del comm
            assert handle() is None, "its programs keep a communicator that nobody has"
        finally:
            gc.enable()


def test_a_communicator_that_is_dropped_ends(ranks: RankPool, cache: str) -> None:
    ranks.run(2, drop, cache)
