#include "nccl/own.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "nccl/communicators.h"
#include "nccl/device.h"
#include "nccl/failure.h"
#include "nccl/group.h"
#include "nccl/hub.h"
#include "nccl/log.h"
#include "nccl/options.h"
#include "nccl/real_library.h"
#include "nccl/sockets.h"

namespace llm_comm::nccl::own {

namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw Failure(ncclInvalidArgument, what);
}

// True if the real library knows the handle: its own communicator, or one of ours that has a counterpart there.
bool is_real(const std::shared_ptr<Communicator>& communicator) {
  if (communicator != nullptr) return communicator->uses_real_library();
  if (!RealLibrary::get().is_there()) {
    throw Failure(ncclInvalidArgument, "this is no communicator of this process");
  }
  return true;
}

// Copies the configuration: the caller may free it before the group ends.
class ConfigCopy {
 public:
  explicit ConfigCopy(const ncclConfig_t* config) {
    if (config == nullptr) return;
    constexpr size_t kMost = 4096;
    const size_t size = config->size;
    require(size >= sizeof(ncclConfig_t) && size <= kMost && config->magic == NCCL_API_MAGIC,
            "ncclConfig_t has size " + std::to_string(size) + " and magic " + std::to_string(config->magic) +
                ": initialize it with NCCL_CONFIG_INITIALIZER");
    require(config->blocking == 0 || config->blocking == 1 || config->blocking == NCCL_CONFIG_UNDEF_INT,
            "ncclConfig_t has blocking " + std::to_string(config->blocking) + ": it must be 0 or 1");
    bytes_.resize((size + sizeof(uint64_t) - 1) / sizeof(uint64_t));
    std::memcpy(bytes_.data(), config, size);
  }
  ncclConfig_t* get() { return bytes_.empty() ? nullptr : reinterpret_cast<ncclConfig_t*>(bytes_.data()); }

 private:
  std::vector<uint64_t> bytes_;
};

ncclResult_t checked(ncclResult_t result, const char* name) {
  if (result == ncclSuccess || result == ncclInProgress) return result;
  const auto last_error = RealLibrary::get().functions().GetLastError;
  const InRealLibrary inside;
  const char* const text = last_error == nullptr ? nullptr : last_error(nullptr);
  throw Failure(result, std::string("nccl") + name + " of the NCCL library: " + (text == nullptr ? "it failed" : text));
}

// Returns the communicator that a call of the real library creates. A non-blocking one is written later by a thread of
// that library and is waited for here, because calls served by llm_comm need it. `asked`: handle whose async error is
// polled; nullptr: the new communicator's own.
template <class Call>
ncclComm_t make_real(const char* name, ncclComm_t asked, Call call) {
  auto place = std::make_unique<ncclComm_t>(nullptr);
  const Deadline deadline(options_of_process().timeout_s);
  ncclResult_t result = call(place.get());
  while (result == ncclInProgress) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const ncclComm_t made = __atomic_load_n(place.get(), __ATOMIC_ACQUIRE);
    const ncclComm_t of = asked != nullptr ? asked : made;
    if (of != nullptr) checked(call_real(&RealFunctions::CommGetAsyncError, "CommGetAsyncError", of, &result), name);
    if (result == ncclInProgress && deadline.is_over()) {
      place.release();  // the library may still write to it
      throw Failure(ncclRemoteError, std::string("nccl") + name + " is not done in time (LLM_COMM_TIMEOUT_S)");
    }
  }
  checked(result, name);
  return *place;
}

ncclComm_t init_real(int world, const ncclUniqueId& id, int rank, ConfigCopy& config) {
  return make_real("CommInitRank", nullptr, [&](ncclComm_t* handle) {
    if (config.get() == nullptr || RealLibrary::get().functions().CommInitRankConfig == nullptr) {
      return call_real(&RealFunctions::CommInitRank, "CommInitRank", handle, world, id, rank);
    }
    return call_real(&RealFunctions::CommInitRankConfig, "CommInitRankConfig", handle, world, id, rank, config.get());
  });
}

// Registers a communicator under its handle: the real library's if there is one.
ncclResult_t enter(ncclComm_t* out, ncclComm_t of_real, std::shared_ptr<Communicator> communicator) {
  const ncclComm_t handle = of_real != nullptr ? of_real : reinterpret_cast<ncclComm_t>(communicator.get());
  add(handle, std::move(communicator));
  *out = handle;
  return ncclSuccess;
}

