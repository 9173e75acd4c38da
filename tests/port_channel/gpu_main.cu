// The kernels of exchange.cuh on two GPUs of one process, or twice on the only one, in streams and in CUDA graphs, with the proxies
// of the library. Exit status: 0 all right, 2 a CUDA call failed.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "exchange.cuh"
#include "host/cuda/copy_engines.h"

namespace {

using namespace llm_comm;        // NOLINT: a test of it
using namespace llm_comm::host;  // NOLINT
using ports::Exchange;

constexpr uint32_t kThreads = 256;
constexpr uint64_t kTenSecondsNs = 10'000'000'000;

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

struct Results {
  uint64_t rounds;
  uint32_t failures;
};

// A rank, with memory of its own.
class Gpu {
 public:
  Gpu(int device, uint64_t lines) : device_(device), lines_(lines), layout_(16, lines * sizeof(Line)) {
    require(cudaSetDevice(device), "cudaSetDevice");
    void* memory = nullptr;
    require(cudaMalloc(&memory, layout_.bytes() + lines * sizeof(Line) + sizeof(Results)), "cudaMalloc");
    memory_ = static_cast<char*>(memory);
    require(cudaMemset(memory_, 0, layout_.bytes() + lines * sizeof(Line) + sizeof(Results)), "cudaMemset");
    require(cudaHostAlloc(&memory, sizeof(HostMailbox), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    mailbox_ = static_cast<HostMailbox*>(memory);
    std::memset(memory, 0, sizeof(HostMailbox));
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    require(cudaDeviceSynchronize(), "zeros");
    ports_ = make_cuda_ports(device);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu() {
    cudaSetDevice(device_);
    ports_->stop();
    cudaStreamDestroy(stream_);
    cudaFreeHost(mailbox_);
    cudaFree(memory_);
  }

  void start(uint32_t rank, const Gpu& peer) {
    PortOwner owner{{}, layout_.bytes(), rank, 2, [] { return false; }, nullptr};
    owner.workspace[rank] = memory_;
    owner.workspace[1 - rank] = peer.memory_;
    owner.fail = [this] { __atomic_fetch_or(&mailbox_->end_reasons, kAbortRequest, __ATOMIC_RELEASE); };
    ports_->start(owner);
  }

  Exchange exchange(uint32_t rank, const Gpu& peer, uint32_t rounds, uint64_t timeout_ns) const {
    Exchange e{};
    e.comm.workspace[rank] = memory_;
    e.comm.workspace[1 - rank] = peer.memory_;
    e.comm.mailbox = mailbox_;
    e.comm.slot_bytes = layout_.slot_bytes();
    e.comm.staging_bytes = layout_.staging_bytes();
    e.comm.timeout_ns = timeout_ns;
    e.comm.rank = rank;
    e.comm.world_size = 2;
    e.comm.ports = ports_->ring();
    e.comm.port_entries_log2 = ports_->entries_log2();
    e.source = reinterpret_cast<Line*>(memory_ + layout_.bytes());
    e.rounds_of = &results()->rounds;
    e.failures = &results()->failures;
    e.lines = lines_;
    e.rounds = rounds;
    return e;
  }

  void load(void (*kernel)(Exchange)) const {
    require(cudaSetDevice(device_), "cudaSetDevice");
    cudaFuncAttributes attributes{};
    require(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  }
  void launch(void (*kernel)(Exchange), const Exchange& e) const {
    require(cudaSetDevice(device_), "cudaSetDevice");
    kernel<<<1, kThreads, sizeof(Line), stream_>>>(e);
    require(cudaGetLastError(), "launch");
  }
  cudaGraphExec_t capture(void (*kernel)(Exchange), const Exchange& e, int launches) const {
    require(cudaSetDevice(device_), "cudaSetDevice");
    require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    for (int i = 0; i < launches; ++i) launch(kernel, e);
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    cudaGraphExec_t executable = nullptr;
    require(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    require(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return executable;
  }
  void replay(cudaGraphExec_t graph) const {
    require(cudaSetDevice(device_), "cudaSetDevice");
    require(cudaGraphLaunch(graph, stream_), "cudaGraphLaunch");
  }

  Results finish() const {
    require(cudaSetDevice(device_), "cudaSetDevice");
    require(cudaStreamSynchronize(stream_), "kernel");
    Results copy;
    require(cudaMemcpy(&copy, results(), sizeof(copy), cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (const auto error = ports_->error()) std::printf("proxy: %s\n", error->c_str());
    return copy;
  }
  const HostMailbox& mailbox() const { return *mailbox_; }

 private:
  Results* results() const { return reinterpret_cast<Results*>(memory_ + layout_.bytes() + lines_ * sizeof(Line)); }

  int device_;
  uint64_t lines_;
  WorkspaceLayout layout_;
  char* memory_ = nullptr;
  HostMailbox* mailbox_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Ports> ports_;
};

struct Pair {
  Gpu gpus[2];
  Pair(int second, uint64_t lines) : gpus{{0, lines}, {second, lines}} {
    for (uint32_t rank = 0; rank < 2; ++rank) gpus[rank].start(rank, gpus[1 - rank]);
    // Now: a load behind a kernel that waits could wait for it in turn.
    for (const Gpu& gpu : gpus) {
      for (const auto kernel : {&ports::exchange, &ports::wait_in_vain, &ports::flood}) gpu.load(kernel);
    }
  }
  Exchange exchange(uint32_t rank, uint32_t rounds) const {
    return gpus[rank].exchange(rank, gpus[1 - rank], rounds, kTenSecondsNs);
  }
  bool finish(const char* name, uint64_t rounds) const {
    const Results results[2] = {gpus[0].finish(), gpus[1].finish()};
    std::printf("%s: failures %u and %u\n", name, results[0].failures, results[1].failures);
    return results[0].failures == 0 && results[1].failures == 0 && results[0].rounds == rounds &&
           results[1].rounds == rounds;
  }
};

bool run_eagerly(int second, uint64_t lines) {
  const Pair pair(second, lines);
  for (int launch = 0; launch < 3; ++launch) {
    for (uint32_t rank = 0; rank < 2; ++rank) pair.gpus[rank].launch(&ports::exchange, pair.exchange(rank, 20));
  }
  return pair.finish("exchange", 60);
}

bool run_in_graphs(int second, uint64_t lines) {
  const Pair pair(second, lines);
  cudaGraphExec_t graphs[2];
  for (uint32_t rank = 0; rank < 2; ++rank) {
    graphs[rank] = pair.gpus[rank].capture(&ports::exchange, pair.exchange(rank, 5), 2);
  }
  for (int replay = 0; replay < 4; ++replay) {
    for (uint32_t rank = 0; rank < 2; ++rank) pair.gpus[rank].replay(graphs[rank]);
    for (uint32_t rank = 0; rank < 2; ++rank) pair.gpus[rank].launch(&ports::exchange, pair.exchange(rank, 3));
  }
  const bool is_right = pair.finish("exchange in graphs", 4 * (2 * 5 + 3));
  for (cudaGraphExec_t graph : graphs) require(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
  return is_right;
}

bool fill_the_fifo(int second) {
  const Pair pair(second, kThreads);
  for (uint32_t rank = 0; rank < 2; ++rank) pair.gpus[rank].launch(&ports::flood, pair.exchange(rank, 20));
  return pair.finish("flood", 0);
}

bool wait_ends(int second) {
  const Pair pair(second, 16);
  pair.gpus[1].launch(&ports::wait_in_vain, pair.gpus[1].exchange(1, pair.gpus[0], 0, 50'000'000));
  const Results results = pair.gpus[1].finish();
  const ErrorRecord& record = pair.gpus[1].mailbox().error;
  std::printf("wait_in_vain: failures %u, rank %u waited for %u\n", results.failures, record.rank, record.peer);
  return results.failures == ports::kWaitAborted && record.complete == 1 && record.rank == 1 && record.peer == 0;
}

// Where there is one GPU, both ranks use it: in one process, so that both kernels run at once.
int second_device() {
  int devices = 0;
  require(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices < 2) return 0;
  for (const int device : {0, 1}) {
    require(cudaSetDevice(device), "cudaSetDevice");
    require(cudaDeviceEnablePeerAccess(1 - device, 0), "cudaDeviceEnablePeerAccess");
  }
  return 1;
}

}  // namespace

int main() {
  const int second = second_device();
  bool all = true;
  for (const uint64_t lines : {3, 777, 262'144}) {
    all &= run_eagerly(second, lines);
    all &= run_in_graphs(second, lines);
  }
  all &= fill_the_fifo(second);
  all &= wait_ends(second);
  std::printf("%s\n", all ? "all right" : "WRONG");
  return all ? 0 : 1;
}
