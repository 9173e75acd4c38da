#include "nccl/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "host/planner.h"
#include "llm_comm/workspace_layout.h"
#include "nccl/agreement.h"
#include "nccl/descriptors.h"
#include "nccl/device.h"
#include "nccl/failure.h"
#include "nccl/hub.h"
#include "nccl/log.h"
#include "nccl/real_library.h"
#include "nccl/wire.h"
#include "nccl/workspaces.h"

namespace llm_comm::nccl {

namespace {

// Bound of prepared_. Programs have few kinds of calls; one with more prepares some of them again.
constexpr size_t kMostPrepared = 4096;

std::string describe(const host::OperationError& error) {
  const std::string rank = "rank " + std::to_string(error.rank);
  const std::string peer = "rank " + std::to_string(error.peer);
  const std::string in = " in " + error.operation + ", operation " + std::to_string(error.sequence);
  if (error.cause == "timeout") return rank + " has waited for " + peer + in + " longer than LLM_COMM_TIMEOUT_S allows";
  if (error.cause == "peer exited") return rank + " waits for " + peer + in + ", whose process has exited";
  if (error.cause == "mismatch") return "the ranks make different calls" + in;
  return rank + ": " + error.cause + in + (error.text.empty() ? "" : ": " + error.text);
}

std::string describe(const Message& message) {
  return std::string(name_of(message.operation)) + " of " + std::to_string(message.shard_bytes()) + " bytes, type " +
         std::to_string(message.type);
}

// Totals of all communicators, for the report at exit.
std::atomic<uint64_t> served_by_all = 0;
std::atomic<uint64_t> forwarded_by_all = 0;
void tell_at_exit() {
  // No report from the many processes that have the library preloaded and do not use NCCL.
  if (served_by_all == 0 && forwarded_by_all == 0) return;
  inform("at exit: " + std::to_string(served_by_all) + " calls by llm_comm, " + std::to_string(forwarded_by_all) +
         " by the NCCL library");
}
[[maybe_unused]] const bool tells_at_exit = is_informing() && std::atexit(tell_at_exit) == 0;

}  // namespace

struct Communicator::Prepared {
  Decision decision;
  std::unique_ptr<host::PreparedCall> call;  // created by the first call that runs
};

size_t Communicator::MessageHash::operator()(const Message& message) const {
  const auto small = static_cast<uint64_t>(message.operation) << 48 | static_cast<uint64_t>(message.type) << 40 |
                     static_cast<uint64_t>(static_cast<uint32_t>(message.root)) << 8 |
                     static_cast<uint64_t>(static_cast<uint32_t>(message.reduction));
  return std::hash<uint64_t>()(message.count * 0x9e3779b97f4a7c15u ^ small);
}

std::shared_ptr<Communicator> Communicator::connect(const HubAddress& hub_address, int rank, int world, int device,
                                                    const Options& options) {
  std::shared_ptr<Communicator> made(
      new Communicator(Bootstrap(hub_address, rank, world, options.timeout_s), device, options));
  made->set_up(made->real_id().has_value());
  return made;
}

std::shared_ptr<Communicator> Communicator::split(int color, int key) {
  const auto own = Writer().number(static_cast<uint64_t>(color)).number(static_cast<uint64_t>(key)).bytes();
  const std::vector<std::string> all = bootstrap_.exchange(own);
  // (key, rank) of the ranks with the same color.
  std::vector<std::pair<int, int>> members;
  for (int rank = 0; rank < world(); ++rank) {
    Reader reader(all[static_cast<size_t>(rank)]);
    const int of = static_cast<int>(reader.number());
    const int key_of = static_cast<int>(reader.number());
    if (of == color) members.emplace_back(key_of, rank);
  }
  std::sort(members.begin(), members.end());
  // The first rank of each new communicator opens its hub. If it cannot, it sends an empty message, which all its ranks
  // see.
  std::string invitation;
  const bool is_host = color >= 0 && members.front().second == rank();
  if (is_host) {
    try {
      const ncclUniqueId id = to_id(open_hub(std::nullopt, options_.timeout_s));
      invitation.assign(id.internal, sizeof(id.internal));
    } catch (const Failure& failure) {
      warn(std::string("no hub for a split communicator: ") + failure.what());
    }
  }
  const std::vector<std::string> invitations = bootstrap_.exchange(invitation);
  if (color < 0) return nullptr;
  const std::string& ours = invitations[static_cast<size_t>(members.front().second)];
  ncclUniqueId id{};
  if (ours.size() == sizeof(id.internal)) std::copy(ours.begin(), ours.end(), id.internal);
  const auto hub_address = from_id(id);
  if (!hub_address) throw Failure(ncclSystemError, "rank " + std::to_string(members.front().second) + " opened no hub");
  const auto at = std::find_if(members.begin(), members.end(), [&](const auto& one) { return one.second == rank(); });
  const int new_rank = static_cast<int>(at - members.begin());
  std::shared_ptr<Communicator> made(new Communicator(
      Bootstrap(*hub_address, new_rank, static_cast<int>(members.size()), options_.timeout_s), device_, options_));
  made->set_up(uses_real_library_);
  return made;
}

Communicator::~Communicator() {
  inform("communicator of " + std::to_string(world()) + " ranks, rank " + std::to_string(rank()) + ", ends: " +
         std::to_string(served_) + " calls by llm_comm, " + std::to_string(forwarded_) + " by the NCCL library");
}

void Communicator::set_up(bool is_offered_real) {
  Entry own;
  own.objection = options_.objection;
  Table table;
  std::unique_ptr<DescriptorExchange> exchange;
  try {
    own.is_enabled = options_.enable;
    own.share_gpu = options_.share_gpu;
    own.options = options_.digest();
    own.host = host_identity();
    own.has_real_library = RealLibrary::get().is_there();
    const DeviceInfo device = describe_device(device_);
    own.device = device.name;
    own.uuid = device.uuid;
    own.sm_count = device.sm_count;
    own.max_cluster = device.max_cluster;
    own.compute_capability = device.compute_capability;
    table = find_table(options_.table, device.name, static_cast<uint32_t>(world()), device.sm_count,
                       device.compute_capability);
    own.table = digest_of(table);
    exchange = std::make_unique<DescriptorExchange>();
    own.name = exchange->name();
  } catch (const std::exception& error) {
    own.objection = error.what();
  }
  std::vector<Entry> entries;
  std::vector<std::string> names;
  for (const std::string& bytes : bootstrap_.exchange(own.bytes())) {
    entries.push_back(Entry::from(bytes));
    names.push_back(entries.back().name);
  }
  const Agreement agreement = agree(entries, is_offered_real);
  const std::string table_name = table.name;
  uses_real_library_ = agreement.uses_real_library;
  why_not_served_ = agreement.why_not_served;
  if (why_not_served_.empty()) {
    try {
      set_up_core(*exchange, names, std::move(table), agreement.limits);
    } catch (const Failure& failure) {
      // ncclSystemError is the same on all ranks. A lost rank is lost for the real library too, so other failures are
      // thrown.
      if (failure.result() != ncclSystemError || !uses_real_library_) throw;
      why_not_served_ = failure.what();
      watch_.reset();
      core_.reset();
      if (rank() == 0) warn("the NCCL library does all of a communicator: " + why_not_served_);
    }
  }
  inform("communicator of " + std::to_string(world()) + " ranks, rank " + std::to_string(rank()) + " on device " +
         std::to_string(device_) + (core_ ? ": served by " + table_name : ": not served: " + why_not_served_) +
         (uses_real_library_ ? "; with an NCCL communicator beside it" : "; without an NCCL library"));
}

void Communicator::set_up_core(DescriptorExchange& exchange, const std::vector<std::string>& names, Table table,
                               const Limits& limits_of_devices) {
  const WorkspaceLayout layout = WorkspaceLayout::within(options_.workspace_bytes);
  Limits limits = limits_of_devices;
  limits.slot_bytes = layout.slot_bytes();
  limits.staging_bytes = layout.staging_bytes();
  Selection selection(std::move(table), static_cast<uint32_t>(world()), limits, !uses_real_library_);
  bootstrap_.attempt("set-up of the device", [&] {
    host::CoreOptions core{rank(), world(), layout.slot_bytes(), options_.timeout_s, options_.pdl, options_.debug};
    core.staging_bytes = layout.staging_bytes();
    core.check_calls |= kCallsAreSynchronous;  // emulated devices always compare calls
    core_ = make_core(core, device_);
    core_->load(selection.algorithms());
  });
  std::vector<Descriptor> processes = map_workspaces(*core_, bootstrap_, exchange, names, options_.timeout_s);
  selection_ = std::move(selection);
  watch_ =
      std::make_unique<PeerWatch>(std::move(processes), [core = core_.get()](int peer) { core->peer_exited(peer); });
}

std::shared_ptr<Communicator::Prepared> Communicator::prepared(const Message& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = prepared_.find(message);
  if (found != prepared_.end()) return found->second;
  if (prepared_.size() >= kMostPrepared) prepared_.clear();
  auto made = std::make_shared<Prepared>();
  made->decision = selection_->decide(message);
  if (rank() == 0 && is_informing()) {
    inform(describe(message) + (made->decision.plan ? ": llm_comm, " : ": the NCCL library: ") + made->decision.why);
  }
  prepared_.emplace(message, made);
  return made;
}

bool Communicator::serves(const Message& message) {
  const bool is_alone = world() == 1 && !uses_real_library_;
  const bool is_served = is_alone || (selection_ && prepared(message)->decision.plan.has_value());
  ++(is_served ? served_ : forwarded_);
  ++(is_served ? served_by_all : forwarded_by_all);
  return is_served;
}

void Communicator::run(const Message& message, const void* send, void* recv, uint64_t stream) {
  std::string text;
  const ncclResult_t before = async_error(text);
  if (before != ncclSuccess) throw Failure(before, text);
  if (world() == 1) {
    if (send != recv) copy(recv, send, message.shard_bytes(), stream);
    return;
  }
  const std::shared_ptr<Prepared> one = prepared(message);
  // In a broadcast the send buffer of a rank other than the root may be an invalid address.
  const void* const from = message.operation == Operation::kBroadcast && message.root != rank() ? recv : send;
  const uint64_t buffers[kMaxBuffers] = {reinterpret_cast<uint64_t>(from), reinterpret_cast<uint64_t>(recv)};
  try {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const Plan& plan = *one->decision.plan;
      if (one->call == nullptr) {
        run_in_relaxed_capture_mode([&] { one->call = core_->prepare(plan.algorithm, plan.problem, plan.tiling); });
      }
    }
    if (one->call->run(buffers, stream) != host::Outcome::kFailed) return;
  } catch (const std::exception& error) {
    // Other ranks may have launched the call, which this rank does not join.
    end(std::string(name_of(message.operation)) + " could not be launched: " + error.what());
  }
  const ncclResult_t result = async_error(text);
  if (result != ncclSuccess) throw Failure(result, text);
  throw Failure(ncclRemoteError,
                std::string(name_of(message.operation)) + " was ended: the communicator was aborted or revoked");
}

ncclResult_t Communicator::async_error(std::string& text) {
  if (core_ == nullptr) return ncclSuccess;
  if (const auto error = core_->error()) {
    text = describe(*error);
    return error->cause == "mismatch" ? ncclInvalidUsage : ncclRemoteError;
  }
  if (!has_ended_) return ncclSuccess;
  const std::lock_guard<std::mutex> lock(mutex_);
  text = ended_for_;
  return ncclUnhandledCudaError;
}

void Communicator::end(const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_for_ = why;
  }
  has_ended_ = true;
  core_->abort();
}

void Communicator::revoke() {
  if (core_ != nullptr) core_->abort();
}

void Communicator::abort() {
  revoke();
  bootstrap_.interrupt();
}

}  // namespace llm_comm::nccl
