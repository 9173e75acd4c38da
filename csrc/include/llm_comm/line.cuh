// Encodings of 16-byte lines that carry their own readiness (the LL protocol). The receiver polls the data itself: no
// barrier, no fence. Used by LL sessions, packets of MemoryChannel and port requests.
//
// - Sentinel: 16 bytes of payload. A word that has not arrived reads kSentinel. The receiver resets the line to the
//   sentinel
// after use. TensorRT-LLM's one-shot all-reduce uses the same idea (Lamport's single-writer signalling) with the
// sentinel -0.0, which costs a value. The sentinel here is a NaN that arithmetic never returns.
// - Flag: 8 bytes of payload and two copies of a 4-byte flag, NCCL's LL format. Nothing has to be reset. The flag must
// differ from the flag of the previous use of the line.
//
// Atomicity that each encoding needs: sentinel, each 4-byte word; flag, the 8 bytes of a word and its flag.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// All bits set: a NaN in bf16, fp16 and fp32, so it works whatever type the next message in the slot has. memset(0xFF)
// writes it. Hardware arithmetic returns 0x7FFF and 0x7FFFFFFF for NaN, so only a caller's own data can equal the
// sentinel.
inline constexpr uint32_t kSentinel = 0xFFFFFFFFu;

LLM_COMM_DEVICE Line sentinel_line() { return {{kSentinel, kSentinel, kSentinel, kSentinel}}; }

// Makes a line safe to send. A word equal to the sentinel becomes kSentinel - 1, which is a NaN in every type too (for
// bf16 and fp16: in both halves). Every other word keeps its bits, -0.0 and subnormals included.
LLM_COMM_DEVICE Line encode_sentinel(Line line) {
  for (int i = 0; i < 4; ++i) line.word[i] = line.word[i] < kSentinel - 1 ? line.word[i] : kSentinel - 1;
  return line;
}

// Result of ambiguous_words(). A word is ambiguous if it equals the sentinel or kSentinel - 1: both have the same
// encoding. Bit i of `mask` is set if word i is the sentinel.
struct AmbiguousWords {
  bool are_there;
  uint32_t mask;
};

// Takes the line before it is encoded.
LLM_COMM_DEVICE AmbiguousWords ambiguous_words(Line line) {
  AmbiguousWords words{false, 0};
  for (uint32_t i = 0; i < 4; ++i) {
    words.are_there |= line.word[i] >= kSentinel - 1;
    words.mask |= line.word[i] == kSentinel ? 1u << i : 0u;
  }
  return words;
}

LLM_COMM_DEVICE bool has_ambiguous_words(Line encoded) {
  bool found = false;
  for (uint32_t i = 0; i < 4; ++i) found |= encoded.word[i] == kSentinel - 1;
  return found;
}

LLM_COMM_DEVICE Line decode_ambiguous(Line encoded, uint32_t mask) {
  for (uint32_t i = 0; i < 4; ++i) encoded.word[i] |= mask >> i & 1;
  return encoded;
}

// Compares bits, not floats: no NaN compares equal. Tests all four words because a 16-byte store may arrive in parts.
LLM_COMM_DEVICE bool has_arrived(Line line) {
  const uint32_t low = line.word[0] > line.word[1] ? line.word[0] : line.word[1];
  const uint32_t high = line.word[2] > line.word[3] ? line.word[2] : line.word[3];
  return (low > high ? low : high) != kSentinel;
}

// Flag encoding: 8 bytes of payload in a 16-byte line. Send it with store_packet_relaxed and poll it with
// load_packet_relaxed, which access each 8-byte half atomically. PTX promises no atomicity for the whole vector, so
// each half carries a copy of the flag.
struct FlagLine {
  uint32_t data[2];

  static LLM_COMM_DEVICE Line encode(FlagLine payload, uint32_t flag) {
    return {{payload.data[0], flag, payload.data[1], flag}};
  }
  static LLM_COMM_DEVICE bool has_arrived(Line line, uint32_t flag) {
    return line.word[1] == flag && line.word[3] == flag;
  }
  static LLM_COMM_DEVICE FlagLine decode(Line line) { return {{line.word[0], line.word[2]}}; }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
