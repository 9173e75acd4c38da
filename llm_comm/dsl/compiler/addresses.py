"""Where the memory of channels lies on each rank, as this rank maps it: kernels get it as arguments."""

from __future__ import annotations

import torch

from llm_comm.dsl.compiler.kernel import compile_kernel

_NAME = "dsl_addresses"
_SOURCE = f"""
#include "llm_comm/channels.cuh"
using namespace llm_comm;

// CommState of this rank, then the memory of this rank, of the next one, ...
extern "C" LLM_COMM_KERNEL(32) {_NAME}(const Channels* channels, uint64_t* addresses) {{
  if (block_index() != 0 || thread_index() != 0) return;
  const DeviceComm& comm = channels->comm;
  addresses[0] = reinterpret_cast<uint64_t>(state_of(comm));
  for (uint32_t i = 0; i < comm.world_size; ++i) {{
    const uint32_t rank = (comm.rank + i) % comm.world_size;
    addresses[1 + i] = reinterpret_cast<uint64_t>(address_of(comm, rank, channels->memory));
  }}
}}
"""


def addresses_of(handle: int, world: int, device: torch.device) -> tuple[int, list[int]]:
    """The address of this rank's CommState, and those of the memory on ranks rank, rank + 1, ...

    Args:
        handle: Of channels.
        world: Number of ranks.
        device: That of the communicator.
    """
    found = torch.zeros(1 + world, dtype=torch.int64, device=device)
    compile_kernel(_SOURCE, _NAME, device)(1, 1, (handle, found.data_ptr()), 0)
    state, *memory = found.tolist()
    return state, memory
