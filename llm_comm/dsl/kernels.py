"""The kernels of one program for the types of an all-reduce: what a communicator calls in place of an algorithm."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llm_comm import _core
from llm_comm.dsl import ir
from llm_comm.dsl.kernel import Kernel, Site
from llm_comm.dsl.sums import sums_in_rank_order
from llm_comm.operations.operation import TORCH_TYPES
from llm_comm.planning.programs import LaunchChoice
from llm_comm.runtime.rendezvous import Rendezvous


class ProgramKernels:
    """A program for all types that all-reduces are of. Making one is collective.

    Args:
        name: As options and tables name it.
        program: A correct one of an all-reduce, which works in place, and whose tensors need not be symmetric.
        site: Of the communicator.
        rendezvous: Of the ranks.
        max_bytes: Of a message.

    Raises:
        RendezvousError: It cannot be compiled on a rank, or a rank has no memory for it. Raised on all ranks alike.
    """

    def __init__(self, name: str, program: ir.Program, site: Site, rendezvous: Rendezvous, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.data_types = tuple(TORCH_TYPES)
        self.sums_in_rank_order = sums_in_rank_order(program)
        self._kernels: dict[str, Kernel] = {}
        workspace = None
        for data_type, dtype in TORCH_TYPES.items():
            kernel = rendezvous.attempt(
                f"compilation of {name} for {data_type}",
                functools.partial(Kernel, program, site, dtype, max_bytes),
            )
            workspace = kernel.connect(workspace)
            self._kernels[data_type] = kernel
        self.workspace_bytes = kernel.workspace_bytes

    def why_not(self, choice: LaunchChoice) -> str:
        """See ``planning.programs.Kernels``."""
        # Those of all types have the same limits.
        return next(iter(self._kernels.values())).why_not(choice)

    def candidates(self, data_type: str, message_bytes: int) -> list[LaunchChoice]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].candidates(message_bytes)

    def grid(self, data_type: str, message_bytes: int, choice: LaunchChoice) -> tuple[int, int]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].grid(message_bytes, choice)

    def prepare(
        self, data_type: str, message_bytes: int, choice: LaunchChoice, counter: _core.Counter
    ) -> Callable[..., bool]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].prepare(message_bytes, message_bytes, counter, choice)
