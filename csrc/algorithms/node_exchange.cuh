// All-to-all of bytes between partner ranks on different nodes, over port channels whose proxy reaches a network
// (host/node_exchange.h). An all-gather is the case in which all partners get the same data. Not an algorithm of the
// registry: hierarchical operations combine it with algorithms inside the node.
//
// Data for a partner is cut into parts. A launch has one block for each of up to kMaxExchangeBlocks parts. A block
//
//   1. copies its part for each partner to memory that the proxy reaches (outbox);
//   2. requests a put to the partner's inbox, and a signal;
//   3. waits for the partner's signal and copies the received part to the output.
//
// Two partners exchange as many parts as the longer direction has, so both know which blocks take part; a part may be
// empty. A block counts its exchanges with each partner. A signal carries this count, and its parity selects the half
// of outbox and inbox. The count lives in memory, so graphs can be replayed.
//
// Why two halves are enough:
//   1. A block sends part n + 2 to a partner only after it has received part n + 1 from it.
//   2. The partner sends part n + 1 in a later grid than part n. So its grid of part n has ended.
//   3. The partner has therefore read its inbox of part n. The signal of part n followed the data, so the outbox of
//      part n has been read too.
#pragma once

#include "llm_comm/port_channel.cuh"
#include "llm_comm/steps.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMaxExchangeBlocks = kUserPortSemaphores;  // each block uses one semaphore per pair of ranks
inline constexpr uint32_t kMaxExchangeThreads = 512;

// Data that a rank and one partner send each other.
struct ExchangePiece {
  uint64_t from;       // offset in the input
  uint64_t bytes_out;  // may be 0
  uint64_t to;         // offset in the output
  uint64_t bytes_in;
};

// Layout of the memory that partners put to. It starts with the header of a workspace, of which CommState, PortState
// and the fault reports are used. The exchange counts use the signal words, because no HB session runs here.
struct ExchangeLayout {
  uint64_t part_bytes;  // a multiple of 16
  uint32_t ranks;

  LLM_COMM_HOST constexpr uint64_t bytes() const {
    return kHeaderBytes + 4 * uint64_t{ranks - 1} * kMaxExchangeBlocks * part_bytes;
  }
};

struct NodeExchangeArgs {
  DeviceComm comm;  // workspace[other rank]: local memory for fault reports, which nobody reads
  ExchangeLayout layout;
  const char* input;
  char* output;
  uint64_t first_part;  // first part of this launch
  ExchangePiece piece[kMaxWorldSize];
};

class ExchangeBlock {
 public:
  LLM_COMM_DEVICE ExchangeBlock(const NodeExchangeArgs& args, uint32_t* incomplete)
      : args_(args), incomplete_(incomplete), begin_((args.first_part + block_index()) * args.layout.part_bytes) {}

  LLM_COMM_DEVICE void run() const {
    const DeviceComm& comm = args_.comm;
    if (thread_index() == 0) *incomplete_ = load_relaxed(&state_of(comm)->aborted);
    block_sync();
    if (*incomplete_ != 0) return;
    for (uint32_t rank = 0; rank < comm.world_size; ++rank) {
      const ExchangePiece& piece = args_.piece[rank];
      const char* const from = args_.input + piece.from + begin_;
      if (rank == comm.rank) {
        copy(args_.output + piece.to + begin_, from, part_of(piece.bytes_out));
      } else if (takes_part(rank)) {
        copy(own_memory() + offset_of(kOutbox, rank, comm.rank, count(rank)), from, part_of(piece.bytes_out));
      }
    }
    block_sync();
    const uint32_t partner = thread_index();
    if (partner < comm.world_size && partner != comm.rank && takes_part(partner) && !swap(partner)) *incomplete_ = 1;
    block_sync();
    if (*incomplete_ != 0) return;
    for (uint32_t rank = 0; rank < comm.world_size; ++rank) {
      if (rank == comm.rank || !takes_part(rank)) continue;
      const ExchangePiece& piece = args_.piece[rank];
      copy(args_.output + piece.to + begin_, own_memory() + offset_of(kInbox, comm.rank, rank, count(rank)),
           part_of(piece.bytes_in));
    }
    block_sync();
    if (partner < comm.world_size && partner != comm.rank && takes_part(partner)) {
      store_relaxed(counter(partner), count(partner) + 1);
    }
  }

