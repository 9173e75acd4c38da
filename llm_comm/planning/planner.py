"""Planner of one communicator."""

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
    """Plans calls of a communicator: holds its tuning table, options, limits and DSL programs.

    Args:
        world_size: Number of ranks of the communicator.
        table: Tuning table to select by.
        config: Options of the communicator.
        limits: Launch limits that hold on the devices of all ranks.
        multicast: NVLink multicast state of the ranks.
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
        #: Cached answers of prefers_layer, by operation, outputs, inputs and tokens. Engines ask before each layer.
        self._preferred: dict[tuple[str, int, int, int], bool] = {}
        self.config = config
        # A call that the named program does not serve is planned by the table, as if no algorithm was named. It is also
        # exact.
        is_program = registry.is_program(config.algorithm)
        self._config_of_tables = config.replace(algorithm="auto", wire="none") if is_program else config
        self.table = table
        #: Compiled DSL programs, by the names that options and tables use. Equal on all ranks.
        self.programs: dict[str, Kernels] = {}
        self.limits = limits
        self.multicast = multicast
        #: True once tensors exist in symmetric memory, which some algorithms require. Equal on all ranks.
        self.has_symmetric = False

    @property
    def table(self) -> TuningTable:
        """Tuning table in use. A new table applies from the next call on."""
        return self._table

    @table.setter
    def table(self, table: TuningTable) -> None:
        self._table = table
        self._preferred.clear()
        # Computed here because torch.compile traces the question, and cannot trace what the answer takes.
        self._limits = {
            operation: selection.message_limit(operation, table, self._config_of_tables)
            for operation in registry.operations()
        }
        #: Sizes of messages that are fused with norms.
        self.fused_sizes = selection.fused_sizes(table, self._config_of_tables)

    def lay_out(
        self, operation: str, count: int, row: int, data_type: str, parameters: tuple[float, ...] = ()
    ) -> Layout:
        """Plan a call. The layout also holds the arguments of ``Core.prepare``."""
        problem = Problem(operation, count, row, data_type, self.world_size, parameters)
        by = (self.table, self._config_of_tables, self.limits)
        layout = selection.lay_out(problem, *by, self.multicast)
        if self.programs:
            layout = programs.with_program(layout, problem, self.table, self.config, self.programs)
        return selection.with_direct(layout, problem, *by) if self.has_symmetric else layout

    def choosable(self) -> list[int]:
        """Return the numbers of the algorithms that plans can name."""
        return selection.choosable(self.table, self._config_of_tables, self.limits, self.multicast)

    def check_table(self, table: TuningTable) -> None:
        """Raise ConfigError if a table names a DSL program that is not compiled."""
        if self.world_size > 1:
            programs.check_rows(table, self.programs)

    def message_limit(self, operation: str) -> int:
        """Return the size in bytes above which messages of ``operation`` are declined."""
        return self._limits[operation]

    def fuses(self, message_bytes: int) -> bool:
        """Return whether all-reduces of so many bytes are fused with norms."""
        return selection.is_within(self.fused_sizes, message_bytes)

    def layer_choice(self, operation: str, outputs: int, inputs: int, tokens: int) -> _core.LinearChoice:
        """Return the launch config of a linear layer: from the table, or one that leaves the choice to the kernel."""
        return layers.choice_of_layer(self.table.layers, operation, outputs, inputs, tokens, self.config.pdl)

    def prefers_layer(self, operation: str, outputs: int, inputs: int, tokens: int) -> bool:
        """Return whether an engine should compute a linear layer with llm_comm."""
        if tokens > _core.linear_max_tokens:  # do not cache the many sizes of prefill
            return False
        layer = (operation, outputs, inputs, tokens)
        found = self._preferred.get(layer)
        if found is None:
            found = layers.is_preferred(self.table.layers, self.config, self.limits, *layer)
            self._preferred[layer] = found
        return found

    def most_preferred_tokens(self) -> int:
        """Return the largest number of tokens at which any layer is preferred; 0 if none is."""
        return layers.most_tokens(self.table.layers, self.config, self.limits)
