// Tensors in the symmetric heap, as kernels see them. Ranks exchange the symmetric offset ("place", workspace_layout.h)
// of a tensor; each rank translates it to the address where it maps the tensor.
#pragma once

#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Address at which this rank maps the tensor of `rank` at `place`. The place must be that of a tensor, not kNoPlace.
LLM_COMM_DEVICE char* address_of(const DeviceComm& comm, uint32_t rank, uint64_t place) {
  const auto* const segments = reinterpret_cast<char* const*>(comm.workspace[comm.rank] + kHeapOffset);
  char* const segment = load_plain(segments + (place >> kPlaceOffsetBits) * kMaxWorldSize + rank);
  return segment + (place & ((uint64_t{1} << kPlaceOffsetBits) - 1));
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
