"""Command ``llm-comm tune``: measures all reasonable launch configs at every size on this machine, and writes a tuning
table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

from llm_comm import _core, registry
from llm_comm.bench import programs, report, tune_layers, tune_nodes, tune_tables
from llm_comm.bench.agreement import require_alike
from llm_comm.bench.choosing import Measured, choose_by_means, is_slower, merge, sums_in_switch
from llm_comm.bench.linear_arms import check_layers
from llm_comm.bench.measuring import AtSize, Bench, Budget, Pace, count_candidates, schedule_of
from llm_comm.bench.report import Progress, format_bytes
from llm_comm.bench.tune_record import Record
from llm_comm.bench.tune_subjects import (
    ELEMENT_BYTES,
    LARGEST_FUSED,
    FusedSubject,
    Subject,
    candidates,
    coarse_first,
    subjects_of,
)
from llm_comm.cli import launch
from llm_comm.cli.launch import Placement
from llm_comm.communicator import Communicator
from llm_comm.config import Config, multicast_state
from llm_comm.errors import ConfigError
from llm_comm.planning.tables import ALL_REDUCE, FUSED, MulticastEntry, Row, TuningTable, of_symmetric
from llm_comm.runtime.multicast import driver_of, name_of

#: Options that name linear layers; ``bench table`` does not have them.
_LAYERS = ("layers", "silu_layers", "fp8_layers")
#: Tuning parameters that are upper bounds.
_BOUNDS = ("blocks", "threads")


class Found(NamedTuple):
    """Measurements of an operation.

    Attributes:
        best: Best candidate of each size, with figures.
        nccl: Microseconds of NCCL by size.
        lesser: With NVLink multicast: candidates of a size that need less than the best one, such as no multicast.
        separate: Microseconds of an all-reduce and a norm by size, for the fused operation.
    """

    best: list[Measured]
    nccl: dict[int, float]
    lesser: Mapping[int, list[Measured]] = MappingProxyType({})
    separate: Mapping[int, float] = MappingProxyType({})

    def by_size(self) -> list[list[Measured]]:
        """Return the candidates of each size, the best first."""
        return [[m, *self.lesser.get(m.row.up_to, ())] for m in self.best]

    def in_rank_order(self) -> list[Measured]:
        """Return the best candidate of each size that sums in rank order, as is the default."""
        return [next(m for m in of_size if not sums_in_switch(m.row)) for of_size in self.by_size()]


NOTHING = Found([], {})


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0, or 1 if a file could not be written or a better table is installed.

    Raises:
        ConfigError: There are no GPUs, the options select nothing, or the configuration is invalid. Also if ``--json``
            is a file of another run, or a table cannot be installed or removed.
    """
    if args.list or args.remove is not None:
        return tune_tables.run(args)
    placement = launch.place(args.world, args.device, over_nodes=True)
    if not placement.on_gpu:
        raise ConfigError(f"tune measures GPUs: {placement.reason}")
    asked_for = launch.checked_config({"--out": args.out, "--json": args.json}, dsl=args.dsl)
    check_options(args, asked_for)
    if args.force and not args.install:
        raise ConfigError("--force: it lets --install replace a better table; give --install too")
    if args.install:
        tune_tables.prepare(asked_for)
    check_layers(args.layers, args.tokens, "--layers")
    check_layers(args.silu_layers, args.tokens, "--silu-layers")
    check_layers(args.fp8_layers, args.tokens, "--fp8-layers", fp8=True)
    config = config_for(args.multicast, asked_for)
    if not launch.in_rank():
        if args.json is not None and args.json.is_file():
            _record(args, placement, asked_for)  # reported once here, and not by every rank
        return launch.spawn(placement, args.argv)
    written = True
    with launch.process_group(placement) as group:
        records: list[Record] = []

        def asked() -> dict[str, Any]:
            records.append(_record(args, placement, asked_for))
            return records[0].asked()

        require_alike(asked, group)  # before rank 0 writes the file
        (record,) = records
        with Communicator(group, placement.device, config) as comm:
            if comm.nodes > 1:
                return 0 if tune_nodes.run(comm, group, args, record, asked_for) else 1
            if args.multicast and not comm.multicast.is_up:
                raise ConfigError(f"--multicast: NVLink multicast cannot be used here: {comm.multicast.why}")
            measured = programs.to_measure(comm, asked_for)
            subjects = subjects_of(
                args.operations, args.hidden, args.max, comm.world_size, measured, config, comm.table
            )
            require_candidates(args, subjects, comm.world_size, comm.limits)
            if comm.rank == 0:
                programs.print_remarks(measured, asked_for, comm.world_size, args.operations, args.max)
            shipped = comm.table
            found, left = measure(comm, group, subjects, args, record)
            comm.use_table(shipped)
            layers = tune_layers.measure(comm, group, args.layers, args.tokens, args.reps)
            layers += tune_layers.measure(comm, group, args.silu_layers, args.tokens, args.reps, silu=True)
            layers += tune_layers.measure(comm, group, args.fp8_layers, args.tokens, args.reps, fp8=True)
            record.layers = [row.as_dict(compared=True) for row in layers]
            if comm.rank == 0:
                environment = record.report(is_complete=left == 0)
                if args.out is not None or args.install:
                    table = tuned(shipped, found).with_layers(tune_layers.rows_of(layers))
                    if args.multicast:
                        table = table._replace(multicast=entry_of(comm, environment["date"]))
                    of_ranks = comm.device, comm.world_size
                    written = tune_tables.write(table, *of_ranks, args, environment, asked_for, out=args.out)
                written = record.write(is_complete=left == 0) and written
    return 0 if written else 1


