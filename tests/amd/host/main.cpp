// Drives the core for AMD GPUs on the stub of the HIP runtime: `hip_host CASE`. Exits with 1 and says what was expected.
#include <algorithm>
#include <map>

#include "faults.h"
#include "ranks.h"

namespace hip_test {

namespace {

using host::Outcome;
using host::Sharing;

stub::State& state() { return stub::state(); }

hipStream_t make_stream() {
  hipStream_t stream = nullptr;
  expect(hipStreamCreateWithPriority(&stream, hipStreamNonBlocking, -1) == hipSuccess, "a stream");
  return stream;
}
uint64_t number(hipStream_t stream) { return reinterpret_cast<uint64_t>(stream); }
long count_calls(const std::string& name) { return std::count(state().calls.begin(), state().calls.end(), name); }

struct Call {
  Call(Ranks& ranks, uint32_t rank, uint64_t count = 1024)
      : algorithm(all_reduce("one_shot")),
        problem(problem_of(count)),
        shape(shape_of(algorithm, problem)),
        tensor(problem.bytes(), 'x'),
        call(ranks.core(rank).prepare(algorithm, problem, shape.tiling)) {}

  Outcome run(hipStream_t stream) {
    const auto address = reinterpret_cast<uint64_t>(tensor.data());
    const uint64_t buffers[kMaxBuffers] = {address, address};
    return call->run(buffers, number(stream));
  }

