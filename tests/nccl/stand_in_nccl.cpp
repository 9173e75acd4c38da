// Stands in for NCCL behind the library under test: keeps communicators, counts calls, and moves nothing.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "nccl/nccl_api.h"

#define STAND_IN extern "C" __attribute__((visibility("default")))

namespace {

struct Counts {
  std::mutex mutex;
  std::map<std::string, int> of;
};
Counts& counts() {
  static auto* const all = new Counts;
  return *all;
}

ncclResult_t count(const char* name) {
  const std::lock_guard<std::mutex> lock(counts().mutex);
  ++counts().of[name];
  return ncclSuccess;
}

constexpr int kMagic = 0x5741;
constexpr char kIdText[] = "an id of the stand-in";
std::atomic<int> group_depth = 0;
thread_local int group_depth_of_thread = 0;

}  // namespace

struct ncclComm {
  int magic = kMagic;
  int world;
  int rank;
  std::atomic<int> asked_for = 0;  // until it is there, of one that is not blocking
};

namespace {

ncclResult_t check(ncclComm_t comm, const char* name) {
  count(name);
  return comm != nullptr && comm->magic == kMagic ? ncclSuccess : ncclInternalError;
}

ncclResult_t init(ncclComm_t* comm, int world, const ncclUniqueId& id, int rank, const char* name) {
  count(name);
  // In a group NCCL would make it at the end of that, and write it where it was told to.
  if (group_depth_of_thread > 0) return ncclInvalidUsage;
  if (std::strcmp(id.internal, kIdText) != 0) return ncclInternalError;
  // As NCCL does through the symbols that others may have put theirs in front of.
  void* memory = nullptr;
  if (ncclMemAlloc(&memory, 16) != ncclSuccess || ncclMemFree(memory) != ncclSuccess) return ncclInternalError;
  ncclUniqueId own;
  if (ncclGetUniqueId(&own) != ncclSuccess || std::strcmp(own.internal, kIdText) != 0) return ncclInternalError;
  *comm = new ncclComm{kMagic, world, rank};
  return ncclSuccess;
}

constexpr int kAsks = 3;

}  // namespace

STAND_IN int stand_in_count(const char* name) {
  const std::lock_guard<std::mutex> lock(counts().mutex);
  return counts().of[name];
}
STAND_IN int stand_in_depth() { return group_depth; }

STAND_IN ncclResult_t ncclMemAlloc(void** memory, size_t size) {
  *memory = new char[size];
  return count("MemAlloc");
}
STAND_IN ncclResult_t ncclMemFree(void* memory) {
  delete[] static_cast<char*>(memory);
  return count("MemFree");
}
STAND_IN ncclResult_t ncclGetVersion(int* version) {
  *version = 22899;
  return ncclSuccess;
}
STAND_IN ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->internal, kIdText, sizeof(kIdText));
  return count("GetUniqueId");
}
STAND_IN ncclResult_t ncclCommInitRank(ncclComm_t* comm, int world, ncclUniqueId id, int rank) {
  return init(comm, world, id, rank, "CommInitRank");
}
STAND_IN ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world, ncclUniqueId id, int rank,
                                             ncclConfig_t* config) {
  if (config == nullptr || config->size != sizeof(ncclConfig_t)) return ncclInvalidArgument;
  const ncclResult_t result = init(comm, world, id, rank, "CommInitRankConfig");
  if (result != ncclSuccess || config->blocking != 0) return result;
  (*comm)->asked_for = kAsks;
  return ncclInProgress;
}
STAND_IN ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ranks, const int*) {
  for (int rank = 0; rank < ranks; ++rank) comms[rank] = new ncclComm{kMagic, ranks, rank};
  return count("CommInitAll");
}
STAND_IN ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int, ncclComm_t* child, ncclConfig_t*) {
  *child = color < 0 ? nullptr : new ncclComm{kMagic, 0, 0};
  return check(comm, "CommSplit");
}
STAND_IN ncclResult_t ncclCommFinalize(ncclComm_t comm) { return check(comm, "CommFinalize"); }
STAND_IN ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const ncclResult_t result = check(comm, "CommDestroy");
  delete comm;
  return result;
}
STAND_IN ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const ncclResult_t result = check(comm, "CommAbort");
  delete comm;
  return result;
}
STAND_IN ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = comm->asked_for > 0 ? ncclInProgress : ncclSuccess;
  if (comm->asked_for > 0) --comm->asked_for;
  return check(comm, "CommGetAsyncError");
}
STAND_IN ncclResult_t ncclCommCount(ncclComm_t comm, int* ranks) {
  *ranks = comm->world;
  return check(comm, "CommCount");
}
STAND_IN ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t op, ncclComm_t comm,
                                    cudaStream_t) {
  const ncclResult_t result = check(comm, "AllReduce");
  return op == ncclNumOps ? ncclInvalidArgument : result;
}
STAND_IN ncclResult_t ncclAllGather(const void*, void*, size_t, ncclDataType_t, ncclComm_t comm, cudaStream_t) {
  return check(comm, "AllGather");
}
STAND_IN ncclResult_t ncclBroadcast(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
  return check(comm, "Broadcast");
}
STAND_IN ncclResult_t ncclBcast(void* buffer, size_t size, ncclDataType_t type, int root, ncclComm_t comm,
                                cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, size, type, root, comm, stream);
}
STAND_IN const char* ncclGetErrorString(ncclResult_t) { return "an error of the stand-in"; }
STAND_IN ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
  return check(comm, "Send");
}
STAND_IN ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
  return check(comm, "Recv");
}
STAND_IN ncclTeam_t ncclTeamWorld(ncclComm_t comm) {
  check(comm, "TeamWorld");
  return {comm->world, comm->rank, 1};
}
STAND_IN ncclResult_t ncclCommSuspend(ncclComm_t comm, int) { return check(comm, "CommSuspend"); }
STAND_IN void ncclParamDumpAll() { count("ParamDumpAll"); }
STAND_IN ncclResult_t ncclGroupStart() {
  ++group_depth;
  ++group_depth_of_thread;
  return count("GroupStart");
}
STAND_IN ncclResult_t ncclGroupEnd() {
  --group_depth;
  --group_depth_of_thread;
  return count("GroupEnd");
}
STAND_IN const char* ncclGetLastError(ncclComm_t) { return "the stand-in's last error"; }
