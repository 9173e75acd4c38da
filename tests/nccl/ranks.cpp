#include "ranks.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

namespace nccl_test {

namespace {

std::atomic<int> failures_of_process = 0;

// The first child of a process that has asked for a namespace is in it; this process only waits for that one.
void enter_pid_namespace() {
  if (unshare(CLONE_NEWPID) != 0) {
    std::perror("unshare");
    _exit(1);
  }
  const pid_t process = fork();
  if (process == 0) return;
  int status = 0;
  waitpid(process, &status, 0);
  _exit(status == 0 ? 0 : 1);
}

}  // namespace

struct Shared {
  std::atomic<int> failures;
  std::atomic<int> arrived;
  std::atomic<int> generation;
  ncclUniqueId id;
};

int failures() { return failures_of_process; }

void expect(bool holds, const char* what, const char* file, int line) {
  if (holds) return;
  ++failures_of_process;
  std::fprintf(stderr, "%s:%d: %s does not hold\n", file, line, what);
}

void expect_result(ncclResult_t result, ncclResult_t wanted, const char* what, const char* file, int line) {
  if (result == wanted) return;
  ++failures_of_process;
  std::fprintf(stderr, "%s:%d: %s is %s, not %s: %s\n", file, line, what, ncclGetErrorString(result),
               ncclGetErrorString(wanted), ncclGetLastError(nullptr));
}

void Rank::barrier() {
  const int generation = shared_.generation;
  if (++shared_.arrived == world_) {
    shared_.arrived = 0;
    ++shared_.generation;
    return;
  }
  while (shared_.generation == generation) usleep(100);
}

ncclUniqueId Rank::next_id() {
  if (rank_ == 0) EXPECT_OK(ncclGetUniqueId(&shared_.id));
  barrier();
  const ncclUniqueId id = shared_.id;
  barrier();
  return id;
}

ncclComm_t Rank::make_communicator() {
  ncclComm_t comm = nullptr;
  EXPECT_OK(ncclCommInitRank(&comm, world_, next_id(), rank_));
  EXPECT(comm != nullptr);
  if (comm == nullptr) std::exit(1);
  return comm;
}

int run_ranks(Ranks kind, int world, const std::function<void(Rank&)>& body, int dies) {
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const shared = new (memory) Shared{};
  const int before = failures_of_process;
  if (kind == Ranks::kThreads) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
      threads.emplace_back([&, rank] {
        Rank self(*shared, rank, world);
        body(self);
      });
    }
    for (std::thread& thread : threads) thread.join();
  } else {
    std::vector<pid_t> processes;
    for (int rank = 0; rank < world; ++rank) {
      const pid_t process = fork();
      if (process == 0) {
        if (kind == Ranks::kContainers) enter_pid_namespace();
        Rank self(*shared, rank, world);
        body(self);
        std::exit(failures_of_process == before ? 0 : 1);
      }
      processes.push_back(process);
    }
    for (int rank = 0; rank < world; ++rank) {
      int status = 0;
      waitpid(processes[static_cast<size_t>(rank)], &status, 0);
      if (status != 0 && rank != dies) {
        ++failures_of_process;
        std::fprintf(stderr, "rank %d of %d ends with status %d\n", rank, world, status);
      }
    }
  }
  munmap(memory, sizeof(Shared));
  return failures_of_process - before;
}

}  // namespace nccl_test
