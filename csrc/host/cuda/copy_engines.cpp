#include "host/cuda/copy_engines.h"

#include <utility>

#include "host/cuda/driver.h"
#include "host/cuda/proxy_patience.h"
#include "host/cuda/registered_memory.h"
#include "host/proxy.h"

namespace llm_comm::host {

namespace {

// Values that signals are copied from, of one peer: a half is written again when the copies from it have ended.
constexpr uint32_t kValuesOfHalf = 512;
constexpr uint64_t kBytesOfValues = kMaxWorldSize * 2 * kValuesOfHalf * sizeof(uint64_t);

// A stream for each peer, so that what goes to one peer is done in order, and the links to all are used at once. Signals are copies
// of eight bytes.
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

  // The thread is the proxy's own: what it calls is no part of a capture of others from now on, and ends none.
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
      // All that was copied from the other half comes before this in the stream.
      check(cudaEventRecord(lane.read[lane.half], lane.stream), "cudaEventRecord");
      check(cudaEventSynchronize(lane.read[half]), "a signal to a peer");
      lane.half = half;
    }
    uint64_t* const from = values_ + (uint64_t{peer} * 2 + half) * kValuesOfHalf + lane.next % kValuesOfHalf;
    for (uint32_t i = 0; i < count; ++i) from[i] = values[i];
    lane.next += count;
    check(cudaMemcpyAsync(to, from, count * sizeof(uint64_t), cudaMemcpyDefault, lane.stream), "a signal to a peer");
  }

  void echo(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) override {
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
    cudaEvent_t read[2] = {};  // the copies from a half have ended
    uint32_t next = 0;         // place of the next value
    uint32_t half = 0;         // that is written to
  };

  int device_;
  uint64_t* values_;
  Lane lanes_[kMaxWorldSize];
};

}  // namespace

std::unique_ptr<Ports> make_cuda_ports(int device) {
  const DeviceGuard guard(device);
  // Values behind the FIFO. Without a mapping there are no port channels: start() says so.
  constexpr uint64_t kRingBytes = port_ring_bytes(ProxyPorts::kEntriesLog2);
  auto memory = std::make_unique<RegisteredMemory>(kRingBytes + kBytesOfValues);
  auto* const values = reinterpret_cast<uint64_t*>(memory->on_host() + kRingBytes);
  auto engines = std::make_unique<CopyEngines>(device, values);
  return std::make_unique<ProxyPorts>(std::move(memory), std::move(engines), kPatienceOfGpus);
}

}  // namespace llm_comm::host
