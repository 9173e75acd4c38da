"""Measured rows of linear layers from one start of an engine to the next: a file for each layer in the user's directory
of tables, by device and by the kernels of this build.

A file is whole at any time, however many engines start at once: each writes its own and renames it. What cannot be
read or written costs the time to measure, and one warning.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from llm_comm.files import replace_json
from llm_comm.installation import VERSION, digest_of_kernels
from llm_comm.planning.catalogue import table_directory
from llm_comm.planning.layers import LayerKey, LayerRow

_MAX_BYTES = 64 << 10
_FEATURES = 1 << 20


class LayerCache:
    """That of one device.

    Args:
        device: Of this rank.
        log: Takes warnings.
    """

    def __init__(self, device: torch.device, log: logging.Logger) -> None:
        self._device = "emulated" if device.type == "cpu" else torch.cuda.get_device_properties(device).name
        self._kernels = digest_of_kernels()[:12]
        self._log = log
        self._has_warned = False

    def path(self, layer: LayerKey) -> Path | None:
        """Of a layer; None for a user without a home."""
        directory = table_directory()
        if directory is None:
            return None
        operation, outputs, inputs, pdl = layer
        device = re.sub(r"[^a-z0-9]+", "_", self._device.lower())
        name = f"{operation}_{outputs}x{inputs}{'_pdl' if pdl else ''}.json"
        return directory / "measured" / f"{device}_{self._kernels}" / name

    def read(self, layer: LayerKey) -> list[tuple[Any, ...]] | None:
        """The rows of a layer, without what they have in common; None where there are none."""
        path = self.path(layer)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                content = json.loads(file.read(_MAX_BYTES))
            rows = [LayerRow(*layer, **entry) for entry in content["rows"]]
            if (content["device"], content["kernels"]) != (self._device, self._kernels) or not _are_valid(rows):
                raise ValueError("it is not what this llm_comm writes")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            self._warn(f"{path} cannot be used ({type(error).__name__}: {error}); its layer is measured again")
            return None
        return [row[len(layer) :] for row in rows]

    def write(self, layer: LayerKey, rows: Sequence[LayerRow]) -> None:
        """Keeps the rows of a layer."""
        path = self.path(layer)
        if path is None:
            return
        entries = [
            {name: value for name, value in row.entry().items() if name not in LayerRow._fields[: len(layer)]}
            for row in rows
        ]
        content = {
            "device": self._device,
            "kernels": self._kernels,
            "llm_comm": VERSION,
            "date": f"{datetime.date.today()}",
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(path, {**content, "rows": entries})
        except OSError as error:
            self._warn(f"{path} cannot be written ({error.strerror or error}): the next start measures again")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._log.warning("llm_comm: measured linear layers: %s", what)


def _are_valid(rows: Sequence[LayerRow]) -> bool:
    """Whether values are of the kinds that rows have."""
    numbers = [(row.up_to, row.block_outputs, row.stages, row.stage_boxes) for row in rows]
    return (
        len(rows) > 0
        and all(type(number) is int and 0 <= number <= _FEATURES for of_row in numbers for number in of_row)
        and all(type(row.is_faster) is bool for row in rows)
        and all(us is None or type(us) in (int, float) for row in rows for us in (row.us, row.cublas_us))
        and [row.up_to for row in rows] == sorted({row.up_to for row in rows})
    )
