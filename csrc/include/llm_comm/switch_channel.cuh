// SwitchChannel: reductions and broadcasts by the NVLink switch (multimem, NVLS) at one offset of every rank's
// workspace (MSCCL++, arXiv 2504.09014). The switch algorithms of csrc/optional use it.
//
//   SwitchChannel channel(comm, offset);   bytes from the start of a workspace
//   channel.load_reduce<D>(at)             sum over all ranks of the 16-byte line at offset + at. Any order,
//                                          accumulated in fp32 at least, rounded once. Two loads of one
//                                          line may return different bits.
//   channel.store(at, line)                stores the line in every rank's memory, this rank's included
//   channel.reduce(at, n)                  adds n to the word of every rank
//
// `at` is a multiple of 16; for reduce() a multiple of the size of n. comm.multicast must be set. All accesses are
// relaxed and of system scope; reduce_release() is a release. Each 4-byte word of a line is a separate access to each
// memory: it may arrive at one rank earlier than at another, and without its neighbours.
//
// Alias fences. The multicast mapping is a second address of memory that kernels also access through each rank's
// workspace. The PTX memory model ("Proxy-preserved base causality order") orders accesses through two addresses only
// if an alias proxy fence lies on the causality path between them. Any point of the path and any thread will do. Each
// exchange through a switch therefore has two calls of fence_aliases().
//
// Fence 1 lies between plain stores and a load_reduce() of the data, and between a store() and plain loads of the data.
// It precedes the signal that announces the data. The signal is a release after a block barrier, so one fence serves
// the whole block.
//
// Fence 2 lies between an earlier store to a line, through either address, and a store() to the same line. The storing
// thread executes it once it has begun the operation and so knows that the line is free. The fence may also precede the
// signals that free the line.
//
// No fence lies between a store() of LL lines and the polls for them. A poll orders nothing: it repeats until the data
// has arrived, and a fence would not make it arrive earlier. The CUDA programming guide ("Use Multicast Mappings")
// polls a counter in the same way, to which all ranks add through the switch. Resetting a polled line to the sentinel
// is ordered by the poll itself: the poll has returned the value that the reset overwrites.
#pragma once

#include "llm_comm/data_type.h"
#include "llm_comm/line.cuh"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

class SwitchChannel {
 public:
  LLM_COMM_DEVICE explicit SwitchChannel(const DeviceComm& comm, uint64_t offset = 0) : comm_(comm), offset_(offset) {}

  template <DataType D>
  LLM_COMM_DEVICE Line load_reduce(uint64_t at) const {
    if constexpr (D == DataType::kBFloat16) {
      return multicast_load_reduce_bf16(address(at));
    } else if constexpr (D == DataType::kFloat16) {
      return multicast_load_reduce_fp16(address(at));
    } else {
      static_assert(D == DataType::kFloat32, "bytes have no sum");
      return multicast_load_reduce_fp32(address(at));
    }
  }

  LLM_COMM_DEVICE void store(uint64_t at, Line line) const { multicast_store_line(address(at), line); }
  // Stores an LL line (line.cuh). Every receiver polls for it in its own memory.
  LLM_COMM_DEVICE void send(uint64_t at, Line payload) const { store(at, encode_sentinel(payload)); }

  template <class T>
  LLM_COMM_DEVICE void reduce(uint64_t at, T n) const {
    multicast_add_relaxed(address(at), n);
  }
  template <class T>
  LLM_COMM_DEVICE void reduce_release(uint64_t at, T n) const {
    multicast_add_release(address(at), n);
  }

  // Converts an address in this rank's workspace to an offset of this channel.
  LLM_COMM_DEVICE uint64_t at(const void* address) const {
    return static_cast<uint64_t>(static_cast<const char*>(address) - comm_.workspace[comm_.rank]) - offset_;
  }

 private:
  LLM_COMM_DEVICE MulticastAddress address(uint64_t at) const {
    return {comm_.multicast, comm_.workspace, comm_.world_size, offset_ + at};
  }

  const DeviceComm& comm_;
  uint64_t offset_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
