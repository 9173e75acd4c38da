// Lines that carry their own readiness (the LL protocol): the receiver polls the data itself, no barrier, no fence.
//
// Two encodings of 16 bytes:
//  * sentinel: 16 bytes of payload. A word that has not arrived reads kSentinel; the receiver puts the
//  sentinel back
//    after use (re-arms). The idea is Lamport's single-writer signalling as TensorRT-LLM's one-shot
//    all-reduce uses it; there the sentinel is -0.0, which costs a value. Here it is a NaN that arithmetic
//    never returns.
//  * flag: 8 bytes of payload and two copies of a 4-byte flag, NCCL's LL format. Nothing to re-arm; the flag
//  must
//    differ from that of the last use of the line.
//
// What each relies on to be written as a unit: sentinel, 4-byte words; flag, the 8 bytes of a word and its flag.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// All bits set: a NaN in bf16, fp16 and fp32, whatever the type of the next message in the slot, and what
// memset(0xFF) writes. Hardware arithmetic returns 0x7FFF and 0x7FFFFFFF for NaN, so only caller's data can equal it.
inline constexpr uint32_t kSentinel = 0xFFFFFFFFu;

LLM_COMM_DEVICE Line armed_line() { return {{kSentinel, kSentinel, kSentinel, kSentinel}}; }

// Makes a line safe to send: a word equal to the sentinel becomes the NaN beside it, which is still a NaN in
// every type (bf16 and fp16: both halves). Every other word, -0.0 and subnormals included, keeps its bits.
LLM_COMM_DEVICE Line encode_sentinel(Line line) {
  for (int i = 0; i < 4; ++i) line.word[i] = line.word[i] < kSentinel - 1 ? line.word[i] : kSentinel - 1;
  return line;
}

// A line of any bytes, in which an encoded word may be the sentinel or the word beside it. `mask` tells which: bit i, word i.
struct AmbiguousWords {
  bool are_there;
  uint32_t mask;
};

// Of a line before it is encoded.
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

// Compares bits: a floating-point test would take subnormals for the sentinel -0.0 under flush-to-zero, and
// no NaN compares equal. All four words are looked at because a 16-byte store may arrive in parts.
LLM_COMM_DEVICE bool has_arrived(Line line) {
  const uint32_t low = line.word[0] > line.word[1] ? line.word[0] : line.word[1];
  const uint32_t high = line.word[2] > line.word[3] ? line.word[2] : line.word[3];
  return (low > high ? low : high) != kSentinel;
}

// 8 bytes of payload per 16-byte line, to be sent by store_packet_relaxed and polled by load_packet_relaxed: each 8-byte
// half is written and read as a unit (PTX makes no promise for a vector as a whole), so each carries a copy of the flag.
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
