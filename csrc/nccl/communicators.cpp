#include "nccl/communicators.h"

#include <pthread.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "nccl/failure.h"

namespace llm_comm::nccl {

namespace {

struct Map {
  std::shared_mutex mutex;
  std::unordered_map<ncclComm_t, std::shared_ptr<Communicator>> communicators;
  const Map* inherited = nullptr;  // map of the process that this one was forked from
};

// Never destroyed, because exit handlers may still use it. A forked process has neither the threads nor the GPU's
// context. It starts with an empty map and does not touch the inherited one. The fork handler holds the lock while a
// process forks, so the child can read the inherited map.
Map* map_of_process = new Map;
[[maybe_unused]] const int at_fork =
    pthread_atfork([] { map_of_process->mutex.lock(); }, [] { map_of_process->mutex.unlock(); },
                   [] {
                     Map* const own = new Map;
                     own->inherited = map_of_process;
                     map_of_process = own;
                   });

// Throws if a handle that is not in this process's map is inherited. The real NCCL library must not get such a handle
// either.
void check_not_inherited(ncclComm_t handle) {
  for (const Map* map = map_of_process->inherited; map != nullptr; map = map->inherited) {
    if (map->communicators.count(handle) == 0) continue;
    throw Failure(ncclInvalidUsage,
                  "this communicator belongs to the process that this one was forked from: make one in this process");
  }
}

}  // namespace

std::shared_ptr<Communicator> find(ncclComm_t handle) {
  Map& map = *map_of_process;
  const std::shared_lock lock(map.mutex);
  const auto found = map.communicators.find(handle);
  if (found != map.communicators.end()) return found->second;
  check_not_inherited(handle);
  return nullptr;
}

void add(ncclComm_t handle, std::shared_ptr<Communicator> communicator) {
  Map& map = *map_of_process;
  const std::unique_lock lock(map.mutex);
  map.communicators[handle] = std::move(communicator);
}

std::shared_ptr<Communicator> remove(ncclComm_t handle) {
  Map& map = *map_of_process;
  const std::unique_lock lock(map.mutex);
  const auto found = map.communicators.find(handle);
  if (found == map.communicators.end()) {
    check_not_inherited(handle);
    return nullptr;
  }
  std::shared_ptr<Communicator> removed = std::move(found->second);
  map.communicators.erase(found);
  return removed;
}

}  // namespace llm_comm::nccl
