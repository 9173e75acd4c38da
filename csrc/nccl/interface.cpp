#include "nccl/interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <cstdlib>
#include <cstring>
#include <sstream>

#include "nccl/failure.h"
#include "nccl/sockets.h"

namespace llm_comm::nccl {

namespace {

bool begins_with(const std::string& text, const std::string& prefix) { return text.rfind(prefix, 0) == 0; }

std::vector<Interface> interfaces(int family) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) fail_with_errno("getifaddrs");
  std::vector<Interface> found;
  for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || (at->ifa_flags & IFF_UP) == 0) continue;
    const int of = at->ifa_addr->sa_family;
    if ((of != AF_INET && of != AF_INET6) || (family != AF_UNSPEC && of != family)) continue;
    Interface one{at->ifa_name, {}};
    std::memcpy(&one.address, at->ifa_addr, of == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    // Link-local addresses are skipped: the id would have to carry their scope.
    const auto& six = reinterpret_cast<const sockaddr_in6&>(one.address);
    if (of == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six.sin6_addr)) continue;
    found.push_back(one);
  }
  freeifaddrs(first);
  return found;
}

std::string variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

}  // namespace

std::vector<Interface> choose(const std::vector<Interface>& all, const std::string& wish) {
  std::vector<Interface> chosen;
  if (wish.empty()) {
    for (const bool with_docker : {false, true}) {
      for (const bool with_loopback : {false, true}) {
        for (const Interface& one : all) {
          const bool is_docker = begins_with(one.name, "docker");
          const bool is_loopback = begins_with(one.name, "lo");
          if (is_docker == with_docker && is_loopback == with_loopback) chosen.push_back(one);
        }
        if (!chosen.empty()) return chosen;
      }
    }
    return chosen;
  }
  std::string list = wish;
  const bool leaves_out = list[0] == '^';
  if (leaves_out) list.erase(0, 1);
  const bool is_exact = !list.empty() && list[0] == '=';
  if (is_exact) list.erase(0, 1);
  for (const Interface& one : all) {
    bool matches = false;
    std::istringstream names(list);
    for (std::string name; std::getline(names, name, ',');) {
      if (name.empty()) continue;
      matches |= is_exact ? one.name == name : begins_with(one.name, name);
    }
    if (matches != leaves_out) chosen.push_back(one);
  }
  return chosen;
}

Interface interface_of_host() {
  const std::string family = variable("NCCL_SOCKET_FAMILY");
  const std::string wish = variable("NCCL_SOCKET_IFNAME");
  const auto all = interfaces(family == "AF_INET" ? AF_INET : family == "AF_INET6" ? AF_INET6 : AF_UNSPEC);
  const auto chosen = choose(all, wish);
  if (chosen.empty()) {
    throw Failure(ncclSystemError, "this host has no network interface" +
                                       (wish.empty() ? std::string() : " that NCCL_SOCKET_IFNAME=" + wish + " allows"));
  }
  return chosen.front();
}

socklen_t length_of(const sockaddr_storage& address) {
  return address.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

std::string describe(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  const bool is_four = address.ss_family == AF_INET;
  const auto& four = reinterpret_cast<const sockaddr_in&>(address);
  const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
  const void* const bytes = is_four ? static_cast<const void*>(&four.sin_addr) : &six.sin6_addr;
  inet_ntop(address.ss_family, bytes, text, sizeof(text));
  // Not "[" + std::string(text): GCC 12 warns of an overlapping copy (GCC bug 105651).
  const std::string host = is_four ? text : std::string("[").append(text).append("]");
  return host + ":" + std::to_string(ntohs(is_four ? four.sin_port : six.sin6_port));
}

}  // namespace llm_comm::nccl
