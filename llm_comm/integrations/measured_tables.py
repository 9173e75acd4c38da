"""Tuning tables that engines have measured at their start, kept as files in the user's directory.

Each device and each build of the kernels has a directory of its own, since measurements hold for both only together.
Engines may start at the same time: a file is written under another name and renamed, so readers see complete files. A
file that cannot be read or written costs another measurement and one warning, but never the start.
"""

from __future__ import annotations

import datetime
import logging
import re
from pathlib import Path

import torch

from llm_comm.errors import ConfigError
from llm_comm.files import replace_text
from llm_comm.installation import VERSION, digest_of_kernels
from llm_comm.planning.catalogue import load_table, table_directory, table_text
from llm_comm.planning.tables import TuningTable


class MeasuredTables:
    """Kept tables of one device.

    Args:
        device: Device of this rank.
        world_size: Number of ranks of the group.
        log: Logger for warnings.
    """

    def __init__(self, device: torch.device, world_size: int, log: logging.Logger) -> None:
        self._device = "emulated" if device.type == "cpu" else torch.cuda.get_device_properties(device).name
        self._world_size = world_size
        self._kernels = digest_of_kernels()[:12]
        self._log = log
        self._has_warned = False

    def path(self, name: str) -> Path | None:
        """Return the path of a table's file; None if the user has no home directory."""
        directory = table_directory()
        device = re.sub(r"[^a-z0-9]+", "_", self._device.lower())
        return None if directory is None else directory / "measured" / f"{device}_{self._kernels}" / f"{name}.yaml"

    def read(self, name: str) -> TuningTable | None:
        """Return a kept table; None if there is no file, or none that can be used."""
        path = self.path(name)
        if path is None or not path.is_file():
            return None
        try:
            found = load_table(path)
        except ConfigError as error:
            self._warn(f"{error}; it is measured again")
            return None
        if (found.device, found.measured.get("kernels")) != (self._device, self._kernels):
            self._warn(f"{path} is of {found.device} and kernels {found.measured.get('kernels')}; it is measured again")
            return None
        return found.table

    def write(self, name: str, table: TuningTable) -> None:
        """Write a table to its file, with the date and the build that it was measured with."""
        path = self.path(name)
        if path is None:
            return
        measured = {"date": f"{datetime.date.today()}", "llm_comm": VERSION, "kernels": self._kernels}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, table_text(self._device, self._world_size, table, measured))
        except OSError as error:
            self._warn(f"{path} cannot be written ({error.strerror or error}): the next start measures again")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._log.warning("llm_comm: what earlier starts have measured: %s", what)
