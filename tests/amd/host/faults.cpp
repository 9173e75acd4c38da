// Makes each call of the HIP runtime fail in turn, in a run that uses everything but graphs.
#include "faults.h"

#include <filesystem>
#include <iterator>
#include <set>

#include "ranks.h"

namespace hip_test {

namespace {

// Returns how many calls it made before it destroyed the cores: the calls of destructors report no errors.
uint64_t use_everything(host::Sharing sharing, hipStream_t stream) {
  std::vector<std::shared_ptr<char>> tensors;  // outlive the cores
  Ranks ranks(sharing, true);
  ranks.open_window();
  ranks.send_marks();
  const uint32_t one_shot = all_reduce("one_shot");
  const uint32_t by_copies = all_reduce("two_shot_ce");
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    host::Core& core = ranks.core(rank);
    tensors.push_back(core.memory_of_window(0));
    const auto output = reinterpret_cast<uint64_t>(tensors.back().get());
    core.load({one_shot});
    const Problem problem = problem_of(64 * 1024);
    const auto first = core.prepare(one_shot, problem_of(1024), shape_of(one_shot, problem_of(1024)).tiling);
    const auto second = core.prepare(by_copies, problem, shape_of(by_copies, problem).tiling);
    const std::string input(problem.bytes(), 'x');
    const uint64_t buffers[] = {reinterpret_cast<uint64_t>(input.data()), output, 0, 0, 0, 0, 0};
    expect(second->takes(buffers), "an output in the heap");
    expect(first->run(buffers, 0) == host::Outcome::kEnqueued, "an enqueued call");
    expect(second->run(buffers, reinterpret_cast<uint64_t>(stream)) == host::Outcome::kEnqueued, "an enqueued call");
  }
  if (sharing == host::Sharing::kDescriptor) {
    ranks.release();
    ranks.restore();
  }
  return stub::state().calls.size();
}

long open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

}  // namespace

void check_faults(host::Sharing sharing) {
  // Called by destructors among others. These report no errors.
  const std::set<std::string> of_destructors = {"hipSetDevice", "hipThreadExchangeStreamCaptureMode",
                                                "hipStreamIsCapturing", "hipStreamDestroy"};
  stub::State& state = stub::state();
  hipStream_t stream = nullptr;
  static_cast<void>(hipStreamCreateWithPriority(&stream, hipStreamNonBlocking, -1));
  state.calls.clear();
  const uint64_t calls = use_everything(sharing, stream);
  std::set<std::string> silent(state.calls.begin(), state.calls.begin() + static_cast<int64_t>(calls));
  const size_t called = silent.size();
  const long files = open_files();
  std::string lives = stub::what_lives();  // the stream
  for (uint64_t failing = 1; failing <= calls; ++failing) {
    state.calls.clear();
    state.failing_call = failing;
    std::string error;
    try {
      use_everything(sharing, stream);
    } catch (const std::runtime_error& thrown) {
      error = thrown.what();
    }
    state.failing_call = 0;
    const std::string failed = state.calls.at(failing - 1);
    const std::string where = failed + ", call " + std::to_string(failing) + ", error '" + error + "'";
    if (!error.empty()) {
      expect(error.find(failed + ": ") == 0, "the name of the function: " + where);
      expect(error.find(stub::kErrorText) != std::string::npos, "the text of the error: " + where);
      silent.erase(failed);
    } else {
      expect(of_destructors.count(failed) != 0, "an error: " + where);
    }
    if (failed == "hipStreamDestroy") lives = stub::what_lives();  // the stream that could not be destroyed
    expect(stub::what_lives() == lives, "no leak of " + stub::what_lives() + ": " + where);
    expect(open_files() == files, "no leak of descriptors: " + where);
    expect(state.misuse.empty(), "no misuse, " + (state.misuse.empty() ? "" : state.misuse[0]) + ": " + where);
    expect(hipSetDevice(0) == hipSuccess, "device 0 again");
    hipStreamCaptureMode mode = hipStreamCaptureModeGlobal;
    expect(hipThreadExchangeStreamCaptureMode(&mode) == hipSuccess, "the default mode again");
  }
  silent.erase("hipStreamDestroy");
  silent.erase("hipThreadExchangeStreamCaptureMode");
  expect(silent.empty(), "an error of each function, but not of " + (silent.empty() ? "" : *silent.begin()));
  std::cout << calls << " calls failed in turn, of " << called << " functions\n";
}

}  // namespace hip_test
