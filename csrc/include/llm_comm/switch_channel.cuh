// SwitchChannel: the NVLink switch adds what lies at one place of all ranks' memory, or stores to that place of all (MSCCL++,
// arXiv 2504.09014). A handle of a place of the workspaces:
//
//   SwitchChannel channel(comm, offset);   bytes from where a workspace begins
//   channel.load_reduce<D>(at)             the sum over all ranks of the 16-byte line at offset + at: in any order, accumulated
//                                          in fp32 at least, rounded once. Two loads of the same line may give different bits
//   channel.store(at, line)                the line, in the memory of every rank, this one's included
//   channel.reduce(at, n)                  adds n to the word there of every rank
//
// `at` is a multiple of 16, of reduce() of the size of n. Only where comm.multicast is set. All are relaxed, at the scope of the
// system; reduce_release() is a release. Each word of 4 bytes of a line is an access of its own to each of the memories: it arrives
// at one rank and not yet at another, and without the word beside it.
//
// Aliases. The multicast mapping is another address of memory that kernels also reach by the address of each rank's workspace. The
// PTX memory model ("Proxy-preserved base causality order") orders accesses by two addresses of one memory only if an alias proxy
// fence lies on the causality path between them; it does not matter where on the path, nor in whose thread. So each exchange through
// a switch has a fence_aliases()
//
//  * between what ranks store plainly and a load_reduce() of it, and between a store() and plain loads of it: before the signal that
//    tells of either (a release, behind a barrier of the block, so that it is one fence for the whole block);
//  * between what was stored to a place before, by whatever address, and a store() to it: in the thread that stores, after it has
//    begun the operation, and so has learnt that the place is free; or before the signals that tell it so.
//
// No fence lies between a store() of LL lines and the polls for them. A poll orders nothing: it returns what was there or what comes,
// and goes on until it has come, which a fence would not hasten. (The CUDA programming guide, "Use Multicast Mappings",
// polls a counter like this that all ranks add to through the switch.) What comes first when a line that has been polled is armed again follows from the poll: it has returned what
// it overwrites.
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
      return multicast_load_reduce_bf16(place(at));
    } else if constexpr (D == DataType::kFloat16) {
      return multicast_load_reduce_fp16(place(at));
    } else {
      static_assert(D == DataType::kFloat32, "bytes have no sum");
      return multicast_load_reduce_fp32(place(at));
    }
  }

  LLM_COMM_DEVICE void store(uint64_t at, Line line) const { multicast_store_line(place(at), line); }
  // As an LL line (line.cuh): receivers poll for it, each in its own memory.
  LLM_COMM_DEVICE void send(uint64_t at, Line payload) const { store(at, encode_sentinel(payload)); }

  template <class T>
  LLM_COMM_DEVICE void reduce(uint64_t at, T n) const {
    multicast_add_relaxed(place(at), n);
  }
  template <class T>
  LLM_COMM_DEVICE void reduce_release(uint64_t at, T n) const {
    multicast_add_release(place(at), n);
  }

  // What `address`, in this rank's workspace, is called here.
  LLM_COMM_DEVICE uint64_t at(const void* address) const {
    return static_cast<uint64_t>(static_cast<const char*>(address) - comm_.workspace[comm_.rank]) - offset_;
  }

 private:
  LLM_COMM_DEVICE MulticastPlace place(uint64_t at) const {
    return {comm_.multicast, comm_.workspace, comm_.world_size, offset_ + at};
  }

  const DeviceComm& comm_;
  uint64_t offset_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