ncclResult_t init(ncclComm_t* out, int world, const ncclUniqueId& id, int rank, const ncclConfig_t* config,
                  int device) {
  require(out != nullptr, "ncclCommInitRank: no place for the communicator");
  require(world > 0 && rank >= 0 && rank < world && static_cast<uint32_t>(world) <= kMaxRanks,
          "rank " + std::to_string(rank) + " of " + std::to_string(world));
  const auto hub_address = from_id(id);
  Job job = [=, config = ConfigCopy(config)]() mutable {
    *out = nullptr;
    // The id was made by another library's ncclGetUniqueId(), so the real library handles it.
    if (!hub_address) {
      *out = init_real(world, id, rank, config);
      return ncclSuccess;
    }
    auto communicator = Communicator::connect(*hub_address, rank, world, device, options_of_process());
    ncclComm_t of_real = nullptr;
    if (communicator->uses_real_library()) of_real = init_real(world, *communicator->real_id(), rank, config);
    return enter(out, of_real, std::move(communicator));
  };
  return run_or_queue({std::move(job), device});
}

using Forward = ncclResult_t (*)(const Message&, const void*, void*, ncclComm_t, cudaStream_t);

ncclResult_t collective(const Message& message, const void* send, void* recv, ncclComm_t comm, cudaStream_t stream,
                        Forward forward) {
  auto communicator = find(comm);
  const bool has_real = is_real(communicator);
  const bool is_valid = bytes_of(message.type) > 0 && message.count < uint64_t{1} << 48 && message.root >= 0 &&
                        (communicator == nullptr || message.root < communicator->world());
  // Invalid calls are forwarded, so that the real library reports them in its own words.
  const bool is_forwarded = communicator == nullptr || (has_real && !is_valid) ||
                            (is_valid && message.count > 0 && !communicator->serves(message));
  if (is_forwarded && has_real) {
    join_group_of_real_library();
    return checked(forward(message, send, recv, comm, stream), name_of(message.operation));
  }
  // Builds texts only on failure, to keep valid calls fast.
  const auto refuse = [&](ncclResult_t result, const std::string& why) {
    throw Failure(result, std::string("nccl") + name_of(message.operation) + why);
  };
  if (is_forwarded) {
    refuse(ncclInvalidUsage,
           " of this type and operation is not served by llm_comm, and there is no NCCL library for it: " +
               RealLibrary::get().why_not());
  }
  if (!is_valid) {
    refuse(ncclInvalidArgument, ": type " + std::to_string(message.type) + ", root " + std::to_string(message.root) +
                                    ", " + std::to_string(message.count) + " elements");
  }
  if (message.count == 0) return ncclSuccess;
  const bool sends = message.operation != Operation::kBroadcast || message.root == communicator->rank();
  if (recv == nullptr || (sends && send == nullptr)) refuse(ncclInvalidArgument, ": a buffer is a null pointer");
  return run_or_queue({std::move(communicator), message, send, recv, reinterpret_cast<uint64_t>(stream)});
}

}  // namespace

ncclResult_t MemAlloc(void** ptr, size_t size) {
  require(ptr != nullptr, "ncclMemAlloc: no place for the address");
  if (RealLibrary::get().functions().MemAlloc != nullptr)
    return call_real(&RealFunctions::MemAlloc, "MemAlloc", ptr, size);
  *ptr = allocate(size);
  return ncclSuccess;
}

ncclResult_t MemFree(void* ptr) {
  if (RealLibrary::get().functions().MemAlloc != nullptr) return call_real(&RealFunctions::MemFree, "MemFree", ptr);
  release(ptr);
  return ncclSuccess;
}

ncclResult_t GetVersion(int* version) {
  require(version != nullptr, "ncclGetVersion: no place for the version");
  *version = RealLibrary::get().is_there() ? RealLibrary::get().version() : LLM_COMM_NCCL_VERSION;
  return ncclSuccess;
}

ncclResult_t GetUniqueId(ncclUniqueId* id) {
  require(id != nullptr, "ncclGetUniqueId: no place for the id");
  std::optional<ncclUniqueId> real_id;
  if (RealLibrary::get().is_there()) {
    real_id.emplace();
    checked(call_real(&RealFunctions::GetUniqueId, "GetUniqueId", &*real_id), "GetUniqueId");
    // With NCCL_COMM_ID every process makes the same id without communication. Only NCCL's own bootstrap supports that.
    if (const char* const fixed = std::getenv("NCCL_COMM_ID"); fixed != nullptr && *fixed != '\0') {
      *id = *real_id;
      return ncclSuccess;
    }
  }
  *id = to_id(open_hub(real_id, options_of_process().timeout_s));
  return ncclSuccess;
}

