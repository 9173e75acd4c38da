// Common code at the begin of every kernel that llm_comm.dsl generates: the call, packets, signals, and access to the
// caller's tensors.
//
// A call is an operation of the communicator (operation.cuh). Its number is in device memory, so CUDA graphs can be
// replayed.
//
// Workspace of a rank: [ semaphore words | half 0 | half 1 ]. A signal stores (number of the call, count within the
// call) as one word. The word only grows, so semaphores are never reset.
#include "llm_comm/program.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET::dsl {

inline constexpr uint32_t kSignalsOfACallLog2 = 24;

// Senders that a kernel waits for are packed into a constant, four bits for each: the offset from this rank, or
// kAbsolute plus the rank.
inline constexpr uint32_t kAbsolute = 8;
static_assert(kMaxExactWorld <= kAbsolute, "a program has no more ranks");

// Slow path of a wait, not inlined into the fast path. `index`: position of the late sender among `senders`.
LLM_COMM_DEVICE_CALL LateWait check_wait_of_call(const ProgramArgs& args, uint64_t start, OperationInWait op,
                                                 uint64_t senders, uint32_t index) {
  const DeviceComm& comm = args.comm;
  const uint32_t sender = static_cast<uint32_t>(senders >> 4 * index) & 15;
  const uint32_t peer = sender >= kAbsolute ? sender - kAbsolute : (comm.rank + sender) % comm.world_size;
  return check_wait_of_operation(comm, start, op, peer, 0);
}

class Call {
 public:
  LLM_COMM_DEVICE explicit Call(const ProgramArgs& args) : args_(args), op_(args.comm, args.kind, args.bytes) {}

  // `precomputed`: values that depend on the addresses that the kernel uses first, so that the compiler computes these
  // before the wait (ll_session.cuh).
  template <class... Values>
  LLM_COMM_DEVICE void wait_for_grids_before(Values... precomputed) {
    grid_dependency_wait_after((op_.precomputed() + ... + precomputed));
    grid_dependency_trigger();
    state_ = op_.load_state();  // in flight until begin()
  }

  // False after the communicator has failed: packets may then not hold the sentinel.
  LLM_COMM_DEVICE bool begin() { return op_.begin(state_); }

  LLM_COMM_DEVICE bool is_odd() const { return op_.is_odd(); }

  // Called by one thread of each block, once its threads have all begun.
  LLM_COMM_DEVICE void arrive() const { op_.arrive(); }

  // Word of signal number `count` of this call to or from a peer.
  LLM_COMM_DEVICE uint64_t signal_word(uint64_t count) const { return (op_.sequence() << kSignalsOfACallLog2) + count; }

  LLM_COMM_DEVICE bool wait(const uint64_t* word, uint64_t expected, uint32_t peer) const {
    return poll_until([&] { return load_acquire(word) >= expected; },
                      [&](uint64_t start) { return check(start, kAbsolute + peer, 0); });
  }

  // Polls all lines that equal sentinel_line() until they have arrived. False if the wait ended before.
  // Each sender sends `Batch` lines.
  template <uint64_t Senders, uint32_t Batch, uint32_t N>
  LLM_COMM_DEVICE bool receive(const Line* const (&from)[N], Line (&line)[N]) const {
    if (N == 1 && has_arrived(line[0])) return true;  // no line is expected
    return poll_until([&] { return poll_lines(from, line); },
                      [&](uint64_t start) {
                        uint32_t late = 0;
                        LLM_COMM_UNROLL(32)
                        for (uint32_t i = 1; i < N; ++i) late = has_arrived(line[i]) ? late : i / Batch;
                        return check(start, Senders, late);
                      });
  }

