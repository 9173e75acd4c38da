"""Selection: from a tuning table to the plan of a message, a pure function of problem, table, options and limits.

The table names algorithm and parameters. The core adapts these to the size (``csrc/algorithms/launch_shape.h``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from llm_comm import _core, registry
from llm_comm.config import LARGE_BYTES, Config
from llm_comm.options import MIB
from llm_comm.planning import multicast as switch
from llm_comm.planning.multicast import NO_MULTICAST, Multicast
from llm_comm.planning.plan import Plan, Problem, without_kernel
from llm_comm.planning.tables import (
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    FUSED,
    Row,
    TuningTable,
    of_symmetric,
    of_wire,
    row_of,
    row_of_fields,
)

_LARGEST_NUMBER = (1 << 32) - 1  # largest value of a field of ``TuningParameters``
_LINE_BYTES = 16
# Smallest chunk in 16-byte lines of an operation with few blocks. The core takes fewer if staging memory is short.
_FEWEST_LINES = 128
_LINES_OF_FEW_BLOCKS = 4096
#: Largest message that option ``wire`` quantizes where ``max_message_bytes`` is not set. On 2 GPUs NCCL takes twice as
#: long for an exact sum of 64 MiB (docs/experiments/wire.md). Larger messages and more ranks are not measured.
MAX_WIRE_BYTES = 256 * MIB
#: Bytes that a quantized element takes on the wire: 8 bits and its share of the fp32 scale of 64 elements.
QUANTIZED_BYTES = 1 + 4 / 64


class Layout(NamedTuple):
    """A plan, and the arguments with which the core prepares it."""

    plan: Plan
    #: Arguments of ``Core.prepare``; None if no kernel is launched.
    launches: tuple[int, _core.Problem, _core.Tiling] | None
    #: Arguments for the launch on symmetric tensors; None if there is no such algorithm.
    direct: tuple[int, _core.Problem, _core.Tiling] | None = None
    #: For a DSL program, instead of ``launches``: builds the launch function. The argument counts its calls.
    program: Callable[[_core.Counter], Callable[..., bool]] | None = None
    #: Bytes that quantization saves this rank on the wire, as a fraction of the message size. 0.0 if nothing is
    #: quantized.
    saved_share: float = 0.0


class _Chosen(NamedTuple):
    algorithm: registry.Algorithm
    tuning: _core.TuningParameters
    reason: str


def select(
    problem: Problem, table: TuningTable, config: Config, limits: _core.Limits, multicast: Multicast = NO_MULTICAST
) -> Plan:
    """Return the plan of a message. A message that cannot be served is declined.

    Equal on ranks with equal table, config, limits and multicast.
    """
    return lay_out(problem, table, config, limits, multicast).plan


def lay_out(
    problem: Problem, table: TuningTable, config: Config, limits: _core.Limits, multicast: Multicast = NO_MULTICAST
) -> Layout:
    """Plan a message, and return the arguments of ``Core.prepare`` with the plan."""
    message_bytes = problem.message_bytes()

    def no_kernel(outcome: str, why: str) -> Layout:
        return Layout(without_kernel(problem.operation, outcome, message_bytes, why, problem.row), None)

    why = why_not_served(problem, table, config)
    if why:
        return no_kernel("declined", why)
    if problem.count == 0:
        return no_kernel("none", "no rows" if problem.row else "empty message")
    for_core = problem.for_core()
    try:
        chosen = _choose(problem, for_core, table, config, limits, multicast)
        if chosen is None:
            return no_kernel("declined", f"no algorithm of {problem.operation} has a shape for {message_bytes} bytes")
        algorithm = chosen.algorithm
        shape = _core.shape(algorithm.number, for_core, _bounded(chosen.tuning, problem, config), limits)
    except ValueError as error:
        return no_kernel("declined", str(error))
    plan = Plan(
        operation=problem.operation,
        algorithm=algorithm.name,
        protocol=algorithm.protocol,
        blocks=shape.whole.blocks,
        threads=shape.whole.threads,
        tile_lines=shape.tiling.tile_lines,
        cluster=shape.tiling.cluster,
        depth=shape.tiling.depth,
        chunks=shape.launches,
        chunk_elements=shape.tiling.launch_units * max(1, problem.row),
        message_bytes=message_bytes,
        reason=chosen.reason,
        row=problem.row,
    )
    return Layout(plan, (algorithm.number, for_core, shape.tiling), saved_share=_saved_share(algorithm, problem))


def wire_of(problem: Problem, config: Config) -> str:
    """Return the type to which a message is quantized on the wire, "fp8" or "int8"; "" if it is sent exactly.

    A forced algorithm decides at every size; a forced DSL program adds exactly. Else inputs of ``wire_min_bytes`` and
    more are quantized, for operations and data types that have an algorithm for it.
    """
    if registry.is_program(config.algorithm):
        return ""
    algorithms = registry.operations()[problem.operation].algorithms
    of_wire = [a for a in algorithms if a.wire == config.wire and problem.data_type in a.data_types]
    if any(a.name == config.algorithm for a in algorithms):
        return config.wire if any(a.name == config.algorithm for a in of_wire) else ""
    return config.wire if of_wire and problem.whole_bytes() >= config.wire_min_bytes else ""


def smallest_quantized(limit: int, config: Config) -> int | None:
    """Return the size in bytes from which on all-reduces are quantized; None if none up to ``limit`` is. Alike for all
    data types."""

    def is_quantized(message_bytes: int) -> bool:
        return bool(wire_of(Problem(ALL_REDUCE, message_bytes // 2, 0, "bf16", 2), config))

    if not is_quantized(limit):
        return None
    return 0 if is_quantized(0) else config.wire_min_bytes


def _saved_share(algorithm: registry.Algorithm, problem: Problem) -> float:
    """Return ``Layout.saved_share``. A rank of a two-shot all-reduce sends (N - 1) / N of the message twice, one of a
    reduce-scatter all shards but its own, which here counts as the largest. An all-gather counts alike."""
    if not algorithm.wire:
        return 0.0
    if registry.operations()[problem.operation].has_shards:
        sent = problem.whole_bytes() / problem.message_bytes() - 1
    else:
        sent = 2 * (problem.world_size - 1) / problem.world_size
    return sent * (1 - QUANTIZED_BYTES / registry.data_types()[problem.data_type])


def with_direct(layout: Layout, problem: Problem, table: TuningTable, config: Config, limits: _core.Limits) -> Layout:
    """Add the launch for symmetric tensors to a layout: by the table's row, or by the first candidate.

    A forced algorithm does not need a row. A quantized message gets none: its result must not depend on the memory of
    its tensors.
    """
    if layout.launches is None or problem.message_bytes() < table.symmetric_from(problem.operation):
        return layout
    if wire_of(problem, config):
        return layout
    operation, for_core = registry.operations()[problem.operation], problem.for_core()
    row = row_of(table.rows.get(of_symmetric(operation.name), ()), problem.message_bytes())

    def is_of_row(algorithm: registry.Algorithm) -> bool:
        return row is not None and (algorithm.name, algorithm.protocol) == (row.algorithm, row.protocol)

    # The row's algorithm is tried first. If it does not serve the message, another may.
    for algorithm in sorted(operation.algorithms, key=is_of_row, reverse=True):
        if not algorithm.is_symmetric or problem.data_type not in algorithm.data_types:
            continue
        if config.algorithm not in ("auto", algorithm.name):
            continue
        if row is not None and is_of_row(algorithm):
            candidates = [_tuning(row, table)]
        elif algorithm.needs_row and config.algorithm != algorithm.name:
            continue
        else:
            candidates = _core.candidates(algorithm.number, for_core, limits)[:1]
        for tuning in candidates:
            try:
                tiling = _core.shape(algorithm.number, for_core, _bounded(tuning, problem, config), limits).tiling
            except ValueError:  # for example, peers access whole lines only
                continue
            plan = dataclasses.replace(layout.plan, symmetric=algorithm.name)
            return layout._replace(plan=plan, direct=(algorithm.number, for_core, tiling))
    return layout


def choosable(table: TuningTable, config: Config, limits: _core.Limits, multicast: Multicast) -> list[int]:
    """Return the numbers of the algorithms that plans can name for any message and tensors."""
    found = []
    for operation in registry.operations().values():
        why_not = _why_not(operation.algorithms, config, multicast)
        rows, _ = _rows_or_general(why_not, table, operation.name, limits)
        named = {(row.algorithm, row.protocol) for row in (*rows, *table.rows.get(of_symmetric(operation.name), ()))}
        of_rows = [operation.find(row.algorithm, row.protocol) for row in rows]
        has_gaps = not rows or any(algorithm is None or algorithm.is_symmetric for algorithm in of_rows)
        for algorithm in operation.algorithms:
            key = algorithm.name, algorithm.protocol
            # Algorithms that plans use without a row: first candidates, those for symmetric tensors, and HB under
            # max_blocks.
            is_few_blocks = algorithm.protocol == "HB" and config.max_blocks is not None
            needs_no_row = not algorithm.needs_row and (has_gaps or algorithm.is_symmetric or is_few_blocks)
            is_chosen = key in named or needs_no_row or algorithm.name == config.algorithm or bool(algorithm.wire)
            if not why_not[key] and is_chosen:
                found.append(algorithm.number)
    return found


def exact_limit(table: TuningTable, config: Config) -> int:
    """Return the size in bytes above which exact messages are declined."""
    return table.max_message_bytes if config.max_message_bytes is None else config.max_message_bytes


def message_limit(operation: str, table: TuningTable, config: Config) -> int:
    """Return the size in bytes above which messages of ``operation`` are declined.

    A table's limit is that of exact messages. Where all-reduces of this size are quantized, so are larger ones, up to
    ``MAX_WIRE_BYTES``.
    """
    if operation == FUSED:
        return fused_sizes(table, config)[-1].last
    limit = exact_limit(table, config)
    is_bound_of_table = config.max_message_bytes is None
    if operation == ALL_REDUCE and is_bound_of_table and smallest_quantized(limit, config) is not None:
        return max(limit, MAX_WIRE_BYTES)
    return limit


class Sizes(NamedTuple):
    """A range of message sizes in bytes, both ends included."""

    first: int
    last: int


def fused_sizes(table: TuningTable, config: Config) -> tuple[Sizes, ...]:
    """Return the sizes whose all-reduces are fused with norms, in order.

    Where all-reduces are quantized, a fused message is quantized too, if the table has rows for it. Else large messages
    are left to an all-reduce and a norm, and small ones are exact.
    """
    limit = exact_limit(table, config)
    # Messages that are not fused would get the engine's norm, with another bitwise result.
    if config.batch_invariant_norm == "llm_comm":
        return (Sizes(0, limit),)
    sizes = Sizes(0, min(limit, table.max_fused_bytes))
    if table.large_fused_bytes is None:
        return (sizes,)
    quantized_from = smallest_quantized(limit, config)
    if quantized_from is not None:
        quantizes = _fuses_quantized(table, config)
        limit = message_limit(ALL_REDUCE, table, config) if quantizes else quantized_from - 1
    if table.large_fused_bytes <= sizes.last + 1:
        return (Sizes(0, max(limit, sizes.last)),)
    return (sizes, Sizes(table.large_fused_bytes, limit)) if table.large_fused_bytes <= limit else (sizes,)


def _fuses_quantized(table: TuningTable, config: Config) -> bool:
    """Return whether fused messages are quantized where all-reduces are: by a row, or by the forced algorithm."""
    has_rows = bool(table.rows.get(of_wire(FUSED, config.wire)))
    algorithms = registry.operations()[FUSED].algorithms
    return any(a.wire == config.wire and (has_rows or a.name == config.algorithm) for a in algorithms)


def is_within(ranges: Iterable[Sizes], message_bytes: int) -> bool:
    """Return whether one of the ranges has a size. A loop, because torch.compile traces it."""
    for sizes in ranges:  # noqa: SIM110
        if sizes.first <= message_bytes <= sizes.last:
            return True
    return False


def limits_whole_tensor(config: Config) -> bool:
    """Return whether ``message_limit`` bounds the whole tensor of an operation on shards, as the option does. A table
    bounds the largest shard, by which its rows are sorted."""
    return config.max_message_bytes is not None


def why_not_served(problem: Problem, table: TuningTable, config: Config) -> str:
    """Return why a message is declined whatever the algorithms, or ""."""
    operation = registry.operations()[problem.operation]
    why = operation.why_not_rows(problem.row)
    if why:
        return why
    if problem.world_size == 1:
        return "one rank: nothing to exchange"
    limit = message_limit(problem.operation, table, config)
    if problem.operation == FUSED:
        limit = max(limit, exact_limit(table, config))
    is_whole = limits_whole_tensor(config)
    message_bytes = problem.whole_bytes() if is_whole else problem.message_bytes()
    if message_bytes > limit:
        what = "the whole tensor" if is_whole else "the largest shard"
        of_shards = f"{what} has {message_bytes} bytes, " if operation.has_shards or operation.bounds_parts else ""
        return f"{of_shards}more than max_message_bytes={limit}"
    if problem.operation == FUSED and not is_within(fused_sizes(table, config), message_bytes):
        if table.large_fused_bytes is not None and message_bytes >= table.large_fused_bytes:
            return f"sums are quantized by wire={config.wire}, and {table.name} has no fused row for it"
        large = "" if table.large_fused_bytes is None else f" and less than large_fused_bytes={table.large_fused_bytes}"
        return f"more than max_fused_bytes={table.max_fused_bytes}{large} of {table.name}: two kernels are as fast"
    wires = "", wire_of(problem, config)
    if not any(problem.data_type in a.data_types and a.wire in wires for a in operation.algorithms):
        return f"{problem.operation} has no kernels for {problem.data_type}"
    return ""


def _choose(
    problem: Problem,
    for_core: _core.Problem,
    table: TuningTable,
    config: Config,
    limits: _core.Limits,
    multicast: Multicast,
) -> _Chosen | None:
    """Choose by the table's row, else the forced algorithm, else the first candidate. A quantized message has
    algorithms and rows of its own."""
    operation = registry.operations()[problem.operation]
    of_type = [a for a in operation.algorithms if problem.data_type in a.data_types and not a.is_symmetric]
    why_not = _why_not(of_type, config, multicast)
    wire = wire_of(problem, config)
    if problem.operation == FUSED and not _fuses_quantized(table, config):
        wire = ""
    algorithms = [a for a in of_type if not why_not[a.name, a.protocol] and a.wire == wire]
    if wire:
        rows, remark = table.rows.get(of_wire(problem.operation, wire), ()), f"; wire {wire}"
    else:
        rows, remark = _rows_or_general(why_not, table, problem.operation, limits)
    row = of_size = row_of(rows, problem.message_bytes())
    proposed = None if row is None else operation.find(row.algorithm, row.protocol)
    found = proposed if proposed in algorithms else None
    if config.algorithm != "auto":
        forced = [a for a in algorithms if a.name == config.algorithm]
        if not forced and any(a.name == config.algorithm and a.is_symmetric for a in operation.algorithms):
            remark += f"; algorithm {config.algorithm} is for symmetric tensors"
        elif not forced and any(name == config.algorithm for name, _ in why_not):
            why = next(why for (name, _), why in why_not.items() if name == config.algorithm)
            remark += f"; algorithm {config.algorithm} cannot be used: {why}"
        elif not forced:
            remark += f"; {problem.operation} has no algorithm {config.algorithm} for {problem.data_type}"
        else:
            remark += f"; algorithm forced to {config.algorithm}"
            algorithms = forced
            if found not in forced:
                found = next((a for a in forced if row is not None and _can_use(a, row, found)), None)
                if found is None:
                    row = row_of(tuple(r for r in rows if r.algorithm == config.algorithm), problem.message_bytes())
                    found = None if row is None else operation.find(row.algorithm, row.protocol)
    if found is not None and row is not None:
        of_what = "bytes a rank" if operation.has_shards or operation.bounds_parts else "bytes"
        reason = f"{table.name}, up to {row.up_to} {of_what}{remark}"
        return _with_few_blocks(_Chosen(found, _tuning(row, table), reason), algorithms, problem, config)
    for algorithm in algorithms:
        if algorithm.needs_row and config.algorithm != algorithm.name and not wire:
            continue
        for tuning in _core.candidates(algorithm.number, for_core, limits):
            reason = f"{table.name} has no row for {problem.operation}: the first candidate{remark}"
            return _Chosen(algorithm, tuning, reason)
    # the core lists no candidates at sizes where other algorithms are better
    if of_size is not None and algorithms[0].name == config.algorithm:
        reason = f"{table.name}, up to {of_size.up_to}, as far as {config.algorithm} takes it{remark}"
        return _Chosen(algorithms[0], _tuning(_within_ranges(of_size, algorithms[0]), table), reason)
    return None


def _can_use(algorithm: registry.Algorithm, row: Row, meant_for: registry.Algorithm | None) -> bool:
    """Return whether the row's parameters also suit ``algorithm``: same protocol and tunables as ``meant_for``.

    A good LL tile is a bad HB chunk, and HB takes fewer blocks.
    """
    if meant_for is None or (algorithm.protocol, algorithm.ranges.keys()) != (row.protocol, meant_for.ranges.keys()):
        return False
    return all(bounds.takes(getattr(row, name)) for name, bounds in algorithm.ranges.items())


def _within_ranges(row: Row, algorithm: registry.Algorithm) -> Row:
    """Clamp the parameters of a row to the ranges of an algorithm."""
    return row._replace(
        **{name: min(max(getattr(row, name), bounds.least), bounds.most) for name, bounds in algorithm.ranges.items()}
    )


def _why_not(
    algorithms: Iterable[registry.Algorithm], config: Config, multicast: Multicast
) -> dict[tuple[str, str], str]:
    """Return why each algorithm is not permitted, by name and protocol; "" if it is."""
    return {
        (a.name, a.protocol): switch.why_not(a, config, multicast, is_forced=a.name == config.algorithm)
        for a in algorithms
    }


def _rows_or_general(
    why_not: Mapping[tuple[str, str], str], table: TuningTable, operation: str, limits: _core.Limits
) -> tuple[tuple[Row, ...], str]:
    """Return the usable rows of an operation, or general rows if there are none, and a remark for the plan's reason.

    Rows whose algorithm is not permitted are dropped. The next row that covers the size then counts. ALL_TO_ALL_V has
    the algorithms of ALL_TO_ALL and takes its rows, unless the table has others.
    """
    if operation == ALL_TO_ALL_V and not table.rows.get(operation):
        operation = ALL_TO_ALL
    rows = tuple(row for row in table.rows.get(operation, ()) if not why_not.get((row.algorithm, row.protocol)))
    if rows:
        return rows, ""
    if operation == FUSED:
        return derive_fused_rows(
            _without_switch(table.rows.get(ALL_REDUCE, ()))
        ), " (derived from all_reduce, not measured)"
    if registry.operations()[operation].has_shards:
        general = _core.rows_of_shards(operation, limits.sm_count)
        return tuple(row_of_fields(fields) for fields in general), " (general rows, not measured)"
    return (), ""


# One-shot receives the whole row from every rank. It takes the largest cluster, so that each block has little to do;
# tables of the plain kernels prefer small blocks too. Two-shot has 1/N of that work, and takes smaller clusters if
# there are more rows than SMs.
_FUSED_ONE_SHOT = Row(0, FUSED, "one_shot", "LL", blocks=1056, threads=1024, cluster=16)
_FUSED_TWO_SHOT = Row(0, FUSED, "two_shot", "LL", blocks=1056, threads=512, cluster=8)
_FUSED_TWO_SHOT_OF_MANY = _FUSED_TWO_SHOT._replace(cluster=4, depth=1)


def derive_fused_rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Derive rows of the fused operation from those of the plain all-reduce: the same algorithm at each size. Not
    measured."""
    derived: list[Row] = []
    for row in rows:
        for up_to in sorted({min(row.up_to, MIB), row.up_to}):
            if derived and up_to <= derived[-1].up_to:
                continue
            if row.algorithm == "one_shot":
                fused = _FUSED_ONE_SHOT
            else:
                fused = _FUSED_TWO_SHOT if up_to <= MIB else _FUSED_TWO_SHOT_OF_MANY
            if derived and derived[-1]._replace(up_to=0) == fused:
                derived.pop()
            derived.append(fused._replace(up_to=up_to))
    return tuple(derived)


