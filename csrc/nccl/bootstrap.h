// A rank's connection to the meeting place of its communicator.
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
  // Returns when all ranks have come. Throws Failure where they do not within the limit. A hub that is flooded by others may drop a
  // rank that it does not know yet: the rank says hello again until the hub knows it.
  Bootstrap(const MeetingPlace& place, int rank, int world, double limit_s);

  int rank() const { return rank_; }
  int world() const { return world_; }
  const Secret& secret() const { return secret_; }
  // Of the library behind this one, made by whoever made the id; nothing where he had none.
  const std::optional<ncclUniqueId>& real_id() const { return real_id_; }

  // The messages of all ranks, by rank. Collective. Throws Failure where a rank is lost or does not come within the limit, and
  // std::invalid_argument for a message above kMaxMessageBytes. After a Failure all further exchanges fail at once: a late answer would
  // be taken for that of the next one.
  std::vector<std::string> exchange(std::string_view message);

  // Makes an exchange that waits, and all later ones, fail. From any thread.
  void interrupt() noexcept;
  // Becomes readable, outside of exchanges, when a rank has left or is lost.
  int socket() const { return socket_.fd(); }

  // Runs a step that may fail on one rank: then it has failed on all, which throw Failure with what the first of them said.
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
  // Whether the hub knows this rank; where it has not answered, `objection` says why.
  bool say_hello(const MeetingPlace& place, const std::string& where, const Deadline& deadline, std::string& objection);
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
