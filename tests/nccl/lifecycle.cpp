// What becomes of communicators: how they are made, split, asked, misused, aborted, left by ranks that die, forked and
// left behind. Usage: lifecycle <scenario> threads|processes|containers <world>; `lifecycle --list` names the
// scenarios. LLM_COMM_TIMEOUT_S is set by each.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "ranks.h"

namespace {

using nccl_test::Rank;
using nccl_test::Ranks;

// The sum over the ranks of a communicator, of one element.
ncclResult_t add_up(ncclComm_t comm, float mine, float& sum) {
  return ncclAllReduce(&mine, &sum, 1, ncclFloat32, ncclSum, comm, nullptr);
}

void expect_sum(ncclComm_t comm, float mine, float wanted) {
  float sum = -1;
  EXPECT_OK(add_up(comm, mine, sum));
  EXPECT(sum == wanted);
}

float sum_of_ranks(int world) { return static_cast<float>(world * (world - 1) / 2); }

bool says(const char* text, const char* part) { return std::strstr(text, part) != nullptr; }

ncclResult_t async_error(ncclComm_t comm) {
  ncclResult_t error = ncclSuccess;
  EXPECT_OK(ncclCommGetAsyncError(comm, &error));
  return error;
}

void questions(Rank& self) {
  ncclComm_t comm = self.make_communicator();
  int answer = -1;
  EXPECT_OK(ncclCommCount(comm, &answer));
  EXPECT(answer == self.world());
  EXPECT_OK(ncclCommUserRank(comm, &answer));
  EXPECT(answer == self.rank());
  EXPECT_OK(pncclCommUserRank(comm, &answer));
  EXPECT_OK(ncclCommCuDevice(comm, &answer));
  EXPECT(answer == 0);
  EXPECT_OK(ncclGetVersion(&answer));
  EXPECT(answer == LLM_COMM_NCCL_VERSION);
  EXPECT(async_error(comm) == ncclSuccess);
  for (int result = 0; result < ncclNumResults; ++result) {
    EXPECT(*ncclGetErrorString(static_cast<ncclResult_t>(result)) != '\0');
  }
  void* memory = nullptr;
  EXPECT_OK(ncclMemAlloc(&memory, 1000));
  std::memset(memory, 1, 1000);
  void* handle = memory;
  EXPECT_OK(ncclCommRegister(comm, memory, 1000, &handle));
  EXPECT_OK(ncclCommDeregister(comm, handle));
  EXPECT_OK(ncclMemFree(memory));
  EXPECT_OK(ncclCommDestroy(comm));
  EXPECT_OK(ncclCommDestroy(nullptr));
}

void one_rank(Rank&) {
  ncclUniqueId id;
  EXPECT_OK(ncclGetUniqueId(&id));
  ncclComm_t comm = nullptr;
  EXPECT_OK(ncclCommInitRank(&comm, 1, id, 0));
  expect_sum(comm, 5, 5);
  EXPECT_OK(ncclCommDestroy(comm));
}

void configured(Rank& self) {
  ncclComm_t comm = nullptr;
  const ncclUniqueId id = self.next_id();
  for (ncclConfig_t wrong : {ncclConfig_t{sizeof(ncclConfig_t), 0xcafebeee, LLM_COMM_NCCL_VERSION, 1},
                             ncclConfig_t{7, NCCL_API_MAGIC, LLM_COMM_NCCL_VERSION, 1},
                             ncclConfig_t{sizeof(ncclConfig_t), NCCL_API_MAGIC, LLM_COMM_NCCL_VERSION, 2}}) {
    EXPECT_RESULT(ncclCommInitRankConfig(&comm, self.world(), id, self.rank(), &wrong), ncclInvalidArgument);
    EXPECT(says(ncclGetLastError(nullptr), "ncclConfig_t has"));
  }
  EXPECT_OK(ncclGroupStart());
  {
    ncclConfig_t config{sizeof(ncclConfig_t), NCCL_API_MAGIC, LLM_COMM_NCCL_VERSION, 1};
    EXPECT_OK(ncclCommInitRankConfig(&comm, self.world(), id, self.rank(), &config));
    std::memset(&config, 0xff, sizeof(config));
  }
  EXPECT_OK(ncclGroupEnd());
  expect_sum(comm, static_cast<float>(self.rank()), sum_of_ranks(self.world()));
  EXPECT_OK(ncclCommDestroy(comm));
  ncclUniqueId ids[2] = {self.next_id(), self.next_id()};
  EXPECT_OK(ncclCommInitRankScalable(&comm, self.world(), self.rank(), 2, ids, nullptr));
  expect_sum(comm, 1, static_cast<float>(self.world()));
  EXPECT_OK(ncclCommDestroy(comm));
}

// Odd and even ranks, in opposite order, without the last one; the new communicators outlive the old.
void split(Rank& self) {
  ncclComm_t comm = self.make_communicator();
  const int last = self.world() - 1;
  const bool takes_part = self.rank() != last || self.world() == 2;
  ncclComm_t child = comm;
  EXPECT_OK(ncclCommSplit(comm, takes_part ? self.rank() % 2 : NCCL_SPLIT_NOCOLOR, -self.rank(), &child, nullptr));
  EXPECT(takes_part == (child != nullptr));
  EXPECT_OK(ncclCommDestroy(comm));
  if (child == nullptr) return;
  int members = 0;
  float sum = 0;
  int behind = 0;
  for (int rank = 0; rank < self.world() - (self.world() == 2 ? 0 : 1); ++rank) {
    if (rank % 2 != self.rank() % 2) continue;
    ++members;
    behind += rank > self.rank();
    sum += static_cast<float>(rank);
  }
  int answer = -1;
  EXPECT_OK(ncclCommCount(child, &answer));
  EXPECT(answer == members);
  EXPECT_OK(ncclCommUserRank(child, &answer));
  EXPECT(answer == behind);
  for (int i = 0; i < 10; ++i) expect_sum(child, static_cast<float>(self.rank()), sum);
  EXPECT_OK(ncclCommDestroy(child));
}

// Splits of one parent in a group run in their order, those of another parent beside them. Threads may split one
// parent, too.
void split_in_groups(Rank& self) {
  ncclComm_t parent = self.make_communicator();
  ncclComm_t other = self.make_communicator();
  const int rank = self.rank();
  ncclComm_t same = nullptr;
  ncclComm_t reversed = nullptr;
  ncclComm_t beside = nullptr;
  ncclComm_t none = parent;
  EXPECT_OK(ncclGroupStart());
  EXPECT_OK(ncclCommSplit(parent, 0, rank, &same, nullptr));
  EXPECT_OK(ncclGroupStart());
  EXPECT_OK(ncclCommSplit(parent, 1, -rank, &reversed, nullptr));
  EXPECT_OK(ncclCommSplit(other, 0, rank, &beside, nullptr));
  EXPECT_OK(ncclGroupEnd());
  EXPECT_OK(ncclCommSplit(parent, NCCL_SPLIT_NOCOLOR, 0, &none, nullptr));
  EXPECT_OK(ncclCommDestroy(parent));  // the queued splits keep it
  EXPECT_OK(ncclGroupEnd());
  EXPECT(none == nullptr);
  int answer = -1;
  EXPECT_OK(ncclCommUserRank(same, &answer));
  EXPECT(answer == rank);
  EXPECT_OK(ncclCommUserRank(reversed, &answer));
  EXPECT(answer == self.world() - 1 - rank);
  for (ncclComm_t comm : {same, reversed, beside}) {
    expect_sum(comm, static_cast<float>(rank), sum_of_ranks(self.world()));
    EXPECT_OK(ncclCommDestroy(comm));
  }
  // Which threads of the ranks share a communicator is left open: all are called in one group.
  ncclComm_t made[4] = {};
  const auto split_twice = [&](ncclComm_t* to) {
    EXPECT_OK(ncclGroupStart());
    for (int i = 0; i < 2; ++i) EXPECT_OK(ncclCommSplit(other, 0, rank, to + i, nullptr));
    EXPECT_OK(ncclGroupEnd());
  };
  std::thread second(split_twice, made + 2);
  split_twice(made);
  second.join();
  float sums[4] = {};
  const float one = 1;
  EXPECT_OK(ncclGroupStart());
  for (int i = 0; i < 4; ++i) EXPECT_OK(ncclAllReduce(&one, sums + i, 1, ncclFloat32, ncclSum, made[i], nullptr));
  EXPECT_OK(ncclGroupEnd());
  for (const float sum : sums) EXPECT(sum == static_cast<float>(self.world()));
  for (ncclComm_t comm : {made[0], made[1], made[2], made[3], other}) EXPECT_OK(ncclCommDestroy(comm));
}

// Two groups that share a rank make calls of their own number, in their own time.
void unequal_counts(Rank& self) {
  ncclComm_t all = self.make_communicator();
  ncclComm_t left = nullptr;
  ncclComm_t right = nullptr;
  const int last = self.world() - 1;
  EXPECT_OK(ncclCommSplit(all, self.rank() < last ? 0 : NCCL_SPLIT_NOCOLOR, 0, &left, nullptr));
  EXPECT_OK(ncclCommSplit(all, self.rank() > 0 ? 0 : NCCL_SPLIT_NOCOLOR, 0, &right, nullptr));
  std::thread of_left([&] {
    for (int i = 0; i < 60 && left != nullptr; ++i) expect_sum(left, 1, static_cast<float>(last));
  });
  for (int i = 0; i < 7 && right != nullptr; ++i) expect_sum(right, 2, static_cast<float>(2 * last));
  of_left.join();
  for (ncclComm_t comm : {left, right, all}) EXPECT_OK(ncclCommDestroy(comm));
}

// Calls a function with zeros, which must name it and the option by which an NCCL library is found.
template <class Result, class... Parameters>
void expect_refusal(const std::string& name, Result (*function)(Parameters...)) {
  if constexpr (std::is_same_v<Result, ncclResult_t>) {
    EXPECT_RESULT(function(Parameters{}...), ncclInvalidUsage);
  } else {
    function(Parameters{}...);
  }
  const std::string refusal = ncclGetLastError(nullptr);
  const bool is_named = says(refusal.c_str(), ("nccl" + name + " is not served").c_str()) &&
                        says(refusal.c_str(), "LLM_COMM_NCCL_LIBRARY");
  EXPECT(is_named);
  if (!is_named) std::fprintf(stderr, "nccl%s says: %s\n", name.c_str(), refusal.c_str());
}

void misuse(Rank& self) {
  ncclComm_t comm = self.make_communicator();
  float number = 1;
  EXPECT_RESULT(ncclGroupEnd(), ncclInvalidUsage);
  EXPECT_RESULT(ncclGetUniqueId(nullptr), ncclInvalidArgument);
  EXPECT_RESULT(ncclCommInitRank(nullptr, 2, {}, 0), ncclInvalidArgument);
  ncclComm_t none = nullptr;
  EXPECT_RESULT(ncclCommInitRank(&none, 2, {}, 2), ncclInvalidArgument);
  EXPECT_RESULT(ncclCommInitRank(&none, 2, {}, 0), ncclInvalidUsage);  // an id of nobody
  EXPECT(says(ncclGetLastError(comm), "no NCCL library"));
  EXPECT_RESULT(ncclCommInitAll(&none, 1000, nullptr), ncclInvalidArgument);
  EXPECT_RESULT(ncclAllReduce(nullptr, &number, 1, ncclFloat32, ncclSum, comm, nullptr), ncclInvalidArgument);
  EXPECT_RESULT(ncclAllReduce(&number, &number, 1, ncclNumTypes, ncclSum, comm, nullptr), ncclInvalidArgument);
  EXPECT_RESULT(ncclBcast(&number, 1, ncclFloat32, self.world(), comm, nullptr), ncclInvalidArgument);
  EXPECT_RESULT(ncclCommSplit(comm, -7, 0, &none, nullptr), ncclInvalidArgument);
  // Nobody is there to do what is not served.
  EXPECT_RESULT(ncclAllReduce(&number, &number, 1, ncclFloat32, ncclMax, comm, nullptr), ncclInvalidUsage);
  EXPECT(says(ncclGetLastError(nullptr), "LLM_COMM_NCCL_LIBRARY"));
  EXPECT_RESULT(ncclSend(&number, 1, ncclFloat32, 0, comm, nullptr), ncclInvalidUsage);
  EXPECT(ncclTeamWorld(comm).nRanks == 0);
  EXPECT_RESULT(
      ncclAllReduce(&number, &number, 1, ncclFloat32, ncclSum, reinterpret_cast<ncclComm_t>(&number), nullptr),
      ncclInvalidArgument);
  EXPECT_RESULT(ncclCommDestroy(reinterpret_cast<ncclComm_t>(&number)), ncclInvalidArgument);
#define LLM_COMM_NCCL_OWN(type, name, parameters, arguments)
#define LLM_COMM_NCCL_FORWARDED(type, name, parameters, arguments) expect_refusal(#name, &nccl##name);
#include "nccl/functions.def"
  // In a group it is said at the end again.
  EXPECT_OK(ncclGroupStart());
  EXPECT_RESULT(ncclRecv(&number, 1, ncclFloat32, 0, comm, nullptr), ncclInvalidUsage);
  EXPECT_RESULT(ncclGroupEnd(), ncclInvalidUsage);
  EXPECT_OK(ncclAllReduce(&number, &number, 0, ncclFloat32, ncclSum, comm, nullptr));
  // None of it did any harm.
  expect_sum(comm, static_cast<float>(self.rank()), sum_of_ranks(self.world()));
  EXPECT_OK(ncclCommDestroy(comm));
}

void abort_from_another_thread(Rank& self) {
  ncclComm_t comm = self.make_communicator();
  self.barrier();
  if (self.rank() == 0) {
    std::thread watchdog([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      EXPECT_OK(ncclCommAbort(comm));
    });
    float sum = 0;
    EXPECT_RESULT(add_up(comm, 1, sum), ncclRemoteError);
    watchdog.join();
  }
  self.barrier();
  if (self.rank() != 0) EXPECT_OK(ncclCommAbort(comm));
  // A split that waits for another rank.
  comm = self.make_communicator();
  if (self.rank() == 0) {
    std::thread watchdog([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      EXPECT_OK(ncclCommAbort(comm));
    });
    ncclComm_t child = nullptr;
    EXPECT_RESULT(ncclCommSplit(comm, 0, 0, &child, nullptr), ncclRemoteError);
    EXPECT(says(ncclGetLastError(nullptr), "closed"));
    watchdog.join();
  }
  self.barrier();
  if (self.rank() != 0) EXPECT_OK(ncclCommAbort(comm));
}

// All others are told long before the time is up, whatever the PID namespace of the rank.
void killed(Rank& self) {
  ncclComm_t comm = self.make_communicator();
  expect_sum(comm, 1, static_cast<float>(self.world()));
  self.barrier();
  if (self.rank() == 1) _exit(1);  // the first process of a PID namespace cannot kill itself
  float sum = 0;
  EXPECT_RESULT(add_up(comm, 1, sum), ncclRemoteError);
  EXPECT(async_error(comm) == ncclRemoteError);
  EXPECT(says(ncclGetLastError(comm), "rank 1"));
  EXPECT(says(ncclGetLastError(comm), "exited"));
  EXPECT_RESULT(add_up(comm, 1, sum), ncclRemoteError);
  EXPECT_OK(ncclCommAbort(comm));
}

// A rank that does not come, in a call and to the making of a communicator.
void late(Rank& self) {
  ncclComm_t comm = self.make_communicator();
  const ncclUniqueId id = self.next_id();
  if (self.rank() != 0) {
    float sum = 0;
    EXPECT_RESULT(add_up(comm, 1, sum), ncclRemoteError);
    EXPECT(async_error(comm) == ncclRemoteError);
    ncclComm_t never = nullptr;
    EXPECT_RESULT(ncclCommInitRank(&never, self.world(), id, self.rank()), ncclRemoteError);
    EXPECT(never == nullptr);
  }
  self.barrier();
  EXPECT_OK(ncclCommAbort(comm));
}

void different_calls(Rank& self) {
  ncclComm_t comm = self.make_communicator();
  std::vector<float> numbers(8, 1);
  const size_t count = self.rank() == 0 ? 8 : 4;
  const ncclResult_t result = ncclAllReduce(numbers.data(), numbers.data(), count, ncclFloat32, ncclSum, comm, nullptr);
  EXPECT(result == ncclInvalidUsage || result == ncclRemoteError);
  EXPECT(async_error(comm) != ncclSuccess);
  EXPECT_OK(ncclCommAbort(comm));
}

// A stranger who has heard of the address but not of the secret; one rank too many; one twice.
void strangers(Rank& self) {
  const ncclUniqueId id = self.next_id();
  ncclUniqueId guessed = id;
  guessed.internal[40] = static_cast<char>(guessed.internal[40] ^ 1);
  ncclComm_t comm = nullptr;
  if (self.rank() == 0) {
    EXPECT_RESULT(ncclCommInitRank(&comm, self.world(), guessed, 0), ncclRemoteError);
  }
  self.barrier();
  EXPECT_OK(ncclCommInitRank(&comm, self.world(), id, self.rank()));
  expect_sum(comm, 1, static_cast<float>(self.world()));
  // The hub is closed to others from now on.
  ncclComm_t late_one = nullptr;
  EXPECT(ncclCommInitRank(&late_one, self.world(), id, self.rank()) != ncclSuccess);
  expect_sum(comm, 2, static_cast<float>(2 * self.world()));
  EXPECT_OK(ncclCommDestroy(comm));
  // Two ranks that are the same: no communicator for anybody.
  const ncclUniqueId other = self.next_id();
  EXPECT(ncclCommInitRank(&comm, self.world(), other, 0) != ncclSuccess);
  EXPECT(comm == nullptr);
}

// A child process has no communicators, and does not disturb its parent's.
void forked(Rank& self) {
  ncclComm_t comm = self.make_communicator();
  const float mine = 1;
  float in_group = 0;
  EXPECT_OK(ncclGroupStart());
  EXPECT_OK(ncclAllReduce(&mine, &in_group, 1, ncclFloat32, ncclSum, comm, nullptr));
  const pid_t child = fork();
  if (child == 0) {
    if (ncclGroupEnd() != ncclInvalidUsage) _exit(2);
    float sum = 0;
    const bool is_refused = add_up(comm, 1, sum) == ncclInvalidUsage && ncclCommDestroy(comm) == ncclInvalidUsage &&
                            ncclCommAbort(comm) == ncclInvalidUsage;
    _exit(is_refused && says(ncclGetLastError(nullptr), "the process that this one was forked from") ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT(status == 0);
  EXPECT_OK(ncclGroupEnd());
  EXPECT(in_group == static_cast<float>(self.world()));
  expect_sum(comm, 1, static_cast<float>(self.world()));
  EXPECT_OK(ncclCommDestroy(comm));
}

// The process ends with communicators, an id that nobody has used, and an open group.
void left_behind(Rank& self) {
  ncclComm_t comm = self.make_communicator();
  expect_sum(comm, 1, static_cast<float>(self.world()));
  ncclUniqueId unused;
  EXPECT_OK(ncclGetUniqueId(&unused));
  self.barrier();
  EXPECT_OK(ncclGroupStart());
}

using Scenario = void (*)(Rank&);
struct Entry {
  Scenario scenario;
  const char* timeout_s;
  bool for_threads;
  int dies;
};

const std::map<std::string, Entry>& scenarios() {
  static const std::map<std::string, Entry> all{
      {"questions", {questions, "60", true, -1}},
      {"one_rank", {one_rank, "60", true, -1}},
      {"configured", {configured, "60", true, -1}},
      {"split", {split, "60", true, -1}},
      {"split_in_groups", {split_in_groups, "60", true, -1}},
      {"unequal_counts", {unequal_counts, "60", true, -1}},
      {"misuse", {misuse, "60", true, -1}},
      {"abort", {abort_from_another_thread, "60", true, -1}},
      {"killed", {killed, "60", false, 1}},
      {"late", {late, "4", true, -1}},
      {"different_calls", {different_calls, "60", true, -1}},
      {"strangers", {strangers, "60", true, -1}},
      {"forked", {forked, "60", false, -1}},
      {"left_behind", {left_behind, "60", false, -1}},
  };
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    for (const auto& [name, entry] : scenarios()) {
      std::printf("%s processes\n", name.c_str());
      if (entry.for_threads) std::printf("%s threads\n", name.c_str());
    }
    return 0;
  }
  const Entry& entry = scenarios().at(argv[1]);
  const std::map<std::string, Ranks> kinds{
      {"threads", Ranks::kThreads}, {"processes", Ranks::kProcesses}, {"containers", Ranks::kContainers}};
  const Ranks kind = kinds.at(argv[2]);
  setenv("LLM_COMM_TIMEOUT_S", entry.timeout_s, 1);
  setenv("LLM_COMM_WORKSPACE_BYTES", "4M", 1);  // what takes long is to make them
  nccl_test::run_ranks(kind, std::atoi(argv[3]), entry.scenario, entry.dies);
  return nccl_test::failures() == 0 ? 0 : 1;
}
