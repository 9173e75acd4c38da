"""Random cases of plain all-reduces, for ``random_cases.py``: what a case is, and how it is drawn from its number."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import torch
from values import DTYPES, Values, draw_values

from llm_comm.bench.wire_reference import FORMAT_OF_WIRE

LINE_BYTES = 16
#: Communicators whose ranks exchange quantized values, with option ``wire``.
QUANTIZED = {f"two_shot_{wire}_hb": wire for wire in FORMAT_OF_WIRE}
#: Of ``random_cases.open_communicators``.
COMMUNICATORS = ("one_shot", "two_shot", "one_shot_hb", "two_shot_hb", "auto", "odd_table", *QUANTIZED)


@dataclass(frozen=True)
class Message:
    count: int
    dtype: torch.dtype
    values: Values

    def __str__(self) -> str:
        size = self.count * self.dtype.itemsize
        return f"{self.count} {str(self.dtype).removeprefix('torch.')} ({size} bytes), {self.values}"


@dataclass(frozen=True)
class Call:
    """One all-reduce. Offsets are elements from a 16-byte boundary, by rank.

    ``placement`` is "in_place", "out" or "new". A chained call of a graph takes the result of the call before as input.
    """

    communicator: str
    placement: str
    input_offsets: tuple[int, ...]
    output_offsets: tuple[int, ...]
    chained: bool = False

    def __str__(self) -> str:
        offsets = f"offsets {self.input_offsets} -> {self.output_offsets}"
        return f"{self.communicator}, {self.placement}{', chained' if self.chained else ''}, {offsets}"


@dataclass(frozen=True)
class EagerStep:
    """One message through each of ``calls``."""

    message: Message
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class ReplayStep:
    """New inputs for a graph, then ``times`` replays of it."""

    graph: int
    times: int


@dataclass(frozen=True)
class Case:
    number: int
    graphs: tuple[tuple[tuple[Message, Call], ...], ...]
    steps: tuple[EagerStep | ReplayStep, ...]


def draw_case(number: int, options: argparse.Namespace, world: int) -> Case:
    rng = random.Random(f"{options.seed}/{number}")
    if rng.random() >= options.graph_share:
        names = rng.sample(options.communicators, 1 if options.few_calls else len(options.communicators))
        calls = tuple(_draw_call(rng, name, world) for name in names)
        return Case(number, (), (EagerStep(_draw_message(rng, options.max_count, world), calls),))
    graphs = tuple(_draw_graph(rng, options, world) for _ in range(rng.randint(1, 3)))
    steps: list[EagerStep | ReplayStep] = []
    for _ in range(rng.randint(2, 5) if options.few_calls else rng.randint(4, 10)):
        if rng.random() < 0.3:
            calls = (_draw_call(rng, rng.choice(options.communicators), world),)
            steps.append(EagerStep(_draw_message(rng, options.max_count // 16, world), calls))
        else:
            times = rng.choice((1, 1, 2) if options.few_calls else (1, 1, 1, 2, 5, 17))
            steps.append(ReplayStep(rng.randrange(len(graphs)), times))
    return Case(number, graphs, tuple(steps))


def _draw_graph(rng: random.Random, options: argparse.Namespace, world: int) -> tuple[tuple[Message, Call], ...]:
    calls: list[tuple[Message, Call]] = []
    for _ in range(rng.randint(2, 6)):
        name = rng.choice(options.communicators)
        if calls and rng.random() < 0.2:
            calls.append((calls[-1][0], _draw_call(rng, name, world, chained=True)))
            continue
        message = _draw_message(rng, options.max_count // 4, world)
        if not calls and message.count == 0:  # an empty graph is no test
            message = Message(1, message.dtype, message.values)
        calls.append((message, _draw_call(rng, name, world)))
    return tuple(calls)


def _draw_message(rng: random.Random, max_count: int, world: int) -> Message:
    dtype = rng.choice(DTYPES)
    per_line = LINE_BYTES // dtype.itemsize
    kind = rng.random()
    if kind < 0.55:
        count = int(2 ** rng.uniform(0, max_count.bit_length() - 1))
    elif kind < 0.62:
        count = rng.choice((0, 1, 2, 3, 5, 7, 9, 15, 17))
    elif kind < 0.72:
        count = rng.choice((1026, 20004, 20036)) // dtype.itemsize
    elif kind < 0.82:
        count = (1 << rng.randint(1, max_count.bit_length() - 1)) + rng.randint(-1, 1)
    else:  # lines, slices of lines, tiles, and tiles of slices, and one element less or more
        unit = rng.choice((1, world, 8, 16, 32, 16 * world, 32 * world))
        count = per_line * unit * rng.randint(1, 40) + rng.randint(-1, 1)
    return Message(min(count, max_count), dtype, draw_values(rng, dtype))


def _draw_call(rng: random.Random, communicator: str, world: int, chained: bool = False) -> Call:
    def offsets() -> tuple[int, ...]:
        kind = rng.random()
        if kind < 0.4:
            return (0,) * world
        if kind < 0.6:
            return (rng.randrange(8),) * world
        return tuple(rng.randrange(8) for _ in range(world))

    # A chained call in place would destroy the result that is to be compared.
    placement = rng.choice(("out", "new") if chained else ("in_place", "out", "new"))
    return Call(communicator, placement, offsets(), offsets(), chained)
