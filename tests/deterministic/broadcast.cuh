// Lines of one rank to all, as an operation of the communicator: the rules of device_comm.cuh at work where they do not
// follow from the data. Only the root sends any, so for rule R1 each rank also greets every other one.
//
// Slot: [line][greeting of each rank].
#pragma once

#include "llm_comm/device_comm.cuh"
#include "llm_comm/memory_channel.cuh"

namespace drill {

using namespace llm_comm;  // NOLINT: kernels are written in the terms of the library

struct BroadcastArgs {
  DeviceComm comm;
  const Line* input;  // of the root
  Line* output;
  uint32_t lines;
  uint32_t root;
};

LLM_COMM_KERNEL(1024) broadcast(LLM_COMM_KERNEL_PARAM BroadcastArgs args) {
  grid_dependency_trigger();
  Operation op(args.comm, OperationKind::kUser, args.lines * sizeof(Line));
  grid_dependency_wait();
  if (!op.begin()) return;
  const auto slot = [&](uint32_t rank) { return op.in_slot(op.slots(rank)); };
  const uint32_t rank = args.comm.rank;
  // A thread for each peer.
  const uint32_t peer = thread_index();
  if (peer < args.comm.world_size && peer != rank) {
    send_line(slot(peer) + args.lines + rank, Line{});
    for (uint32_t i = 0; i < args.lines; ++i) {
      if (rank == args.root) send_line(slot(peer) + i, args.input[i]);
    }
    if (peer == args.root) {
      for (uint32_t i = 0; i < args.lines; ++i) {
        store_line(args.output + i, receive_line(slot(rank) + i, op, peer, 0));
        re_arm_line(slot(rank) + i);
      }
    }
    receive_line(slot(rank) + args.lines + peer, op, peer, 1);
    re_arm_line(slot(rank) + args.lines + peer);
  }
  block_sync();
  if (thread_index() == 0) op.arrive();
}

}  // namespace drill
