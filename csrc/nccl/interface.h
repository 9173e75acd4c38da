// Where ranks of other processes, or of other hosts, reach this one.
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

// As NCCL reads NCCL_SOCKET_IFNAME: prefixes with commas between; "=" before them: whole names; "^": those are left out. Empty: any but
// loopback and docker's, or those where there is no other.
std::vector<Interface> choose(const std::vector<Interface>& all, const std::string& wish);

// Of this host, by NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY (AF_INET or AF_INET6). Throws Failure where there is none.
Interface interface_of_host();

socklen_t length_of(const sockaddr_storage& address);
// "10.0.0.1:1234".
std::string describe(const sockaddr_storage& address);

}  // namespace llm_comm::nccl
