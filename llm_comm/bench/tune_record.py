"""Record of a tuning run in the file of ``--json``, from which another run continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_comm import files
from llm_comm.bench.agreement import difference
from llm_comm.bench.choosing import Measured
from llm_comm.bench.measuring import AtSize
from llm_comm.errors import ConfigError
from llm_comm.planning.tables import Row

_COMMAND = "tune"
# Variables that do not distinguish runs: the GPUs of a machine are alike, and so are nodes.
_NOT_COMPARED = ("CUDA_VISIBLE_DEVICES", "LLM_COMM_NODE")
_TO_DO = "name another file, or remove this one to measure anew"


class Record:
    """Measured sizes by the key of a subject. Every rank has a record; rank 0 writes the file.

    Args:
        path: File of ``--json``, or None.
        environment: Environment of this run (``report.environment``).
        options: Options of this run that affect what is measured.

    Raises:
        ConfigError: The file exists and is of another run or program.
    """

    def __init__(self, path: Path | None, environment: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._path = path
        # Normalized by a round trip through JSON, which turns tuples into lists.
        self._head = json.loads(json.dumps({"command": _COMMAND, **environment, "options": options}))
        self._sizes: dict[str, dict[int, AtSize]] = {}
        #: Measured linear layers, in the format of ``llm-comm bench linear``. A continued run measures them again.
        self.layers: list[dict[str, Any]] = []
        #: Over several nodes: measured rows by size. A continued run measures them again.
        self.nodes: list[dict[str, Any]] = []
        self._has_warned = False
        if path is not None and path.is_file() and path.stat().st_size > 0:
            self._read(path)

    def sizes(self, key: str) -> dict[int, AtSize]:
        """Return the measurements of a subject by size."""
        return self._sizes.setdefault(key, {})

    def add(self, key: str, at_size: AtSize, *, writes: bool) -> None:
        """Add a measurement.

        Args:
            key: Key of the subject.
            at_size: Measurement.
            writes: Also write the file. A failure is reported once, and the run continues.
        """
        self.sizes(key)[at_size.size] = at_size
        if self._path is None or not writes:
            return
        try:
            files.replace_json(self._path, self.report(is_complete=False))
        except OSError as error:
            if not self._has_warned:
                files.tell_unwritten("--json", self._path, error, "measuring goes on, and it is tried again")
            self._has_warned = True

    def asked(self) -> dict[str, Any]:
        """Return what must be equal on all ranks of a run. This includes the known sizes, since the ranks measure the
        rest together."""
        known = {key: sorted(found) for key, found in self._sizes.items() if found}
        return {**_compared(self._head), "known from --json": known}

    def write(self, *, is_complete: bool = True) -> bool:
        """Write the file at the end of the run. If that fails, print the content.

        Args:
            is_complete: Nothing is left to measure.

        Returns:
            True if it was written, or there is no file.
        """
        if self._path is None:
            return True
        report = self.report(is_complete)
        try:
            files.replace_json(self._path, report)
        except OSError:
            return files.write_json("--json", self._path, report)
        return True

    def report(self, is_complete: bool) -> dict[str, Any]:
        """Return the content of the file."""
        sizes = {key: [_entry(found[size]) for size in sorted(found)] for key, found in self._sizes.items() if found}
        layers = {"layers": self.layers} if self.layers else {}
        nodes = {"nodes": self.nodes} if self.nodes else {}
        return {**self._head, "complete": is_complete, "operations": sizes, **layers, **nodes}

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            is_ours = content["command"] == _COMMAND
            told = difference(_compared(content), _compared(self._head), "there", "here") if is_ours else ""
            sizes = {
                key: {at_size.size: at_size for at_size in map(_at_size, entries)}
                for key, entries in (content["operations"].items() if is_ours and not told else ())
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"--json {path}: there is a file that `llm-comm tune` did not write: {_TO_DO}") from error
        if not is_ours:
            raise ConfigError(f"--json {path}: there is a file of another command: {_TO_DO}")
        if told:
            raise ConfigError(f"--json {path}: there is a file of another run: {told}; {_TO_DO}")
        self._sizes = sizes


def _compared(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for one run to continue another, by name."""
    variables = {name: value for name, value in content["variables"].items() if name not in _NOT_COMPARED}
    return {
        "world": content["ranks"]["world"],
        "device": content["ranks"]["device"],
        **{f"--{name}": value for name, value in content["options"].items()},
        **content["versions"],
        **variables,
    }


def _entry(at_size: AtSize) -> dict[str, Any]:
    candidates = [{"us": m.us, "at_length": m.at_length, **m.row.entry()} for m in at_size.measured]
    separate = {} if at_size.separate_us is None else {"separate_us": at_size.separate_us}
    return {"bytes": at_size.size, "nccl_us": at_size.nccl_us, **separate, "candidates": candidates}


def _at_size(entry: dict[str, Any]) -> AtSize:
    measured = [_measured(**found) for found in entry["candidates"]]
    return AtSize(int(entry["bytes"]), measured, entry["nccl_us"], entry.get("separate_us"))


def _measured(us: float, at_length: bool, **of_row: Any) -> Measured:
    return Measured(Row(**of_row), us, at_length)
