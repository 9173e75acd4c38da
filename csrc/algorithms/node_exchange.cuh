// Bytes between partners on different nodes, by port channels whose proxy reaches a network (host/node_exchange.h): an all-to-all, of
// which an all-gather is the case that all partners get the same. It is no algorithm of the registry: a hierarchical operation is
// made of it, of algorithms in the node, and of sums.
//
// What goes from one partner to another is cut in parts. A launch has a block for each of up to kMaxExchangeBlocks parts. The block
//
//   1. copies its part for each partner to memory that the proxy reaches (the outbox);
//   2. asks the proxy to put it to the partner (into its inbox), and to signal;
//   3. waits for the partner's signal, and copies what has come to the output.
//
// Two partners take as many parts from each other as the longer of the two ways has, so both know which blocks take part; a part may
// be empty. Block b and its likes count what they have swapped with each partner; this number is what a signal says, and its parity
// says which half of outbox and inbox is used. The count lives in memory of the device or of the host, so graphs can be replayed.
//
// Why two halves are enough: a block sends its part n + 2 to a partner when it has ended part n + 1, so the partner has sent its own part
// n + 1, so the grid has ended there in which the same block ended part n. So the inbox of n has been read, and, as the signal of n came
// behind the data, the outbox of n as well.
#pragma once

#include "llm_comm/port_channel.cuh"
#include "llm_comm/steps.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMaxExchangeBlocks = kUserPortSemaphores;  // each has a semaphore of a pair of ranks
inline constexpr uint32_t kMaxExchangeThreads = 512;

// What a rank and a partner send each other.
struct ExchangePiece {
  uint64_t from;       // offset in the input
  uint64_t bytes_out;  // 0 is allowed
  uint64_t to;         // offset in the output
  uint64_t bytes_in;
};

// Where things lie in the memory that partners put to. Before it lies the header of a workspace, of which this uses CommState, PortState
// and the notes of suspicion.cuh; counts lie where HB sessions have their signals, of which there are none.
struct ExchangeLayout {
  uint64_t part_bytes;  // a multiple of 16
  uint32_t ranks;

  LLM_COMM_HOST constexpr uint64_t bytes() const {
    return kHeaderBytes + 4 * uint64_t{ranks - 1} * kMaxExchangeBlocks * part_bytes;
  }
};

struct NodeExchangeArgs {
  DeviceComm comm;  // of the partners: `workspace` of another rank is memory of this one, for notes that nobody reads
  ExchangeLayout layout;
  const char* input;
  char* output;
  uint64_t first_part;  // of the launch
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
        copy(own_memory() + place(kOutbox, rank, comm.rank, count(rank)), from, part_of(piece.bytes_out));
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
      copy(args_.output + piece.to + begin_, own_memory() + place(kInbox, comm.rank, rank, count(rank)),
           part_of(piece.bytes_in));
    }
    block_sync();
    if (partner < comm.world_size && partner != comm.rank && takes_part(partner)) {
      store_relaxed(counter(partner), count(partner) + 1);
    }
  }

 private:
  enum Box : uint32_t { kOutbox, kInbox };

  // By one thread.
  LLM_COMM_DEVICE bool swap(uint32_t partner) const {
    const DeviceComm& comm = args_.comm;
    const uint64_t number = count(partner) + 1;
    const uint64_t bytes = part_of(args_.piece[partner].bytes_out);
    const PortChannel channel{comm, {comm.rank, OperationKind::kUser, number, bytes}, partner};
    const char* const from = own_memory() + place(kOutbox, partner, comm.rank, number - 1);
    return channel.put_with_signal(place(kInbox, partner, comm.rank, number - 1), from, bytes, block_index(), number) &&
           channel.wait(block_index(), number);
  }

  // Offset of a half of what goes from `sender` to `receiver`. Parts of neighbouring blocks are neighbours in both boxes, so that the
  // proxy puts them as one.
  LLM_COMM_DEVICE uint64_t place(Box box, uint32_t receiver, uint32_t sender, uint64_t number) const {
    const uint32_t other = box == kInbox ? among_others(sender, receiver) : among_others(receiver, sender);
    const uint64_t half = box * 2 + number % 2;
    const uint64_t slot = (half * (args_.layout.ranks - 1) + other) * kMaxExchangeBlocks + block_index();
    return kHeaderBytes + slot * args_.layout.part_bytes;
  }

  // Bytes of this block's part of a piece.
  LLM_COMM_DEVICE uint64_t part_of(uint64_t bytes) const {
    if (bytes <= begin_) return 0;
    return bytes - begin_ < args_.layout.part_bytes ? bytes - begin_ : args_.layout.part_bytes;
  }

  // The first part is always sent, so that nobody ends before its partners have begun.
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
  uint64_t begin_;        // of this block's part in each piece
};

LLM_COMM_KERNEL(kMaxExchangeThreads) node_exchange(LLM_COMM_KERNEL_PARAM NodeExchangeArgs args) {
  grid_dependency_wait();
  ExchangeBlock(args, shared_memory<uint32_t>()).run();
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
