// The workspace of a rank, mapped by all ranks: named regions, each with the rule that its bytes obey. Host and device
// share this file; the host initialises a new workspace from regions(), and nothing else knows an offset.
//
//   region   begins at       at first   who writes, and the rule
//   state    0               zero       this rank's GPU alone: CommState
//   heap     kHeapOffset     zero       this rank's host: where each segment of the symmetric heap lies on each rank, as this
//                                       rank maps it (symmetric.cuh)
//   ports    kPortsOffset    zero       this rank's GPU and its proxy, and semaphores that peers' proxies write: PortState
//   marks    kMarksOffset    zero       each peer one line at set-up: the proof that a mapping carries stores
//   notes    kNotesOffset    zero       each rank one word after an error: whom it waited for (suspicion.cuh)
//   calls    kCallsOffset    zero       each rank its next call, where calls are compared, as flag lines (check_call.cuh)
//   places   kPlacesOffset   0xFF       each peer one word: where its output lies (two_shot_port.cuh)
//   ends     kEndsOffset     0x7F       each peer one word: the last operation whose data it has got (two_shot_port.cuh)
//   arrivals kPortSemaphoresOffset 0x7F each peer's proxy the last step whose data it has brought (port_session.cuh)
//   signals  CommonSignals   0x7F       each block of each peer the last step that it has done (hb_session.cuh): of
//                                       algorithms that all ranks choose by what they agree on
//   sum signals     SumSlicesSignals 0x7F   the same, of two_shot_port.cuh
//   direct signals  DirectSignals    0x7F   the same, of direct.cuh. A rank chooses these two by where its tensors lie
//   slots    kHeaderBytes    armed      peers send LL lines here. Every line holds the sentinel whenever no operation uses
//                                       its slot; who receives a line re-arms it (the rules R1 and R2 of operation.cuh)
//   staging  behind slots    zero       peers store plain data here, ordered by signals: of the kernel that runs
//
// A region for another protocol is a row of regions() and of this table. It must not share bytes with the slots: a word
// that is not LL could look like a line that has arrived. Nor may words that are not steps share a region with signals: an
// offset could look like a step that has been done. Two regions that overlap do not compile.
#pragma once

#include "llm_comm/platform_types.h"

namespace llm_comm {

inline constexpr int kMaxWorldSize = 8;
inline constexpr int kMaxParameters = 9;  // of an operation

inline constexpr uint64_t kHeaderBytes = 64 * 1024;
inline constexpr uint64_t kHeapOffset = 256;
inline constexpr uint64_t kPortsOffset = 2048;
inline constexpr uint64_t kMarksOffset = 4096;
inline constexpr uint64_t kNotesOffset = 6144;
inline constexpr uint64_t kCallsOffset = 8192;
inline constexpr uint64_t kPlacesOffset = 10240;
inline constexpr uint64_t kEndsOffset = 11264;
inline constexpr uint64_t kPortSemaphoresOffset = 12288;
inline constexpr uint64_t kSignalsOffset = 16384;
inline constexpr uint64_t kRowOfWordsBytes = kMaxWorldSize * sizeof(uint64_t);  // a word for each sender
// Words of one sender, which the blocks of a grid that uses ports share out: one for each block and hop.
inline constexpr uint32_t kPortWords = (kSignalsOffset - kPortSemaphoresOffset) / kRowOfWordsBytes;

// The rows of signals that one kind of algorithms owns: one for each block of a grid, from `First` on. A session takes a
// SignalRow (steps.cuh), which only such a range makes, so that no algorithm names a word of another owner.
template <uint32_t First, uint32_t Blocks>
struct SignalRange {
  static constexpr uint32_t kFirst = First;
  static constexpr uint32_t kBlocks = Blocks;  // of a grid, at most
  static constexpr uint64_t kOffset = kSignalsOffset + First * kRowOfWordsBytes;
  static constexpr uint64_t kBytes = Blocks * kRowOfWordsBytes;
};
// Two blocks for each multiprocessor of a GPU that has 192 of them.
using CommonSignals = SignalRange<0, 384>;
// Algorithms that a rank chooses by where its tensors lie must not meet each other, nor others.
using SumSlicesSignals = SignalRange<CommonSignals::kFirst + CommonSignals::kBlocks, 224>;
using DirectSignals = SignalRange<SumSlicesSignals::kFirst + SumSlicesSignals::kBlocks, 160>;
inline constexpr uint32_t kMaxSegments = (kPortsOffset - kHeapOffset) / (kMaxWorldSize * sizeof(char*));
inline constexpr int kSlots = 2;
inline constexpr uint32_t kPieces = 2;  // of a slice, which go one by one
inline constexpr uint64_t kLineBytes = 16;

// What every operation reads lies in the first line, so that one load brings it all.
struct alignas(16) CommState {
  uint64_t arrivals;         // the number of the operation (operation.cuh)
  uint32_t aborted;          // set once a wait of this communicator has ended without what it waited for
  uint32_t zero;             // always; Operation::begin() says why it is read
  uint32_t claim;            // of the launch that runs, where calls are compared (Operation::claim)
  uint32_t last_poll;        // of host memory by a late wait (WaitBounds::elect_poller)
  uint32_t exited;           // WaitBounds
  uint32_t tickets;          // that blocks of the grid which starts have taken (operation.cuh, "Progress")
  uint32_t summed[kPieces];  // blocks that have summed what they have of a piece (two_shot_port.cuh)
  uint64_t order;            // which operations have had which numbers (Operation::arrive, host/order_of_operations.h)
};

// Of port channels (port_channel.cuh).
inline constexpr uint32_t kUserPortSemaphores = 16;  // of a pair of ranks, for kernels outside of the library
struct PortState {
  uint64_t head;                    // requests for which threads have taken a place
  uint64_t tail;                    // of these, the proxy has taken so many, as a thread saw it last
  uint64_t flushed[kMaxWorldSize];  // by peer: all requests before this one have been carried out
  uint64_t received[kMaxWorldSize][kUserPortSemaphores];  // by sender
};
static_assert(kPortsOffset + sizeof(PortState) <= kMarksOffset, "the region holds it");
static_assert(sizeof(CommState) <= kHeapOffset);

// Where a tensor lies in the symmetric heap, in a word that ranks tell each other.
inline constexpr uint32_t kPlaceOffsetBits = 48;
inline constexpr uint64_t kNoPlace = ~uint64_t{0};  // in no segment
LLM_COMM_HOST constexpr uint64_t place_at(uint32_t segment, uint64_t offset) {
  return uint64_t{segment} << kPlaceOffsetBits | offset;
}

struct Region {
  const char* name;
  uint64_t offset;
  uint64_t bytes;
  uint8_t initial_byte;
};

class WorkspaceLayout {
 public:
  static constexpr int kRegions = 14;
  struct Regions {
    Region region[kRegions];
  };

