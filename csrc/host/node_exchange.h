// NodeExchange: sends bytes between partner ranks on different nodes. Port channels whose proxy uses UCX (host/ucx).
// Data is staged in host memory that the device maps, so the network card need not access GPU memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace llm_comm::host {

struct NodeExchangeOptions {
  uint32_t rank;  // this node's index among the partners
  uint32_t ranks;
  uint64_t part_bytes;  // bytes of one block, a multiple of 16; host memory holds 64 of them for each partner
  double timeout_s;     // bound of every wait of a kernel
};

// Data of a call to and from one partner, or this rank itself.
struct NodePiece {
  uint64_t from;       // offset in the input
  uint64_t bytes_out;  // may be 0, like every size here
  uint64_t to;         // offset in the output
  uint64_t bytes_in;   // equals that partner's bytes_out for this rank
};

// Calls of several threads are serialized; connect() must come first. Does not work in a forked child of its process.
class NodeExchange {
 public:
  virtual ~NodeExchange() = default;

  // Connection data for the partners' connect(). Secret: whoever has it can write to this memory.
  virtual std::string address() const = 0;
  // Connects to all partners; call it once. `addresses`: by partner, their address(); this rank's own is ignored.
  // `names`: by partner, for messages. Throws std::runtime_error.
  virtual void connect(const std::vector<std::string>& addresses, const std::vector<std::string>& names) = 0;
  // Enqueues a call on a stream; graphs may capture it. `pieces`: by partner. Returns false if the exchange has failed;
  // error() says why. On an emulated device the call is complete on return. Throws std::invalid_argument or
  // std::runtime_error.
  virtual bool run(uint64_t input, uint64_t output, const std::vector<NodePiece>& pieces, uint64_t stream) = 0;
  // Sets the time-out of later calls.
  virtual void set_limit(double timeout_s) = 0;
  // Reason of the failure; empty while the exchange works. Thread-safe.
  virtual std::string error() const = 0;
  // Ends all waits soon. Thread-safe.
  virtual void abort() = 0;
  virtual bool has_been_captured() const = 0;
  // Waits for a running call, then at most one second for the partners to finish, and closes the connections. May be
  // called repeatedly.
  virtual void close() = 0;
};

std::unique_ptr<NodeExchange> make_emulated_node_exchange(const NodeExchangeOptions& options);
[[gnu::visibility("default")]] std::unique_ptr<NodeExchange> make_cuda_node_exchange(const NodeExchangeOptions& options,
                                                                                     int device);

}  // namespace llm_comm::host