def config_for(multicast: bool, config: Config) -> Config:
    """Return the options to measure with. Multicast is set up and tested only with ``--multicast``.

    Raises:
        ConfigError: The machine forbids multicast. No multicast call was made.
    """
    if not multicast:
        return config.replace(multicast="0")
    may, why = multicast_state(config)
    if not may:
        raise ConfigError(f"--multicast: {why} forbids NVLink multicast on this machine; nothing of it was tried")
    if config.deterministic:
        raise ConfigError("--multicast: option deterministic keeps sums out of the switch: unset it to measure them")
    return config.replace(multicast="1", sum="any")


def entry_of(comm: Communicator, date: str) -> MulticastEntry:
    """Return the table entry of the machine on which NVLink multicast was tested and measured."""
    return MulticastEntry(name_of(comm.device), driver_of(comm.device), comm.world_size, date)


def check_options(args: argparse.Namespace, config: Config) -> None:
    """Raise ConfigError if the options select nothing, or exclude candidates."""
    if not args.operations and not any(getattr(args, name, ()) for name in _LAYERS):
        raise ConfigError("--operations none: there is nothing to measure")
    bounds = f"--min {format_bytes(args.min)}, --max {format_bytes(args.max)}"
    if args.min < 2:
        raise ConfigError(f"{bounds}: the smallest message has an element, 2 bytes")
    if args.max < args.min:
        raise ConfigError(f"{bounds}: the largest message is smaller than the smallest")
    if "fused" in args.operations:
        fused = registry.operations()[FUSED]
        if not fused.takes_rows_of(args.hidden):
            raise ConfigError(
                f"--hidden {args.hidden}: rows of fused operations have a multiple of {fused.row_multiple} elements, "
                f"up to {fused.max_row}"
            )
        if not any(FusedSubject(args.hidden).sizes(args.min, args.max)):
            raise ConfigError(
                f"{bounds}: no fused message lies between; they are rows of {args.hidden * ELEMENT_BYTES} bytes "
                f"(--hidden {args.hidden}), up to {format_bytes(LARGEST_FUSED)}"
            )
    quantized = {"all-reduce", "fused"} & set(args.operations)
    if config.wire != "none" and quantized and args.max < config.wire_min_bytes:
        raise ConfigError(
            f"--max {format_bytes(args.max)}: with option wire {min(quantized)} is measured where it is quantized, "
            f"from {format_bytes(config.wire_min_bytes)} on"
        )
    # These options would decline candidates, or run another algorithm than the row being measured.
    for name in ("algorithm", "max_message_bytes"):
        if name in config.origins and getattr(config, name) != getattr(Config.load({}), name):
            raise ConfigError(
                f"option {name} is {getattr(config, name)!r} ({config.origins[name]}), but tune measures every "
                "algorithm and size: unset it"
            )


def require_candidates(
    args: argparse.Namespace, subjects: Sequence[Subject], world_size: int, limits: _core.Limits
) -> None:
    """Raise ConfigError if a size has no candidate. Checked first, since measuring the smaller sizes takes minutes."""
    for subject in subjects:
        for size in subject.sizes(args.min, args.max):
            problem = subject.problem(size, world_size)
            if next(candidates(problem, limits, subject.is_symmetric, wire=subject.wire), None) is None:
                raise ConfigError(
                    f"--max {format_bytes(args.max)}: no shape of grid and tile is worth measuring at "
                    f"{format_bytes(size)} on this device; give a smaller one"
                )