ncclResult_t CommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return init(comm, nranks, id, rank, nullptr, current_device());
}

ncclResult_t CommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return init(comm, nranks, id, rank, config, current_device());
}

// Several ids mean several bootstrap roots for NCCL. llm_comm uses the first one.
ncclResult_t CommInitRankScalable(ncclComm_t* comm, int nranks, int rank, int ids, ncclUniqueId* id,
                                  ncclConfig_t* config) {
  require(ids > 0 && id != nullptr, "ncclCommInitRankScalable: no ids");
  if (from_id(*id)) return init(comm, nranks, *id, rank, config, current_device());
  join_group_of_real_library();
  return call_real(&RealFunctions::CommInitRankScalable, "CommInitRankScalable", comm, nranks, rank, ids, id, config);
}

ncclResult_t CommInitAll(ncclComm_t* comms, int ndev, const int* devices) {
  require(comms != nullptr && ndev > 0 && ndev <= device_count(),
          "ncclCommInitAll of " + std::to_string(ndev) + " devices; there are " + std::to_string(device_count()));
  ncclUniqueId id;
  GetUniqueId(&id);
  begin_group();
  try {
    for (int rank = 0; rank < ndev; ++rank) {
      init(comms + rank, ndev, id, rank, nullptr, devices == nullptr ? rank : devices[rank]);
    }
  } catch (const Failure& failure) {
    note_failure(failure.result());
    end_group();
    throw;
  }
  return end_group();
}

ncclResult_t CommFinalize(ncclComm_t comm) {
  if (!is_real(find(comm))) return ncclSuccess;
  join_group_of_real_library();
  return call_real(&RealFunctions::CommFinalize, "CommFinalize", comm);
}

ncclResult_t CommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  auto communicator = remove(comm);
  const bool has_real = is_real(communicator);
  communicator.reset();
  if (!has_real) return ncclSuccess;
  join_group_of_real_library();
  return call_real(&RealFunctions::CommDestroy, "CommDestroy", comm);
}

ncclResult_t CommAbort(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  auto communicator = remove(comm);
  const bool has_real = is_real(communicator);
  if (communicator != nullptr) communicator->abort();
  communicator.reset();
  if (!has_real) return ncclSuccess;
  join_group_of_real_library();
  return call_real(&RealFunctions::CommAbort, "CommAbort", comm);
}

ncclResult_t CommRevoke(ncclComm_t comm, int flags) {
  const auto communicator = find(comm);
  const bool has_real = is_real(communicator);
  if (communicator != nullptr) communicator->revoke();
  if (!has_real) return ncclSuccess;
  join_group_of_real_library();
  return call_real(&RealFunctions::CommRevoke, "CommRevoke", comm, flags);
}

ncclResult_t CommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  require(newcomm != nullptr, "ncclCommSplit: no place for the communicator");
  require(color >= 0 || color == NCCL_SPLIT_NOCOLOR, "ncclCommSplit: color " + std::to_string(color));
  const auto parent = find(comm);
  const bool has_real = is_real(parent);
  if (parent == nullptr) {
    join_group_of_real_library();
    return call_real(&RealFunctions::CommSplit, "CommSplit", comm, color, key, newcomm, config);
  }
  Job job = [=, config = ConfigCopy(config)]() mutable {
    *newcomm = nullptr;
    const auto lock = parent->lock_set_up();
    auto child = parent->split(color, key);
    ncclComm_t of_real = nullptr;
    if (has_real) {
      of_real = make_real("CommSplit", comm, [&](ncclComm_t* handle) {
        return call_real(&RealFunctions::CommSplit, "CommSplit", comm, color, key, handle, config.get());
      });
    }
    return child == nullptr ? ncclSuccess : enter(newcomm, of_real, std::move(child));
  };
  return run_or_queue({std::move(job), parent->device(), parent});
}

