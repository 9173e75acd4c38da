// Size of the head of a copy to a peer. A kernel stores the head while the copy engine starts; the engine copies the
// rest.
#pragma once

#include "llm_comm/line.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Maximum for all peers together: 6 MiB, as measured (docs/experiments/channels.md).
inline constexpr uint32_t kMaxHeadLines = (6u << 20) / sizeof(Line);
// The head is at most 1 / kPiecesPerHead of what goes to a peer.
inline constexpr uint32_t kPiecesPerHead = 4;

}  // namespace llm_comm::inline LLM_COMM_TARGET
