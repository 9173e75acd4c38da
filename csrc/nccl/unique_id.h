// Content of an ncclUniqueId of this library (address of the hub and the secret by which ranks are recognized), and the
// messages that open a connection to the hub.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>

#include "nccl/nccl_types.h"

namespace llm_comm::nccl {

using Secret = std::array<unsigned char, 32>;

struct HubAddress {
  sockaddr_storage address;
  Secret secret;
};

ncclUniqueId to_id(const HubAddress& hub_address);
// Empty if the id was made by another library or holds no address.
std::optional<HubAddress> from_id(const ncclUniqueId& id);

// First message of a rank.
struct Hello {
  static constexpr uint64_t kMagic = 0x0002'4d4d'4f43'4c4c;  // "LLCOMM", version 2
  uint64_t magic;
  Secret secret;
  uint32_t rank;
  uint32_t world;
};

// The hub's immediate answer to a Hello, one byte. A rank that is disconnected without an answer repeats its hello.
enum class Answer : char {
  kKnown = '+',     // accepted; the hub keeps this connection until the rank closes it
  kUnknown = '?',   // other secret, or other version of this library
  kRejected = '-',  // this rank is connected already, or gave another number of ranks
};

// The hub's second answer, sent when every rank has connected.
struct Welcome {
  uint64_t has_real_id;
  ncclUniqueId real_id;
};

// Maximum message of a rank in a round. A rank that announces more is disconnected.
inline constexpr uint32_t kMaxMessageBytes = 4096;
inline constexpr uint32_t kMaxRanks = 1 << 16;

}  // namespace llm_comm::nccl
