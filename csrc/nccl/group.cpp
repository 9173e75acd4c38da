#include "nccl/group.h"

#include <pthread.h>

#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl/device.h"
#include "nccl/failure.h"
#include "nccl/real_library.h"

namespace llm_comm::nccl {

namespace {

struct Group {
  int depth = 0;
  bool is_in_real_group = false;
  ncclResult_t result = ncclSuccess;
  std::vector<QueuedJob> jobs;
  std::vector<QueuedCall> calls;
};

thread_local Group group_of_thread;

// A group that is open at a fork belongs to the parent. The child never destroys its copies.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  static auto* const inherited = new std::vector<Group>;
  inherited->push_back(std::move(group_of_thread));
  group_of_thread = {};
});

// Result and message of a job that ran in a thread.
struct Outcome {
  ncclResult_t result = ncclSuccess;
  std::string text;
};

template <class Step>
Outcome outcome_of(Step step) {
  try {
    return {step(), ""};
  } catch (const Failure& failure) {
    return {failure.result(), failure.what()};
  } catch (const std::exception& error) {
    return {ncclInternalError, error.what()};
  }
}

ncclResult_t run(const QueuedJob& one) {
  const CurrentDevice current(one.device);
  return one.job();
}

ncclResult_t run(const QueuedCall& call) {
  call.communicator->run(call.message, call.send, call.recv, call.stream);
  return ncclSuccess;
}

// Groups the queue by communicator, in order. Entries without a communicator get a list each.
template <class Queued>
std::vector<std::vector<Queued>> by_communicator(std::vector<Queued> queued) {
  std::vector<std::vector<Queued>> lists;
  for (Queued& one : queued) {
    auto list = one.communicator == nullptr ? lists.end() : lists.begin();
    while (list != lists.end() && list->front().communicator != one.communicator) ++list;
    if (list == lists.end()) {
      lists.emplace_back();
      list = lists.end() - 1;
    }
    list->push_back(std::move(one));
  }
  return lists;
}

// Runs all lists concurrently, each in its own thread and to its end: other ranks continue after a failure of this one.
// Throws the first failure. Returns ncclInProgress if a step did.
template <class Queued>
ncclResult_t run_together(const std::vector<std::vector<Queued>>& lists) {
  std::vector<std::vector<Outcome>> outcomes_of_lists(lists.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < lists.size(); ++i) {
    const Outcome start = outcome_of([&] {
      threads.emplace_back([&, i] {
        for (const Queued& one : lists[i]) outcomes_of_lists[i].push_back(outcome_of([&] { return run(one); }));
      });
      return ncclSuccess;
    });
    if (start.result != ncclSuccess) outcomes_of_lists[i].push_back(start);
  }
  for (std::thread& thread : threads) thread.join();
  ncclResult_t result = ncclSuccess;
  for (const std::vector<Outcome>& outcomes : outcomes_of_lists) {
    for (const Outcome& outcome : outcomes) {
      if (outcome.result != ncclSuccess && outcome.result != ncclInProgress)
        throw Failure(outcome.result, outcome.text);
      if (outcome.result == ncclInProgress) result = ncclInProgress;
    }
  }
  return result;
}

void run_calls(std::vector<QueuedCall> calls) {
  const auto lists = by_communicator(std::move(calls));
  if (kCallsAreSynchronous && lists.size() > 1) {
    run_together(lists);
    return;
  }
  // Launches the first call of every communicator, then the second ones, and so on. A stream accepts a limited number
  // of launches before it blocks the host. Launches of one communicator end only after the other ranks have launched
  // theirs.
  size_t longest = 0;
  for (const auto& list : lists) longest = std::max(longest, list.size());
  for (size_t i = 0; i < longest; ++i) {
    for (const auto& list : lists) {
      if (i < list.size()) run(list[i]);
    }
  }
}

Group take_outermost(const char* name) {
  Group& group = group_of_thread;
  if (group.depth == 0) throw Failure(ncclInvalidUsage, std::string(name) + " without ncclGroupStart");
  return std::exchange(group, Group{});
}

}  // namespace

bool is_in_group() { return group_of_thread.depth > 0; }

void begin_group() { ++group_of_thread.depth; }

ncclResult_t end_group() {
  if (group_of_thread.depth > 1) {
    --group_of_thread.depth;
    return ncclSuccess;
  }
  Group group = take_outermost("ncclGroupEnd");
  // The real library's group is ended in any case: later groups' calls would join it otherwise.
  Outcome own = outcome_of([&] {
    if (group.result != ncclSuccess) return group.result;
    // Runs jobs in threads, even a single one. This thread may be in a group of the real library, but what a job asks
    // of that library must be complete when the job returns.
    const ncclResult_t result = run_together(by_communicator(std::move(group.jobs)));
    run_calls(std::move(group.calls));
    return result;
  });
  if (group.is_in_real_group) {
    const ncclResult_t real = call_real(&RealFunctions::GroupEnd, "GroupEnd");
    if (own.result == ncclSuccess) own.result = real;
  }
  if (!own.text.empty()) throw Failure(own.result, own.text);
  return own.result;
}

ncclResult_t simulate_end_of_group(ncclSimInfo_t* info) {
  if (group_of_thread.depth > 1) {
    --group_of_thread.depth;
    return ncclSuccess;
  }
  const Group group = take_outermost("ncclGroupSimulateEnd");
  if (!group.is_in_real_group) call_real(&RealFunctions::GroupStart, "GroupStart");
  return call_real(&RealFunctions::GroupSimulateEnd, "GroupSimulateEnd", info);
}

ncclResult_t run_or_queue(QueuedJob job) {
  if (!is_in_group()) return run(job);
  group_of_thread.jobs.push_back(std::move(job));
  return ncclSuccess;
}

ncclResult_t run_or_queue(QueuedCall call) {
  if (is_in_group()) {
    group_of_thread.calls.push_back(std::move(call));
  } else {
    run(call);
  }
  return ncclSuccess;
}

void join_group_of_real_library() {
  Group& group = group_of_thread;
  if (group.depth == 0 || group.is_in_real_group || !RealLibrary::get().is_there()) return;
  const ncclResult_t result = call_real(&RealFunctions::GroupStart, "GroupStart");
  if (result != ncclSuccess) throw Failure(result, "ncclGroupStart of the NCCL library has failed");
  group.is_in_real_group = true;
}

void note_failure(ncclResult_t result) {
  Group& group = group_of_thread;
  if (group.depth > 0 && group.result == ncclSuccess) group.result = result;
}

}  // namespace llm_comm::nccl
