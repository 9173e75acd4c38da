// Runs the kernels of exchange.cuh on two GPUs of one process, or twice on the only one, in streams of their own. Exit
// status 0: all data was right, and the wait in vain ended with a record of whom it had waited for.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "exchange.cuh"

namespace {

using user::Exchange;

constexpr uint64_t kLines = 777;
constexpr uint32_t kRounds = 50;
constexpr uint32_t kThreads = 96;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

// What a rank has on its GPU, zeros at first.
struct Memory {
  llm_comm::Line buffer[3 * kLines + 1];
  llm_comm::Line source[kLines];
  llm_comm::Line received[kLines];
  uint64_t signals_received;
  uint64_t signals_sent;
  uint64_t signals_awaited;
  uint32_t aborted;
  uint32_t last_look;
  uint32_t exited;
  uint32_t failures;
};

class Gpu {
 public:
  explicit Gpu(int device) : device_(device) {
    check(cudaSetDevice(device), "cudaSetDevice");
    check(cudaMalloc(&memory_, sizeof(Memory)), "cudaMalloc");
    check(cudaMemset(memory_, 0, sizeof(Memory)), "cudaMemset");
    check(cudaHostAlloc(&mailbox_, sizeof(*mailbox_), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    std::memset(static_cast<void*>(mailbox_), 0, sizeof(*mailbox_));
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaDeviceSynchronize(), "zeros");
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu() {
    cudaSetDevice(device_);
    cudaStreamDestroy(stream_);
    cudaFreeHost(mailbox_);
    cudaFree(memory_);
  }

  Exchange exchange(uint32_t rank, const Gpu& peer, uint64_t timeout_ns) const {
    Exchange e{};
    e.channel.semaphore = {&peer.memory_->signals_received, &memory_->signals_received, &memory_->signals_sent,
                           &memory_->signals_awaited};
    e.channel.local = reinterpret_cast<char*>(memory_->buffer);
    e.channel.remote = reinterpret_cast<char*>(peer.memory_->buffer);
    e.channel.bounds = {mailbox_, &memory_->aborted, &memory_->last_look, &memory_->exited, timeout_ns};
    e.channel.site = {rank, llm_comm::OperationKind::kUser, 7, kLines};
    e.channel.peer = 1 - rank;
    e.source = memory_->source;
    e.received = memory_->received;
    e.lines = kLines;
    e.rounds = kRounds;
    e.failures = &memory_->failures;
    return e;
  }

  void load(void (*kernel)(Exchange)) const {
    check(cudaSetDevice(device_), "cudaSetDevice");
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  }

  void launch(void (*kernel)(Exchange), const Exchange& e) const {
    check(cudaSetDevice(device_), "cudaSetDevice");
    kernel<<<1, kThreads, 0, stream_>>>(e);
    check(cudaGetLastError(), "launch");
  }

  Memory result() const {
    check(cudaSetDevice(device_), "cudaSetDevice");
    check(cudaStreamSynchronize(stream_), "kernel");
    Memory copy;
    check(cudaMemcpy(&copy, memory_, sizeof(copy), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }

  const llm_comm::HostMailbox& mailbox() const { return *mailbox_; }

 private:
  int device_;
  Memory* memory_ = nullptr;
  llm_comm::HostMailbox* mailbox_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

bool run_on_both(const char* name, void (*kernel)(Exchange), int second) {
  constexpr uint64_t kTenSecondsNs = 10'000'000'000;
  const Gpu gpus[2] = {Gpu(0), Gpu(second)};
  // Now: a load behind a kernel that waits could wait for it in turn.
  for (const Gpu& gpu : gpus) gpu.load(kernel);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    gpus[rank].launch(kernel, gpus[rank].exchange(rank, gpus[1 - rank], kTenSecondsNs));
  }
  const uint32_t failures[2] = {gpus[0].result().failures, gpus[1].result().failures};
  std::printf("%s: failures %u and %u\n", name, failures[0], failures[1]);
  return failures[0] == 0 && failures[1] == 0;
}

bool wait_ends(int second) {
  const Gpu gpus[2] = {Gpu(0), Gpu(second)};
  gpus[1].launch(&user::wait_in_vain, gpus[1].exchange(1, gpus[0], 50'000'000));
  const Memory memory = gpus[1].result();
  const llm_comm::ErrorRecord& record = gpus[1].mailbox().error;
  std::printf("wait_in_vain: failures %u, complete %u, rank %u waited for %u in operation %llu\n", memory.failures,
              record.complete, record.rank, record.peer, static_cast<unsigned long long>(record.sequence));
  return memory.failures == user::kCountDiffers && memory.aborted == 1 && record.complete == 1 && record.rank == 1 &&
         record.peer == 0 && record.sequence == 7 && record.bytes == kLines && memory.last_look != 0;
}

// Where there is one GPU, both ranks use it: in one process, so that both kernels run at once.
int second_device() {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices < 2) return 0;
  for (const int device : {0, 1}) {
    check(cudaSetDevice(device), "cudaSetDevice");
    check(cudaDeviceEnablePeerAccess(1 - device, 0), "cudaDeviceEnablePeerAccess");
  }
  return 1;
}

}  // namespace

int main() {
  const int second = second_device();
  bool all = run_on_both("exchange_with_signals", &user::exchange_with_signals, second);
  all &= run_on_both("exchange_packets", &user::exchange_packets, second);
  all &= run_on_both("count_signals", &user::count_signals, second);
  all &= wait_ends(second);
  return all ? 0 : 1;
}
