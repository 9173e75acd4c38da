// Two-shot all-reduce (2PA, LL): reduce-scatter, then all-gather, both by pushed lines, in one kernel without a barrier.
//
// Lines are cut into World slices of ceil(lines / World); rank k owns slice k: it sums the slice and sends the sums to
// all. Two hops, 2 (N-1)/N x bytes sent by each rank. Slot: [phase][rank][line of slice], where rank is the sender in
// phase 0 (scatter) and the owner in phase 1 (gather): again the sender.
//
// The rules of device_comm.cuh: R1, slice 0 is never empty and its owner sums it only after a line of every rank has
// come, and every rank ends after it has received those sums (the owner: made them); R2, the thread that receives a
// line re-arms it.
#pragma once

#include "kernels/all_reduce/args.cuh"
#include "llm_comm/memory_channel.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

template <DataType D, int World, bool SingleTile>
LLM_COMM_KERNEL(kMaxBlockThreads)
all_reduce_two_shot(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  grid_dependency_trigger();
  const PeerParallel self(args);
  const uint32_t rank = args.comm.rank;
  const bool is_own = self.peer == rank;
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const uint32_t slice = (lines + World - 1) / World;
  const auto slice_lines = [&](uint32_t owner) {
    const uint32_t first = owner * slice;
    return first >= lines ? 0 : (lines - first < slice ? lines - first : slice);
  };
  const uint32_t peer_lines = slice_lines(self.peer);
  const uint32_t own_lines = slice_lines(rank);
  const uint32_t first = block_index() * self.tile_lines;
  const uint32_t stride = block_count() * self.tile_lines;
  // Set by threads of the block whose wait ended in vain: there is no sum to send then.
  uint32_t* const incomplete = shared_memory<Line>()->word;
  Line* const contributions = shared_memory<Line>() + 1;       // [rank][column]
  Line* const sums = contributions + World * self.tile_lines;  // [column]
  if (thread_index() == 0) *incomplete = 0;

  Operation op(args.comm, OperationKind::kAllReduceTwoShot, message.bytes());
  Line* outgoing = op.slots(self.peer) + static_cast<uint64_t>(rank) * slice;
  Line* incoming = op.slots(rank) + static_cast<uint64_t>(self.peer) * slice;
  const uint64_t gather = static_cast<uint64_t>(World) * slice;  // where phase 1 starts in a slot

  typename Message<D>::Load coming(message, self.peer * slice + first + self.column, first + self.column < peer_lines,
                                   args.comm.workspace[rank]);
  grid_dependency_wait_after(reinterpret_cast<uint64_t>(outgoing) + reinterpret_cast<uint64_t>(incoming) +
                             message.fingerprint() + coming.fingerprint() + op.fingerprint() + first +
                             reinterpret_cast<uint64_t>(contributions));
  // The next line to send is always on its way; the first beside the operation's number, which is as far away.
  coming.begin();
  // A thread that may not begin stays without doing anything: others of its block may have begun, and must learn that a
  // slice is incomplete.
  const bool begun = op.begin();
  Line next = coming.end();
  outgoing = op.in_slot(outgoing);
  incoming = op.in_slot(incoming);

  const auto scatter = [&](uint32_t tile) {
    const uint32_t i = tile + self.column;
    if (begun && !is_own && i < peer_lines) send_line(outgoing + i, next);
    if (!SingleTile && i + stride < peer_lines) next = message.load(self.peer * slice + i + stride);
  };
  const auto reduce = [&](uint32_t tile) {
    const uint32_t i = tile + self.column;
    if (i < own_lines) {
      contributions[thread_index()] =
          is_own ? (SingleTile ? next : message.load(rank * slice + i)) : receive_line(incoming + i, op, self.peer, 0);
    }
    block_sync();
    if (op.in_vain()) *incomplete = 1;  // between the barriers: it has been zero before, and is read after
    if (tile == first && thread_index() == 0) op.arrive();
    constexpr uint32_t kWidth = kSumWidth<D, World>;
    const uint32_t tile_packs = self.tile_lines * Message<D>::kPerLine / kWidth;
    const auto* const packs = reinterpret_cast<const Pack<D, kWidth>*>(contributions);
    for_each_pack<D, World>(tile_packs, [&](uint32_t i) {
      reinterpret_cast<Pack<D, kWidth>*>(sums)[i] = sum_in_rank_order<D, World>(packs + i, tile_packs);
    });
    // The sums are read before the next tile's first block_sync() and written after it; contributions are
    // written after this one and read before it.
    block_sync();
    if (i >= own_lines || *incomplete != 0) return;
    if (is_own) {
      message.store(rank * slice + i, sums[self.column]);
    } else {
      send_line(outgoing + gather + i, sums[self.column]);
      re_arm_line(incoming + i);
    }
  };
  const auto collect = [&](uint32_t tile) {
    const uint32_t i = tile + self.column;
    if (!begun || is_own || i >= peer_lines) return;
    message.store(self.peer * slice + i, receive_line(incoming + gather + i, op, self.peer, 1));
    re_arm_line(incoming + gather + i);
  };

  if constexpr (SingleTile) {
    scatter(first);
    reduce(first);
    collect(first);
  } else {
    // Reducing runs `depth` tiles behind scattering and collecting as far behind reducing, so that the links
    // carry later tiles while earlier ones wait for their answer.
    const uint32_t lag = args.depth * stride;
    for (uint32_t tile = first; tile < slice + 2 * lag; tile += stride) {
      if (tile < slice) scatter(tile);
      if (tile >= first + lag && tile - lag < slice) reduce(tile - lag);
      if (tile >= first + 2 * lag && tile - 2 * lag < slice) collect(tile - 2 * lag);
    }
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
