#include "host/cuda/copy_engines.h"

#include <utility>

#include "host/cuda/driver.h"
#include "host/cuda/proxy_patience.h"
#include "host/cuda/registered_memory.h"
#include "host/proxy.h"

namespace llm_comm::host {

namespace {

// Signal values are copied from two halves of a buffer for each peer. A half is reused after the copies from it have
// ended.
constexpr uint32_t kValuesOfHalf = 512;
constexpr uint64_t kBytesOfValues = kMaxWorldSize * 2 * kValuesOfHalf * sizeof(uint64_t);

// Transport by the copy engines. One stream per peer keeps the order of what goes to it and uses the links to all peers
// at once. A signal is a copy of 8 bytes.
class CopyEngines final : public Transport {
 public:
  CopyEngines(int device, uint64_t* values) : device_(device), values_(values) {}
  CopyEngines(const CopyEngines&) = delete;
  CopyEngines& operator=(const CopyEngines&) = delete;
  ~CopyEngines() override {
    for (Lane& lane : lanes_) {
      if (lane.stream != nullptr) cudaStreamDestroy(lane.stream);
      for (cudaEvent_t event : lane.read) {
        if (event != nullptr) cudaEventDestroy(event);
      }
    }
  }

  // Runs on the proxy's own thread. The relaxed capture mode keeps its calls out of captures by other threads, and
  // keeps them from invalidating those captures.
  void begin(uint32_t world_size) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    for (uint32_t peer = 0; peer < world_size; ++peer) {
      Lane& lane = lanes_[peer];
      if (lane.stream != nullptr) continue;
      check(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), "cudaStreamCreate");
      for (cudaEvent_t& event : lane.read) {
        check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
      }
    }
  }

  void put(uint32_t peer, char* to, const char* from, uint64_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, lanes_[peer].stream), "a copy to a peer");
  }

  void signal(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) override {
    Lane& lane = lanes_[peer];
    if (lane.next % kValuesOfHalf + count > kValuesOfHalf) lane.next += kValuesOfHalf - lane.next % kValuesOfHalf;
    const uint32_t half = lane.next / kValuesOfHalf % 2;
    if (half != lane.half) {
      // Everything copied from the other half is ahead of this event in the stream.
      check(cudaEventRecord(lane.read[lane.half], lane.stream), "cudaEventRecord");
      check(cudaEventSynchronize(lane.read[half]), "a signal to a peer");
      lane.half = half;
    }
    uint64_t* const from = values_ + (uint64_t{peer} * 2 + half) * kValuesOfHalf + lane.next % kValuesOfHalf;
    for (uint32_t i = 0; i < count; ++i) from[i] = values[i];
    lane.next += count;
    check(cudaMemcpyAsync(to, from, count * sizeof(uint64_t), cudaMemcpyDefault, lane.stream), "a signal to a peer");
  }

  void notify_local_completion(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) override {
    signal(peer, to, values, count);
  }

  void finish() override {
    for (const Lane& lane : lanes_) {
      if (lane.stream != nullptr) cudaStreamSynchronize(lane.stream);
    }
  }

 private:
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t read[2] = {};  // recorded after the copies from each half
    uint32_t next = 0;         // index of the next value
    uint32_t half = 0;         // the half that is being written
  };

  int device_;
  uint64_t* values_;
  Lane lanes_[kMaxWorldSize];
};

}  // namespace

std::unique_ptr<Ports> make_cuda_ports(int device) {
  const DeviceGuard guard(device);
  // The signal values lie after the ring. If the device cannot map the memory there are no port channels; start() then
  // throws.
  constexpr uint64_t kRingBytes = port_ring_bytes(ProxyPorts::kEntriesLog2);
  auto memory = std::make_unique<RegisteredMemory>(kRingBytes + kBytesOfValues);
  auto* const values = reinterpret_cast<uint64_t*>(memory->on_host() + kRingBytes);
  auto engines = std::make_unique<CopyEngines>(device, values);
  return std::make_unique<ProxyPorts>(std::move(memory), std::move(engines), kPatienceOfGpus);
}

}  // namespace llm_comm::host
