// Tensors in the symmetric heap, as kernels see them: a rank tells its peers the place of its tensor (workspace_layout.h), and each
// finds there what it has mapped itself.
#pragma once

#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Where the tensor of `rank` at `place` lies, as this rank maps it. The place is that of a tensor.
LLM_COMM_DEVICE char* address_of(const DeviceComm& comm, uint32_t rank, uint64_t place) {
  const auto* const segments = reinterpret_cast<char* const*>(comm.workspace[comm.rank] + kHeapOffset);
  char* const segment = load_plain(segments + (place >> kPlaceOffsetBits) * kMaxWorldSize + rank);
  return segment + (place & ((uint64_t{1} << kPlaceOffsetBits) - 1));
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