def _record(args: argparse.Namespace, placement: Placement, config: Config) -> Record:
    """Return the record of this run before it starts."""
    measured = programs.digests(config, placement.world)  # an edited program makes it another run
    return Record(
        args.json, report.environment(placement), {**options_of(args), **({"dsl": measured} if measured else {})}
    )


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that affect what is measured."""
    found = {name: getattr(args, name) for name in ("operations", "min", "max", "reps", "hidden", "method")}
    layers = {name: getattr(args, name) for name in _LAYERS if getattr(args, name, ())}
    if layers:
        found.update(**layers, tokens=args.tokens)
    return {**found, "multicast": True} if getattr(args, "multicast", False) else found


def measure(
    comm: Communicator, group: dist.ProcessGroup, subjects: Sequence[Subject], args: argparse.Namespace, record: Record
) -> tuple[dict[str, Found], int]:
    """Time all candidates at the sizes that the record lacks, and record them. Collective.

    Returns:
        Measurements by the keys of the subjects, and how many sizes are missing because the time was up.

    Raises:
        ConfigError: At some size no candidate ran.
    """
    to_do = coarse_first(subjects, args.min, args.max)
    missing = [(subject, size) for subject, size in to_do if size not in record.sizes(subject.key)]
    known = [(subject, size) for subject, size in to_do if size in record.sizes(subject.key)]
    if known and comm.rank == 0:
        print(f"{args.json} has {len(known)} of {len(to_do)} sizes: going on behind them", flush=True)
    found: dict[str, Found] = {subject.key: Found([], {}, {}) for subject in subjects}
    progress = Progress(enabled=comm.rank == 0)

    def take(subject: Subject, at_size: AtSize) -> None:
        chosen, *lesser = choose_by_means(at_size.measured, at_size.size, at_size.refusals)
        found[subject.key].best.append(chosen)
        if lesser:
            found[subject.key] = found[subject.key]._replace(lesser={**found[subject.key].lesser, at_size.size: lesser})
        if at_size.nccl_us is not None:
            found[subject.key].nccl[at_size.size] = at_size.nccl_us
        if at_size.separate_us is not None:
            separate = {**found[subject.key].separate, at_size.size: at_size.separate_us}
            found[subject.key] = found[subject.key]._replace(separate=separate)
        progress.clear()
        if comm.rank == 0:
            for one in (chosen, *lesser):
                print(line(subject, one, at_size.nccl_us, at_size.separate_us), flush=True)

    for subject, size in known:
        take(subject, record.sizes(subject.key)[size])
    pace = Pace(sum(count_candidates(subject, [size], comm) for subject, size in missing))
    budget = Budget(args.seconds, group)
    for subject, size in budget.take(missing):
        at_size = _measure_size(comm, group, subject, size, args, progress, pace)
        record.add(subject.key, at_size, writes=comm.rank == 0)
        take(subject, at_size)
    if budget.left and comm.rank == 0:
        behind = "the same command measures the rest" if args.json else "with --json FILE another run would go on"
        print(f"--seconds {args.seconds} are over: {budget.left} of {len(to_do)} sizes were not measured; {behind}")
    for of_subject in found.values():
        of_subject.best.sort(key=lambda m: m.row.up_to)
    return found, budget.left


def _measure_size(
    comm: Communicator,
    group: dist.ProcessGroup,
    subject: Subject,
    size: int,
    args: argparse.Namespace,
    progress: Progress,
    pace: Pace,
) -> AtSize:
    what = f"tuning {subject.label}{format_bytes(size)}"
    schedule = schedule_of(args.method, args.reps, subject.problem(size, comm.world_size).whole_bytes())
    bench = Bench(comm, group, subject, size, schedule)
    at_size = bench.candidates(lambda which: progress.show(f"{what}: {which}; {pace.text()}"))
    pace.advance(count_candidates(subject, [size], comm))
    return at_size


def tuned(shipped: TuningTable, found: Mapping[str, Found]) -> TuningTable:
    """Return the table to write: the measured rows, and the device's current table for the rest."""
    plain = found.get(ALL_REDUCE, NOTHING)
    limit = largest_won(plain.in_rank_order(), plain.nccl) if plain.best else shipped.max_message_bytes
    rows = [row for key, of_operation in found.items() for row in merge(of_operation.by_size()) if is_kept(key, found)]
    fused = found.get(FUSED, NOTHING)
    max_fused_bytes, large_fused_bytes = fused_bounds(fused, shipped)
    # Fused messages that are larger than the measured ones may have another kernel.
    measured = max((m.row.up_to for m in fused.best), default=0)
    if large_fused_bytes is not None:
        rows += [row for row in shipped.rows.get(FUSED, ()) if 0 < measured < row.up_to]
    # fused_blocks is not measured here and stays as it is.
    return shipped.with_rows(*rows)._replace(
        name="",
        max_message_bytes=limit,
        max_fused_bytes=max_fused_bytes,
        large_fused_bytes=large_fused_bytes,
        min_symmetric_bytes=least_symmetric(found, shipped),
    )


