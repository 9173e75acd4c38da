// One-shot all-reduce (1PA, LL): every rank sends its whole message to every other rank, and sums what it gets.
//
// One hop. Each rank sends (N-1) x bytes, which is why larger messages take two_shot.cuh. Slot: [sender][line].
//
// The rules of device_comm.cuh: R1, a rank ends after it has received line 0 from every peer; R2, the thread that
// receives a line re-arms it.
#pragma once

#include "kernels/all_reduce/args.cuh"
#include "llm_comm/memory_channel.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

template <DataType D, int World, bool SingleTile>
LLM_COMM_KERNEL(kMaxBlockThreads)
all_reduce_one_shot(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  grid_dependency_trigger();
  const PeerParallel self(args);
  const uint32_t rank = args.comm.rank;
  const bool is_own = self.peer == rank;
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const uint32_t first = block_index() * self.tile_lines;
  const uint32_t stride = block_count() * self.tile_lines;
  // Contributions of a tile by rank, twice: a tile is written while slow threads still sum the one before.
  Line* const contributions = shared_memory<Line>();

  Operation op(args.comm, OperationKind::kAllReduceOneShot, message.bytes());
  // Where this thread's line of the first tile goes, and where its like comes.
  const uint32_t first_line = first + self.column;
  Line* outgoing = opaque(op.slots(self.peer) + static_cast<uint64_t>(rank) * lines + first_line);
  Line* incoming = opaque(op.slots(rank) + static_cast<uint64_t>(self.peer) * lines + first_line);

  typename Message<D>::Load coming(message, first_line, first_line < lines, args.comm.workspace[rank]);
  grid_dependency_wait_after(reinterpret_cast<uint64_t>(outgoing) + reinterpret_cast<uint64_t>(incoming) +
                             message.fingerprint() + coming.fingerprint() + op.fingerprint() + first +
                             reinterpret_cast<uint64_t>(contributions));
  // The next line to send is always on its way; the first beside the operation's number, which is as far away.
  coming.begin();
  const bool begun = op.begin();
  Line next = coming.end();
  outgoing = op.in_slot(outgoing);
  incoming = op.in_slot(incoming);

  const auto send = [&](uint32_t tile) {
    const uint32_t line = tile + self.column;
    if (begun && !is_own && line < lines) send_line(outgoing + (tile - first), next);
    if (!SingleTile && line + stride < lines) next = message.load(line + stride);
  };
  uint32_t parity = 0;
  const auto reduce = [&](uint32_t tile) {
    const uint32_t line = tile + self.column;
    Line* const received = incoming + (tile - first);
    Line* const columns = contributions + parity * block_threads();
    parity ^= 1;
    if (line < lines) {
      columns[thread_index()] =
          is_own ? (SingleTile ? next : message.load(line)) : receive_line(received, op, self.peer, 0);
    }
    block_sync();
    if (tile == first && thread_index() == 0) op.arrive();
    constexpr uint32_t kWidth = kSumWidth<D, World>;
    const uint32_t tile_packs = self.tile_lines * Message<D>::kPerLine / kWidth;
    const auto* const packs = reinterpret_cast<const Pack<D, kWidth>*>(columns);
    for_each_pack<D, World>(tile_packs, [&](uint32_t i) {
      message.store_pack(tile * Message<D>::kPerLine + i * kWidth, sum_in_rank_order<D, World>(packs + i, tile_packs));
    });
    // After the result is out: the next operation that uses the line cannot start before this one has ended.
    if (!is_own && line < lines) re_arm_line(received);
  };

  // Threads that may not begin leave behind the first send, which is none. They are missed only in the sums of this rank,
  // which has an error. Were there a way out before, ptxas would load the line after it, when the number has come.
  if constexpr (SingleTile) {
    send(first);
    if (!begun) return;
    reduce(first);
  } else {
    // Reducing runs `depth` tiles behind sending, so that the links carry later tiles while earlier ones are
    // waited for.
    const uint32_t lag = args.depth * stride;
    for (uint32_t tile = first; tile < lines + lag; tile += stride) {
      if (tile < lines) send(tile);
      if (!begun) return;
      if (tile >= first + lag && tile - lag < lines) reduce(tile - lag);
    }
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
