// How all ranks come to name the rank that is missing, not one that waits for it as they do.
//
// A rank whose wait expires leaves a note with every rank: whom it waited for. A rank that left a note is alive, so
// whoever suspects it goes on to the one whom its note names, and so on to a rank without a note. A rank that finds a
// note in the middle of a wait gives up too, so all end together and none waits for a rank that has given up.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

class Suspicions {
 public:
  // For waits outside of a communicator: nobody to tell.
  Suspicions() = default;

  // `workspace`: every rank's, as this rank maps it, with `offset` bytes before `world_size` lines for notes, which are
  // zero at first.
  LLM_COMM_DEVICE Suspicions(char* const* workspace, uint64_t offset, uint32_t rank, uint32_t world_size)
      : workspace_(workspace), offset_(offset), rank_(rank), world_size_(world_size) {}

  // Whether a rank has left a note here. `suspect` is then whom one of the notes names, unless they all name this rank,
  // which is alive: it keeps to whom it waits for itself.
  LLM_COMM_DEVICE bool find(uint32_t& suspect) const {
    bool found = false;
    LLM_COMM_UNROLL(1)
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      uint32_t named = rank_;
      found |= noted_by(rank, named);
      if (named != rank_) suspect = named;
    }
    return found;
  }

  // Leaves a note with every rank, this one too.
  LLM_COMM_DEVICE void tell(uint32_t suspect) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t rank = 0; rank < world_size_; ++rank) store_relaxed(note(rank, rank_), suspect + 1);
  }

  // Follows the notes from `suspect` to a rank that has left none. Where they lead round or back here, which they do when
  // the first of a rank's waits to expire was for one that waits for the missing rank too, the notes of the others are
  // followed, and after that the first rank is named that has left no note: whoever has come and waits has left one. If all
  // have (ranks that wait for each other make different calls), it stays with `suspect`.
  //
  // One call of follow(), not two: a predicate that this takes is one less for what kernels keep across a wait
  // (docs/experiments/cold_code.md).
  LLM_COMM_DEVICE uint32_t culprit(uint32_t suspect) const {
    uint32_t silent = world_size_;
    uint32_t candidate = suspect;
    LLM_COMM_UNROLL(1)
    for (uint32_t rank = 0; rank <= world_size_; ++rank) {
      const uint32_t found = follow(candidate);
      if (found != world_size_) return found;
      candidate = rank_;  // leads nowhere
      if (rank < world_size_ && !noted_by(rank, candidate) && silent == world_size_) silent = rank;
    }
    return silent != world_size_ ? silent : suspect;
  }

 private:
  LLM_COMM_DEVICE uint32_t* note(uint32_t at, uint32_t by) const {
    return reinterpret_cast<uint32_t*>(workspace_[at] + offset_ + by * sizeof(Line));
  }

  // The rank without a note that the notes lead to from `candidate`; world_size_ if there is none.
  LLM_COMM_DEVICE uint32_t follow(uint32_t candidate) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t steps = 0; steps < world_size_ && candidate != rank_; ++steps) {
      if (!noted_by(candidate, candidate)) return candidate;
    }
    return world_size_;
  }

  LLM_COMM_DEVICE bool noted_by(uint32_t rank, uint32_t& suspect) const {
    const uint32_t word = load_relaxed(note(rank_, rank));
    if (word != 0) suspect = word - 1;
    return word != 0;
  }

  char* const* workspace_ = nullptr;
  uint64_t offset_ = 0;
  uint32_t rank_ = 0;
  uint32_t world_size_ = 0;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
