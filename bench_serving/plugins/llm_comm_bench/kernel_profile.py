"""Recorder of the GPU kernels of a worker process, by torch.profiler (CUPTI)."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

#: Ranks that record. Two show whether a kernel waits for its peer.
RANKS = (0, 1)
#: Kernels of ``torch.cuda._sleep``, which no engine runs, mark the begin of a section. There are several, because CUPTI
#: may lose the first kernels of a recording (pytorch issue 192021).
_MARK, _MARKS = "spin_kernel", 20

Event = tuple[int, int, str, int]


def sections(events: Iterable[Event]) -> list[list[Event]]:
    """Split (start, duration, name, stream) in nanoseconds, in order of time, at the marks. Drop what precedes them.

    Also drop fewer than ``_MARKS`` kernels in a row between marks: another thread of the engine launched them while the
    marks ran.
    """
    found: list[list[Event]] = []
    after_mark = False
    for event in sorted(events):
        if _MARK in event[2]:
            if found and not after_mark and len(found[-1]) < _MARKS:
                found.pop()
            after_mark = True
        elif after_mark:
            found.append([event])
            after_mark = False
        elif found:
            found[-1].append(event)
    return found


class Recorder:
    """Recorder of one rank. An error goes into the files and never reaches the engine.

    One recording has all sections: each further recording of a process loses more kernels (pytorch issue 192021).
    """

    def __init__(self) -> None:
        self._profile: Any = None
        self._error = "was not started"

    def start(self, rank: int) -> None:
        """Begin to record, in ranks of ``RANKS``."""
        if rank not in RANKS:
            return
        os.environ["TEARDOWN_CUPTI"] = "0"  # after a teardown, CUDA graphs that were captured before may crash
        self._error = ""
        try:
            torch.cuda.synchronize()
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profile.start()
            self._profile = profile
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def begin_section(self) -> None:
        """Mark the begin of a section, if this rank records."""
        if self._profile is not None:
            torch.cuda.synchronize()
            for _ in range(_MARKS):
                torch.cuda._sleep(1)
            torch.cuda.synchronize()

    def stop(self, rank: int, directory: str, names: str) -> None:
        """Write each section to ``DIRECTORY/NAME.rankN.json.gz``: {"error", "names", "kernels"}.

        A kernel is [start, duration, index of its name, stream], in microseconds from the first one on.

        Args:
            rank: Rank of this process.
            directory: Existing directory.
            names: Names of the sections, separated by commas.
        """
        if rank not in RANKS:
            return
        files = names.split(",")
        found: list[list[Event]] = []
        try:
            if self._profile is not None:
                torch.cuda.synchronize()
                self._profile.stop()
                found = sections(
                    (event.start_ns(), event.duration_ns(), event.name(), event.device_resource_id())
                    for event in self._profile.profiler.kineto_results.events()
                    if event.device_type() == DeviceType.CUDA
                )
                if len(found) != len(files):
                    self._error = f"kernels of {len(found)} of {len(files)} workloads were recorded"
                    self._error += "" if found else ": CUPTI may be missing, not permitted, or used by another tool"
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        for file, events in zip(files, [[] for _ in files] if self._error else found, strict=True):
            content = {"error": self._error, **_compact(events)}
            path = Path(directory, f"{file}.rank{rank}.json.gz")
            path.write_bytes(gzip.compress(json.dumps(content).encode()))
        self._profile, self._error = None, "was not started"


def _compact(events: list[Event]) -> dict[str, Any]:
    names: dict[str, int] = {}
    begin = events[0][0] if events else 0
    kernels = [
        [(start - begin) / 1e3, ns / 1e3, names.setdefault(name, len(names)), stream]
        for start, ns, name, stream in events
    ]
    return {"names": list(names), "kernels": kernels}


recorder = Recorder()
