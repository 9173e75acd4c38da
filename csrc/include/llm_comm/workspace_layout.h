// Layout of a rank's workspace, which all ranks map: named regions, each with its writers and rules. Host and device
// share this file. The host initialises a workspace from regions(); no other file knows an offset.
//
//   region     begins at             initially  writer and rule
//   state      0                     zero       this rank's GPU: CommState
//   heap       kHeapOffset           zero       this rank's host: address of each registered window of the symmetric
//                                               heap on each rank, as this rank maps it (symmetric.cuh)
//   ports      kPortsOffset          zero       this rank's GPU and proxy, and semaphores written by peers' proxies:
//                                               PortState
//   marks      kMarksOffset          zero       each peer, one line at set-up: proves that a mapping carries stores
//   fault reports   kFaultReportsOffset zero    each rank, one word after an error (fault_reports.cuh)
//   calls      kCallsOffset          zero       each rank, its next call as flag lines, where calls are compared
//                                               (check_call.cuh)
//   output offsets  kOutputOffsetsOffset 0xFF   each peer, one word: symmetric offset of its output
//                                               (two_shot_port.cuh)
//   ends       kEndsOffset           0x7F       each peer, one word: last operation whose data it has received
//                                               (two_shot_port.cuh)
//   arrivals   kPortSemaphoresOffset 0x7F       each peer's proxy: last step whose data it has delivered
//                                               (port_session.cuh)
//   signals    CommonSignals         0x7F       each block of each peer: last step that it has finished
//                                               (hb_session.cuh). For algorithms that all ranks choose alike
//   sum signals     SumSlicesSignals 0x7F       as signals, for two_shot_port.cuh
//   direct signals  DirectSignals    0x7F       as signals, for direct.cuh. A rank chooses this algorithm and
//                                               two_shot_port.cuh by where its tensors lie
//   slots      kHeaderBytes          sentinel   peers, LL lines. Every line holds the sentinel while no operation uses
//                                               its slot; the receiver of a line resets it (R1, R2 of operation.cuh)
//   staging    after the slots       zero       peers, plain data ordered by signals, for the kernel that runs
//
// A new protocol adds a row to regions() and to this table. Its words must not share bytes with the slots: a word that
// is not an LL word could look like a line that has arrived. Words that are not steps must not share a region with
// signals: an offset could look like a finished step. Overlapping regions do not compile (static_assert below).
#pragma once

#include "llm_comm/platform_types.h"

