// What goes to the NCCL library behind this one, which a stand-in is (stand_in_nccl.cpp, named by LLM_COMM_NCCL_LIBRARY): what is not
// served, and that alone, in groups of its own.
// Usage: forwarding threads|processes <world>.
#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "ranks.h"

namespace {

using nccl_test::Rank;

int (*stand_in_count)(const char*) = nullptr;
int (*stand_in_depth)() = nullptr;

// How often a function of the stand-in was called, by this process, since it was asked last.
class Calls {
 public:
  explicit Calls(const char* name) : name_(name), before_(stand_in_count(name)) {}
  int more() {
    const int now = stand_in_count(name_);
    const int more = now - before_;
    before_ = now;
    return more;
  }

 private:
  const char* name_;
  int before_;
};

void sum_of_ones(ncclComm_t comm, int world) {
  std::vector<float> numbers(100, 1);
  EXPECT_OK(ncclAllReduce(numbers.data(), numbers.data(), numbers.size(), ncclFloat32, ncclSum, comm, nullptr));
  EXPECT(numbers.front() == static_cast<float>(world) && numbers.back() == static_cast<float>(world));
}

// Ranks that are threads count together: they look in turn.
void in_turn(Rank& self, const auto& step) {
  for (int rank = 0; rank < self.world(); ++rank) {
    if (rank == self.rank()) step();
    self.barrier();
  }
}

void run(Rank& self) {
  int version = 0;
  EXPECT_OK(ncclGetVersion(&version));
  EXPECT(version == 22899);
  ncclComm_t comm = self.make_communicator();
  EXPECT(stand_in_count("CommInitRank") > 0);
  EXPECT(stand_in_count("MemAlloc") > 0);
  sum_of_ones(comm, self.world());
  EXPECT(stand_in_count("AllReduce") == 0);
  self.barrier();

  // Memory that nothing but the stand-in gets: it does not look at it.
  float number = 1;
  std::vector<float> large(17 << 20);
  Calls all_reduce("AllReduce");
  Calls group_start("GroupStart");
  Calls group_end("GroupEnd");
  in_turn(self, [&] {
    all_reduce.more();
    group_start.more();
    EXPECT_OK(ncclAllReduce(&number, &number, 1, ncclFloat32, ncclMax, comm, nullptr));
    EXPECT_OK(ncclAllReduce(&number, &number, 1, ncclFloat64, ncclSum, comm, nullptr));
    EXPECT_OK(ncclAllReduce(large.data(), large.data(), large.size(), ncclFloat32, ncclSum, comm, nullptr));
    EXPECT(all_reduce.more() == 3);
    Calls broadcast("Broadcast");
    EXPECT_OK(ncclBcast(large.data(), large.size(), ncclFloat32, 0, comm, nullptr));
    EXPECT(broadcast.more() == 1);
    EXPECT(group_start.more() == 0);
    EXPECT(ncclTeamWorld(comm).rank == self.rank());
    Calls suspend("CommSuspend");
    EXPECT_OK(ncclCommSuspend(comm, 1));
    EXPECT(suspend.more() == 1);
    Calls dump("ParamDumpAll");
    pncclParamDumpAll();
    EXPECT(dump.more() == 1);
    // What the library does not have, and what fails in it.
    EXPECT_RESULT(ncclCommResume(comm), ncclInvalidUsage);
    const std::string refusal = ncclGetLastError(comm);
    EXPECT(refusal.find("version 22899, has no ncclCommResume: LLM_COMM_NCCL_LIBRARY may name") != std::string::npos);
    EXPECT_RESULT(ncclAllReduce(&number, &number, 1, ncclFloat32, ncclNumOps, comm, nullptr), ncclInvalidArgument);
    EXPECT(std::string(ncclGetLastError(comm)).find("the stand-in's last error") != std::string::npos);
  });

  // A group of both kinds: one group there, with what is its own.
  std::vector<float> ones(100, 1);
  EXPECT_OK(ncclGroupStart());
  EXPECT_OK(ncclAllReduce(ones.data(), ones.data(), ones.size(), ncclFloat32, ncclSum, comm, nullptr));
  EXPECT_OK(ncclSend(&number, 1, ncclFloat32, 0, comm, nullptr));
  EXPECT_OK(ncclRecv(&number, 1, ncclFloat32, 0, comm, nullptr));
  EXPECT(ones.front() == 1);
  EXPECT(stand_in_depth() > 0);
  EXPECT_OK(ncclGroupEnd());
  EXPECT(ones.front() == static_cast<float>(self.world()));
  self.barrier();
  EXPECT(stand_in_depth() == 0);
  EXPECT(stand_in_count("GroupStart") == stand_in_count("GroupEnd"));
  self.barrier();

  // A communicator is made in a group that has calls of that library, too, but not as one of them.
  const ncclUniqueId id = self.next_id();
  ncclComm_t second = nullptr;
  EXPECT_OK(ncclGroupStart());
  EXPECT_OK(ncclSend(&number, 1, ncclFloat32, 0, comm, nullptr));
  EXPECT_OK(ncclCommInitRank(&second, self.world(), id, self.rank()));
  EXPECT_OK(ncclGroupEnd());
  sum_of_ones(second, self.world());
  EXPECT_OK(ncclCommDestroy(second));
  self.barrier();
  in_turn(self, [&] {
    group_end.more();
    EXPECT_OK(ncclGroupStart());
    EXPECT_OK(ncclGroupEnd());
    EXPECT(group_end.more() == 0);
  });

  // Split, and an id of the other library.
  ncclComm_t child = nullptr;
  EXPECT_OK(ncclCommSplit(comm, 0, -self.rank(), &child, nullptr));
  sum_of_ones(child, self.world());
  EXPECT_OK(ncclCommDestroy(child));
  in_turn(self, [&] {
    ncclUniqueId foreign{};
    std::string("an id of the stand-in").copy(foreign.internal, sizeof(foreign.internal));
    ncclComm_t other = nullptr;
    ncclConfig_t config{sizeof(ncclConfig_t), NCCL_API_MAGIC, LLM_COMM_NCCL_VERSION, 1};
    EXPECT_OK(ncclCommInitRankConfig(&other, 1000, foreign, 3, &config));
    int ranks = 0;
    EXPECT_OK(ncclCommCount(other, &ranks));
    EXPECT(ranks == 1000);
    all_reduce.more();
    EXPECT_OK(ncclAllReduce(&number, &number, 1, ncclFloat32, ncclSum, other, nullptr));
    EXPECT(all_reduce.more() == 1);
    // One that is not blocking is there nevertheless when it has been made.
    config.blocking = 0;
    ncclComm_t soon = nullptr;
    EXPECT_OK(ncclCommInitRankConfig(&soon, 2, foreign, 0, &config));
    ncclResult_t error = ncclInternalError;
    EXPECT_OK(ncclCommGetAsyncError(soon, &error));
    EXPECT(error == ncclSuccess);
    EXPECT_OK(ncclCommDestroy(soon));
    EXPECT_OK(ncclCommGetAsyncError(other, &error));
    EXPECT(error == ncclSuccess);
    EXPECT_OK(ncclCommAbort(other));
  });
  EXPECT_OK(ncclCommFinalize(comm));
  Calls destroy("CommDestroy");
  EXPECT_OK(ncclCommDestroy(comm));
  EXPECT(destroy.more() > 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  void* const stand_in = dlopen(std::getenv("LLM_COMM_NCCL_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
  if (stand_in == nullptr) {
    std::fprintf(stderr, "no stand-in: %s\n", dlerror());
    return 2;
  }
  stand_in_count = reinterpret_cast<int (*)(const char*)>(dlsym(stand_in, "stand_in_count"));
  stand_in_depth = reinterpret_cast<int (*)()>(dlsym(stand_in, "stand_in_depth"));
  const auto kind = std::string(argv[1]) == "threads" ? nccl_test::Ranks::kThreads : nccl_test::Ranks::kProcesses;
  nccl_test::run_ranks(kind, std::atoi(argv[2]), run);
  return nccl_test::failures() == 0 ? 0 : 1;
}
