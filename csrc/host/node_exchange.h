// What carries bytes between partners on different nodes: port channels whose proxy reaches a network by UCX (host/ucx). The data goes
// through host memory, which the device maps: no network card has to reach the memory of a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace llm_comm::host {

struct NodeExchangeOptions {
  uint32_t rank;  // among the partners: the node
  uint32_t ranks;
  uint64_t part_bytes;  // of a block, a multiple of 16; host memory is 64 of them for each other partner
  double timeout_s;     // bound of every wait of a kernel
};

// Of a call, with one partner, or with this rank itself.
struct NodePiece {
  uint64_t from;       // offset in the input
  uint64_t bytes_out;  // 0 is allowed, as in all of them
  uint64_t to;         // offset in the output
  uint64_t bytes_in;   // of the same partner's bytes_out for this rank
};

// Calls of several threads take turns; connect() comes before them. In a forked child of the process that made it, nothing works.
class NodeExchange {
 public:
  virtual ~NodeExchange() = default;

  // What the partners need for connect(). They must not show it to others: whoever has it can write to the memory.
  virtual std::string address() const = 0;
  // Once. By partner: what its address() has returned (this rank's own is not looked at), and how messages call it. Throws
  // std::runtime_error.
  virtual void connect(const std::vector<std::string>& addresses, const std::vector<std::string>& names) = 0;
  // Enqueues a call on a stream; graphs may capture it. `pieces` by partner. False: the exchange has failed, and error() says why.
  // On an emulated device it is over when it returns. Throws std::invalid_argument, std::runtime_error.
  virtual bool run(uint64_t input, uint64_t output, const std::vector<NodePiece>& pieces, uint64_t stream) = 0;
  // Of calls from now on.
  virtual void set_limit(double timeout_s) = 0;
  // Why nothing works any more; empty as long as it does. Beside a call, too.
  virtual std::string error() const = 0;
  // Ends what waits, soon. Beside a call, too.
  virtual void abort() = 0;
  virtual bool has_been_captured() const = 0;
  // Waits for a call that runs, then until partners have ended as well, a second at most, and ends the connections. More than once is
  // no error.
  virtual void close() = 0;
};

std::unique_ptr<NodeExchange> make_emulated_node_exchange(const NodeExchangeOptions& options);
[[gnu::visibility("default")]] std::unique_ptr<NodeExchange> make_cuda_node_exchange(const NodeExchangeOptions& options,
                                                                                     int device);

}  // namespace llm_comm::host
