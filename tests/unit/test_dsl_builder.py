"""What tracing makes of a program's text, and what it refuses at once, at the line that is wrong."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest

from llm_comm import dsl
from llm_comm.dsl import Fault, Relative, ir
from llm_comm.dsl.library import all_gather_ll, reduce_scatter_ll, two_shot_hb, two_shot_ll

Text = Callable[[dsl.Builder], None]
MARK = "# refused"


def operations(program: ir.Program) -> list[ir.Op]:
    return list(program.ops())


# ---- What is traced ------------------------------------------------------------------------------------------------


def test_operations_follow_the_text() -> None:
    program = two_shot_ll.build(world=3)
    names = [type(op).__name__ for op in operations(program)]
    assert names == [
        *["Load", "PutPackets"] * 2,
        *["Load", "ReadPackets", "ReadPackets", "Sum", "Store"],
        *["PutPackets"] * 2,
        *["ReadPackets", "Store"] * 2,
    ]
    first = operations(program)[1]
    assert isinstance(first, ir.PutPackets)
    assert (first.peer, first.target.index) == (Relative(1), Relative(0))
    assert first.where.text == "p.put_packets(x[peer], peer, scattered[p.rank])"
    assert (program.name, program.operation, program.world) == ("two_shot_ll", ir.Operation.ALL_REDUCE, 3)


def test_values_are_defined_once() -> None:
    program = two_shot_hb.build(world=4)
    made = [op.result for op in operations(program) if isinstance(op, ir.Load | ir.Get | ir.ReadPackets | ir.Sum)]
    assert len(made) == len(set(made))


def test_buffers_go_by_the_names_of_their_variables() -> None:
    program = two_shot_ll.build(world=4)
    assert [buffer.name for buffer in program.buffers] == ["input", "output", "scattered", "gathered"]


def test_buffers_of_one_name_are_told_apart() -> None:
    def hop(p: dsl.Builder, x: dsl.Chunks, y: dsl.Chunks, part: int) -> None:
        received = p.packets(1, like=x)
        p.put_packets(x[part], p.rank + 1, received[0])
        p.store(p.read_packets(received[0]), y[part])

    @dsl.program("broadcast")
    def twice(p: dsl.Builder) -> None:
        x, y = p.input.chunks(2), p.output.chunks(2)
        for part in range(2):
            hop(p, x, y, part)

    names = [buffer.name for buffer in twice.build(2).buffers]
    assert names == ["input", "output", "received", "received_2"]


@pytest.mark.parametrize(
    ("text", "parts"), [(two_shot_ll, [4, 4]), (all_gather_ll, [4, 4]), (reduce_scatter_ll, [4, 4])]
)
def test_chunks_are_measured_by_the_message(text: dsl.ProgramDefinition, parts: list[int]) -> None:
    """That of an all-gather is its output, that of a reduce-scatter its input."""
    assert [buffer.parts for buffer in text.build(world=4).buffers[:2]] == parts


def test_ranks_go_around_the_world() -> None:
    @dsl.program("broadcast")
    def around(p: dsl.Builder) -> None:
        p.signal(p.rank - 1)
        p.wait(p.rank + 5)

    assert [op.peer for op in operations(around.build(4))] == [Relative(3), Relative(1)]  # type: ignore[attr-defined]
    assert Relative(1) + 2 == Relative(3)
    assert [Relative(-1).on(rank, 3) for rank in range(3)] == [2, 0, 1]


def test_only_is_the_intersection_of_all_around() -> None:
    @dsl.program("broadcast")
    def nested(p: dsl.Builder) -> None:
        with p.only(0, 1, 2):
            with p.only(p.ranks[1], 3):
                p.signal(p.rank + 1)
            p.wait(p.rank + 1)
        p.wait(p.rank + 1)

    assert [op.only for op in operations(nested.build(4))] == [{1}, {0, 1, 2}, None]


def test_groups_and_loops() -> None:
    @dsl.program("broadcast", instances=2)
    def several(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        for _ in range(2):
            with p.group("one"):
                p.copy(x[0], y[0])
        with p.loop():
            p.load(x[0])
            with p.behind(2):
                p.copy(x[0], y[0])
            p.signal(p.rank + 1, semaphore=3)

    program = several.build(2)
    assert [group.name for group in program.groups] == ["one", "main"]
    assert [len(group.steps) for group in program.groups] == [4, 1]
    assert [op.lag for op in operations(program)[4:]] == [0, 2, 2, 0]
    assert (program.semaphores, program.instances) == (4, 2)


def test_a_chunk_is_loaded_where_a_value_is_taken() -> None:
    @dsl.program("all_reduce")
    def text(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        p.store(p.sum({p.rank: x[0]}), y[0])

    assert [type(op).__name__ for op in operations(text.build(2))] == ["Load", "Sum", "Store"]


def test_unknown_operation() -> None:
    with pytest.raises(ValueError, match="all_sum"):
        dsl.program("all_sum")


# ---- What is refused -----------------------------------------------------------------------------------------------

REFUSED: list[tuple[Text, str, str]] = []


def refused(message: str, operation: str = "all_reduce") -> Callable[[Text], Text]:
    def register(text: Text) -> Text:
        REFUSED.append((text, operation, message))
        return text

    return register


@pytest.mark.parametrize(("text", "operation", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_misuse(text: Text, operation: str, message: str) -> None:
    lines, first = inspect.getsourcelines(text)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(MARK)]
    with pytest.raises(dsl.ProgramError) as caught:
        dsl.program(operation)(text).build(4)
    error = caught.value
    assert error.fault is Fault.MISUSE
    assert message in str(error)
    assert (error.where.file, [error.where.line]) == (__file__, marked), error


@refused("input[4] on rank 0 is chunk 4, but input has 4 chunk(s), 0 to 3")
def a_chunk_is_out_of_range(p: dsl.Builder) -> None:
    p.load(p.input.chunks(4)[4])  # refused


@refused("input[rank] on rank 2 is chunk 2, but input has 2 chunk(s), 0 to 1")
def a_chunk_of_a_rank_is_out_of_range(p: dsl.Builder) -> None:
    p.load(p.input.chunks(2)[p.rank])  # refused


@refused("a chunk is named by a whole number or a rank")
def a_chunk_is_named_by_a_slice(p: dsl.Builder) -> None:
    p.load(p.input.chunks(2)[0:1])  # type: ignore[index]  # refused


@refused("cut into a multiple of 4 chunks, not into 6", "all_gather")
def parts_are_cut_unevenly(p: dsl.Builder) -> None:
    p.output.chunks(6)  # refused


@refused("the input is cut into 2 chunks (symmetric=False), but was cut into 4")
def a_tensor_is_cut_twice(p: dsl.Builder) -> None:
    p.input.chunks(4)
    p.input.chunks(2)  # refused


@refused("store uses memory of kind output, scratch; input[0] is of kind input")
def the_input_is_written(p: dsl.Builder) -> None:
    x = p.input.chunks(1)
    p.store(x[0], x[0])  # refused


@refused("put uses memory of kind output, scratch; received[0] is of kind packets")
def packets_are_written_plainly(p: dsl.Builder) -> None:
    x = p.input.chunks(1)
    received = p.packets(1, like=x)
    p.put(x[0], p.rank + 1, received[0])  # refused


@refused("load uses memory of kind input, output, scratch; received[0] is of kind packets")
def packets_are_read_plainly(p: dsl.Builder) -> None:
    received = p.packets(1, like=p.input.chunks(1))
    p.load(received[0])  # refused


@refused("put_packets uses memory of kind packets; received[0] is of kind scratch")
def packets_are_put_to_plain_memory(p: dsl.Builder) -> None:
    x = p.input.chunks(1)
    received = p.scratch(1, like=x)
    p.put_packets(x[0], p.rank + 1, received[0])  # refused


@refused("output[0] of a peer: the output is not in symmetric memory")
def a_peers_output_is_not_symmetric(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    p.put(x[0], p.rank + 1, y[0])  # refused


@refused("input[0] of a peer: the input is not in symmetric memory")
def a_peers_input_is_not_symmetric(p: dsl.Builder) -> None:
    p.get(p.rank + 1, p.input.chunks(1)[0])  # refused


@refused("rank is rank 0 itself where rank 0 runs this line")
def a_rank_signals_to_itself(p: dsl.Builder) -> None:
    p.signal(p.rank)  # refused


@refused("2 is rank 2 itself where rank 2 runs this line")
def all_ranks_wait_for_one(p: dsl.Builder) -> None:
    p.wait(p.ranks[2])  # refused


@refused("3 is no rank of a world of 4: p.rank + 1 or p.ranks[0] is one")
def a_peer_is_a_number(p: dsl.Builder) -> None:
    p.wait(3)  # type: ignore[arg-type]  # refused


@refused("a sum of chunks of different size: the operand of rank is 1/2 of the message, that of rank+1 1/4")
def a_sum_of_two_sizes(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(4)
    p.sum({p.rank: x[0], p.rank + 1: y[0]})  # refused


@refused("on rank 1 two operands are labelled with rank 2: label each with its own")
def two_operands_of_a_rank(p: dsl.Builder) -> None:
    x = p.input.chunks(1)
    p.sum({p.rank + 1: x[0], p.ranks[2]: x[0]})  # refused


@refused("the value is 1/2 of the message, output[0] 1/4: chunks of one size fit each other")
def a_value_does_not_fit(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(4)
    p.store(x[0], y[0])  # refused


@refused("input[0] is 1/2 of the message, received[0] 1/4")
def a_port_copies_between_two_sizes(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(4)
    received = p.scratch(1, like=y)
    p.port_put(x[0], p.rank + 1, received[0])  # refused


@refused("rank(s) [1, 2, 3] have no such value: it is made under another `only`")
def a_value_that_others_have_not(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    with p.only(0):
        value = p.load(x[0])
    p.store(value, y[0])  # refused


@refused("the value belongs to group 'one'")
def a_value_of_another_group(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    with p.group("one"):
        value = p.load(x[0])
    with p.group("other"):
        p.store(value, y[0])  # refused


@refused("the value is made in another loop, or under another `behind`")
def a_value_leaves_its_loop(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    with p.loop():
        value = p.load(x[0])
    p.store(value, y[0])  # refused


@refused("the value is made in another loop, or under another `behind`")
def a_value_of_another_piece(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    with p.loop():
        value = p.load(x[0])
        with p.behind(1):
            p.store(value, y[0])  # refused


@refused("staged has 2 stages, which only a loop uses")
def turns_without_a_loop(p: dsl.Builder) -> None:
    x = p.input.chunks(1)
    staged = p.scratch(1, like=x, stages=2)
    p.copy(x[0], staged[0])  # refused


@refused("staged is used both in a loop, where it holds pieces of chunks, and outside")
def scratch_of_pieces_and_of_chunks(p: dsl.Builder) -> None:
    x = p.input.chunks(1)
    staged = p.scratch(1, like=x)
    with p.loop():
        p.copy(x[0], staged[0])
    p.load(staged[0])  # refused


@refused("all loops of a program are over chunks of one size")
def a_loop_over_two_sizes(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(4)
    with p.loop():
        p.load(x[0])
        p.load(y[0])  # refused


@refused("a loop begins inside of another one")
def a_loop_in_a_loop(p: dsl.Builder) -> None:
    with p.loop(), p.loop():  # refused
        pass


@refused("group 'other' begins inside of another group or of a loop")
def a_group_in_a_group(p: dsl.Builder) -> None:
    with p.group("one"), p.group("other"):  # refused
        pass


@refused("behind(1): it stands in a loop")
def behind_without_a_loop(p: dsl.Builder) -> None:
    with p.behind(1):  # refused
        pass


@refused("no rank runs what follows")
def only_none(p: dsl.Builder) -> None:
    with p.only(0), p.only(1):  # refused
        pass


@refused("only(4): give numbers of ranks, 0 to 3")
def only_a_rank_that_is_not(p: dsl.Builder) -> None:
    with p.only(4):  # refused
        pass


@refused("the name of a group is 'a\\n#error'; it must have 1 to 196 characters, all of them printable")
def a_group_of_two_lines(p: dsl.Builder) -> None:
    with p.group("a\n#error"):  # refused
        pass


@refused("the name of a group is 3; it must have")
def a_group_by_number(p: dsl.Builder) -> None:
    with p.group(3):  # type: ignore[arg-type]  # refused
        pass


@refused("semaphore -1: they are numbered from 0")
def a_negative_semaphore(p: dsl.Builder) -> None:
    p.signal(p.rank + 1, semaphore=-1)  # refused


@refused("0 chunk(s) in 1 stage(s): both are at least 1")
def scratch_of_nothing(p: dsl.Builder) -> None:
    p.scratch(0, like=p.input.chunks(1))  # refused


@refused("load takes a chunk of a buffer of this program")
def a_buffer_is_taken_for_a_chunk(p: dsl.Builder) -> None:
    p.load(p.input.chunks(1))  # type: ignore[arg-type]  # refused


@refused("program 'nothing_at_all' has no operation")  # refused
def nothing_at_all(p: dsl.Builder) -> None:
    p.input.chunks(1)


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "\u202e", "a" * 197])
def test_names_that_are_refused(name: str) -> None:
    def text(p: dsl.Builder) -> None:
        raise AssertionError

    text.__name__ = name
    with pytest.raises(
        ValueError, match=r"^dsl\.program: the name of the function is .* 1 to 196 characters, all of them"
    ):
        dsl.program("all_reduce")(text)


def test_what_is_no_function() -> None:
    with pytest.raises(ValueError, match=r"takes a function, not functools\.partial\(.*: wrap it in one"):
        dsl.program("all_reduce")(functools.partial(print))


@pytest.mark.parametrize(("world", "root"), [(1, 0), (2, 2)])
def test_worlds_that_are_too_small(world: int, root: int) -> None:
    @dsl.program("broadcast", root=root)
    def text(p: dsl.Builder) -> None:
        p.signal(p.rank + 1)

    with pytest.raises(dsl.ProgramError, match=rf"program 'text', root {root}, for {world} rank"):
        text.build(world)
