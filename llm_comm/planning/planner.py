"""The plans of one communicator."""

from __future__ import annotations

from llm_comm import _core, registry
from llm_comm.config import Config
from llm_comm.planning import layers, programs, selection
from llm_comm.planning.multicast import NO_MULTICAST, Multicast
from llm_comm.planning.plan import Problem
from llm_comm.planning.programs import Kernels
from llm_comm.planning.selection import Layout
from llm_comm.planning.tables import TuningTable


class Planner:
    """What its operations go by.

    Args:
        world_size: Ranks of the communicator.
        table: Tuning table that selects.
        config: Options of the communicator.
        limits: What the devices of all ranks have room for.
        multicast: Of the ranks.
    """

    def __init__(
        self,
        world_size: int,
        table: TuningTable,
        config: Config,
        limits: _core.Limits,
        multicast: Multicast = NO_MULTICAST,
    ) -> None:
        self.world_size = world_size
        #: By operation, outputs, inputs and tokens of a linear layer: engines ask before each.
        self._preferred: dict[tuple[str, int, int, int], bool] = {}
        self.table = table
        self.config = config
        # What a program does not serve is selected as if none was named.
        self._config_of_tables = config.replace(algorithm="auto") if registry.is_program(config.algorithm) else config
        #: Compiled programs of llm_comm.dsl by the names that options and tables give them. The same on all ranks.
        self.programs: dict[str, Kernels] = {}
        self.limits = limits
        self.multicast = multicast
        #: Whether there are tensors in symmetric memory, which some algorithms are for. The same on all ranks.
        self.has_symmetric = False

    @property
    def table(self) -> TuningTable:
        """Selects. Another one counts from the next call on."""
        return self._table

    @table.setter
    def table(self, table: TuningTable) -> None:
        self._table = table
        self._preferred.clear()

    def lay_out(
        self, operation: str, count: int, row: int, data_type: str, parameters: tuple[float, ...] = ()
    ) -> Layout:
        """The plan of a call, ready for the core."""
        problem = Problem(operation, count, row, data_type, self.world_size, parameters)
        by = (self.table, self._config_of_tables, self.limits)
        layout = selection.lay_out(problem, *by, self.multicast)
        if self.programs:
            layout = programs.with_program(layout, problem, self.table, self.config, self.programs)
        return selection.with_direct(layout, problem, *by) if self.has_symmetric else layout

    def choosable(self) -> list[int]:
        """Numbers of the algorithms that plans can name."""
        return selection.choosable(self.table, self._config_of_tables, self.limits, self.multicast)

    def check_table(self, table: TuningTable) -> None:
        """Raises ConfigError if a table names a program that is not compiled."""
        if self.world_size > 1:
            programs.check_rows(table, self.programs)

    def message_limit(self, operation: str) -> int:
        """Larger messages are declined, in bytes."""
        return selection.message_limit(operation, self.table, self.config)

    def layer_choice(self, operation: str, outputs: int, inputs: int, tokens: int) -> _core.LinearChoice:
        """How the kernel of a linear layer is to run: as the table says, or as it finds best itself."""
        return layers.choice_of_layer(self.table.layers, operation, outputs, inputs, tokens, self.config.pdl)

    def prefers_layer(self, operation: str, outputs: int, inputs: int, tokens: int) -> bool:
        """Whether an engine is to compute a linear layer by llm_comm."""
        if tokens > _core.linear_max_tokens:  # nothing of the many sizes of a prefill is kept
            return False
        layer = (operation, outputs, inputs, tokens)
        found = self._preferred.get(layer)
        if found is None:
            found = layers.is_preferred(self.table.layers, self.config, self.limits, *layer)
            self._preferred[layer] = found
        return found

    def most_preferred_tokens(self) -> int:
        """Of any layer; 0 where none is to be computed by llm_comm."""
        return layers.most_tokens(self.table.layers, self.config, self.limits)
