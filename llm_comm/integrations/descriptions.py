"""Texts of the start line that tells which collectives llm_comm serves in an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llm_comm import registry
from llm_comm.config import Config, EngineOptions
from llm_comm.integrations.engine_config import EVERY_SIZE
from llm_comm.options import MIB
from llm_comm.planning.multicast import NO_MULTICAST, Multicast, why_not
from llm_comm.planning.programs import NO_PROGRAMS, Kernels
from llm_comm.planning.selection import message_limit, smallest_quantized
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, TuningTable, of_programs

#: Log line for the first fused norm, with the number of ranks and the shape. The start line alone does not prove that
#: any norm is fused.
FIRST_FUSED = "llm_comm: first all-reduce fused with its RMSNorm (%d ranks, shape %s)"

#: Part of the start line for norms that llm_comm computes in an engine's batch-invariant mode.
AT_EVERY_SIZE = " at every size (batch_invariant_norm)"

# Operations and their names in the log. Each operation has an option of its own name, which switches it off.
_GATHER_SCATTER = {ALL_GATHER: "all-gather", REDUCE_SCATTER: "reduce-scatter"}
# Operations that option ``wire`` can quantize, and their names in the log.
_QUANTIZED = {ALL_REDUCE: "all-reduces", REDUCE_SCATTER: "reduce-scatters", ALL_GATHER: "all-gathers that permit it"}


def describe_plans(
    table: TuningTable,
    config: Config,
    engine: str,
    multicast: Multicast = NO_MULTICAST,
    programs: Mapping[str, Kernels] = NO_PROGRAMS,
) -> str:
    """Describe which algorithm serves which message sizes: "one_shot to 48 KiB, two_shot to 48 MiB, then vLLM"."""
    limit = message_limit(ALL_REDUCE, table, config)
    quantized_from = smallest_quantized(limit, config)
    exact = limit if quantized_from is None else quantized_from
    algorithms = registry.operations()[ALL_REDUCE].algorithms
    usable = [a for a in algorithms if not why_not(a, config, multicast, is_forced=a.name == config.algorithm)]
    forced = {a.name for a in usable} & {config.algorithm}
    known = {(a.name, a.protocol) for a in usable}
    parts: list[tuple[str, int]] = []
    for row in table.rows.get(ALL_REDUCE, ()) if exact else ():
        if (row.algorithm, row.protocol) not in known or (parts and row.up_to <= parts[-1][1]):
            continue
        algorithm = config.algorithm if forced else row.algorithm
        if parts and parts[-1][0] == algorithm:
            parts.pop()
        parts.append((algorithm, min(row.up_to, exact)))
        if row.up_to >= exact:
            break
    if exact and not parts:
        parts = [("what no table chose", exact)]
    if parts:
        parts[-1] = (parts[-1][0], exact)  # the last row serves all larger messages
    if exact < limit:
        parts.append((next(a.name for a in usable if a.wire == config.wire), limit))
    words = [f"{algorithm} to {format_bytes(up_to)}" for algorithm, up_to in parts]
    by_programs = _describe_programs(table, config, limit, programs)
    if limit >= EVERY_SIZE:
        return by_programs + ", ".join([*words[:-1], f"{parts[-1][0]} at all {'other ' * (len(parts) > 1)}sizes"])
    return by_programs + ", ".join(words) + f", then {engine}"


def _describe_programs(table: TuningTable, config: Config, limit: int, programs: Mapping[str, Kernels]) -> str:
    """Describe the DSL kernels that are tried before the algorithms: "dsl:two_shot to 8 MiB, else "; "" if none."""
    sizes = {row.algorithm: row.up_to for row in table.rows.get(of_programs(ALL_REDUCE), ())}
    if config.algorithm != "auto":
        is_of_others = config.algorithm in programs and programs[config.algorithm].operation != ALL_REDUCE
        sizes = {config.algorithm: limit} if registry.is_program(config.algorithm) and not is_of_others else {}
    words = [f"{name} to {format_bytes(min(up_to, limit, config.dsl_max_bytes))}" for name, up_to in sizes.items()]
    return f"{', '.join(words)}, else " if words else ""


def describe_wire(config: Config, limit: int, operations: Sequence[str] = (ALL_REDUCE, REDUCE_SCATTER)) -> str:
    """Return the warning that results are lossy: "; all-reduces from 8 MiB to 256 MiB are quantized (int8): lossy".

    Returns "" if none of the operations has a quantized message up to ``limit`` bytes.
    """
    quantized_from = smallest_quantized(limit, config)
    known = registry.operations()
    found = [_QUANTIZED[name] for name in operations if any(a.wire == config.wire for a in known[name].algorithms)]
    if quantized_from is None or not found:
        return ""
    smallest = f" from {format_bytes(quantized_from)}" if quantized_from else ""
    largest = "" if limit >= EVERY_SIZE else f" to {format_bytes(limit)}"
    return f"; {' and '.join(found)}{smallest}{largest} are quantized ({config.wire}): lossy"


def describe_gather_scatter(table: TuningTable, config: EngineOptions, beyond: str = "") -> str:
    """Describe the size up to which all-gathers and reduce-scatters are served, or the option that switches one off.

    Args:
        table: Tuning table of the group.
        config: Options of the group.
        beyond: Text after a size limit, such as ", then vLLM's own".
    """
    on = [words for name, words in _GATHER_SCATTER.items() if getattr(config, name)]
    off = [
        f"{name} is false ({config.origins.get(name, 'Python')})"
        for name in _GATHER_SCATTER
        if not getattr(config, name)
    ]
    limit = message_limit(ALL_GATHER, table, config)
    size = "at all sizes" if limit >= EVERY_SIZE else f"to {format_bytes(limit)}{beyond}"
    return "; ".join([*([f"{' and '.join(on)} {size}"] if on else []), *off])


def format_bytes(count: int) -> str:
    """Return a byte count in its largest unit: 1536 becomes "1.5 KiB"."""
    for unit, size in (("TiB", MIB << 20), ("GiB", MIB << 10), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
