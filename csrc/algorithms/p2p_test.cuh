// Kernel that writes a mark into the header of every peer's workspace, to prove at set-up that stores through
// the mappings arrive.
#pragma once

#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// First word of a mark. The others are sender, receiver and 0.
inline constexpr uint32_t kMarkWord = 0x70327000u;

// One block of at least world_size threads.
LLM_COMM_KERNEL(kMaxWorldSize) p2p_test(LLM_COMM_KERNEL_PARAM DeviceComm comm) {
  const uint32_t peer = thread_index();
  if (peer >= comm.world_size) return;
  store_line_relaxed(comm.workspace[peer] + kMarksOffset + comm.rank * sizeof(Line),
                     Line{{kMarkWord, comm.rank, peer, 0}});
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
