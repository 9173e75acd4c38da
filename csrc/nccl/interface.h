// Choice of the network interface on which the hub listens.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

namespace llm_comm::nccl {

struct Interface {
  std::string name;
  sockaddr_storage address;  // IPv4 or IPv6, without a port
};

// Filters interfaces by NCCL_SOCKET_IFNAME, as NCCL reads it: comma-separated prefixes; after "=" whole names; after
// "^" names to exclude. Empty: any interface except loopback and docker's, or these if there is no other.
std::vector<Interface> choose(const std::vector<Interface>& all, const std::string& wish);

// Interface of this host by NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY (AF_INET or AF_INET6). Throws Failure if there is
// none.
Interface interface_of_host();

socklen_t length_of(const sockaddr_storage& address);
// Text form, for example "10.0.0.1:1234".
std::string describe(const sockaddr_storage& address);

}  // namespace llm_comm::nccl
