// Carries out what port channels ask for over a network, by one-sided puts of UCX: RDMA where UCX finds a network card that has it,
// TCP or shared memory else. UCX_TLS and UCX_NET_DEVICES choose, as for any program over UCX.
//
// Ranks tell each other addresses by what brings them together (address(), connect()). Whoever has them can write to the memory;
// nobody else is told the keys. UCX neither encrypts what it sends nor asks who connects to it.
//
//   order    of one peer: a fence of UCX stands before each signal, and before a put to where the one before it has put
//   echo     a flush of the endpoint has ended
//   end      who ends says so, by a word to each peer (a farewell). A connection that ends without one is an error, which names
//            the peer
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/proxy.h"
#include "host/ucx/ucp_api.h"

namespace llm_comm::host {

class UcxTransport final : public Transport {
 public:
  // What the ranks are to each other.
  struct Peer {
    std::string address;  // what its address() has returned; of this rank unused
    std::string name;     // for messages: "rank 3 (node 1, worker-7)"
  };

  // `memory`: what peers put to, and what this rank puts from; it must stay. Throws std::runtime_error where UCX is missing, or
  // cannot be used.
  UcxTransport(char* memory, uint64_t bytes);
  ~UcxTransport() override;
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;

  std::string address() const;
  // By rank. `has_failed`: whether this rank has; then nobody is told that it ends. Throws std::runtime_error where an address cannot
  // be used. Connections are made when they are used first.
  void connect(uint32_t rank, const std::vector<Peer>& peers, std::function<bool()> has_failed);
  // The memory of a peer, for put() and signal(): an address in the process of the peer.
  char* memory_of(uint32_t peer) const { return lanes_.at(peer)->memory; }

  void begin(uint32_t) override;  // throws after finish()
  void put(uint32_t peer, char* to, const char* from, uint64_t bytes) override;
  void signal(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) override;
  void echo(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) override;
  bool progress() override;
  void finish() override;

 private:
  struct Echo {
    void* flush;  // nullptr: has ended
    uint64_t* to;
    std::vector<uint64_t> values;
  };
  struct Range {
    uint64_t begin;
    uint64_t end;
  };
  struct Lane {
    std::string name;
    char* memory = nullptr;
    uint64_t farewell = 0;  // where this rank says that it ends
    ucp::Endpoint endpoint = nullptr;
    ucp::RemoteKey key_of_memory = nullptr;
    ucp::RemoteKey key_of_farewells = nullptr;
    ucp::Status error = ucp::kOk;
    uint64_t pending = 0;         // puts that UCX has not done with
    std::vector<Range> unfenced;  // what has been put since the last fence
    std::deque<Echo> echoes;
  };
  struct Sent;

  const ucp::Functions& ucp_;
  ucp::Context context_ = nullptr;
  ucp::Worker worker_ = nullptr;
  char* memory_;
  uint64_t bytes_;
  ucp::Memory registered_ = nullptr;
  ucp::Memory registered_farewells_ = nullptr;
  std::unique_ptr<uint64_t[]> farewells_;  // by rank: other than 0 once it has said that it ends
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::function<bool()> has_failed_;
  bool has_thrown_ = false;

  void set_up();
  void say_farewell();
  void tear_down();  // more than once is no error
  void connect(Lane& lane, uint32_t rank, const std::string& address);
  void check(ucp::Status status, const char* what) const;
  ucp::Memory register_memory(void* memory, uint64_t bytes) const;
  std::string key_of(ucp::Memory memory) const;
  Lane& open_lane(uint32_t peer);
  void fence();
  void send(Lane& lane, const void* from, uint64_t bytes, uint64_t to, ucp::RemoteKey key, ucp::Memory own,
            std::unique_ptr<Sent> sent);
  void send_word(Lane& lane, uint64_t value, uint64_t to, ucp::RemoteKey key);
  bool advance();
  bool has_said_farewell(uint32_t peer) const;
  void complete_echoes(Lane& lane);
  bool is_live(uint32_t peer) const;
  [[noreturn]] void fail(const Lane& lane, ucp::Status status);
  template <class Done>
  bool wait_until(Done done, std::chrono::steady_clock::time_point deadline);
};

}  // namespace llm_comm::host
