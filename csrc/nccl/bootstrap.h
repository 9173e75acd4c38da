// Bootstrap: a rank's connection to the hub of its communicator (hub.h), over which the ranks exchange messages.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nccl/sockets.h"
#include "nccl/unique_id.h"

namespace llm_comm::nccl {

class Bootstrap {
 public:
  // Returns when all ranks have connected. Throws Failure if they do not within the limit. A hub that is flooded by
  // others may drop an unknown connection, so the rank repeats its hello until the hub answers.
  Bootstrap(const HubAddress& hub_address, int rank, int world, double limit_s);

  int rank() const { return rank_; }
  int world() const { return world_; }
  const Secret& secret() const { return secret_; }
  // Id of the real NCCL library, from the process that made our id; empty if it has no such library.
  const std::optional<ncclUniqueId>& real_id() const { return real_id_; }

  // Returns the messages of all ranks, by rank. Collective. Throws Failure if a rank is lost or late, and
  // std::invalid_argument for a message above kMaxMessageBytes. After a Failure all further exchanges fail at once: a
  // late answer would otherwise be taken for one of the next exchange.
  std::vector<std::string> exchange(std::string_view message);

  // Makes a waiting exchange and all later ones fail. Thread-safe.
  void interrupt() noexcept;
  // Readable, outside of exchanges, when a rank has left or is lost.
  int socket() const { return socket_.fd(); }

  // Runs a step that may fail on one rank. If it failed anywhere, all ranks throw Failure with the first rank's
  // message.
  template <class Step>
  void attempt(const char* what, Step step) {
    std::string objection;
    try {
      step();
    } catch (const std::exception& error) {
      objection = error.what();
      if (objection.empty()) objection = "it failed";
    }
    agree(what, objection);
  }

 private:
  // Returns true if the hub accepts this rank. If it did not answer, `objection` says why.
  bool say_hello(const HubAddress& hub_address, const std::string& where, const Deadline& deadline,
                 std::string& objection);
  std::vector<std::string> exchange_until(const Deadline& deadline, std::string_view message);
  void agree(const char* what, std::string objection);

  int rank_;
  int world_;
  double limit_s_;
  Secret secret_;
  Descriptor socket_;
  std::optional<ncclUniqueId> real_id_;
};

}  // namespace llm_comm::nccl
