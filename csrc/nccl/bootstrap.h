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
  // Returns when all ranks have come. Throws Failure where they do not within the limit.
  Bootstrap(const MeetingPlace& place, int rank, int world, double limit_s);

  int rank() const { return rank_; }
  int world() const { return world_; }
  const Secret& secret() const { return secret_; }
  // Of the library behind this one, made by whoever made the id; nothing where he had none.
  const std::optional<ncclUniqueId>& real_id() const { return real_id_; }

  // The messages of all ranks, by rank. Collective. Throws Failure where a rank is lost or does not come within the limit, and
  // std::invalid_argument for a message above kMaxMessageBytes.
  std::vector<std::string> exchange(std::string_view message);

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
  void agree(const char* what, std::string objection);

  int rank_;
  int world_;
  double limit_s_;
  Secret secret_;
  Descriptor socket_;
  std::optional<ncclUniqueId> real_id_;
};

}  // namespace llm_comm::nccl
