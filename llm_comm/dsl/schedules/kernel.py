"""Kernel for schedules: compiled with the deterministic emulator, and called from Python."""

from __future__ import annotations

import ctypes
import threading
from enum import IntEnum
from pathlib import Path

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.cache import cached_library
from llm_comm.dsl.compiler.layout import sentinel_ranges
from llm_comm.dsl.compiler.source import kernel_name, symmetric_spaces
from llm_comm.dsl.schedules.plan import Plan
from llm_comm.emulated import Driver

#: The deterministic emulator, which runs all ranks of a world in one thread.
SCHEDULES = Driver(
    "llm_comm/schedules/explored_kernel.h",
    "EXPLORED_KERNEL",
    "libllm_comm_deterministic.a",
    ("EMULATOR", "DETERMINISTIC"),
)

#: The compiled library has global state: one run at a time.
_one_at_a_time = threading.Lock()


class Failure(IntEnum):
    """``Failure`` of explored_kernel.h."""

    NONE = 0
    RESULT = 1
    WAIT = 2
    NOT_RESET = 3
    UNDEFINED = 4


class Outcome(ctypes.Structure):
    """``Outcome`` of explored_kernel.h: result of a run of schedules."""

    _fields_ = [
        ("failure", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("peer", ctypes.c_uint32),
        ("schedules", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("element", ctypes.c_uint64),
        ("part_bytes", ctypes.c_uint64),
        ("fingerprint", ctypes.c_uint64),
        ("text", ctypes.c_char * 512),
    ]


class _Size(ctypes.Structure):
    _fields_ = [("part_bytes", ctypes.c_uint64), ("blocks", ctypes.c_uint32), ("threads", ctypes.c_uint32)]


class _SentinelRange(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_uint64), ("end", ctypes.c_uint64)]


class _Program(ctypes.Structure):
    _fields_ = [
        ("world", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("root", ctypes.c_uint32),
        ("has_parted_input", ctypes.c_bool),
        ("has_parted_output", ctypes.c_bool),
        ("adds_up", ctypes.c_bool),
        ("sums_in_rank_order", ctypes.c_bool),
        ("works_in_place", ctypes.c_bool),
        ("has_symmetric_input", ctypes.c_bool),
        ("has_symmetric_output", ctypes.c_bool),
        ("semaphores", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint64),
        ("workspace_bytes", ctypes.c_uint64),
        ("sentinel_ranges", ctypes.POINTER(_SentinelRange)),
        ("sentinel_range_count", ctypes.c_uint32),
        ("size_count", ctypes.c_uint32),
        ("sizes", ctypes.POINTER(_Size)),
    ]


class ExploredKernel:
    """Compiled kernel of a plan.

    Raises:
        RuntimeError, ConfigError, OSError: See ``cached_library``.
    """

    def __init__(self, plan: Plan) -> None:
        library = cached_library(plan.source, kernel_name(plan.program), driver=SCHEDULES)
        self._explore = ctypes.CDLL(str(library)).llm_comm_explore
        self._explore.restype = None
        self._explore.argtypes = [
            ctypes.POINTER(_Program),
            ctypes.c_uint64,
            ctypes.c_uint32,
            ctypes.c_char_p,
            ctypes.POINTER(Outcome),
        ]
        self._program = _described(plan)

    def run(self, seed: int, schedules: int, trace: Path | None = None) -> Outcome:
        """Run schedules ``seed``, ``seed + 1``, ... until one fails.

        Args:
            seed: First seed.
            schedules: Number of schedules.
            trace: File to which every memory access is written.
        """
        outcome = Outcome()
        file = None if trace is None else str(trace).encode()
        with _one_at_a_time:
            self._explore(self._program, seed, schedules, file, outcome)
        return outcome


def _described(plan: Plan) -> _Program:
    program, operation = plan.program, plan.program.operation
    symmetric = symmetric_spaces(program)
    ranges = sentinel_ranges(program, plan.layout)
    array = (_SentinelRange * len(ranges))(*(_SentinelRange(begin, end) for begin, end in ranges))
    sizes = (_Size * len(plan.sizes))(*(_Size(size.part_bytes, size.blocks, size.threads) for size in plan.sizes))
    return _Program(
        world=program.world,
        groups=len(program.groups),
        root=program.root,
        has_parted_input=operation.has_parted_input,
        has_parted_output=operation.has_parted_output,
        adds_up=operation.adds_up,
        sums_in_rank_order=program.sums_in_rank_order,
        works_in_place=plan.works_in_place,
        has_symmetric_input=ir.Space.INPUT in symmetric,
        has_symmetric_output=ir.Space.OUTPUT in symmetric,
        semaphores=plan.instances * program.semaphores,
        shared_bytes=plan.shared_bytes,
        workspace_bytes=plan.layout.bytes,
        sentinel_ranges=array,
        sentinel_range_count=len(ranges),
        size_count=len(plan.sizes),
        sizes=sizes,
    )
