"""The source that the compiler of the DSL generates, and the order in which a thread carries out operations."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from llm_comm import dsl
from llm_comm.dsl import ir, library
from llm_comm.dsl.compiler.analysis import readers_of, sender_of, works_in_place
from llm_comm.dsl.compiler.grid import Limits
from llm_comm.dsl.compiler.layout import batch_of, chunk_lines, lay_out, sentinel_ranges, synchronizing_blocks_of_sm
from llm_comm.dsl.compiler.runs import DataRun, LoopRuns, PortRun, SignalRun, WaitRun, runs_of
from llm_comm.dsl.compiler.schedule import Receive, schedule, stages_of
from llm_comm.dsl.compiler.source import generate, is_moved, kernel_name
from llm_comm.dsl.compiler.text import element_of
from llm_comm.dsl.errors import CompileError
from llm_comm.dsl.programs import ProgramDefinition

Text = Callable[[dsl.Builder], None]


def two_shot(p: dsl.Builder) -> None:
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    scattered, gathered = p.packets(p.world, like=x), p.packets(p.world, like=x)
    for peer in p.peers:
        p.put_packets(x[peer], peer, scattered[p.rank])
    total = p.sum({p.rank: p.load(x[p.rank]), **{peer: p.read_packets(scattered[peer]) for peer in p.peers}})
    p.store(total, y[p.rank])
    for peer in p.peers:
        p.put_packets(total, peer, gathered[p.rank])
    for peer in p.peers:
        p.store(p.read_packets(gathered[peer]), y[peer])


def pipelined(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(p.world, like=x, stages=2)
    with p.loop():
        for peer in p.peers:
            p.put(x[0], peer, received[p.rank])
        for peer in p.peers:
            p.signal(peer)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer)
            p.store(p.sum({p.rank: p.load(x[0]), **{peer: p.load(received[peer]) for peer in p.peers}}), y[0])


def build(text: Text, world: int = 3, operation: str = "all_reduce") -> ir.Program:
    return dsl.program(operation)(text).build(world)


def source_of(text: Text, world: int = 3, operation: str = "all_reduce", dtype: torch.dtype = torch.bfloat16) -> str:
    return source_of_program(build(text, world, operation), dtype)


def source_of_program(program: ir.Program, dtype: torch.dtype = torch.bfloat16) -> str:
    groups = runs_of(program)
    layout = lay_out(program, groups, 1 << 16, 4, 64, masks=is_moved(program))
    return generate(program, groups, layout, element_of(dtype))


def code_of(source: str) -> str:
    """Behind the prelude, without comments."""
    return re.sub(r"//[^\n]*", "", source[source.index('extern "C"') :])


# ---- Source ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [two_shot, pipelined])
def test_one_kernel(text: Text) -> None:
    source = source_of(text)
    assert source.count("extern ") == 1
    assert f'extern "C" LLM_COMM_KERNEL(512) {kernel_name(build(text))}(' in source
    assert str(build(text).where) in source
    assert source.count("{") == source.count("}")


def test_names_of_kernels_are_names_of_cpp() -> None:
    def names(p: dsl.Builder) -> None:
        two_shot(p)

    names.__name__ = "<lambda>"
    assert kernel_name(build(names)) == "dsl__lambda_"
    names.__name__ = "größe/" + 100 * "n"
    assert kernel_name(build(names)) == "dsl_gr__e_" + 54 * "n"


@pytest.mark.parametrize(
    "text", ["a\n#error", "a\r#error", "ends \\", "ends \\ ", "a\u2028#error", "\udc80", "*/ #error"]
)
def test_texts_of_the_user_reach_the_source_as_comments(text: str) -> None:
    """Names and lines: a backslash at the end of a comment would make the next line of the source a part of it."""
    where = ir.Location(text, 1, text)

    def changed(step: ir.Op | ir.Loop, **changes: object) -> ir.Op | ir.Loop:
        if isinstance(step, ir.Loop):
            step = replace(step, body=tuple(changed(op, **changes) for op in step.body))
        return replace(step, **{name: value for name, value in changes.items() if hasattr(step, name)})

    program = build(pipelined)
    (group,) = program.groups
    other = ir.Group("other", tuple(changed(step, semaphore=1) for step in group.steps))
    program = replace(program, semaphores=2, groups=(group, other))
    spoiled = ir.Group(text, tuple(changed(step, where=where) for step in group.steps))
    source = source_of_program(replace(program, name=text, where=where, groups=(spoiled, other)))
    clean = source_of_program(program)
    assert re.sub(r" dsl_\w+\(", "(", code_of(source)) == re.sub(r" dsl_\w+\(", "(", code_of(clean))
    assert all(line.isascii() and line.isprintable() for line in source[source.index("extern") :].splitlines())
    assert not any(line.rstrip().endswith("\\") for line in source.splitlines())
    head = source.splitlines()
    assert all(line.startswith("//") for line in head[:3])
    assert head[3:4] == clean.splitlines()[3:4]


def test_source_says_dtype_and_world() -> None:
    assert "sum_lines<DataType::kBFloat16, 3>" in source_of(two_shot)
    assert "sum_lines<DataType::kFloat32, 5>" in source_of(two_shot, world=5, dtype=torch.float32)
    assert "constexpr uint32_t kWorld = 5;" in source_of(two_shot, world=5)
    with pytest.raises(CompileError, match=r"elements of torch\.int8 are moved, never summed\n.*p\.sum"):
        source_of(two_shot, dtype=torch.int8)


def test_each_rank_sums_in_rank_order() -> None:
    code = code_of(source_of(two_shot, world=3)).partition("else {")[0]
    orders = {}
    for rank, values in re.findall(r"case (\d): {\s*{\s*const Line of\[3\] = {(.*?)};", code):
        first, second, third = values.split(", ")
        orders[rank] = ({first, second}, third)  # which of two comes first makes no difference
    received = re.search(r"(v\d_0) = line\[0\];\s*(v\d_0) = line\[1\];", code)
    assert received is not None
    of_next, of_second = received.groups()
    own = orders["2"][1]
    assert own not in (of_next, of_second)
    assert orders == {
        "0": ({own, of_next}, of_second),
        "1": ({of_second, own}, of_next),
        "2": ({of_next, of_second}, own),
    }


def test_the_sum_of_two_ranks_has_one_order() -> None:
    assert "switch (rank)" not in source_of(two_shot, world=2)


def test_a_kernel_without_signals_has_one_barrier() -> None:
    one_line, _, lines = code_of(source_of(two_shot)).partition("else {")
    for form in (one_line, lines):
        assert form.count("block_sync()") == 1
        assert form.index("call.begin()") < form.index("block_sync()") < form.index("call.arrive()")
    assert one_line.index("send_line(") < one_line.index("block_sync()") < one_line.index("call.receive<")
    assert "shared_memory" not in one_line + lines


def test_barriers_stand_before_signals_and_behind_waits() -> None:
    loop = code_of(source_of(pipelined)).partition("for (uint32_t t")[2]
    assert re.search(r"block_sync\(\);\s*if \(\*incomplete != 0\) return;(?:(?!block_sync).)*store_release", loop, re.S)
    assert re.search(r"call\.wait\(at, value, peer\)\) \*incomplete = 1;\s*}\s*block_sync\(\);", loop)


def test_packets_of_moved_data_carry_any_bytes() -> None:
    def gather(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(p.world)
        received = p.packets(p.world, like=x)
        p.copy(x[0], y[p.rank])
        for peer in p.peers:
            p.put_packets(x[0], peer, received[p.rank])
            p.store(p.read_packets(received[peer]), y[peer])

    code = code_of(source_of(gather, operation="all_gather", dtype=torch.int8))
    assert "send_bytes(" in code
    assert "receive_masks<" in code
    assert "send_bytes(" not in code_of(source_of(two_shot))


def test_ports_copy_what_lies_in_one_piece() -> None:
    def by_port(p: dsl.Builder) -> None:
        x = p.input.chunks(1)
        scratch = p.scratch(p.world, like=x)
        p.port_put(x[0], p.rank + 1, scratch[p.rank])
        p.signal(p.rank + 1, through_port=True)
        p.wait(p.rank + (p.world - 1), through_port=True)
        p.flush(p.rank + 1)

    (group,) = runs_of(build(by_port))
    assert [type(run) for run in group.runs()] == [PortRun]
    code = code_of(source_of(by_port))
    calls = [code.index(f"port.{call}(") for call in ("put", "signal", "wait", "flush")]
    assert calls == sorted(calls)
    assert "const uint32_t stride = block_threads();" in code
    assert "const uint32_t stride = instances * block_threads();" in code_of(source_of(two_shot))


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_runs_end_where_blocks_meet() -> None:
    (group,) = runs_of(build(pipelined))
    (loop,) = group.steps
    assert isinstance(loop, LoopRuns)
    assert [type(run) for run in loop.runs] == [DataRun, SignalRun, WaitRun, DataRun]
    assert loop.lag == 1
    assert [len(run.ops) for run in loop.runs[1:3]] == [2, 2]


def test_two_signals_of_a_semaphore_are_counted_one_after_the_other() -> None:
    def twice(p: dsl.Builder) -> None:
        for _ in range(2):
            p.signal(p.rank + 1)
        p.signal(p.rank + 1, semaphore=1)
        p.signal(p.ranks[0], semaphore=2) if p.world > 9 else None
        for _ in range(2):
            p.wait(p.rank + (p.world - 1))
        p.wait(p.rank + (p.world - 1), semaphore=1)

    (group,) = runs_of(build(twice))
    assert [len(run.ops) for run in group.runs()] == [1, 2, 1, 2]


def test_groups_do_not_share_a_semaphore() -> None:
    def shared(p: dsl.Builder, second: int) -> None:
        for name, semaphore in (("first", 0), ("second", second)):
            with p.group(name):
                p.signal(p.rank + 1, semaphore=semaphore)
                p.wait(p.rank + (p.world - 1), semaphore=semaphore)

    def alike(p: dsl.Builder) -> None:
        shared(p, 0)

    def apart(p: dsl.Builder) -> None:
        shared(p, 1)

    with pytest.raises(
        CompileError, match=r"groups 'first' and 'second' of rank 0 use semaphore 0 with rank 1; signals"
    ):
        runs_of(build(alike))
    assert len(runs_of(build(apart))) == 2


def test_values_do_not_outlive_a_barrier() -> None:
    def keeps(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        received = p.packets(1, like=x)
        p.put_packets(x[0], p.rank + 1, received[0])
        value = p.read_packets(received[0])
        p.signal(p.rank + 1)
        p.wait(p.rank + (p.world - 1))
        p.store(value, y[0])

    with pytest.raises(
        CompileError, match=r"%1, made by `.*read_packets.*`, is used behind a signal or a wait"
    ) as error:
        runs_of(build(keeps))
    assert "p.store(value, y[0])" in str(error.value)


def test_input_is_loaded_again_behind_a_barrier() -> None:
    def keeps(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        own = p.load(x[0])
        p.store(own, y[0])
        p.signal(p.rank + 1)
        p.wait(p.rank + (p.world - 1))
        p.store(own, y[0])

    (group,) = runs_of(build(keeps))
    assert [type(op) for op in group.steps[-1].ops] == [ir.Load, ir.Store]  # type: ignore[union-attr]


def test_chunks_of_two_sizes_are_two_runs() -> None:
    def sizes(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(2)
        whole, half = p.scratch(1, like=x), p.scratch(1, like=y)
        p.copy(x[0], whole[0])
        p.copy(half[0], y[0])

    (group,) = runs_of(build(sizes))
    assert [run.parts for run in group.runs() if isinstance(run, DataRun)] == [1, 2]


# ---- Order -----------------------------------------------------------------------------------------------------------


def test_what_peers_wait_for_goes_first() -> None:
    (group,) = runs_of(build(two_shot))
    (run,) = group.steps
    assert isinstance(run, DataRun)
    plan = schedule(run.ops)
    assert len(plan.first) == 3
    assert [type(step) for step in plan.steps] == [
        *(ir.PutPackets, ir.PutPackets, Receive, ir.Sum),
        *(ir.PutPackets, ir.PutPackets, ir.Store, Receive, ir.Store, ir.Store),
    ]
    assert [len(step.ops) for step in plan.steps if isinstance(step, Receive)] == [2, 2]


def test_nothing_is_sent_before_what_was_received_before_it() -> None:
    def in_a_ring(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        received, second = p.packets(1, like=x), p.packets(1, like=x)
        own = p.load(x[0])
        p.put_packets(own, p.rank + 1, received[0])
        p.store(p.read_packets(received[0]), y[0])
        p.put_packets(own, p.rank + 1, second[0])
        p.store(p.read_packets(second[0]), y[0])

    (group,) = runs_of(build(in_a_ring))
    (run,) = group.steps
    assert isinstance(run, DataRun)
    steps = schedule(run.ops).steps
    assert [type(step) for step in steps] == [ir.PutPackets, Receive, ir.PutPackets, ir.Store, Receive, ir.Store]


def test_a_load_keeps_behind_a_store_to_its_buffer() -> None:
    def through_scratch(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        scratch, other = p.scratch(1, like=x), p.scratch(1, like=x)
        p.copy(x[0], scratch[0])
        p.copy(scratch[0], y[0])
        p.copy(other[0], y[0])

    (group,) = runs_of(build(through_scratch))
    (run,) = group.steps
    assert isinstance(run, DataRun)
    steps = schedule(run.ops).steps
    names = [step.source.buffer.name if isinstance(step, ir.Load) else type(step).__name__ for step in steps]
    assert names == ["other", "Store", "scratch", "Store", "Store"]


def test_in_place() -> None:
    def stores_before_it_loads(p: dsl.Builder) -> None:
        x, y = p.input.chunks(2), p.output.chunks(2)
        p.copy(x[0], y[0])
        p.signal(p.rank + 1)
        p.wait(p.rank + (p.world - 1))
        p.copy(x[0], y[1])

    def answer(text: Text) -> bool:
        program = build(text)
        return works_in_place(program, runs_of(program))

    assert answer(two_shot)
    assert answer(pipelined) is True
    assert not answer(stores_before_it_loads)


# ---- Sizes -----------------------------------------------------------------------------------------------------------


def test_chunks_are_never_empty() -> None:
    assert [chunk_lines(nbytes, 4) for nbytes in (1, 16, 64, 65, 128, 129)] == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(("text", "operation"), [(two_shot, "all_reduce"), (pipelined, "all_reduce")])
def test_buffers_do_not_overlap(text: Text, operation: str) -> None:
    program = build(text, 4, operation)
    groups = runs_of(program)
    for masks in (False, True):
        layout = lay_out(program, groups, 100_000, 4, 64, masks)
        spans = []
        for buffer in program.buffers:
            if buffer.name in layout.buffers:
                place = layout.buffers[buffer.name]
                assert place.chunk_stride >= buffer.stages * place.stage_lines * 16
                spans.append((place.offset, place.offset + buffer.chunks * place.chunk_stride))
                if place.mask_offset is not None:
                    spans.append((place.mask_offset, place.mask_offset + buffer.chunks * place.chunk_stride // 4))
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= layout.half_bytes
        assert 4 * program.semaphores * 4 * 8 <= layout.half_offset
        reset = sentinel_ranges(program, layout)
        assert bool(reset) == (text is two_shot)
        assert all(layout.half_offset <= begin < end <= layout.bytes for begin, end in reset)


def test_stages_hold_what_all_threads_carry_together() -> None:
    program = build(pipelined, 3)
    groups = runs_of(program)
    (loop,) = groups[0].steps
    assert isinstance(loop, LoopRuns)
    layout = lay_out(program, groups, 1 << 20, 4, 64, masks=False)
    assert layout.buffers["received"].stage_lines == 4 * 64 * batch_of(loop)
    assert lay_out(program, groups, 160, 4, 64, masks=False).buffers["received"].stage_lines == 10


def test_grid_follows_from_the_lines() -> None:
    limits = Limits(instances=10, few_instances=10, threads=512, few_threads=64, synchronizes=True)
    assert limits.of_call(1) == (1, 64)
    assert limits.of_call(65) == (2, 64)
    assert limits.of_call(641) == (7, 96)
    assert limits.of_call(10_000_000) == (10, 512)
    for lines in range(1, 7000, 13):
        blocks, threads = limits.of_call(lines)
        assert blocks * threads >= min(lines, 5120)


def test_a_second_block_that_meets_comes_where_threads_have_many_lines() -> None:
    limits = Limits(instances=20, few_instances=10, threads=512, few_threads=64, synchronizes=True)
    assert limits.of_call(10 * 512) == (10, 512)
    assert limits.of_call(2 * 10 * 512) == (10, 512)
    assert limits.of_call(2 * 10 * 512 + 1) == (20, 512)


@pytest.mark.parametrize(
    ("text", "world", "blocks_of_sm"),
    [
        (library.two_shot_hb, 2, 2),
        (library.one_shot_hb, 2, 2),
        (library.two_shot_hb, 3, 1),  # more lines under way
        (library.all_gather_hb, 2, 1),  # no loop in which a block would wait again
        (library.one_shot_ll, 2, 1),  # no meeting
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_blocks_that_meet_share_a_multiprocessor_where_half_of_the_registers_do(
    text: ProgramDefinition, world: int, blocks_of_sm: int
) -> None:
    program = text.build(world)
    groups = runs_of(program)
    assert synchronizing_blocks_of_sm(groups) == blocks_of_sm
    layout = lay_out(program, groups, 1 << 16, 4, 64, masks=is_moved(program))
    source = generate(program, groups, layout, element_of(torch.bfloat16))
    assert f"LLM_COMM_KERNEL({512 * blocks_of_sm}) {kernel_name(program)}(" in source


def test_a_loop_in_which_only_proxies_copy() -> None:
    def gather(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(p.world, symmetric=True)
        p.copy(x[0], y[p.rank])
        with p.loop():
            for peer in p.peers:
                p.port_put(x[0], peer, y[p.rank])
                p.signal(peer, through_port=True)
            for peer in p.peers:
                p.wait(peer, through_port=True)

    groups = runs_of(build(gather, 2, "all_gather"))
    (loop,) = (step for step in groups[0].steps if isinstance(step, LoopRuns))
    assert not any(isinstance(run, DataRun) for run in loop.runs)
    assert batch_of(loop) == 4
    assert synchronizing_blocks_of_sm(groups) == 1


def test_grid_of_lines_that_are_on_their_way_by_themselves() -> None:
    limits = Limits(instances=1056, few_instances=1056, threads=256, few_threads=64, synchronizes=False)
    assert limits.of_call(1) == (1, 64)
    assert limits.of_call(2048) == (32, 64)
    assert limits.of_call(2049) == (17, 128)
    assert limits.of_call(32768) == (256, 128)
    assert limits.of_call(32769) == (129, 256)
    assert limits.of_call(10_000_000) == (1056, 256)
    few = Limits(instances=4, few_instances=4, threads=16, few_threads=16, synchronizes=False)
    assert [few.of_call(lines) for lines in (1, 17, 64, 4096, 40000)] == [(1, 16), (2, 16), (4, 16), (4, 16), (4, 16)]


# ---- Stages ----------------------------------------------------------------------------------------------------------


def stages(text: Text, world: int = 3) -> list[tuple[list[str], list[str]]]:
    """What each loads again, and its steps, by their kinds."""
    ((run,),) = [group.steps for group in runs_of(build(text, world))]
    assert isinstance(run, DataRun)
    return [
        ([str(op.source) for op in stage.again], [type(step).__name__ for step in stage.steps])
        for stage in stages_of(schedule(run.ops))
    ]


def test_what_is_waited_for_begins_a_stage() -> None:
    assert stages(two_shot) == [
        ([], ["PutPackets", "PutPackets"]),
        (["input[rank]"], ["Receive", "Sum", "PutPackets", "PutPackets", "Store"]),
        ([], ["Receive", "Store", "Store"]),
    ]


def test_values_that_go_over_a_cut_keep_it_one_stage() -> None:
    def program(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        first, second = p.packets(p.world, like=x), p.packets(p.world, like=x)
        (peer,) = p.peers
        p.put_packets(x[0], peer, first[p.rank])
        got = p.read_packets(first[peer])
        p.put_packets(got, peer, second[p.rank])
        p.store(p.sum({p.rank: got, peer: p.read_packets(second[peer])}), y[0])

    ((again, steps),) = stages(program, world=2)
    assert again == []
    assert steps.count("Receive") == 2


def test_nothing_is_loaded_again_behind_a_store_to_the_output() -> None:
    def program(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        first, second = p.packets(p.world, like=x), p.packets(p.world, like=x)
        (peer,) = p.peers
        p.put_packets(x[0], peer, first[p.rank])
        p.store(p.read_packets(first[peer]), y[0])
        p.put_packets(x[0], peer, second[p.rank])
        p.store(p.sum({p.rank: x[0], peer: p.read_packets(second[peer])}), y[0])

    assert len(stages(program, world=2)) == 1


# ---- Packets ---------------------------------------------------------------------------------------------------------


def test_senders_of_packets() -> None:
    def from_root(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        received, relayed = p.packets(1, like=x), p.packets(1, like=x)
        with p.only(0):
            p.put_packets(x[0], p.ranks[1], received[0])
            p.put_packets(x[0], p.ranks[2], received[0])
        with p.only(1, 2):
            value = p.read_packets(received[0])
            p.store(value, y[0])
        p.put_packets(x[0], p.rank + 1, relayed[0])
        p.store(p.read_packets(relayed[0]), y[0])

    program = build(from_root)
    first, second = (op for op in program.ops() if isinstance(op, ir.ReadPackets))
    assert sender_of(program, first) == dsl.Absolute(0)
    assert sender_of(program, second) == dsl.Relative(2)
    assert readers_of(program, first) == readers_of(program, second) == 1
