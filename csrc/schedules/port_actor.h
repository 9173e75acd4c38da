// PortActor: the proxy of a rank in a schedule. It reads requests in order and executes them at random times of the
// seed.
//
// There is no order between peers. The data of a put is read late and stored in pieces, in any order, by weak stores,
// so that only the following signal, a release, makes it visible. Requests to one peer that arrive together are merged
// as in the product (host/port_batch.h).
#pragma once

#include <deque>
#include <vector>

#include "emulator/deterministic/machine.h"
#include "host/port_batch.h"
#include "host/ports.h"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

class PortActor final : public host::Ports {
 public:
  static constexpr uint32_t kEntriesLog2 = 3;

  // `ring`: in the rank's modelled memory, zeroed.
  PortActor(emulator::Machine& machine, uint32_t rank, char* ring) : machine_(machine), rank_(rank), ring_(ring) {}

  PortRing* ring() const override { return reinterpret_cast<PortRing*>(ring_); }
  uint32_t entries_log2() const override { return kEntriesLog2; }
  void start(const host::PortOwner& owner) override;
  void stop() override {}
  void abandon() override {}
  std::optional<std::string> error() const override { return std::nullopt; }
  void leave_to_graphs() override {}

 private:
  struct Piece {
    uint64_t offset;
    uint64_t bytes;
  };
  // Requests for one peer.
  struct Lane {
    emulator::ThreadMemory memory;
    std::deque<PortRequest> requests;
    host::PortBatch batch;
    std::vector<host::PortStep> steps;  // remaining steps of the batch
    std::vector<Piece> pieces;          // remaining pieces of the first step
    bool is_busy = false;
  };

  void later(void (PortActor::*action)(uint32_t), uint32_t peer);
  bool may_act(void (PortActor::*action)(uint32_t), uint32_t peer);
  void look();
  void take(uint32_t);
  bool take_one();
  void begin_batch(uint32_t peer);
  void go_on(uint32_t peer);
  void copy(Lane& lane, char* to, const char* from, uint64_t bytes);
  void store_words(Lane& lane, char* to, const host::PortStep& step);

  emulator::Machine& machine_;
  uint32_t rank_;
  char* ring_;
  host::PortOwner owner_{};
  bool has_started_ = false;
  bool is_looking_ = false;
  uint32_t delay_ = 0;
  uint32_t most_of_batch_ = 1;
  uint64_t position_ = 0;  // of the next request
  emulator::ViewId view_ = 0;
  emulator::ThreadMemory memory_;  // memory state of the reader of requests
  Lane lanes_[kMaxWorldSize];
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
