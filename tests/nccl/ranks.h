// Ranks of a communicator as threads of this process, as processes, or as processes in PID namespaces of their own, for tests of the NCCL library.
#pragma once

#include <cstdio>
#include <functional>
#include <string>

#include "nccl/nccl_api.h"

namespace nccl_test {

enum class Ranks { kThreads, kProcesses, kContainers };

// What the ranks of a test have in common, in memory that processes share too.
struct Shared;

class Rank {
 public:
  Rank(Shared& shared, int rank, int world) : shared_(shared), rank_(rank), world_(world) {}
  int rank() const { return rank_; }
  int world() const { return world_; }
  // Of rank 0's making, another one each time. Collective.
  ncclUniqueId next_id();
  void barrier();
  ncclComm_t make_communicator();

 private:
  Shared& shared_;
  int rank_;
  int world_;
};

// Counts as a failure of the test if it does not hold.
void expect(bool holds, const char* what, const char* file, int line);
#define EXPECT(condition) nccl_test::expect((condition), #condition, __FILE__, __LINE__)
// And says what the library says.
void expect_result(ncclResult_t result, ncclResult_t wanted, const char* what, const char* file, int line);
#define EXPECT_OK(call) nccl_test::expect_result((call), ncclSuccess, #call, __FILE__, __LINE__)
#define EXPECT_RESULT(call, wanted) nccl_test::expect_result((call), (wanted), #call, __FILE__, __LINE__)

// Runs `body` on each rank. A process that ends other than by returning counts as a failure, unless it is rank `dies`. Returns how many
// failures there were.
int run_ranks(Ranks kind, int world, const std::function<void(Rank&)>& body, int dies = -1);
int failures();

}  // namespace nccl_test