  LLM_COMM_HOST constexpr explicit WorkspaceLayout(uint64_t slot_bytes, uint64_t staging_bytes = 0)
      : slot_bytes_(slot_bytes), staging_bytes_(staging_bytes) {}

  // The layout that makes the most of so many bytes: three eighths for staging, two slots, all of whole lines. Slots of 0 bytes where
  // it is too small.
  LLM_COMM_HOST static constexpr WorkspaceLayout within(uint64_t bytes) {
    const uint64_t available = bytes < kHeaderBytes ? 0 : bytes - kHeaderBytes;
    const uint64_t staging = available * 3 / 8 / kLineBytes * kLineBytes;
    return WorkspaceLayout((available - staging) / kSlots / kLineBytes * kLineBytes, staging);
  }

  LLM_COMM_HOST constexpr uint64_t slot_bytes() const { return slot_bytes_; }
  LLM_COMM_HOST constexpr uint64_t staging_bytes() const { return staging_bytes_; }
  LLM_COMM_HOST constexpr uint64_t bytes() const { return kHeaderBytes + kSlots * slot_bytes_ + staging_bytes_; }

  LLM_COMM_HOST constexpr Regions regions() const {
    return {{
        {"state", 0, kHeapOffset, 0},
        {"heap", kHeapOffset, kPortsOffset - kHeapOffset, 0},
        {"ports", kPortsOffset, kMarksOffset - kPortsOffset, 0},
        {"marks", kMarksOffset, kNotesOffset - kMarksOffset, 0},
        {"notes", kNotesOffset, kCallsOffset - kNotesOffset, 0},
        {"calls", kCallsOffset, kPlacesOffset - kCallsOffset, 0},
        {"places", kPlacesOffset, kEndsOffset - kPlacesOffset, 0xFF},  // kNoPlace
        {"ends", kEndsOffset, kPortSemaphoresOffset - kEndsOffset, 0x7F},
        {"arrivals", kPortSemaphoresOffset, kSignalsOffset - kPortSemaphoresOffset, 0x7F},
        {"signals", CommonSignals::kOffset, CommonSignals::kBytes, 0x7F},
        {"sum signals", SumSlicesSignals::kOffset, SumSlicesSignals::kBytes, 0x7F},
        {"direct signals", DirectSignals::kOffset, DirectSignals::kBytes, 0x7F},
        {"slots", kHeaderBytes, kSlots * slot_bytes_, 0xFF},  // the sentinel (line.cuh)
        {"staging", kHeaderBytes + kSlots * slot_bytes_, staging_bytes_, 0},
    }};
  }

 private:
  uint64_t slot_bytes_;
  uint64_t staging_bytes_;
};

// True if each region begins where the one before it ends, and the last one ends with the workspace.
LLM_COMM_HOST constexpr bool are_side_by_side(const WorkspaceLayout& layout) {
  const WorkspaceLayout::Regions regions = layout.regions();
  uint64_t end = 0;
  for (const Region& region : regions.region) {
    if (region.offset != end || region.bytes > layout.bytes()) return false;  // less than nothing is very much
    end += region.bytes;
  }
  return end == layout.bytes();
}
static_assert(are_side_by_side(WorkspaceLayout(kLineBytes, kLineBytes)), "regions overlap, or leave a gap");

}  // namespace llm_comm