  uint32_t algorithm;
  Problem problem;
  Shape shape;
  std::string tensor;
  std::unique_ptr<host::PreparedCall> call;
};

// Argument of the last launch.
AllReduceArgs last_arguments() {
  AllReduceArgs args;
  expect(state().launches.back().arguments.size() == sizeof(args), "the arguments of an all-reduce");
  std::memcpy(&args, state().launches.back().arguments.data(), sizeof(args));
  return args;
}

void set_up(Sharing sharing) {
  std::shared_ptr<char> tensor;
  {
    Ranks ranks(sharing);
    ranks.send_marks();
    ranks.open_window();
    tensor = ranks.core(0).memory_of_window(0);
    const auto found = ranks.core(0).find(reinterpret_cast<uint64_t>(tensor.get()) + 64, 64);
    expect(found && found->window == 0 && found->offset == 64, "the place of a tensor");
    expect(ranks.core(1).operations_ended() == uint64_t{0}, "no operations yet");

    Call(ranks, 0).run(nullptr);
    const DeviceComm comm = last_arguments().comm;
    const WorkspaceLayout layout(kSlotBytes, kStagingBytes);
    for (const Region& region : layout.regions().region) {
      if (region.bytes == 0 || std::string(region.name) == "heap" || std::string(region.name) == "marks") continue;
      for (const char* const workspace : {comm.workspace[0], comm.workspace[1]}) {  // its own, and the mapped one
        expect(static_cast<uint8_t>(workspace[region.offset]) == region.initial_byte,
               std::string("region ") + region.name);
        expect(static_cast<uint8_t>(workspace[region.offset + region.bytes - 1]) == region.initial_byte,
               std::string("the end of region ") + region.name);
      }
    }
    char* windows[kRanks];
    std::memcpy(windows, comm.workspace[0] + kHeapOffset, sizeof(windows));
    expect(windows[0] == tensor.get(), "the address of this rank's window");
    windows[1][5] = 'w';
    expect(ranks.core(1).memory_of_window(0).get()[5] == 'w', "a store to the peer's window arrives");

    ranks.core(0).unmap_window(0);
    ranks.core(0).close_window(0);
  }
  tensor.get()[0] = 't';  // outlives the core
  const long waits = count_calls("hipDeviceSynchronize");
  tensor.reset();
  expect(count_calls("hipDeviceSynchronize") == waits + 1, "a tensor that outlives its core waits for the device");
}

void launch() {
  Ranks ranks(Sharing::kIpc);
  Call call(ranks, 1);
  hipStream_t const stream = make_stream();
  expect(call.run(stream) == Outcome::kEnqueued, "an enqueued call");
  const stub::Launch& launch = state().launches.back();
  expect(launch.kernel.find("all_reduce_one_shot") != std::string::npos, "the kernel, not " + launch.kernel);
  expect(launch.blocks == call.shape.last.blocks && launch.threads == call.shape.last.threads, "the shape's grid");
  expect(launch.shared_bytes == call.shape.last.shared_bytes, "the shape's shared memory");
  expect(launch.stream == stream && launch.device == 1, "the caller's stream and the rank's device");
  int device = -1;
  expect(hipGetDevice(&device) == hipSuccess && device == 0, "the caller's device again");
  const AllReduceArgs args = last_arguments();
  expect(args.comm.rank == 1 && args.comm.world_size == kRanks, "the rank");
  expect(args.input == call.tensor.data() && args.output == call.tensor.data() && args.count == 1024, "the tensors");
  expect(args.comm.multicast == nullptr && args.comm.ports == nullptr && args.comm.takes_tickets == 0, "no more");

  // A call on another stream waits for the last one.
  const long waits = count_calls("hipStreamWaitEvent");
  expect(call.run(stream) == Outcome::kEnqueued && count_calls("hipStreamWaitEvent") == waits, "no event");
  expect(call.run(nullptr) == Outcome::kEnqueued && count_calls("hipStreamWaitEvent") == waits + 1, "an event");
  expect(ranks.core(1).last_call().number == 3, "three calls");

  // Calls are refused after an abort.
  ranks.core(1).abort();
  expect(call.run(nullptr) == Outcome::kFailed, "a refused call");
  static_cast<void>(hipStreamDestroy(stream));
}

void copies() {
  auto ranks_now = std::make_unique<Ranks>(Sharing::kDescriptor);
  Ranks& ranks = *ranks_now;
  ranks.open_window();
  const uint32_t algorithm = all_reduce("two_shot_ce");
  const Problem problem = problem_of(128 * 1024);
  auto call = ranks.core(0).prepare(algorithm, problem, shape_of(algorithm, problem).tiling);
  const std::shared_ptr<char> output = ranks.core(0).memory_of_window(0);
  const std::shared_ptr<char> of_peer = ranks.core(1).memory_of_window(0);
  std::string input(problem.bytes(), 'i');
  const uint64_t buffers[kMaxBuffers] = {reinterpret_cast<uint64_t>(input.data()),
                                         reinterpret_cast<uint64_t>(output.get())};
  expect(call->takes(buffers), "an output in the heap");
  hipStream_t const stream = make_stream();
  expect(hipStreamBeginCapture(stream, hipStreamCaptureModeGlobal) == hipSuccess, "a capture");
  expect(call->run(buffers, number(stream)) == Outcome::kCaptured, "a captured call with copies");
  expect(of_peer.get()[problem.bytes() / 2] == 0, "captured copies do not run");
  hipGraph_t graph = nullptr;
  expect(hipStreamEndCapture(stream, &graph) == hipSuccess, "the end of the capture");
  expect(call->run(buffers, 0) == Outcome::kEnqueued, "an enqueued call with copies");
  expect(of_peer.get()[problem.bytes() / 2] == 'i', "the contribution to the peer's slice");
  // The side stream is part of a capture that outlives the core.
  expect(hipStreamBeginCapture(stream, hipStreamCaptureModeGlobal) == hipSuccess, "a capture");
  expect(call->run(buffers, number(stream)) == Outcome::kCaptured, "a captured call with copies");
  call.reset();
  ranks_now.reset();
  expect(hipStreamEndCapture(stream, &graph) == hipSuccess, "the end of the capture");
  static_cast<void>(hipStreamDestroy(stream));
}

// Memory that a graph may use stays mapped after the core, and launches of the graph find the abort word.
void capture() {
  const char* workspace = nullptr;
  hipStream_t const stream = make_stream();
  {
    Ranks ranks(Sharing::kIpc);
    Call call(ranks, 0);
    expect(call.run(nullptr) == Outcome::kEnqueued && !ranks.core(0).has_been_captured(), "an eager call");
    expect(hipStreamBeginCapture(stream, hipStreamCaptureModeGlobal) == hipSuccess, "a capture");
    expect(call.run(stream) == Outcome::kCaptured && ranks.core(0).has_been_captured(), "a captured call");
    workspace = last_arguments().comm.workspace[0];
    // A core is made and calls are prepared while another thread captures.
    {
      Ranks others(Sharing::kDescriptor);
      others.send_marks();
      Call other(others, 0);
    }
    hipGraph_t graph = nullptr;
    expect(hipStreamEndCapture(stream, &graph) == hipSuccess, "the end of the capture");
    // The eager stream is captured: an eager call on another stream cannot wait for it.
    expect(hipStreamBeginCapture(nullptr, hipStreamCaptureModeGlobal) == hipSuccess, "a capture");
    expect_error<std::runtime_error>("make the call before the capture begins", [&] { call.run(stream); });
    expect(hipStreamEndCapture(nullptr, &graph) == hipSuccess, "the end of the capture");
  }
  CommState header;
  std::memcpy(&header, workspace, sizeof(header));
  expect(header.aborted == 1, "the abort word");
  static_cast<void>(hipStreamDestroy(stream));
}

void release() {
  Ranks ranks(Sharing::kDescriptor);
  Call call(ranks, 0);
  call.run(nullptr);
  char* const workspace = last_arguments().comm.workspace[0];
  char* const of_peer = last_arguments().comm.workspace[1];
  reinterpret_cast<CommState*>(workspace)->arrivals = 5 * kArrivalsPerOperation;
  ranks.release();
  expect(stub::what_lives().find("physical memory 2") != std::string::npos,
         "one granule of each rank: " + stub::what_lives());
  expect(call.run(nullptr) == Outcome::kFailed, "a refused call");
  expect(reinterpret_cast<CommState*>(workspace)->aborted == 1, "graph launches that do nothing");
  expect(ranks.core(0).operations_ended() == uint64_t{5}, "the kept header");
  ranks.restore();
  expect(reinterpret_cast<CommState*>(workspace)->aborted == 0, "the header again");
  expect(ranks.core(0).operations_ended() == uint64_t{5}, "as many operations");
  expect(call.run(nullptr) == Outcome::kEnqueued, "an enqueued call");
  of_peer[kHeaderBytes] = 'p';
  ranks.send_marks();

  Ranks by_ipc(Sharing::kIpc);
  by_ipc.core(0).begin_release();
  expect_error<std::runtime_error>("shared by hipIpc", [&] { by_ipc.core(0).release_workspaces(); });
  by_ipc.core(0).end_release();
}

void refusals() {
  const host::CoreOptions options{0, kRanks, kSlotBytes, 1.0, true, false};
  state().architecture = "gfx90a:sramecc+:xnack-";
  expect_error<std::runtime_error>("device 1 is gfx90a", [&] { host::make_hip_core(options, 1); });
  expect_error<std::runtime_error>("hipSetDevice: ", [&] { host::make_hip_core(options, stub::kDevices); });
  state().architecture = "gfx950";
  Ranks ranks(Sharing::kIpc);
  host::Core& core = ranks.core(0);
  expect(core.max_cluster_blocks() == 1 && !core.multiplies_fp8(), "neither clusters nor FP8");
  expect_error<std::runtime_error>("no NVLink multicast", [&] { core.create_multicast(); });
  expect_error<std::runtime_error>("no NVLink multicast", [&] { core.join_multicast({}); });
  expect_error<std::runtime_error>("no NVLink multicast", [&] { core.bind_multicast(); });
  core.drop_multicast();
  const auto prepare = [&](const char* name) {
    core.prepare(all_reduce(name), problem_of(1024), Tiling{1, 64, 1, 1, 1024});
  };
  expect_error<std::invalid_argument>("NVLink multicast is not set up", [&] { prepare("two_shot_switch"); });
  expect_error<std::runtime_error>("port channels are not supported", [&] { prepare("port"); });
  expect_error<std::runtime_error>("port channels are not supported", [&] { core.channels({}, 0, {}, 0); });
  expect_error<std::runtime_error>("no DSL kernels", [&] { core.load_program("image", "kernel", "title"); });
  LinearProblem layer{};
  layer.tokens = 8;
  layer.outputs = layer.inputs = 1024;
  const LinearChoice choice = core.linear_choices(layer).at(0);
  expect_error<std::invalid_argument>("no such kernel", [&] { core.prepare_linear(layer, choice); });
  expect_error<std::invalid_argument>("bytes, got 3", [&] { core.map_peer(1, {-1, "abc"}); });
  expect_error<std::invalid_argument>("fabric", [&] { core.create_workspace(Sharing::kFabric); });
  state().version = 70051831;
  expect_error<std::runtime_error>("needs HIP 7.1", [&] { core.create_workspace(Sharing::kDescriptor); });
}

// The watchdog's reads say nothing where a copy fails.
void watchdog() {
  Ranks ranks(Sharing::kIpc);
  expect(ranks.core(0).operations_ended() == uint64_t{0}, "no operations yet");
  for (const std::string name : {"hipStreamQuery", "hipMemcpyAsync"}) {
    state().calls.clear();
    ranks.core(0).operations_ended();
    const auto first = std::find(state().calls.begin(), state().calls.end(), name);
    expect(first != state().calls.end(), "a call of " + name);
    state().failing_call = state().calls.size() + static_cast<uint64_t>(first - state().calls.begin()) + 1;
    expect(!ranks.core(0).operations_ended(), "no answer");
  }
  ranks.core(0).check_order();
  ranks.core(0).wait_for(0);
  expect(!ranks.core(0).error(), "no error");
}

int run(const std::string& name) {
  const std::map<std::string, void (*)()> cases = {
      {"set-up-ipc", [] { set_up(Sharing::kIpc); }},
      {"set-up-descriptor", [] { set_up(Sharing::kDescriptor); }},
      {"launch", launch},
      {"copies", copies},
      {"capture", capture},
      {"release", release},
      {"refusals", refusals},
      {"watchdog", watchdog},
      {"faults-ipc", [] { check_faults(Sharing::kIpc); }},
      {"faults-descriptor", [] { check_faults(Sharing::kDescriptor); }},
  };
  state().run_kernel = run_p2p_test;
  state().noted = "all_reduce_one_shot";
  state().parameter_bytes = sizeof(AllReduceArgs);
  try {
    cases.at(name)();
    expect(state().misuse.empty(), "no misuse: " + (state().misuse.empty() ? "" : state().misuse[0]));
    // Graphs keep what they may use, and the last stream of the faults could not be destroyed.
    const bool may_leak = name == "capture" || name == "copies" || name.find("faults") == 0;
    expect(may_leak || stub::what_lives().empty(), "nothing lives: " + stub::what_lives());
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}

}  // namespace

}  // namespace hip_test

int main(int count, char** arguments) { return hip_test::run(count == 2 ? arguments[1] : ""); }
