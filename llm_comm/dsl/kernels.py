"""The kernels of one program for the types of its operation: what a communicator calls in place of an algorithm."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from llm_comm import _core
from llm_comm.dsl import ir
from llm_comm.dsl.kernel import Kernel, Site, Workspace, load_kernel
from llm_comm.dsl.sums import sums_in_rank_order
from llm_comm.operations.operation import TORCH_TYPES
from llm_comm.planning.programs import LaunchChoice


class ProgramKernels:
    """A program for all types that calls of its operation are of. Making one is collective.

    Args:
        name: As options and tables name it.
        program: A correct one of an all-reduce, an all-gather or a reduce-scatter, which works in place, and whose
            tensors need not be symmetric.
        site: Of the communicator.
        max_bytes: Of the larger one of input and output.

    Raises:
        RendezvousError: As of ``load_kernel``. Raised on all ranks alike.
    """

    def __init__(self, name: str, program: ir.Program, site: Site, max_bytes: int) -> None:
        operation = program.operation
        self.operation = operation.value
        self._inputs, self._outputs = (
            program.world if is_parted else 1 for is_parted in (operation.has_parted_input, operation.has_parted_output)
        )
        self.max_bytes = max_bytes // max(self._inputs, self._outputs)
        # What is moved is bytes, of whatever type.
        types = TORCH_TYPES if operation.adds_up else {"byte": torch.uint8}
        self.data_types = tuple(types)
        self.sums_in_rank_order = sums_in_rank_order(program)
        self._kernels: dict[str, Kernel] = {}
        workspace: Workspace | None = None
        for data_type, dtype in types.items():
            make = functools.partial(Kernel, program, site, dtype, max_bytes)
            kernel, workspace = load_kernel(f"{name} for {data_type}", make, site, workspace)
            self._kernels[data_type] = kernel
        self.workspace_bytes = kernel.workspace_bytes

    def why_not(self, choice: LaunchChoice) -> str:
        """See ``planning.programs.Kernels``."""
        # Those of all types have the same limits.
        return next(iter(self._kernels.values())).why_not(choice)

    def candidates(self, data_type: str, message_bytes: int) -> list[LaunchChoice]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].candidates(self._whole(message_bytes))

    def grid(self, data_type: str, message_bytes: int, choice: LaunchChoice) -> tuple[int, int]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].grid(self._whole(message_bytes), choice)

    def prepare(
        self, data_type: str, message_bytes: int, choice: LaunchChoice, counter: _core.Counter
    ) -> Callable[..., bool]:
        """See ``planning.programs.Kernels``."""
        kernel = self._kernels[data_type]
        return kernel.prepare(message_bytes * self._inputs, message_bytes * self._outputs, counter, choice)

    def _whole(self, message_bytes: int) -> int:
        """Bytes of all parts, as a kernel counts a message."""
        return message_bytes * max(self._inputs, self._outputs)
