"""The kernels of one program for the types of an all-reduce: what a communicator calls in place of an algorithm."""

from __future__ import annotations

from collections.abc import Callable

from llm_comm.dsl import ir
from llm_comm.dsl.kernel import Kernel, Site
from llm_comm.operations.operation import TORCH_TYPES
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
        self._kernels: dict[str, Kernel] = {}
        workspace = None
        for data_type, dtype in TORCH_TYPES.items():
            kernel = rendezvous.attempt(
                f"compilation of {name} for {data_type}",
                lambda dtype=dtype: Kernel(program, site, dtype, max_bytes),  # type: ignore[misc]
            )
            workspace = kernel.connect(workspace)
            self._kernels[data_type] = kernel
        self.workspace_bytes = kernel.workspace_bytes

    def grid(self, data_type: str, message_bytes: int) -> tuple[int, int]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].grid(message_bytes)

    def prepare(self, data_type: str, message_bytes: int) -> Callable[..., bool]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].prepare(message_bytes, message_bytes)
