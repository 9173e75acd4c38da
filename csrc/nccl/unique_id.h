// What is in an ncclUniqueId of this library: where the ranks meet, and the secret by which they know each other. And what they
// say when they connect.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>

#include "nccl/nccl_types.h"

namespace llm_comm::nccl {

using Secret = std::array<unsigned char, 32>;

struct MeetingPlace {
  sockaddr_storage address;
  Secret secret;
};

ncclUniqueId to_id(const MeetingPlace& place);
// Nothing where the id is that of another library, or holds no address.
std::optional<MeetingPlace> from_id(const ncclUniqueId& id);

// The first bytes of a connection.
struct Hello {
  static constexpr uint64_t kMagic = 0x0002'4d4d'4f43'4c4c;  // "LLCOMM", version 2
  uint64_t magic;
  Secret secret;
  uint32_t rank;
  uint32_t world;
};

// The hub's answer to a Hello, at once, of one byte. A rank that is cut off without an answer says hello again.
enum class Answer : char {
  kKnown = '+',       // the hub keeps this connection until the rank closes it
  kUnknown = '?',     // another secret, or another version of this library
  kNoPlaceFor = '-',  // another rank has come under this number, or with another number of ranks
};

// The hub's second answer, once all ranks have come.
struct Welcome {
  uint64_t has_real_id;
  ncclUniqueId real_id;
};

// Of a message of a rank in a round. Whoever announces more is cut off.
inline constexpr uint32_t kMaxMessageBytes = 4096;
inline constexpr uint32_t kMaxRanks = 1 << 16;

}  // namespace llm_comm::nccl
