"""Measurement of all-reduces at an engine's start, on a machine without a tuning table.

The all-reduces of decode batches are timed, fused with RMSNorm and unfused, with the candidates of ``llm-comm tune``.
Rows for larger messages stay as the table in use has them. Rank 0 writes the measured rows to a file that later starts
read (``measured_tables.py``). All candidates give bitwise equal results, so a measured choice changes no output.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from llm_comm.bench.choosing import choose_by_means, merge
from llm_comm.bench.measuring import AtSize, Bench, Budget, schedule_of
from llm_comm.bench.report import first_line
from llm_comm.bench.tune_subjects import ELEMENT_BYTES, CollectiveSubject, FusedSubject
from llm_comm.communicator import Communicator
from llm_comm.integrations.engine_config import options_of, seconds_at_start
from llm_comm.integrations.joining import ENGINE_TIMEOUT_S
from llm_comm.integrations.measured_tables import MeasuredTables
from llm_comm.planning.models import Model
from llm_comm.planning.selection import wire_of
from llm_comm.planning.tables import ALL_REDUCE, Row, TuningTable, by_operation
from llm_comm.runtime.rendezvous import Rendezvous

#: Batch sizes to measure, in tokens. The most informative comes first, since the time budget may end early.
TOKENS = (16, 1, 64, 4)
#: Time budget in seconds for ``tune_at_start="auto"``.
_USUAL_BUDGET_S = 20.0
_REPS = 5


def tune(communicator: Communicator, group: dist.ProcessGroup, model: Model | None, log: logging.Logger) -> str:
    """Measure the all-reduces of decode batches and add their rows to the communicator's table. Collective.

    Nothing is measured if the table was tuned for this machine, or if the ranks disagree about the hidden size.

    Args:
        communicator: Communicator of the tensor-parallel group.
        group: gloo group of the same ranks.
        model: The model, as this rank reads it; None if it is unknown.
        log: Logger for warnings.

    Returns:
        Text for the start line of the log; "" if nothing was measured and nothing was kept from an earlier start.

    Raises:
        LlmCommError: A rank is lost, or the communicator has failed.
    """
    if _budget_s(communicator) <= 0 or communicator.nodes > 1:
        return ""
    rendezvous = Rendezvous(group, ENGINE_TIMEOUT_S)
    # The hidden size to measure, or 0 if this rank has nothing to measure.
    wanted = 0 if model is None or communicator.table.origin.is_tuned else model.hidden
    of_ranks = rendezvous.gather("rows of the model, where no table is of the machine", wanted)
    if wanted <= 0 or any(of_rank != wanted for of_rank in of_ranks):
        return ""
    tuner = _CollectiveTuner(communicator, group, wanted, log)
    kept = rendezvous.collect("sums that were measured", tuner.kept)[0]
    rows = [Row(*row) for row in kept]
    if not rows:
        failures = rendezvous.gather("measurement of sums", tuner.why_not_measured())
        if any(failures):
            log.warning("llm_comm: sums were not measured: %s", max(failures, key=bool))
            return ""
        rows = tuner.rows
    if not rows:  # option max_message_bytes declines all measured sizes
        return ""
    return rendezvous.attempt("choice of sums", partial(tuner.use, rows))


def _budget_s(communicator: Communicator) -> float:
    """Return the time budget in seconds. It is 0 on emulated GPUs, and where option ``algorithm`` names the
    algorithm."""
    config = options_of(communicator)
    if communicator.is_emulated or config.algorithm != "auto":
        return 0.0
    return seconds_at_start(config, communicator.device, _USUAL_BUDGET_S)


class _CollectiveTuner:
    """This rank's steps of ``tune``.

    Attributes:
        rows: Rows measured in this start.
    """

    def __init__(self, communicator: Communicator, group: dist.ProcessGroup, hidden: int, log: logging.Logger) -> None:
        self._communicator, self._group, self._hidden, self._log = communicator, group, hidden, log
        self._table, self._start = communicator.table, time.monotonic()
        self.rows: list[Row] = []

    def kept(self) -> list[Row]:
        """Return the rows that an earlier start has kept. Ranks other than 0 return none."""
        if self._communicator.rank != 0:
            return []
        table = self._tables.read(self._name)
        return [] if table is None else [row.without_figures() for rows in table.rows.values() for row in rows]

    def why_not_measured(self) -> str:
        """Measure, and return the error in one line, or "". Collective: an error on one rank ends it on all ranks."""
        try:
            self.rows = self._measure()
        except Exception as error:  # any error must reach the other ranks
            self._log.debug("llm_comm: sums were not measured", exc_info=True)
            return first_line(error)
        finally:
            self._communicator.use_table(self._table)
        return ""

    def _measure(self) -> list[Row]:
        comm = self._communicator
        subjects = FusedSubject(self._hidden), CollectiveSubject(ALL_REDUCE)
        row_bytes = self._hidden * ELEMENT_BYTES
        found: dict[str, list[AtSize]] = {subject.key: [] for subject in subjects}
        # A quantized message uses no row that is measured here.
        to_do = [
            (subject, tokens * row_bytes)
            for tokens in TOKENS
            for subject in subjects
            if not wire_of(subject.problem(tokens * row_bytes, comm.world_size), comm.config)
        ]
        for subject, size in Budget(_budget_s(comm), self._group).take(to_do):
            whole_bytes = subject.problem(size, comm.world_size).whole_bytes()
            bench = Bench(comm, self._group, subject, size, schedule_of("aligned", _REPS, whole_bytes))
            found[subject.key].append(bench.candidates(_say_nothing, with_nccl=False))
        return [row for of_operation in found.values() for row in _best(of_operation)]

    def use(self, rows: Sequence[Row]) -> str:
        """Put ``rows`` into the communicator's table, and return text for the start line.

        The table keeps its own rows for messages larger than those measured. Rank 0 writes new rows to the file.
        """
        name = f"{self._table.name} with sums measured at start"
        origin = self._table.origin._replace(is_tuned=True)
        self._communicator.use_table(over(self._table, rows)._replace(name=name, origin=origin))
        if self._communicator.rank == 0 and self.rows:
            self._tables.write(self._name, self._table._replace(rows=by_operation(self.rows), layers=(), nodes=()))
        when = f"in {time.monotonic() - self._start:.1f} s" if self.rows else "at an earlier start"
        return f"; sums of decode batches measured {when}"

    @property
    def _name(self) -> str:
        config = self._communicator.config
        exact = "" if config.wire == "none" else f"_exact_below_{config.wire_min_bytes}"
        return f"sums_{self._communicator.world_size}_ranks_{self._hidden}{exact}"

    @functools.cached_property
    def _tables(self) -> MeasuredTables:
        return MeasuredTables(self._communicator.device, self._communicator.world_size, self._log)


def _best(measured: Sequence[AtSize]) -> list[Row]:
    """Return the rows of one operation. Sizes without a successful measurement are skipped."""
    of_sizes = sorted((at_size for at_size in measured if at_size.measured), key=lambda at_size: at_size.size)
    return merge([choose_by_means(at_size.measured, at_size.size, ()) for at_size in of_sizes])


def over(table: TuningTable, rows: Sequence[Row]) -> TuningTable:
    """Return ``table`` with the measured ``rows``, and with its own rows for larger messages of the same operations."""
    measured = by_operation(rows)
    larger = [
        row for key, of_key in measured.items() for row in table.rows.get(key, ()) if row.up_to > of_key[-1].up_to
    ]
    return table.with_rows(*rows, *larger)


def _say_nothing(_: str) -> None:
    pass