def _without_switch(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    algorithms = registry.operations()[ALL_REDUCE].algorithms
    by_switch = {(a.name, a.protocol) for a in algorithms if a.uses_multimem}
    return tuple(row for row in rows if (row.algorithm, row.protocol) not in by_switch)


def _tuning(row: Row, table: TuningTable) -> _core.TuningParameters:
    return _core.TuningParameters(
        blocks=row.blocks,
        threads=row.threads,
        tile_lines=row.tile_lines,
        cluster=row.cluster,
        depth=row.depth,
        crowded_above=min(table.fused_blocks, _LARGEST_NUMBER),
    )


def _with_few_blocks(
    chosen: _Chosen, algorithms: list[registry.Algorithm], problem: Problem, config: Config
) -> _Chosen:
    """Under ``max_blocks``, replace a choice with more blocks by an HB algorithm with large chunks, if there is one.

    A few blocks carry several times as much by HB as by LL (docs/operate/tuning.md).
    """
    if not _is_bound(chosen.tuning, problem, config):
        return chosen
    assert config.max_blocks is not None
    reason = f"{chosen.reason}; max_blocks={config.max_blocks}"
    part_bytes = problem.whole_bytes() / problem.world_size
    lines_of_block = int(part_bytes / _LINE_BYTES / config.max_blocks)
    # Several chunks for each block, so that it sends one while it receives another.
    tile_lines = min(max(lines_of_block // 4, _FEWEST_LINES), _LINES_OF_FEW_BLOCKS)
    for algorithm in algorithms:
        if algorithm.protocol == "HB":
            tuning = _core.TuningParameters(blocks=config.max_blocks, tile_lines=tile_lines, depth=2)
            return _Chosen(algorithm, tuning, reason)
    return chosen._replace(reason=reason)


def _is_bound(tuning: _core.TuningParameters, problem: Problem, config: Config) -> bool:
    most = config.max_blocks
    return most is not None and tuning.blocks > most and problem.whole_bytes() >= LARGE_BYTES


def _bounded(tuning: _core.TuningParameters, problem: Problem, config: Config) -> _core.TuningParameters:
    """Limit the blocks of a large operation to ``max_blocks``."""
    if config.max_blocks is None or not _is_bound(tuning, problem, config):
        return tuning
    return _core.TuningParameters(
        blocks=config.max_blocks,
        threads=tuning.threads,
        tile_lines=tuning.tile_lines,
        cluster=tuning.cluster,
        depth=tuning.depth,
        crowded_above=tuning.crowded_above,
    )
