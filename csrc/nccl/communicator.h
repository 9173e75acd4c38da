// Communicator: a communicator of NCCL's API in llm_comm: its ranks, and the calls that it serves. A communicator of
// the real NCCL library may exist beside it and serve the others. The functions of own.cpp use it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/core.h"
#include "nccl/bootstrap.h"
#include "nccl/options.h"
#include "nccl/peer_watch.h"
#include "nccl/selection.h"

namespace llm_comm::nccl {

class Communicator {
 public:
  // Collective; succeeds or fails on all ranks alike. `device`: the current one. Throws Failure.
  static std::shared_ptr<Communicator> connect(const HubAddress& hub_address, int rank, int world, int device,
                                               const Options& options);
  // Serializes set-ups over this communicator's ranks: concurrent ones would mix up their messages. Held until the lock
  // is released.
  std::unique_lock<std::mutex> lock_set_up() { return std::unique_lock(set_up_mutex_); }
  // Returns the communicator of the ranks that pass the same color, ordered by key; nullptr if `color` is negative.
  // Collective over this communicator. Throws Failure on all ranks of the new communicator, or on all ranks of this
  // one.
  std::shared_ptr<Communicator> split(int color, int key);

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  // Waits until everything launched has ended.
  ~Communicator();

  int rank() const { return bootstrap_.rank(); }
  int world() const { return bootstrap_.world(); }
  int device() const { return device_; }
  // True if all ranks have a real NCCL library, which then must have a communicator beside this one.
  bool uses_real_library() const { return uses_real_library_; }
  const std::optional<ncclUniqueId>& real_id() const { return bootstrap_.real_id(); }

  // True if llm_comm serves the call; the same on all ranks.
  bool serves(const Message& message);
  // Enqueues a call for which serves() is true. Throws Failure if the communicator has failed.
  void run(const Message& message, const void* send, void* recv, uint64_t stream);

  // Result of ncclCommGetAsyncError(), with an explanation. Thread-safe.
  ncclResult_t async_error(std::string& text);
  // Ends all running and later calls. Thread-safe.
  void revoke();
  // revoke(), and also ends a set-up that waits for this communicator's ranks. Thread-safe.
  void abort();

 private:
  struct Prepared;
  struct MessageHash {
    size_t operator()(const Message& message) const;
  };

  Communicator(Bootstrap bootstrap, int device, const Options& options)
      : bootstrap_(std::move(bootstrap)), device_(device), options_(options) {}

  // `is_offered_real`: a real NCCL communicator is possible, as far as the id or the parent decides it.
  void set_up(bool is_offered_real);
  void set_up_core(class DescriptorExchange& exchange, const std::vector<std::string>& names, Table table,
                   const Limits& limits_of_devices);
  std::shared_ptr<Prepared> prepared(const Message& message);
  void end(const std::string& why);

  Bootstrap bootstrap_;
  int device_;
  Options options_;
  bool uses_real_library_ = false;
  std::string why_not_served_;
  std::unique_ptr<host::Core> core_;  // nullptr if llm_comm serves nothing
  std::optional<Selection> selection_;
  std::mutex set_up_mutex_;
  std::mutex mutex_;  // guards the next two members
  std::unordered_map<Message, std::shared_ptr<Prepared>, MessageHash> prepared_;
  std::string ended_for_;
  std::atomic<bool> has_ended_ = false;
  std::atomic<uint64_t> served_ = 0;
  std::atomic<uint64_t> forwarded_ = 0;
  std::unique_ptr<PeerWatch> watch_;  // destroyed before the core
};

}  // namespace llm_comm::nccl