 private:
  enum Mailbox : uint32_t { kOutbox, kInbox };

  // Called by one thread per partner.
  LLM_COMM_DEVICE bool swap(uint32_t partner) const {
    const DeviceComm& comm = args_.comm;
    const uint64_t number = count(partner) + 1;
    const uint64_t bytes = part_of(args_.piece[partner].bytes_out);
    const PortChannel channel{comm, {comm.rank, OperationKind::kUser, number, bytes}, partner};
    const char* const from = own_memory() + offset_of(kOutbox, partner, comm.rank, number - 1);
    return channel.put_with_signal(offset_of(kInbox, partner, comm.rank, number - 1), from, bytes, block_index(),
                                   number) &&
           channel.wait(block_index(), number);
  }

  // Offset of one half of the data from `sender` to `receiver`. Parts of adjacent blocks are adjacent in both boxes, so
  // that the proxy can merge their puts.
  LLM_COMM_DEVICE uint64_t offset_of(Mailbox mailbox, uint32_t receiver, uint32_t sender, uint64_t number) const {
    const uint32_t other = mailbox == kInbox ? among_others(sender, receiver) : among_others(receiver, sender);
    const uint64_t half = mailbox * 2 + number % 2;
    const uint64_t slot = (half * (args_.layout.ranks - 1) + other) * kMaxExchangeBlocks + block_index();
    return kHeaderBytes + slot * args_.layout.part_bytes;
  }

  // Bytes of this block's part of a piece of `bytes` bytes.
  LLM_COMM_DEVICE uint64_t part_of(uint64_t bytes) const {
    if (bytes <= begin_) return 0;
    return bytes - begin_ < args_.layout.part_bytes ? bytes - begin_ : args_.layout.part_bytes;
  }

  // The first part is always exchanged, so that no rank ends before its partners have begun.
  LLM_COMM_DEVICE bool takes_part(uint32_t rank) const {
    const ExchangePiece& piece = args_.piece[rank];
    return begin_ == 0 || begin_ < piece.bytes_out || begin_ < piece.bytes_in;
  }

  LLM_COMM_DEVICE char* own_memory() const { return args_.comm.workspace[args_.comm.rank]; }
  LLM_COMM_DEVICE uint64_t* counter(uint32_t rank) const {
    return SignalRow::of<CommonSignals>(block_index()).word(args_.comm, args_.comm.rank, rank);
  }
  LLM_COMM_DEVICE uint64_t count(uint32_t rank) const { return load_relaxed(counter(rank)); }

  LLM_COMM_DEVICE static void copy(char* to, const char* from, uint64_t bytes) {
    uint64_t lines = 0;
    if ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % sizeof(Line) == 0) {
      lines = bytes / sizeof(Line);
      for (uint64_t i = thread_index(); i < lines; i += block_threads()) {
        store_line(to + i * sizeof(Line), load_line(from + i * sizeof(Line)));
      }
    }
    for (uint64_t i = lines * sizeof(Line) + thread_index(); i < bytes; i += block_threads()) {
      store_plain(to + i, load_plain(from + i));
    }
  }

  const NodeExchangeArgs& args_;
  uint32_t* incomplete_;  // a word of shared memory
  uint64_t begin_;        // offset of this block's part in each piece
};

LLM_COMM_KERNEL(kMaxExchangeThreads) node_exchange(LLM_COMM_KERNEL_PARAM NodeExchangeArgs args) {
  grid_dependency_wait();
  ExchangeBlock(args, shared_memory<uint32_t>()).run();
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
