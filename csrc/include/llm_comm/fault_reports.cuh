// Fault reports: how all ranks agree on the rank that is missing. Used by bounded waits (wait.cuh).
//
// A rank whose wait expires stores a fault report at every rank; it names the peer that the rank waited for. A rank
// that has stored a report is alive. A rank that suspects such a rank therefore follows its report to the next suspect,
// until it reaches a rank without a report. A waiting rank that finds a report aborts its wait too: all ranks end
// together, and none waits for a rank that has given up.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

class FaultReports {
 public:
  // For waits outside a communicator: there are no other ranks to report to.
  FaultReports() = default;

  // `workspace`: every rank's workspace, as this rank maps it. The reports are `world_size` lines at `offset`, zero at
  // first.
  LLM_COMM_DEVICE FaultReports(char* const* workspace, uint64_t offset, uint32_t rank, uint32_t world_size)
      : workspace_(workspace), offset_(offset), rank_(rank), world_size_(world_size) {}

  // Returns whether any rank has stored a fault report here, and sets `suspect` to a rank that a report names. Reports
  // that name this rank do not change `suspect`, because this rank is alive.
  LLM_COMM_DEVICE bool find(uint32_t& suspect) const {
    bool found = false;
    LLM_COMM_UNROLL(1)
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      uint32_t named = rank_;
      found |= reported_by(rank, named);
      if (named != rank_) suspect = named;
    }
    return found;
  }

  // Stores a fault report at every rank, this one included.
  LLM_COMM_DEVICE void send(uint32_t suspect) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t rank = 0; rank < world_size_; ++rank) store_relaxed(report(rank, rank_), suspect + 1);
  }

  // Returns the failed peer, in this order:
  // - Follow the reports from `suspect` to a rank without a report.
  // - If they lead in a circle or back to this rank, follow the reports of the other ranks. This happens when the first
  //   wait of
  // a rank to expire was for a rank that waits for the missing one too.
  // - Else return the first rank without a report: every rank that waits has stored one.
  // - If all ranks have reports, because they wait for each other in different calls, return `suspect`.
  //
  // follow() is called at one place only: a second call would cost one more predicate register in every kernel that
  // waits (docs/experiments/cold_code.md).
  LLM_COMM_DEVICE uint32_t failed_peer(uint32_t suspect) const {
    uint32_t silent = world_size_;
    uint32_t candidate = suspect;
    LLM_COMM_UNROLL(1)
    for (uint32_t rank = 0; rank <= world_size_; ++rank) {
      const uint32_t found = follow(candidate);
      if (found != world_size_) return found;
      candidate = rank_;  // follow() returns at once for this rank
      if (rank < world_size_ && !reported_by(rank, candidate) && silent == world_size_) silent = rank;
    }
    return silent != world_size_ ? silent : suspect;
  }

 private:
  LLM_COMM_DEVICE uint32_t* report(uint32_t at, uint32_t by) const {
    return reinterpret_cast<uint32_t*>(workspace_[at] + offset_ + by * sizeof(Line));
  }

  // Follows the reports from `candidate` to a rank without one. Returns world_size_ if there is none.
  LLM_COMM_DEVICE uint32_t follow(uint32_t candidate) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t steps = 0; steps < world_size_ && candidate != rank_; ++steps) {
      if (!reported_by(candidate, candidate)) return candidate;
    }
    return world_size_;
  }

  LLM_COMM_DEVICE bool reported_by(uint32_t rank, uint32_t& suspect) const {
    const uint32_t word = load_relaxed(report(rank_, rank));
    if (word != 0) suspect = word - 1;
    return word != 0;
  }

  char* const* workspace_ = nullptr;
  uint64_t offset_ = 0;
  uint32_t rank_ = 0;
  uint32_t world_size_ = 0;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
