// Tensors in the symmetric heap, as kernels see them. Ranks exchange the symmetric offset of a tensor
// (workspace_layout.h). Each rank translates it to the address where it maps the tensor.
#pragma once

#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Address at which this rank maps the tensor of `rank` at `symmetric_offset`, which must be that of a tensor, not
// kNoSymmetricOffset.
LLM_COMM_DEVICE char* address_of(const DeviceComm& comm, uint32_t rank, uint64_t symmetric_offset) {
  const auto* const windows = reinterpret_cast<char* const*>(comm.workspace[comm.rank] + kHeapOffset);
  char* const window = load_plain(windows + (symmetric_offset >> kWindowOffsetBits) * kMaxWorldSize + rank);
  return window + (symmetric_offset & ((uint64_t{1} << kWindowOffsetBits) - 1));
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