ncclResult_t CommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  require(error != nullptr, "ncclCommGetAsyncError: no place for the error");
  const auto communicator = find(comm);
  const bool has_real = is_real(communicator);
  if (communicator != nullptr) {
    std::string text;
    *error = communicator->async_error(text);
    if (*error != ncclSuccess) {
      set_last_error(text);
      return ncclSuccess;
    }
  }
  if (has_real) return call_real(&RealFunctions::CommGetAsyncError, "CommGetAsyncError", comm, error);
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t CommCount(ncclComm_t comm, int* count) {
  const auto communicator = find(comm);
  if (communicator == nullptr && is_real(nullptr))
    return call_real(&RealFunctions::CommCount, "CommCount", comm, count);
  require(count != nullptr, "ncclCommCount: no place for the count");
  *count = communicator->world();
  return ncclSuccess;
}

ncclResult_t CommCuDevice(ncclComm_t comm, int* device) {
  const auto communicator = find(comm);
  if (communicator == nullptr && is_real(nullptr)) {
    return call_real(&RealFunctions::CommCuDevice, "CommCuDevice", comm, device);
  }
  require(device != nullptr, "ncclCommCuDevice: no place for the device");
  *device = communicator->device();
  return ncclSuccess;
}

ncclResult_t CommUserRank(ncclComm_t comm, int* rank) {
  const auto communicator = find(comm);
  if (communicator == nullptr && is_real(nullptr)) {
    return call_real(&RealFunctions::CommUserRank, "CommUserRank", comm, rank);
  }
  require(rank != nullptr, "ncclCommUserRank: no place for the rank");
  *rank = communicator->rank();
  return ncclSuccess;
}

// Registration permits optimizations that the kernels here do not use.
ncclResult_t CommRegister(ncclComm_t comm, void* buffer, size_t size, void** handle) {
  if (is_real(find(comm))) return call_real(&RealFunctions::CommRegister, "CommRegister", comm, buffer, size, handle);
  require(handle != nullptr, "ncclCommRegister: no place for the handle");
  *handle = nullptr;
  return ncclSuccess;
}

ncclResult_t CommDeregister(ncclComm_t comm, void* handle) {
  if (is_real(find(comm))) return call_real(&RealFunctions::CommDeregister, "CommDeregister", comm, handle);
  return ncclSuccess;
}

ncclResult_t AllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                       cudaStream_t stream) {
  return collective({Operation::kAllReduce, type, count, op}, send, recv, comm, stream,
                    [](const Message& m, const void* from, void* to, ncclComm_t of, cudaStream_t on) {
                      return call_real(&RealFunctions::AllReduce, "AllReduce", from, to, m.count, m.type,
                                       static_cast<ncclRedOp_t>(m.reduction), of, on);
                    });
}

ncclResult_t AllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                       cudaStream_t stream) {
  return collective({Operation::kAllGather, type, count}, send, recv, comm, stream,
                    [](const Message& m, const void* from, void* to, ncclComm_t of, cudaStream_t on) {
                      return call_real(&RealFunctions::AllGather, "AllGather", from, to, m.count, m.type, of, on);
                    });
}

ncclResult_t ReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective({Operation::kReduceScatter, type, count, op}, send, recv, comm, stream,
                    [](const Message& m, const void* from, void* to, ncclComm_t of, cudaStream_t on) {
                      return call_real(&RealFunctions::ReduceScatter, "ReduceScatter", from, to, m.count, m.type,
                                       static_cast<ncclRedOp_t>(m.reduction), of, on);
                    });
}

ncclResult_t AlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                      cudaStream_t stream) {
  return collective({Operation::kAllToAll, type, count}, send, recv, comm, stream,
                    [](const Message& m, const void* from, void* to, ncclComm_t of, cudaStream_t on) {
                      return call_real(&RealFunctions::AlltoAll, "AlltoAll", from, to, m.count, m.type, of, on);
                    });
}

ncclResult_t Broadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return collective({Operation::kBroadcast, type, count, ncclSum, root}, send, recv, comm, stream,
                    [](const Message& m, const void* from, void* to, ncclComm_t of, cudaStream_t on) {
                      return call_real(&RealFunctions::Broadcast, "Broadcast", from, to, m.count, m.type, m.root, of,
                                       on);
                    });
}

ncclResult_t Bcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return Broadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t GroupStart() {
  begin_group();
  return ncclSuccess;
}

ncclResult_t GroupEnd() { return end_group(); }
ncclResult_t GroupSimulateEnd(ncclSimInfo_t* info) { return simulate_end_of_group(info); }

}  // namespace llm_comm::nccl::own
