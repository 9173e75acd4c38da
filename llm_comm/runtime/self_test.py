"""Self-test of NVLink multicast at set-up: results of the switch are compared with those of LL algorithms.

It covers several sizes and data types of every algorithm that the options permit, on the real device, before any other
operation runs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from llm_comm import _core, registry
from llm_comm.config import Config
from llm_comm.errors import MissingRankError, RendezvousError
from llm_comm.options import MIB
from llm_comm.planning.multicast import Multicast, why_not
from llm_comm.planning.plan import Problem
from llm_comm.runtime.devices import current_stream_of
from llm_comm.runtime.rendezvous import Rendezvous

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "byte": torch.uint8}
_ROW = 512  # elements in a row, for operations on rows
#: Message sizes in bytes. An emulated device is too slow for the large ones.
_SIZES = (16, 6144, 65_536)
_LARGE_SIZES = (MIB, 5 * MIB)
_EPSILON = 1e-5
#: Inputs are whole numbers up to this, so that sums over 16 ranks are exact in every data type and any order.
_LARGEST_WHOLE = 16
_POLL_S = 0.0005
#: Tuning parameters for algorithms without a candidate at a tested size.
_USUAL = {"blocks": 8, "threads": 256, "tile_lines": 64, "cluster": 1, "depth": 2}


class _Case(NamedTuple):
    """One call through the switch and the same call by LL. Both have been enqueued."""

    name: str
    algorithm: registry.Algorithm
    is_exact: bool
    outputs: list[tuple[torch.Tensor, torch.Tensor]]


def run(rendezvous: Rendezvous, core: _core.Core, device: torch.device, config: Config, limits: _core.Limits) -> str:
    """Test the algorithms that these options permit. Collective. Each rank ends within ``config.timeout_s`` seconds.

    Returns:
        Text of the failure, equal on all ranks, or "". After "" the core can be used.

    Raises:
        MissingRankError: A rank did not arrive at the end of the test.
    """

    def test() -> list[str]:
        return _test(core, device, config, limits, rendezvous.rank, rendezvous.world_size)

    try:
        digests: list[list[str]] = rendezvous.collect("self-test of NVLink multicast", test)
    except MissingRankError:
        raise
    except RendezvousError as error:  # raised on all ranks alike
        return str(error)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not differing:
        return ""
    names = rendezvous.names
    return f"self-test of NVLink multicast: {names.several(differing)} have other sums than {names.full(0)}"


def _test(
    core: _core.Core, device: torch.device, config: Config, limits: _core.Limits, rank: int, world_size: int
) -> list[str]:
    """Run all cases on this rank. Return a digest of the outputs that must be equal on all ranks.

    Raises:
        RuntimeError: A call failed, or its output differs from that of LL.
    """
    deadline = time.monotonic() + config.timeout_s
    generator = torch.Generator().manual_seed(20_000 + rank)
    cases: list[_Case] = []
    for algorithm in _algorithms(config):
        sizes = _SIZES if device.type == "cpu" else _SIZES + _LARGE_SIZES
        before = len(cases)
        for problem in _problems(algorithm, sizes, world_size):
            for is_exact in (True, False) if algorithm.sums_in_switch and not problem.row else (True,):
                case = _enqueue(core, device, limits, algorithm, problem, rank, is_exact, generator)
                cases += [] if case is None else [case]
        if len(cases) == before:
            raise RuntimeError(f"{algorithm.title} takes none of the sizes that are tested")
    _wait(core, device, deadline)
    wrong = [case.name for case in cases if not _is_right(case, world_size)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RuntimeError(f"not what LL gives: {', '.join(wrong[:3])}{more} of {len(cases)} calls")
    alike = [case for case in cases if not (case.algorithm.ranks_may_differ and not case.is_exact)]
    digest = hashlib.sha256()
    for case in alike:
        if not registry.operations()[case.algorithm.operation].has_shards:
            for output, _ in case.outputs:
                digest.update(_bits(output).cpu().numpy().tobytes())
    return [digest.hexdigest()]


def _algorithms(config: Config) -> Iterator[registry.Algorithm]:
    up = Multicast(True, "")
    for operation in registry.operations().values():
        for algorithm in operation.algorithms:
            is_forced = algorithm.name == config.algorithm
            if algorithm.uses_multimem and not why_not(algorithm, config, up, is_forced=is_forced):
                yield algorithm


def _problems(algorithm: registry.Algorithm, sizes: tuple[int, ...], world_size: int) -> Iterator[Problem]:
    operation = registry.operations()[algorithm.operation]
    for data_type in algorithm.data_types:
        for size in sizes:
            row = _ROW if operation.row_multiple else 0
            count = max(1, size // registry.data_types()[data_type])
            # one extra element makes the count odd, if rows are not needed
            count = -(-count // row) * row if row else count + 1
            known = {"epsilon": _EPSILON, "rows": 1.0, **{f"size_{i}": float(count) for i in range(world_size)}}
            parameters = tuple(known.get(name, 0.0) for name in operation.parameters)
            yield Problem(operation.name, count, row, data_type, world_size, parameters)


def _enqueue(
    core: _core.Core,
    device: torch.device,
    limits: _core.Limits,
    algorithm: registry.Algorithm,
    problem: Problem,
    rank: int,
    is_exact: bool,
    generator: torch.Generator,
) -> _Case | None:
    """Enqueue both calls of a case. Return None if an algorithm does not support the size."""
    operation = registry.operations()[algorithm.operation]
    reference = next(
        a
        for a in operation.algorithms
        if a.protocol == "LL" and not a.needs_row and not a.is_symmetric and problem.data_type in a.data_types
    )
    for_core = problem.for_core()
    tilings = []
    for one in (algorithm, reference):
        tuning = next(iter(_core.candidates(one.number, for_core, limits)), None) or _usual_tuning(one)
        try:
            tilings.append(_core.shape(one.number, for_core, tuning, limits).tiling)
        except ValueError:  # the size is no multiple of a line, for example
            return None
    operands = {
        name: _operand(name, operation, problem, is_exact, generator).to(device)
        for name in operation.buffers
        if name not in operation.outputs and name not in operation.optional
    }
    stream = current_stream_of(device)()
    outputs: list[list[torch.Tensor]] = []
    for one, tiling in zip((algorithm, reference), tilings, strict=True):
        results = {
            name: torch.zeros(
                _length(operation, problem, is_output=True), dtype=_TYPES[problem.data_type], device=device
            )
            for name in operation.buffers
            if name in operation.outputs
        }
        buffers = [{**operands, **results}.get(name) for name in operation.buffers]
        call: Callable[..., bool] = core.prepare(one.number, for_core, tiling)
        if not call(*[0 if buffer is None else buffer.data_ptr() for buffer in buffers], stream):
            raise RuntimeError(f"{one.title} did not run: {_error(core)}")
        outputs.append(list(results.values()))
    kind = "whole numbers" if is_exact else "fractions"
    name = f"{operation.name}/{algorithm.name} of {problem.count} {problem.data_type} ({kind})"
    return _Case(name, algorithm, is_exact, list(zip(*outputs, strict=True)))


def _usual_tuning(algorithm: registry.Algorithm) -> _core.TuningParameters:
    """Build tuning parameters for a size at which the algorithm has no candidate because other algorithms are
    faster."""
    usual = {name: _USUAL.get(name, bounds.least) for name, bounds in algorithm.ranges.items()}
    return _core.TuningParameters(
        **{name: min(max(usual[name], bounds.least), bounds.most) for name, bounds in algorithm.ranges.items()}
    )


def _length(operation: registry.Operation, problem: Problem, *, is_output: bool) -> int:
    """Return the number of elements of an input or output of this rank."""
    if not operation.has_shards:
        return problem.count
    gathers = problem.data_type == "byte"
    return problem.count * problem.world_size if is_output == gathers else problem.count


def _operand(
    name: str, operation: registry.Operation, problem: Problem, is_exact: bool, generator: torch.Generator
) -> torch.Tensor:
    dtype = _TYPES[problem.data_type]
    if name != "input":  # weights and residuals: equal on all ranks
        return torch.linspace(0.5, 1.5, problem.row or problem.count).to(dtype)
    length = _length(operation, problem, is_output=False)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (length,), generator=generator, dtype=dtype)
    if is_exact:
        return torch.randint(-_LARGEST_WHOLE, _LARGEST_WHOLE + 1, (length,), generator=generator).to(dtype)
    return (torch.rand(length, generator=generator) * 2 - 1).to(dtype)


def _wait(core: _core.Core, device: torch.device, deadline: float) -> None:
    """Wait for the end of the calls, at most until ``deadline``."""
    if device.type != "cpu":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        while not event.query():
            if time.monotonic() > deadline:
                raise RuntimeError("it has not ended in time")
            time.sleep(_POLL_S)
    if core.error() is not None:
        raise RuntimeError(f"a call has failed: {_error(core)}")


def _error(core: _core.Core) -> str:
    error = core.error()
    return "the core has ended" if error is None else f"{error.cause} in {error.operation}, rank {error.peer}"


def _is_right(case: _Case, world_size: int) -> bool:
    for output, expected in case.outputs:
        if case.is_exact:
            if not torch.equal(_bits(output), _bits(expected)):
                return False
            continue
        # Both round an fp32 sum of world_size numbers up to 1. They differ by one unit in the last place, plus the fp32
        # rounding errors of the two orders.
        ours, theirs = output.double(), expected.double()
        bound = torch.finfo(output.dtype).eps * theirs.abs() + world_size**2 * torch.finfo(torch.float32).eps
        if not bool(((ours - theirs).abs() <= bound).all()):
            return False
    return True


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8)
