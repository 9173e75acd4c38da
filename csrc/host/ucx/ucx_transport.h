// UcxTransport: executes port-channel requests over a network by one-sided puts of UCX. UCX uses RDMA if it finds a
// network card for it, else TCP or shared memory; UCX_TLS and UCX_NET_DEVICES choose, as for any program with UCX.
// NodeExchange uses this transport.
//
// Ranks exchange addresses themselves (address(), connect()). An address contains the memory keys, so its holder can
// write to the memory: keep it secret. UCX neither encrypts nor authenticates.
//
//   order             a UCX fence precedes each signal, and each put whose range overlaps an unfenced one
//   local completion  reported when a flush of the endpoint has completed
//   end               a rank that ends sends an end word ("farewell") to each peer. A connection that closes without
//                     one is an error that names the peer
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
  // Connection data of a rank.
  struct Peer {
    std::string address;  // result of its address(); unused for this rank
    std::string name;     // for messages: "rank 3 (node 1, worker-7)"
  };

  // `memory`: destination of the peers' puts and source of this rank's; must outlive the object. Throws
  // std::runtime_error if UCX is missing or unusable.
  UcxTransport(char* memory, uint64_t bytes);
  ~UcxTransport() override;
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;

  std::string address() const;
  // `peers`: by rank. `has_failed`: if it returns true at the end, no end words are sent. Throws std::runtime_error for
  // an unusable address. Connections are established at their first use.
  void connect(uint32_t rank, const std::vector<Peer>& peers, std::function<bool()> has_failed);
  // Address of a peer's memory in the peer's process, as destination for put() and signal().
  char* memory_of(uint32_t peer) const { return lanes_.at(peer)->memory; }

  void begin(uint32_t) override;  // throws after finish()
  void put(uint32_t peer, char* to, const char* from, uint64_t bytes) override;
  void signal(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) override;
  void notify_local_completion(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) override;
  bool progress() override;
  void finish() override;

 private:
  struct LocalCompletion {
    void* flush;  // nullptr: completed
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
    uint64_t farewell = 0;  // address of this rank's end word at the peer
    ucp::Endpoint endpoint = nullptr;
    ucp::RemoteKey key_of_memory = nullptr;
    ucp::RemoteKey key_of_farewells = nullptr;
    ucp::Status error = ucp::kOk;
    uint64_t pending = 0;         // puts that UCX has not completed
    std::vector<Range> unfenced;  // ranges put since the last fence
    std::deque<LocalCompletion> local_completions;
  };
  struct Sent;

  const ucp::Functions& ucp_;
  ucp::Context context_ = nullptr;
  ucp::Worker worker_ = nullptr;
  char* memory_;
  uint64_t bytes_;
  ucp::Memory registered_ = nullptr;
  ucp::Memory registered_farewells_ = nullptr;
  std::unique_ptr<uint64_t[]> farewells_;  // end words of the peers, by rank: non-zero once received
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::function<bool()> has_failed_;
  bool has_thrown_ = false;

  void set_up();
  void say_farewell();
  void tear_down();  // may be called repeatedly
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
  void poll_local_completions(Lane& lane);
  bool is_live(uint32_t peer) const;
  [[noreturn]] void fail(const Lane& lane, ucp::Status status);
  template <class Done>
  bool wait_until(Done done, std::chrono::steady_clock::time_point deadline);
};

}  // namespace llm_comm::host
