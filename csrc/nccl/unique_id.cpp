#include "nccl/unique_id.h"

#include <netinet/in.h>

#include <cstring>

namespace llm_comm::nccl {

namespace {

constexpr char kMagic[8] = {'L', 'L', 'M', 'C', 'O', 'M', 'M', 1};

struct Layout {
  char magic[8];
  uint16_t family;  // 4 or 6
  uint16_t port;    // network byte order
  uint32_t unused;
  unsigned char address[16];
  Secret secret;
};
static_assert(sizeof(Layout) <= NCCL_UNIQUE_ID_BYTES);

}  // namespace

ncclUniqueId to_id(const HubAddress& hub_address) {
  Layout layout{};
  std::memcpy(layout.magic, kMagic, sizeof(kMagic));
  if (hub_address.address.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(hub_address.address);
    layout.family = 4;
    layout.port = four.sin_port;
    std::memcpy(layout.address, &four.sin_addr, sizeof(four.sin_addr));
  } else {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(hub_address.address);
    layout.family = 6;
    layout.port = six.sin6_port;
    std::memcpy(layout.address, &six.sin6_addr, sizeof(six.sin6_addr));
  }
  layout.secret = hub_address.secret;
  ncclUniqueId id{};
  std::memcpy(id.internal, &layout, sizeof(layout));
  return id;
}

std::optional<HubAddress> from_id(const ncclUniqueId& id) {
  Layout layout;
  std::memcpy(&layout, id.internal, sizeof(layout));
  if (std::memcmp(layout.magic, kMagic, sizeof(kMagic)) != 0 || layout.port == 0) return std::nullopt;
  HubAddress hub_address{};
  if (layout.family == 4) {
    auto& four = reinterpret_cast<sockaddr_in&>(hub_address.address);
    four.sin_family = AF_INET;
    four.sin_port = layout.port;
    std::memcpy(&four.sin_addr, layout.address, sizeof(four.sin_addr));
  } else if (layout.family == 6) {
    auto& six = reinterpret_cast<sockaddr_in6&>(hub_address.address);
    six.sin6_family = AF_INET6;
    six.sin6_port = layout.port;
    std::memcpy(&six.sin6_addr, layout.address, sizeof(six.sin6_addr));
  } else {
    return std::nullopt;
  }
  hub_address.secret = layout.secret;
  return hub_address;
}

}  // namespace llm_comm::nccl
