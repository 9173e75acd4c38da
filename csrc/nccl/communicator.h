// A communicator of NCCL's API as llm_comm has it: who its ranks are, and what of its calls they do by themselves. Beside it there
// may be one of the real library, which does the rest.
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
  // Collective; returns or fails on all ranks alike. `device`: the current one. Throws Failure.
  static std::shared_ptr<Communicator> connect(const MeetingPlace& place, int rank, int world, int device,
                                               const Options& options);
  // Holds until the lock is released that no other thread sets up communicators over this one's ranks: the ranks would mix up the
  // messages of two of them.
  std::unique_lock<std::mutex> lock_set_up() { return std::unique_lock(set_up_mutex_); }
  // That of the ranks that give the same color, in the order of their keys; nothing where `color` is negative. Collective over
  // this one. Throws Failure: on all ranks of the new one alike, or on all of this one.
  std::shared_ptr<Communicator> split(int color, int key);

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  // Waits until what has been launched has ended.
  ~Communicator();

  int rank() const { return bootstrap_.rank(); }
  int world() const { return bootstrap_.world(); }
  int device() const { return device_; }
  // Whether all ranks have a library behind this one, which is to have a communicator beside this one.
  bool uses_real_library() const { return uses_real_library_; }
  const std::optional<ncclUniqueId>& real_id() const { return bootstrap_.real_id(); }

  // Whether a call is served here: the same on all ranks.
  bool serves(const Message& message);
  // Enqueues a call that is. Throws Failure where the communicator has failed, then or before.
  void run(const Message& message, const void* send, void* recv, uint64_t stream);

  // What ncclCommGetAsyncError() says of it, and why. From any thread.
  ncclResult_t async_error(std::string& text);
  // Ends all that runs and will be launched. From any thread.
  void revoke();
  // Ends a set-up over this one's ranks that waits for them, too. From any thread.
  void abort();

 private:
  struct Prepared;
  struct MessageHash {
    size_t operator()(const Message& message) const;
  };

  Communicator(Bootstrap bootstrap, int device, const Options& options)
      : bootstrap_(std::move(bootstrap)), device_(device), options_(options) {}

  // `is_offered_real`: a communicator of the real library can be made beside it, as far as that is not up to a rank.
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
  std::unique_ptr<host::Core> core_;  // where it serves anything
  std::optional<Selection> selection_;
  std::mutex set_up_mutex_;
  std::mutex mutex_;  // of the two that follow
  std::unordered_map<Message, std::shared_ptr<Prepared>, MessageHash> prepared_;
  std::string ended_for_;
  std::atomic<bool> has_ended_ = false;
  std::atomic<uint64_t> served_ = 0;
  std::atomic<uint64_t> forwarded_ = 0;
  std::unique_ptr<PeerWatch> watch_;  // goes before the core
};

}  // namespace llm_comm::nccl