def is_kept(key: str, found: Mapping[str, Found]) -> bool:
    """Return whether the rows of ``key`` go into the table.

    Quantized fused messages are fused if there are rows for them. These are kept if the largest size is not slower than
    a quantized all-reduce and a norm.
    """
    of_key = found[key]
    if key == FUSED or not of_key.separate:
        return True
    largest = max(of_key.separate)
    (us,) = (m.us for m in of_key.best if m.row.up_to == largest)
    return not is_slower(us, of_key.separate[largest])


def largest_won(best: Sequence[Measured], nccl: dict[int, float]) -> int:
    """Return the largest measured size up to which NCCL was never faster by more than the noise."""
    won = 0
    for row, us, *_ in best:
        if is_slower(us, nccl.get(row.up_to, us)):
            break
        won = row.up_to
    return won


def fused_bounds(fused: Found, shipped: TuningTable) -> tuple[int, int | None]:
    """Return ``max_fused_bytes`` and ``large_fused_bytes``: up to which size, and from which size on, one kernel is not
    slower than an all-reduce and a norm by more than the noise. A present value that no measurement contradicts
    stays."""
    compared = [(m.row.up_to, m.us) for m in fused.best if m.row.up_to in fused.separate]
    lost = [size for size, us in compared if is_slower(us, fused.separate[size])]
    won = [size for size, _ in compared if size not in lost]
    before = [size for size in won if not lost or size < lost[0]]
    up_to = max([shipped.max_fused_bytes, *before])
    if not lost:
        return up_to, shipped.large_fused_bytes
    behind = [size for size in won if size > lost[-1]]
    from_on = [size for size in (shipped.large_fused_bytes, *behind) if size is not None and size > lost[-1]]
    return min(up_to, lost[0] - 1), min(from_on, default=None)


def least_symmetric(found: Mapping[str, Found], shipped: TuningTable) -> int | dict[str, int]:
    """Return ``min_symmetric_bytes`` by operation: the size from which symmetric tensors are not slower, by more than
    the noise, at that and all larger sizes. Values that were not measured stay as they are."""
    least: dict[str, int] = {}
    for key, ordinary in found.items():
        symmetric = {m.row.up_to: m.us for m in found.get(of_symmetric(key), NOTHING).best}
        compared = [
            (m.row.up_to, not is_slower(symmetric[m.row.up_to], m.us))
            for m in ordinary.best
            if m.row.up_to in symmetric
        ]
        if not compared:
            continue
        lost = [size for size, has_won in compared if not has_won]
        won = [size for size, has_won in compared if has_won and size > max(lost, default=0)]
        least[key] = min(won, default=compared[-1][0] + 1)
    if not least:
        return (
            shipped.min_symmetric_bytes
            if isinstance(shipped.min_symmetric_bytes, int)
            else {**shipped.min_symmetric_bytes}
        )
    return {
        name: least.get(name, shipped.symmetric_from(name))
        for name, operation in registry.operations().items()
        if any(algorithm.is_symmetric for algorithm in operation.algorithms)
    }


def line(subject: Subject, chosen: Measured, nccl_us: float | None, separate_us: float | None = None) -> str:
    """Format a size for printing."""
    row = chosen.row
    beside = "" if row.runner_up is None else "   {} {} {:8.2f}".format(*row.runner_up)
    if nccl_us is not None:
        beside += f"   NCCL {nccl_us:8.2f}"
    if separate_us is not None:
        beside += f"   all-reduce and norm {separate_us:8.2f}"
    return f"{format_bytes(row.up_to):>10} {chosen.us:8.2f} us  {subject.label}{choice_text(row)}{beside}"


def choice_text(row: Row) -> str:
    """Format a row's algorithm and parameters: ``one_shot LL  blocks<=8 tile_lines=16``."""
    shape = " ".join(f"{name}{'<=' if name in _BOUNDS else '='}{value}" for name, value in row.tunables().items())
    return f"{row.algorithm} {row.protocol}  {shape}".rstrip()
