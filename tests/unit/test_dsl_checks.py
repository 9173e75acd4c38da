"""Broken programs are refused, each for its own reason and at its own line; correct ones are accepted."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from llm_comm import dsl
from llm_comm.dsl import Fault
from llm_comm.dsl.library import PROGRAMS

Text = Callable[[dsl.Builder], None]

#: At the end of the line that the error is to point at.
MARK = "# refused"


@dataclass(frozen=True)
class Broken:
    text: Text
    program: dsl.ProgramDefinition
    fault: Fault
    message: str
    world: int


BROKEN: list[Broken] = []


def broken(operation: str, fault: Fault, message: str, *, world: int = 3) -> Callable[[Text], Text]:
    """Registers a program that is to be refused with a message that contains ``message``."""

    def register(text: Text) -> Text:
        BROKEN.append(Broken(text, dsl.program(operation)(text), fault, message, world))
        return text

    return register


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.text.__name__)
def test_refused(case: Broken) -> None:
    lines, first = inspect.getsourcelines(case.text)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(MARK)]
    built = case.program.build(case.world)
    with pytest.raises(dsl.ProgramError) as caught:
        dsl.check(built)
    error = caught.value
    assert error.fault is case.fault, error
    assert case.message in str(error)
    assert (error.where.file, [error.where.line]) == (__file__, marked), error


def announce(p: dsl.Builder, *, through_port: bool = True) -> None:
    """All ranks signal to all others."""
    for peer in p.peers:
        p.signal(peer, semaphore=1, through_port=through_port)
    for peer in p.peers:
        p.wait(peer, semaphore=1, through_port=through_port)


def exchange(p: dsl.Builder, x: dsl.Chunks) -> dsl.Chunks:
    """Every rank has the first chunk of all others: packets, by the rank they come from."""
    received = p.packets(p.world, like=x)
    for peer in p.peers:
        p.put_packets(x[0], peer, received[p.rank])
    return received


# ---- Signals and waits, packets and readers ------------------------------------------------------------------------


@broken("all_gather", Fault.UNMATCHED, "rank 0 signals semaphore 0 of rank 1 1 time, which waits for it 0 times")
def a_wait_is_dropped(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.put(x[0], peer, received[p.rank])
        p.signal(peer)  # refused
    for peer in p.peers:
        p.copy(received[peer], y[peer])


@broken("all_gather", Fault.UNMATCHED, "rank 0 waits 1 time for semaphore 0 of rank 1, which signals it 0 times")
def a_signal_is_dropped(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.put(x[0], peer, received[p.rank])
    for peer in p.peers:
        p.wait(peer)  # refused
        p.copy(received[peer], y[peer])


@broken("all_reduce", Fault.UNMATCHED, "rank 0 waits 1 time for semaphore 0 of rank 1, which signals it 0 times")
def waits_for_the_wrong_peer(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(1, like=x)
    p.put(x[0], p.rank + 1, received[0])
    p.signal(p.rank + 1)
    p.wait(p.rank + 1)  # refused
    p.store(p.sum({p.rank: x[0], p.rank - 1: received[0]}), y[0])


@broken("all_gather", Fault.UNMATCHED, "rank 0 waits 1 time for semaphore 1 of rank 1, which signals it 0 times")
def waits_on_the_wrong_semaphore(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.put(x[0], peer, received[p.rank])
        p.signal(peer, semaphore=0)
    for peer in p.peers:
        p.wait(peer, semaphore=1)  # refused
        p.copy(received[peer], y[peer])


@broken("all_gather", Fault.UNMATCHED, "rank 0 waits 1 time for semaphore 0 of rank 1, which signals it 0 times")
def waits_for_memory_what_a_port_signals(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.port_put(x[0], peer, received[p.rank])
        p.signal(peer, through_port=True)
        p.flush(peer)
    for peer in p.peers:
        p.wait(peer)  # refused
        p.copy(received[peer], y[peer])


@broken("all_gather", Fault.UNMATCHED, "signals it 1 time (with 2 pieces)")
def waits_for_each_piece_of_one_signal(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world, symmetric=True)
    for peer in p.peers:
        p.signal(peer)
    with p.loop():
        p.copy(x[0], y[p.rank])
        for peer in p.peers:
            p.wait(peer)  # refused
            p.put(x[0], peer, y[p.rank])
    announce(p, through_port=False)


@broken("all_gather", Fault.UNMATCHED, "packets are put to received[0] of rank 1 1 time, and it reads them 0 times")
def packets_are_not_read(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)
    p.copy(x[0], y[p.rank])
    p.put_packets(x[0], p.rank + 1, received[p.rank])  # refused


@broken("all_gather", Fault.UNMATCHED, "rank 0 reads packets of received[2] 2 times, and they are put there 1 time")
def packets_never_come(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)
    p.copy(x[0], y[p.rank])
    p.put_packets(x[0], p.rank + 1, received[p.rank])
    p.store(p.read_packets(received[p.rank - 1]), y[p.rank - 1])
    p.store(p.read_packets(received[p.rank - 1]), y[p.rank - 2])  # refused


@broken("all_gather", Fault.UNMATCHED, "rank 0 reads packets of received[1] 1 time, and they are put there 0 times")
def packets_go_to_the_readers_chunk(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.put_packets(x[0], peer, received[peer])
    for peer in p.peers:
        p.store(p.read_packets(received[peer]), y[peer])  # refused


@broken("all_gather", Fault.UNMATCHED, "rank 0 waits for it in group 'one'", world=2)
def two_groups_wait_on_one_semaphore(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(2 * p.world)
    received = p.scratch(2, like=x)
    for i, name in enumerate(("one", "other")):
        with p.group(name):
            p.put(x[i], p.rank + 1, received[i])
            p.signal(p.rank + 1, semaphore=i)
    for i, name in enumerate(("one", "other")):
        with p.group(name):
            p.wait(p.rank + 1, semaphore=0)  # refused
            p.copy(received[i], y[i])
    with p.group("one"):
        p.wait(p.rank + 1, semaphore=1)
        p.signal(p.rank + 1, semaphore=0)


@broken("all_gather", Fault.UNMATCHED, "two groups of rank 0 read packets of received[0]", world=2)
def two_groups_read_the_same_packets(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(1, like=x)
    for name in ("one", "other"):
        with p.group(name):
            p.put_packets(x[0], p.rank + 1, received[0])
            p.store(p.read_packets(received[0]), y[p.rank + 1])  # refused


# ---- Ranks that wait for each other --------------------------------------------------------------------------------


@broken("all_gather", Fault.DEADLOCK, "rank 0 waits for a signal of rank 1 (")
def all_wait_before_they_signal(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.put(x[0], peer, received[p.rank])
    for peer in p.peers:
        p.wait(peer)  # refused
        p.signal(peer)
    for peer in p.peers:
        p.copy(received[peer], y[peer])


@broken("all_gather", Fault.DEADLOCK, "rank 1 waits for packets in received[2] (")
def all_read_before_they_put(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.store(p.read_packets(received[peer]), y[peer])  # refused
        p.put_packets(x[0], peer, received[p.rank])


@broken("all_reduce", Fault.DEADLOCK, "rank 2 waits for a signal of rank 1 (")
def nobody_begins_the_ring(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(1, like=x)
    p.wait(p.rank - 1)  # refused
    total = p.sum({p.rank: x[0], p.rank - 1: received[0]})
    p.put(total, p.rank + 1, received[0])
    p.signal(p.rank + 1)
    p.store(total, y[0])


@broken("broadcast", Fault.DEADLOCK, "rank 0 (group 'one') waits for a signal of rank 1", world=2)
def groups_wait_crosswise(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    for name, mine, other in (("one", 0, 1), ("other", 1, 0)):
        with p.group(name):
            p.wait(p.rank + 1, semaphore=mine)  # refused
            p.signal(p.rank + 1, semaphore=other)
    p.copy(x[0], y[0])


@broken("all_reduce", Fault.DEADLOCK, "ranks wait for each other")
def acknowledges_behind_what_needs_it(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(p.world, like=x, stages=1)
    with p.loop():
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer, semaphore=1)  # refused
        for peer in p.peers:
            p.put(x[0], peer, received[p.rank])
            p.signal(peer)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer)
            p.store(p.sum({p.rank: x[0], **{peer: received[peer] for peer in p.peers}}), y[0])
            for peer in p.peers:
                p.signal(peer, semaphore=1)


# ---- Races within a call -------------------------------------------------------------------------------------------


@broken("all_gather", Fault.RACE, "rank 1 reads received[0] of rank 1, and may not see what rank 0 puts there")
def nobody_announces_a_put(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.put(x[0], peer, received[p.rank])
    for peer in p.peers:
        p.copy(received[peer], y[peer])  # refused


@broken("all_gather", Fault.RACE, "have rank 0 signal after it, and rank 1 wait for that signal before it reads")
def signals_before_it_puts(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.signal(peer)
        p.put(x[0], peer, received[p.rank])
    for peer in p.peers:
        p.wait(peer)
        p.copy(received[peer], y[peer])  # refused


@broken("all_gather", Fault.RACE, "rank 1 reads received[0] of rank 1, and may not see what rank 0 puts there")
def waits_behind_the_load(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.put(x[0], peer, received[p.rank])
        p.signal(peer)
    for peer in p.peers:
        p.copy(received[peer], y[peer])  # refused
        p.wait(peer)


@broken("all_gather", Fault.RACE, "rank 1 reads staged[0] of rank 0, and may not see what rank 0 stores there")
def gets_what_nobody_has_announced(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    staged = p.scratch(1, like=x)
    p.copy(x[0], staged[0])
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.store(p.get(peer, staged[0]), y[peer])  # refused


@broken("all_gather", Fault.RACE, "rank 1 may still read received[0] of rank 1", world=2)
def overwrites_what_is_being_read(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(2 * p.world)
    received = p.scratch(1, like=x)
    for i in range(2):
        with p.only(0):
            p.put(x[i], p.ranks[1], received[0])  # refused
            p.signal(p.ranks[1])
        with p.only(1):
            p.wait(p.ranks[0])
            p.copy(received[0], y[i])


@broken("all_reduce", Fault.RACE, "write received[0] of rank 1, and nothing says which of them last")
def two_ranks_put_to_one_chunk(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(1, like=x)
    for peer in p.peers:
        p.put(x[0], peer, received[0])  # refused
        p.signal(peer)
    for peer in p.peers:
        p.wait(peer)
    p.store(p.sum({p.rank: x[0], p.rank + 1: received[0]}), y[0])


@broken("broadcast", Fault.RACE, "write output[0] of rank 0, and nothing says which of them last")
def two_groups_write_one_chunk(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    for name in ("one", "other"):
        with p.group(name):
            p.copy(x[0], y[0])  # refused


@broken("broadcast", Fault.RACE, "groups of a rank run side by side. Have one group do both")
def a_group_reads_what_another_one_writes(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    staged = p.scratch(1, like=x)
    with p.group("one"):
        p.copy(x[0], staged[0])
    with p.group("other"):
        p.copy(staged[0], y[0])  # refused


@broken("all_gather", Fault.RACE, "rank 1 may not have read received[0]", world=2)
def packets_are_put_again_too_early(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(2 * p.world)
    received = p.packets(1, like=x)
    for i in range(2):
        with p.only(0):
            p.put_packets(x[i], p.ranks[1], received[0])  # refused
        with p.only(1):
            p.store(p.read_packets(received[0]), y[i])


@broken("all_gather", Fault.RACE, "Have rank 0 wait before it for a signal that rank 1 gives after the read", world=2)
def packets_acknowledge_packets(p: dsl.Builder) -> None:
    """What rank 1 stores to arm the packets again may come later than its answer."""
    x, y = p.input.chunks(2), p.output.chunks(2 * p.world)
    received, answers = p.packets(1, like=x), p.packets(1, like=x)
    for i in range(2):
        with p.only(0):
            p.put_packets(x[i], p.ranks[1], received[0])  # refused
            p.store(p.read_packets(answers[0]), y[2 + i])
        with p.only(1):
            p.store(p.read_packets(received[0]), y[i])
            p.put_packets(x[i], p.ranks[0], answers[0])
            if i == 0:
                p.wait(p.ranks[0])
        with p.only(0):
            if i == 0:
                p.signal(p.ranks[1])


@broken("all_gather", Fault.RACE, "have rank 1 signal after it, and rank 0 wait for that signal", world=2)
def packets_announce_plain_memory(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(2 * p.world)
    plain, flag = p.scratch(1, like=x), p.packets(1, like=x)
    p.put(x[0], p.rank + 1, plain[0])
    p.put_packets(x[1], p.rank + 1, flag[0])
    with p.only(0):
        p.store(p.read_packets(flag[0]), y[3])
        p.copy(plain[0], y[2])  # refused
    with p.only(1):
        p.store(p.read_packets(flag[0]), y[1])


# ---- Ports ---------------------------------------------------------------------------------------------------------


@broken("all_gather", Fault.RACE, "the proxy reads its source later. flush(rank+1) before", world=2)
def the_source_of_a_port_changes(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    staged, received = p.scratch(1, like=x), p.scratch(1, like=x)
    p.copy(x[0], staged[0])
    p.port_put(staged[0], p.rank + 1, received[0])
    p.store(x[0], staged[0])  # refused
    announce(p)
    p.copy(received[0], y[p.rank + 1])


@broken("all_gather", Fault.RACE, "have rank 0 signal through the port after it", world=2)
def a_port_is_announced_by_memory(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(1, like=x)
    p.port_put(x[0], p.rank + 1, received[0])
    announce(p, through_port=False)
    p.copy(received[0], y[p.rank + 1])  # refused
    p.flush(p.rank + 1)


@broken("all_gather", Fault.RACE, "have rank 0 signal through the port after it", world=2)
def a_flush_is_taken_for_arrival(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(1, like=x)
    p.port_put(x[0], p.rank + 1, received[0])
    p.flush(p.rank + 1)
    announce(p, through_port=False)
    p.copy(received[0], y[p.rank + 1])  # refused


@broken("all_gather", Fault.RACE, "the proxy of rank 0 may still read input[0] when the call ends", world=2)
def a_flush_is_missing(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(1, like=x)
    p.copy(x[0], y[p.rank])
    p.port_put(x[0], p.rank + 1, received[0])  # refused
    announce(p)
    p.copy(received[0], y[p.rank + 1])


@broken("all_gather", Fault.RACE, "the call may end on rank 1 before the proxy of rank 0 has put received[0]", world=2)
def a_proxy_outlives_the_call(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received, packets = p.scratch(1, like=x), p.packets(1, like=x)
    p.copy(x[0], y[p.rank])
    p.port_put(x[0], p.rank + 1, received[0])  # refused
    p.flush(p.rank + 1)
    p.put_packets(x[0], p.rank + 1, packets[0])
    p.store(p.read_packets(packets[0]), y[p.rank + 1])


# ---- Tensors of callers --------------------------------------------------------------------------------------------


@broken("all_gather", Fault.RACE, "rank 1 puts to output[1] of rank 0 before it has heard from rank 0 in this call")
def puts_to_an_output_that_may_be_in_use(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world, symmetric=True)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.put(x[0], peer, y[p.rank])  # refused
    announce(p, through_port=False)


@broken("all_gather", Fault.RACE, "the call may end on rank 0 while rank 1 still puts to output[1] there")
def ends_before_its_output_is_there(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world, symmetric=True)
    p.copy(x[0], y[p.rank])
    announce(p, through_port=False)
    for peer in p.peers:
        p.put(x[0], peer, y[p.rank])  # refused


@broken("all_gather", Fault.RACE, "rank 1 gets input[0] of rank 0 before it has heard from rank 0 in this call")
def gets_an_input_that_may_not_be_there(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1, symmetric=True), p.output.chunks(p.world)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.store(p.get(peer, x[0]), y[peer])  # refused
    announce(p, through_port=False)


@broken("all_gather", Fault.RACE, "the call may end on rank 0 while rank 2 still gets input[0] there")
def ends_while_its_input_is_read(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1, symmetric=True), p.output.chunks(p.world)
    p.copy(x[0], y[p.rank])
    announce(p, through_port=False)
    for peer in p.peers:
        p.store(p.get(peer, x[0]), y[peer])  # refused


@broken("all_gather", Fault.RACE, "rank 1 gets input[0] of rank 0 before it has heard from rank 0", world=2)
def packets_say_that_an_input_is_there(p: dsl.Builder) -> None:
    """A load may come before the poll that stands before it."""
    x, y = p.input.chunks(1, symmetric=True), p.output.chunks(p.world)
    packets = p.packets(1, like=x)
    p.put_packets(x[0], p.rank + 1, packets[0])
    p.store(p.read_packets(packets[0]), y[p.rank])
    p.store(p.get(p.rank + 1, x[0]), y[p.rank + 1])  # refused
    announce(p, through_port=False)


@broken("all_gather", Fault.RACE, "Packets are enough for what is stored there, of chunks of the same size", world=2)
def packets_of_small_chunks_tell_few_threads(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(p.world, symmetric=True)
    large = p.scratch(1, like=y)
    small = p.packets(1, like=x)
    p.store(p.load(large[0]), y[p.rank])
    p.put_packets(x[0], p.rank + 1, small[0])
    p.read_packets(small[0])
    p.put(large[0], p.rank + 1, y[p.rank])  # refused
    announce(p, through_port=False)


# ---- Loops ---------------------------------------------------------------------------------------------------------


@broken("all_reduce", Fault.RACE, "rank 1 may still read received[0] of rank 1")
def a_loop_without_acknowledgement(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(p.world, like=x, stages=2)
    with p.loop():
        for peer in p.peers:
            p.put(x[0], peer, received[p.rank])  # refused
        for peer in p.peers:
            p.signal(peer)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer)
            p.store(p.sum({p.rank: x[0], **{peer: received[peer] for peer in p.peers}}), y[0])


@broken("all_reduce", Fault.RACE, "or give the buffer more stages")
def two_shots_with_stages_too_few(p: dsl.Builder) -> None:
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    scattered, gathered = p.scratch(p.world, like=x, stages=3), p.scratch(p.world, like=x, stages=2)
    with p.loop():
        for peer in p.peers:
            p.put(x[peer], peer, scattered[p.rank])
        for peer in p.peers:
            p.signal(peer, semaphore=0)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer, semaphore=0)
            total = p.sum({p.rank: x[p.rank], **{peer: scattered[peer] for peer in p.peers}})
            for peer in p.peers:
                p.put(total, peer, gathered[p.rank])  # refused
                p.signal(peer, semaphore=1)
            p.store(total, y[p.rank])
        with p.behind(2):
            for peer in p.peers:
                p.wait(peer, semaphore=1)
                p.copy(gathered[peer], y[peer])


@broken("all_reduce", Fault.RACE, "rank 1 may still read received[0] of rank 1")
def waits_for_acknowledgement_behind_the_put(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(p.world, like=x, stages=2)
    with p.loop():
        for peer in p.peers:
            p.put(x[0], peer, received[p.rank])  # refused
        for peer in p.peers:
            p.signal(peer, semaphore=0)
        with p.behind(2):
            for peer in p.peers:
                p.wait(peer, semaphore=1)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer, semaphore=0)
            p.store(p.sum({p.rank: x[0], **{peer: received[peer] for peer in p.peers}}), y[0])
            for peer in p.peers:
                p.signal(peer, semaphore=1)


@broken("all_gather", Fault.RACE, "rank 1 may not have read received[0]")
def packets_in_a_loop_without_acknowledgement(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(p.world, like=x, stages=2)
    with p.loop():
        for peer in p.peers:
            p.put_packets(x[0], peer, received[p.rank])  # refused
        p.copy(x[0], y[p.rank])
        for peer in p.peers:
            p.store(p.read_packets(received[peer]), y[peer])


@broken("all_gather", Fault.CONTENT, "staged[0] of rank 0 is read for piece 0, and holds piece 1")
def its_own_scratch_has_stages_too_few(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world, symmetric=True)
    staged = p.scratch(1, like=x, stages=1)
    announce(p, through_port=False)
    with p.loop():
        p.copy(x[0], staged[0])
        with p.behind(1):
            part = p.load(staged[0])  # refused
            p.store(part, y[p.rank])
            for peer in p.peers:
                p.put(part, peer, y[p.rank])
    announce(p, through_port=False)


# ---- Calls that follow each other ----------------------------------------------------------------------------------


@broken("broadcast", Fault.CALLS, "when rank 0 puts packets there again in the next call but one")
def the_root_of_a_broadcast_runs_ahead(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(1, like=x)
    with p.only(p.root):
        for peer in p.peers:
            p.put_packets(x[0], peer, received[0])  # refused
        p.copy(x[0], y[0])
    with p.only(1, 2):
        p.store(p.read_packets(received[0]), y[0])


@broken("broadcast", Fault.CALLS, "rank 1 may still read received[0] of rank 1")
def a_broadcast_by_signals_runs_ahead(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(1, like=x)
    with p.only(p.root):
        for peer in p.peers:
            p.put(x[0], peer, received[0])  # refused
            p.signal(peer)
        p.copy(x[0], y[0])
    with p.only(1, 2):
        p.wait(p.root)
        p.copy(received[0], y[0])


@broken("broadcast", Fault.CALLS, "rank 1 may end a call before rank 2 has begun it")  # refused
def ranks_that_receive_do_not_hear_of_each_other(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(1, like=x)
    with p.only(p.root):
        for peer in p.peers:
            p.put_packets(x[0], peer, received[0])
        for peer in p.peers:
            p.wait(peer)
        p.copy(x[0], y[0])
    with p.only(1, 2):
        p.store(p.read_packets(received[0]), y[0])
        p.signal(p.root)


# ---- Results -------------------------------------------------------------------------------------------------------


@broken("broadcast", Fault.UNWRITTEN, "staged[0] of rank 0 is read, and no line before has written it in this call")
def reads_what_nobody_writes(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    staged = p.scratch(1, like=x)
    p.copy(staged[0], y[0])  # refused


@broken(
    "all_reduce",
    Fault.UNWRITTEN,
    "output[0] of rank 0 is read, and no line before has written it in this call",
    world=2,
)
def reads_the_output_of_the_call_before(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = exchange(p, x)
    p.store(p.sum({p.rank: y[0], p.rank + 1: p.read_packets(received[p.rank + 1])}), y[0])  # refused


@broken("all_reduce", Fault.CONTENT, "the sum has input[0] of rank 0 2 times: add each rank once")
def adds_a_rank_twice(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = exchange(p, x)
    next_one = p.read_packets(received[p.rank + 1])
    some = p.sum({p.rank: x[0], p.rank + 1: next_one})
    more = p.sum({p.rank: x[0], p.rank + 2: p.read_packets(received[p.rank + 2])})
    p.store(p.sum({p.rank: some, p.rank + 2: more}), y[0])  # refused


@broken("all_reduce", Fault.CONTENT, "the operand labelled with rank 1 is of rank(s) [2]")
def labels_are_mixed_up(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = exchange(p, x)
    one, other = (p.read_packets(received[peer]) for peer in p.peers)
    p.store(p.sum({p.rank: x[0], p.rank + 1: other, p.rank + 2: one}), y[0])  # refused


@broken("all_reduce", Fault.CONTENT, "holds the sum of input[0] of ranks [0, 1]: rank(s) [2] are lacking")
def forgets_a_rank(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = exchange(p, x)
    values = {peer: p.read_packets(received[peer]) for peer in p.peers}
    p.store(p.sum({p.rank: x[0], p.rank + 1: values[p.rank + 1]}), y[0])  # refused


@broken("all_reduce", Fault.CONTENT, "the sum adds input[0] of rank 1 to input[1] of rank 0", world=2)
def adds_different_chunks(p: dsl.Builder) -> None:
    x, y = p.input.chunks(2), p.output.chunks(2)
    received = exchange(p, x)
    p.store(p.sum({p.rank: x[1], p.rank + 1: p.read_packets(received[p.rank + 1])}), y[0])  # refused


@broken("all_gather", Fault.CONTENT, "output[1] of rank 0 is to hold input[0] of rank 1, and holds input[0] of rank 2")
def stores_parts_in_the_wrong_order(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = exchange(p, x)
    p.copy(x[0], y[p.rank])
    p.store(p.read_packets(received[p.rank + 1]), y[p.rank + 2])
    p.store(p.read_packets(received[p.rank + 2]), y[p.rank + 1])  # refused


@broken("all_gather", Fault.CONTENT, "output[0] of rank 0 is never written")  # refused
def forgets_its_own_part(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = exchange(p, x)
    for peer in p.peers:
        p.store(p.read_packets(received[peer]), y[peer])


@broken("all_reduce", Fault.CONTENT, "is to hold the sum of input[1] of ranks [0, 1, 2], and holds the sum of input[2]")
def a_ring_is_off_by_one(p: dsl.Builder) -> None:
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    partial, final = p.packets(p.world, like=x), p.packets(p.world, like=x)
    behind, ahead = p.rank - 1, p.rank + 1
    p.put_packets(x[p.rank], ahead, partial[0])
    second = p.sum({behind: p.read_packets(partial[0]), p.rank: x[p.rank - 1]})
    p.put_packets(second, ahead, partial[1])
    done = p.sum({behind: p.read_packets(partial[1]), p.rank: x[p.rank - 2]})
    for step in range(2):
        p.put_packets(done, ahead, final[step])
        p.store(done, y[p.rank - 2 - step])
        done = p.read_packets(final[step])
    p.store(done, y[p.rank - 2])  # refused


@broken("all_reduce", Fault.CONTENT, "ranks 0 and 2 add up output[0] in different order")
def ranks_add_up_in_different_order(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = exchange(p, x)
    some = p.sum({p.rank: x[0], p.rank + 1: p.read_packets(received[p.rank + 1])})
    p.store(p.sum({p.rank: some, p.rank + 2: p.read_packets(received[p.rank + 2])}), y[0])  # refused


@broken("broadcast", Fault.CONTENT, "output[0] of rank 0 is to hold input[0] of rank 0, and holds input[0] of rank 1")
def broadcasts_from_another_root(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = exchange(p, x)
    values = [p.read_packets(received[peer]) for peer in p.peers]
    with p.only(0):
        p.store(values[0], y[0])  # refused
    with p.only(1):
        p.store(values[1], y[0])
    with p.only(2):
        p.store(values[0], y[0])


@broken("all_to_all", Fault.CONTENT, "output[1] of rank 0 is to hold input[0] of rank 1, and holds input[1] of rank 1")
def sends_its_own_part_to_all(p: dsl.Builder) -> None:
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)
    p.copy(x[p.rank], y[p.rank])
    for peer in p.peers:
        p.put_packets(x[p.rank], peer, received[p.rank])
    for peer in p.peers:
        p.store(p.read_packets(received[peer]), y[peer])  # refused


@broken("reduce_scatter", Fault.CONTENT, "on rank 0 the sum adds input[0] of rank 2 to input[1] of rank 0")
def scatters_the_first_part_to_all(p: dsl.Builder) -> None:
    x, y = p.input.chunks(p.world), p.output.chunks(1)
    received = p.packets(p.world, like=x)
    for peer in p.peers:
        p.put_packets(x[p.rank + 1], peer, received[p.rank])
    p.store(p.sum({p.rank: x[p.rank + 1], p.rank - 1: p.read_packets(received[p.rank - 1])}), y[0])  # refused
    p.read_packets(received[p.rank + 1])


# ---- Correct programs ----------------------------------------------------------------------------------------------


@dsl.program("all_gather")
def by_ports(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    for peer in p.peers:
        p.port_put(x[0], peer, received[p.rank])
        p.signal(peer, through_port=True)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.wait(peer, through_port=True)
        p.copy(received[peer], y[peer])
        p.flush(peer)


@dsl.program("all_gather")
def by_gets(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1, symmetric=True), p.output.chunks(p.world)
    announce(p, through_port=False)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.store(p.get(peer, x[0]), y[peer])
    announce(p, through_port=False)


@dsl.program("all_gather")
def two_groups(p: dsl.Builder) -> None:
    """Each treats a half of the message: one by packets, one by signals."""
    x, y = p.input.chunks(2), p.output.chunks(2 * p.world)
    packets, plain = p.packets(p.world, like=x), p.scratch(p.world, like=x)
    first = {rank: [y[2 * rank.rank], y[2 * rank.rank + 1]] for rank in p.ranks}
    for rank in p.ranks:
        with p.only(rank):
            with p.group("packets"):
                for peer in p.peers:
                    p.put_packets(x[0], peer, packets[p.rank])
                p.copy(x[0], first[rank][0])
                for other in p.ranks:
                    if other != rank:
                        p.store(p.read_packets(packets[other]), first[other][0])
            with p.group("signals"):
                for peer in p.peers:
                    p.put(x[1], peer, plain[p.rank])
                    p.signal(peer)
                p.copy(x[1], first[rank][1])
                for other in p.ranks:
                    if other != rank:
                        p.wait(other)
                        p.copy(plain[other], first[other][1])


@dsl.program("all_gather")
def packets_in_a_loop(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(p.world, like=x, stages=2)
    with p.loop():
        with p.behind(2):
            for peer in p.peers:
                p.wait(peer)
        for peer in p.peers:
            p.put_packets(x[0], peer, received[p.rank])
        p.copy(x[0], y[p.rank])
        for peer in p.peers:
            p.store(p.read_packets(received[peer]), y[peer])
        for peer in p.peers:
            p.signal(peer)


@dsl.program("all_gather")
def packets_free_an_output(p: dsl.Builder) -> None:
    """Packets of chunks of the same size tell each thread that a peer has begun: enough to put to its output."""
    x, y = p.input.chunks(1), p.output.chunks(p.world, symmetric=True)
    received = exchange(p, x)
    for peer in p.peers:
        p.read_packets(received[peer])
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.put(x[0], peer, y[p.rank])
    announce(p, through_port=False)


@dsl.program("broadcast", root=1)
def along_a_chain(p: dsl.Builder) -> None:
    """From rank to rank, and the signal that all have begun the other way around the ring, twice."""
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(1, like=x)
    for turn in range(2):
        for rank in p.ranks:
            with p.only(rank):
                if (turn, rank.rank) != (0, 0):
                    p.wait(p.rank - 1)
                if (turn, rank.rank) != (1, p.world - 1):
                    p.signal(p.rank + 1)
    for step in range(p.world):
        with p.only((1 + step) % p.world):
            value = p.read_packets(received[0]) if step else p.load(x[0])
            if step < p.world - 1:
                p.put_packets(value, p.rank + 1, received[0])
            p.store(value, y[0])


@dsl.program("all_reduce")
def by_halving(p: dsl.Builder) -> None:
    """Pairs add up, then pairs of pairs, ...: all ranks add in the same order, with no sum over all. Powers of two."""
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(3, like=x)
    values = {rank.rank: x[0] for rank in p.ranks}
    distance = 1
    for step in range(3):
        if distance >= p.world:
            break
        for rank in p.ranks:
            partner = p.ranks[rank.rank ^ distance]
            with p.only(rank):
                mine = values[rank.rank]
                value = p.load(mine) if step == 0 else mine
                p.put_packets(value, partner, received[step])
                values[rank.rank] = p.sum({rank: value, partner: p.read_packets(received[step])})
        distance *= 2
    for rank in p.ranks:
        with p.only(rank):
            p.store(values[rank.rank], y[0])


@dsl.program("all_reduce")
def signals_acknowledge_what_was_before(p: dsl.Builder) -> None:
    """A peer gives its signal for piece t - 2 when it has read piece t - 4: so four stages need no other one."""
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(p.world, like=x, stages=4)
    with p.loop():
        for peer in p.peers:
            p.put(x[0], peer, received[p.rank])
        for peer in p.peers:
            p.signal(peer)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer)
            p.store(p.sum({p.rank: x[0], **{peer: received[peer] for peer in p.peers}}), y[0])


CORRECT = (
    *PROGRAMS,
    by_ports,
    by_gets,
    two_groups,
    packets_in_a_loop,
    signals_acknowledge_what_was_before,
    packets_free_an_output,
    along_a_chain,
    by_halving,
)
WORLDS = {"hierarchical_ll": (2, 4, 6, 8), "by_halving": (2, 4, 8)}


@pytest.mark.parametrize(
    ("program", "world"),
    [(program, world) for program in CORRECT for world in WORLDS.get(program.name, range(2, 9))],
    ids=lambda value: value.name if isinstance(value, dsl.ProgramDefinition) else str(value),
)
def test_accepted(program: dsl.ProgramDefinition, world: int) -> None:
    dsl.check(program.build(world))


def test_every_kind_of_error_is_met() -> None:
    assert {case.fault for case in BROKEN} == set(Fault) - {Fault.MISUSE, Fault.SCHEDULE}
    assert len(BROKEN) >= 40


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "dsl.md"


def test_the_page_shows_what_is_found(tmp_path: Path) -> None:
    """The first program of the page is accepted; the careless one gets the error that stands behind it."""
    text = PAGE.read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert "dsl.check(built)" in programs[0]
    first = tmp_path / "first.py"
    first.write_text(programs[0].replace("two_shot.svg", str(tmp_path / "two_shot.svg")), encoding="utf-8")
    runpy.run_path(str(first))
    careless = tmp_path / "careless.py"
    careless.write_text(next(text for text in programs if "def careless" in text), encoding="utf-8")
    with pytest.raises(dsl.ProgramError) as caught:
        dsl.check(runpy.run_path(str(careless))["careless"].build(4))
    shown = re.findall(r"```\n(careless.py.*?)```", text, flags=re.DOTALL)
    assert [" ".join(error.split()) for error in shown] == [
        " ".join(str(caught.value).replace(f"{tmp_path}/", "").split())
    ]