namespace llm_comm {

inline constexpr int kMaxWorldSize = 16;
inline constexpr int kMaxExactWorld = 8;                  // largest world that has kernels of its own (ranks.cuh)
inline constexpr int kMaxParameters = 1 + kMaxWorldSize;  // maximum per operation: that of shards.h

inline constexpr uint64_t kHeaderBytes = 128 * 1024;
inline constexpr uint64_t kHeapOffset = 512;
inline constexpr uint64_t kPortsOffset = 4096;
inline constexpr uint64_t kMarksOffset = 8192;
inline constexpr uint64_t kFaultReportsOffset = 10240;
inline constexpr uint64_t kCallsOffset = 12288;
inline constexpr uint64_t kOutputOffsetsOffset = 20480;
inline constexpr uint64_t kEndsOffset = 22528;
inline constexpr uint64_t kPortSemaphoresOffset = 24576;
inline constexpr uint64_t kSignalsOffset = 32768;
inline constexpr uint64_t kRowOfWordsBytes = kMaxWorldSize * sizeof(uint64_t);  // one word for each sender
// Arrival words of one sender. A grid that uses ports divides them into one for each block and hop.
inline constexpr uint32_t kPortWords = (kSignalsOffset - kPortSemaphoresOffset) / kRowOfWordsBytes;

// Rows of signal words that one class of algorithms owns: one row for each block of a grid, starting at `First`. A
// session takes a SignalRow (steps.cuh), which only such a range creates. No algorithm can therefore name a word of
// another owner.
template <uint32_t First, uint32_t Blocks>
struct SignalRange {
  static constexpr uint32_t kFirst = First;
  static constexpr uint32_t kBlocks = Blocks;  // maximum blocks of a grid
  static constexpr uint64_t kOffset = kSignalsOffset + First * kRowOfWordsBytes;
  static constexpr uint64_t kBytes = Blocks * kRowOfWordsBytes;
};
// Two blocks for each SM of a GPU with 192 SMs.
using CommonSignals = SignalRange<0, 384>;
// A rank chooses these algorithms by where its tensors lie, so ranks may choose differently. Separate ranges keep their
// signals from being mistaken for those of other algorithms.
using SumSlicesSignals = SignalRange<CommonSignals::kFirst + CommonSignals::kBlocks, 224>;
using DirectSignals = SignalRange<SumSlicesSignals::kFirst + SumSlicesSignals::kBlocks, 160>;
inline constexpr uint32_t kMaxWindows = (kPortsOffset - kHeapOffset) / (kMaxWorldSize * sizeof(char*));
inline constexpr int kSlots = 2;
inline constexpr uint32_t kPieces = 2;  // pieces of a shard, which are sent one after the other
inline constexpr uint64_t kLineBytes = 16;

// Everything that an operation reads at its start lies in the first line, so that one load brings it all.
struct alignas(16) CommState {
  uint64_t arrivals;         // counts blocks that have begun; yields the operation number (operation.cuh, "Numbering")
  uint32_t aborted;          // set when a wait of this communicator has been aborted
  uint32_t zero;             // always 0; Operation::begin() says why it is read
  uint32_t claim;            // launch that holds the claim, where calls are compared (Operation::claim)
  uint32_t last_poll;        // time of the last read of host memory by a late wait (WaitBounds::elect_poller)
  uint32_t exited;           // end reasons that the last poller found (WaitBounds)
  uint32_t tickets;          // tickets taken by blocks of the grid that is starting (operation.cuh, "Tickets")
  uint32_t summed[kPieces];  // blocks that have reduced their share of a piece (two_shot_port.cuh)
  uint64_t order;            // checksum of call numbers (Operation::arrive, host/order_of_operations.h)
};

// State of the port channels (port_channel.cuh).
inline constexpr uint32_t kUserPortSemaphores = 16;  // for each pair of ranks, for kernels outside the library
struct PortState {
  uint64_t head;                                          // ring positions that threads have taken
  uint64_t tail;                                          // requests that the proxy has read, as a thread last saw it
  uint64_t flushed[kMaxWorldSize];                        // by peer: all requests below this position are complete
  uint64_t received[kMaxWorldSize][kUserPortSemaphores];  // by sender
};
static_assert(kPortsOffset + sizeof(PortState) <= kMarksOffset, "the region holds it");
static_assert(sizeof(CommState) <= kHeapOffset);

// Symmetric offset of a tensor: number of the registered window and offset in it, in one word. Ranks exchange
// it.
inline constexpr uint32_t kWindowOffsetBits = 48;
inline constexpr uint64_t kNoSymmetricOffset = ~uint64_t{0};  // in no registered window
LLM_COMM_HOST constexpr uint64_t symmetric_offset_at(uint32_t window, uint64_t offset) {
  return uint64_t{window} << kWindowOffsetBits | offset;
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

  // Layout that makes the most of `bytes`: three eighths for staging, the rest for two slots, all in whole lines. If
  // `bytes` is too small, the slots have 0 bytes.
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
        {"marks", kMarksOffset, kFaultReportsOffset - kMarksOffset, 0},
        {"fault reports", kFaultReportsOffset, kCallsOffset - kFaultReportsOffset, 0},
        {"calls", kCallsOffset, kOutputOffsetsOffset - kCallsOffset, 0},
        {"output offsets", kOutputOffsetsOffset, kEndsOffset - kOutputOffsetsOffset, 0xFF},  // kNoSymmetricOffset
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

// True if every region begins where the previous one ends, and the last one ends with the workspace.
LLM_COMM_HOST constexpr bool are_side_by_side(const WorkspaceLayout& layout) {
  const WorkspaceLayout::Regions regions = layout.regions();
  uint64_t end = 0;
  for (const Region& region : regions.region) {
    if (region.offset != end || region.bytes > layout.bytes()) return false;  // an underflowed size is very large
    end += region.bytes;
  }
  return end == layout.bytes();
}
static_assert(are_side_by_side(WorkspaceLayout(kLineBytes, kLineBytes)), "regions overlap, or leave a gap");

}  // namespace llm_comm