  // For packets of arbitrary bytes, after receive(): a line with a word that could be the sentinel has a mask, as in
  // ll_bytes.cuh. Resets the masks to the sentinel.
  template <uint64_t Senders, uint32_t Batch, uint32_t N>
  LLM_COMM_DEVICE bool receive_masks(uint32_t* const (&from)[N], Line (&line)[N]) const {
    LLM_COMM_UNROLL(32)
    for (uint32_t i = 0; i < N; ++i) {
      if (!has_ambiguous_words(line[i])) continue;
      uint32_t mask = kSentinel;
      const bool has_come = poll_until(
          [&] {
            mask = load_relaxed(from[i]);
            return mask != kSentinel;
          },
          [&](uint64_t start) { return check(start, Senders, i / Batch); });
      if (!has_come) return false;
      store_relaxed(from[i], kSentinel);
      line[i] = decode_ambiguous(line[i], mask);
    }
    return true;
  }

 private:
  LLM_COMM_DEVICE LateWait check(uint64_t start, uint64_t senders, uint32_t index) const {
    return check_wait_of_call(args_, start, op_.in_wait(), senders, index);
  }

  const ProgramArgs& args_;
  Operation op_;
  Line state_;
};

LLM_COMM_DEVICE void send_bytes(Line* line, uint32_t* mask, Line payload) {
  send_line(line, payload);
  const AmbiguousWords words = ambiguous_words(payload);
  if (words.are_there) store_relaxed(mask, words.mask);
}

// 4-byte elements use the accesses that the emulator's memory model tracks. The model has no smaller accesses.
template <class Storage>
LLM_COMM_DEVICE Storage load_element(const Storage* element) {
  if constexpr (sizeof(Storage) == 4) {
    return load_plain(element);
  } else {
    return *element;
  }
}

template <class Storage>
LLM_COMM_DEVICE void store_element(Storage* element, Storage value) {
  if constexpr (sizeof(Storage) == 4) {
    store_plain(element, value);
  } else {
    *element = value;
  }
}

// Loads an unaligned line, or one of which only `bytes` bytes exist, element by element. The rest is zeros.
template <class Storage>
LLM_COMM_DEVICE_CALL Line load_elements(const char* first, uint64_t bytes) {
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(Storage);
  const auto* const elements = reinterpret_cast<const Storage*>(first);
  Storage element[kPerLine];
  LLM_COMM_UNROLL(16)
  for (uint32_t i = 0; i < kPerLine; ++i)
    element[i] = i * sizeof(Storage) < bytes ? load_element(elements + i) : Storage{0};
  Line line{};
  LLM_COMM_UNROLL(16)
  for (uint32_t i = 0; i < kPerLine; ++i) {
    line.word[i * sizeof(Storage) / 4] |= static_cast<uint32_t>(element[i]) << (i * sizeof(Storage) % 4 * 8);
  }
  return line;
}

template <class Storage>
LLM_COMM_DEVICE_CALL void store_elements(char* first, uint64_t bytes, Line line) {
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(Storage);
  auto* const elements = reinterpret_cast<Storage*>(first);
  LLM_COMM_UNROLL(16)
  for (uint32_t i = 0; i < kPerLine; ++i) {
    if (i * sizeof(Storage) >= bytes) continue;
    store_element(elements + i,
                  static_cast<Storage>(line.word[i * sizeof(Storage) / 4] >> (i * sizeof(Storage) % 4 * 8)));
  }
}

// Tensor of the caller in shards, accessed by lines. Bytes beyond the end of a shard load as zeros and are not stored.
// Aligned whole lines are accessed at once, others element by element.
template <class Storage>
class Tensor {
 public:
  LLM_COMM_DEVICE Tensor(char* begin, uint64_t part_bytes)
      : begin_(begin), part_bytes_(part_bytes), whole_lines_(static_cast<uint32_t>(part_bytes / sizeof(Line))) {}

  // Load in two steps, so that several loads are in flight together. Must be constructed before the wait for earlier
  // grids. begin() loads unconditionally, from `spare` memory if no whole line is wanted: a branch would delay it.
  class Load {
   public:
    LLM_COMM_DEVICE Load(const Tensor& tensor, uint32_t part, uint32_t line, bool is_wanted, const void* spare)
        : address_(tensor.at(part, line)) {
      const bool is_whole = tensor.is_whole(address_, line);
      is_later_ = is_wanted && !is_whole;
      bytes_ = tensor.bytes_from(line);
      from_ = is_wanted && is_whole ? address_ : spare;
    }

    LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(from_); }
    LLM_COMM_DEVICE void begin() { value_ = load_line(from_); }
    // Returns the line; unspecified if it is not wanted.
    LLM_COMM_DEVICE Line end() const { return is_later_ ? load_elements<Storage>(address_, bytes_) : value_; }

   private:
    const char* address_;
    const void* from_;
    uint64_t bytes_;
    bool is_later_;
    Line value_{};
  };

  // Prepared store of a line: the constructor computes the addresses before the line has arrived.
  class Store {
   public:
    LLM_COMM_DEVICE Store(const Tensor& tensor, uint32_t part, uint32_t line)
        : address_(opaque(tensor.at(part, line))),
          whole_(opaque(tensor.is_whole(address_, line) ? address_ : nullptr)),
          bytes_(tensor.bytes_from(line)) {}

    LLM_COMM_DEVICE uint64_t precomputed() const {
      return reinterpret_cast<uint64_t>(address_) + reinterpret_cast<uint64_t>(whole_);
    }
    LLM_COMM_DEVICE void operator()(Line value) const {
      if (whole_ != nullptr) {
        store_line(whole_, value);
      } else {
        store_elements<Storage>(address_, bytes_, value);
      }
    }

   private:
    char* address_;
    char* whole_;  // address_ if the line is whole and aligned, else null
    uint64_t bytes_;
  };

  LLM_COMM_DEVICE Line load(uint32_t part, uint32_t line) const {
    const char* const address = at(part, line);
    return is_whole(address, line) ? load_line(address) : load_elements<Storage>(address, bytes_from(line));
  }

  LLM_COMM_DEVICE void store(uint32_t part, uint32_t line, Line value) const {
    char* const address = at(part, line);
    if (is_whole(address, line)) {
      store_line(address, value);
    } else {
      store_elements<Storage>(address, bytes_from(line), value);
    }
  }

 private:
  LLM_COMM_DEVICE char* at(uint32_t part, uint32_t line) const {
    return begin_ + part * part_bytes_ + uint64_t{line} * sizeof(Line);
  }
  LLM_COMM_DEVICE bool is_whole(const char* address, uint32_t line) const {
    return line < whole_lines_ && (reinterpret_cast<uint64_t>(address) & (sizeof(Line) - 1)) == 0;
  }
  LLM_COMM_DEVICE uint64_t bytes_from(uint32_t line) const {
    const uint64_t begin = uint64_t{line} * sizeof(Line);
    return begin < part_bytes_ ? part_bytes_ - begin : 0;
  }

  char* begin_;
  uint64_t part_bytes_;
  uint32_t whole_lines_;
};

// Offsets in a workspace are 32-bit, since it is smaller than 4 GiB: a thread keeps one register for each.
LLM_COMM_DEVICE Line* line_at(char* workspace, uint32_t offset) { return reinterpret_cast<Line*>(workspace + offset); }
LLM_COMM_DEVICE uint32_t* mask_at(char* workspace, uint32_t offset) {
  return reinterpret_cast<uint32_t*>(workspace + offset);
}

LLM_COMM_DEVICE Line* in_half(Line* line, uint32_t half) {
  return reinterpret_cast<Line*>(reinterpret_cast<char*>(line) + half);
}

// Bytes of a shard from piece `piece` to its end, with pieces of `lines` lines.
LLM_COMM_DEVICE uint64_t bytes_behind(uint64_t part_bytes, uint32_t piece, uint32_t lines) {
  const uint64_t begin = uint64_t{piece} * lines * sizeof(Line);
  return begin < part_bytes ? part_bytes - begin : 0;
}

// Returns how much of `bytes` bytes, beginning at line `from`, is before byte `end`. Offsets count from the begin of a
// chunk.
LLM_COMM_DEVICE uint64_t bytes_within(uint32_t from, uint64_t bytes, uint64_t end) {
  const uint64_t begin = uint64_t{from} * sizeof(Line);
  const uint64_t most = begin < end ? end - begin : 0;
  return bytes < most ? bytes : most;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::dsl
