"""Hooks of all-gathers and reduce-scatters in SGLang's groups: llm_comm runs the calls that it accepts.

Five methods of ``GroupCoordinator`` end in NCCL, and are hooked:

* ``_all_gather_into_tensor`` and ``_reduce_scatter_tensor`` are called inside custom operators, by
  ``all_gather_into_tensor``, ``reduce_scatter_tensor`` and what is built on them: attention data parallelism, context
  parallelism, scattered layers.
* ``all_gatherv`` and ``reduce_scatterv`` take shards of different sizes.
* ``all_gather`` (logits, column-parallel linear layers) concatenates along the first dimension, then copies into the
  wanted layout. llm_comm writes that layout directly.

The hooks are set when llm_comm serves the first group. They act only on groups with the attribute
``llm_comm_gather_scatter``.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import parallel_state

from llm_comm.integrations.gather_scatter import EngineGatherScatter

#: Name of the attribute that a served group has.
ATTRIBUTE = "llm_comm_gather_scatter"

# The operator is opaque to torch.compile, like SGLang's operator around an all-gather, so llm_comm can decide at run
# time. The library is a fragment because ``fused_norm.py`` defines operators in it too, and need not be loaded.
_library = torch.library.Library("llm_comm_sglang", "FRAGMENT")
_library.define(
    "all_gather(Tensor x, int dim, int world_size, str group_name) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _of(group: Any) -> EngineGatherScatter | None:
    served: EngineGatherScatter | None = getattr(group, ATTRIBUTE, None)
    return served


def all_gather_into_tensor(theirs: Any, group: Any, output: torch.Tensor, input: torch.Tensor) -> Any:
    """Hook of ``GroupCoordinator._all_gather_into_tensor``."""
    ours = _of(group)
    if ours is None or ours.all_gather("all_gather_into_tensor", input, out=output) is None:
        return theirs(group, output, input)
    return None


def reduce_scatter_tensor(theirs: Any, group: Any, output: torch.Tensor, input: torch.Tensor) -> Any:
    """Hook of ``GroupCoordinator._reduce_scatter_tensor``."""
    ours = _of(group)
    # Flatten: SGLang's call goes to NCCL, which splits by elements, whatever the shapes are.
    if ours is None or ours.reduce_scatter("reduce_scatter_tensor", input.reshape(-1), out=output) is None:
        return theirs(group, output, input)
    return output


def all_gather(
    theirs: Any,
    group: Any,
    input_: torch.Tensor,
    dim: int = -1,
    output_tensor_list: list[torch.Tensor] | None = None,
) -> Any:
    """Hook of ``GroupCoordinator.all_gather``. Compiled graphs get an operator, which decides at run time."""
    ours = _of(group)
    if ours is None or output_tensor_list is not None:
        return theirs(group, input_, dim, output_tensor_list)
    if torch.compiler.is_compiling():
        return torch.ops.llm_comm_sglang.all_gather(input_, dim, group.world_size, group.unique_name)
    result = ours.all_gather("all_gather", input_, dim)
    return theirs(group, input_, dim) if result is None else result


def all_gatherv(
    theirs: Any,
    group: Any,
    input_: torch.Tensor | list[torch.Tensor],
    sizes: list[int] | None = None,
    output: torch.Tensor | None = None,
) -> Any:
    """Hook of ``GroupCoordinator.all_gatherv``. Like SGLang's method it returns a list, also for one tensor."""
    ours = _of(group)
    inputs = [input_] if isinstance(input_, torch.Tensor) else input_
    if ours is None or (inputs is input_ and output is not None):  # SGLang raises its own error for a list with output
        return theirs(group, input_, sizes, output)
    results = [ours.all_gather("all_gatherv", x, 0, sizes, output) for x in inputs]
    declined = [place for place, result in enumerate(results) if result is None]
    if declined:  # in one call, which NCCL runs as one grouped operation
        left = [inputs[place] for place in declined] if inputs is input_ else input_
        for place, result in zip(declined, theirs(group, left, sizes, output), strict=True):
            results[place] = result
    return results


def reduce_scatterv(
    theirs: Any,
    group: Any,
    input_: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: list[int] | None = None,
) -> Any:
    """Hook of ``GroupCoordinator.reduce_scatterv``."""
    ours = _of(group)
    result = None if ours is None else ours.reduce_scatter("reduce_scatterv", input_, 0, sizes, output)
    return theirs(group, input_, output, sizes) if result is None else result


def _all_gather(x: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    # Find the group by its name, like SGLang's operators: a compiled graph cannot hold the object.
    reference = parallel_state._groups.get(group_name)
    group = None if reference is None else reference()
    if group is None:
        raise ValueError(f"there is no group {group_name!r} in this process")
    return group.all_gather(x, dim)  # type: ignore[no-any-return]


def _fake_all_gather(x: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= world_size
    return x.new_empty(shape)


_library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
torch.library.register_fake("llm_comm_sglang::all_gather", _fake_all_gather, lib=_library)
