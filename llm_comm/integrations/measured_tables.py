"""Files of what engines have measured at their start: tuning tables in the user's directory, by device and by the
kernels of this build.

A file is whole at any time, however many engines start at once: each writes its own and renames it. What cannot be
read or written costs the time to measure, and one warning.
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
    """The tables that were measured on one device.

    Args:
        device: Of this rank.
        world_size: Ranks of the group.
        log: Takes warnings.
    """

    def __init__(self, device: torch.device, world_size: int, log: logging.Logger) -> None:
        self._device = "emulated" if device.type == "cpu" else torch.cuda.get_device_properties(device).name
        self._world_size = world_size
        self._kernels = digest_of_kernels()[:12]
        self._log = log
        self._has_warned = False

    def path(self, name: str) -> Path | None:
        """Return where a table is kept; None for a user without a home."""
        directory = table_directory()
        device = re.sub(r"[^a-z0-9]+", "_", self._device.lower())
        return None if directory is None else directory / "measured" / f"{device}_{self._kernels}" / f"{name}.yaml"

    def read(self, name: str) -> TuningTable | None:
        """Return a table; None where there is none that can be used."""
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
        """Keep a table."""
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
