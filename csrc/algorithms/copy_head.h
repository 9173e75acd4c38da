// The head of what is copied to a peer: a kernel stores it until the copy engine begins, and the copy takes the rest.
#pragma once

#include "llm_comm/line.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// To all peers together at most: 6 MiB, as measured (docs/experiments/channels.md).
inline constexpr uint32_t kMaxHeadLines = (6u << 20) / sizeof(Line);
// And of what goes to a peer at most one of so many equal pieces.
inline constexpr uint32_t kPiecesPerHead = 4;

}  // namespace llm_comm::inline LLM_COMM_TARGET
