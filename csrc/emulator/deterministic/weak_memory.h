// WeakMemory: memory of several GPUs, as weak as PTX permits, as an abstract machine with views. Used by Machine.
//
// A location is a word of 4 or 8 bytes, whichever is accessed atomically. It holds all its stores in coherence order. A
// view gives, for each location, the newest store that its owner must have seen:
//
// - A load may return any store that is not older than the thread's view of the location. It raises the view.
// - A store is placed after the thread's view. It may be placed before stores that are neither performed nor in the
//   view:
// it overtakes them.
// - A release attaches the thread's view to the store, and to the thread's later relaxed stores to that location. An
//   acquire
// that reads such a store joins its view. A fence does the same for later relaxed stores, and for earlier relaxed loads
// and read-modify-writes; weak accesses take no part. Fences are totally ordered, and each joins the view of the one
// before (fence.sc). Interpreted machine code has a fence for each direction instead: acquire() and release.
// - A read-modify-write reads the newest store, and no store is ever placed between the two. It carries on the view
//   attached
// to the value that it read.
// - A block barrier joins the views of the block's threads. The end of a grid joins those of its blocks into the view
//   from
// which later grids of the rank start.
//
// These are the rules of the promising semantics (Kang et al., POPL 2017) without promises. Of the PTX model (PTX ISA,
// "Memory Consistency Model"; Lustig et al., ASPLOS 2019) they give coherence per location, and causality order through
// release, acquire, fences, barriers and stream order, and nothing more. Stores become visible to each rank at a
// different time. Not modelled: load buffering, where a load returns a value that is stored later in program order.
//
// Aliases (NVLink multicast; PTX ISA, "Proxies" and "Proxy-preserved base causality order"). A rank's memory has its
// own address and the multicast address of all ranks.
// - A view bounds accesses through each address separately: what a thread must have seen through one says nothing of
//   the other.
// - An alias fence of a thread raises both bounds to the larger one, for everything in the thread's view. Views joined
//   later
// include the result, so the fence may lie anywhere on the causality path.
// - A multicast access is executed and torn like any other, once for each rank.
// - A store through either address may overtake a performed store through the other, unless the thread has made an
//   alias fence
// since.
// - The value of a load counts as seen through the address of the load, whichever address the store used.
//
// One assumption goes beyond the PTX model and can be switched off (grid_end_performs). When a later grid of a rank has
// passed grid_dependency_wait(), the stores of earlier grids to the rank's own memory are performed: no later store, of
// any rank, precedes them. griddepcontrol.wait promises "performed and made visible to the current grid". That this
// holds for peers too follows from the L2 of the GPU that owns the memory, where its own and its peers' stores meet.
// Nothing is assumed of stores to peers.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "emulator/deterministic/random.h"
#include "llm_comm/platform_emulator_multicast.h"
#include "llm_comm/workspace_layout.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

inline constexpr uint32_t kMaxRanks = kMaxWorldSize;

using ViewId = uint32_t;

// Memory state of a thread. The thread must have seen what its rank, its block and it itself have seen.
struct ThreadMemory {
  uint32_t rank = 0;
  uint64_t grid = 0;  // number of the grid on its rank
  ViewId block = 0;
  ViewId thread = 0;
  uint32_t fenced = 0;             // snapshot of its last fence, carried by later stores
  std::vector<uint32_t> observed;  // snapshots of values returned by relaxed loads, for the next fence
  std::vector<std::pair<uint32_t, uint32_t>> released;  // location and snapshot of its own releases
  uint32_t joined = 0;                                  // snapshot that it joined last
  uint64_t aliases_fenced = 0;                          // time of its last alias fence
};

// Schedule parameters of the memory.
struct MemoryParameters {
  uint32_t stale = 0;  // probability in 256 per load: return any permitted store instead of the newest that has arrived
  uint32_t overtake = 0;  // probability in 256 per store: be placed before any stores that it may overtake
  uint32_t delay = 0;  // typical steps until a store is visible to another rank; a few take up to eight times as long
  uint32_t local_delay = 0;  // the same within a rank
  uint64_t slow_links = 0;   // bit (8 * from + to) % 64: delays are sixteen times as long
  bool grid_end_performs = true;
};

// A store becomes visible at the rank that owns it at `time`.
struct Arrival {
  uint64_t time;
  uint32_t line;  // offset / 16
};

class WeakMemory {
 public:
  // All ranks' memory is one block of ranks * bytes_of_rank bytes.
  WeakMemory(uint32_t ranks, uint64_t bytes_of_rank);
  WeakMemory(const WeakMemory&) = delete;
  WeakMemory& operator=(const WeakMemory&) = delete;

  // Forgets all stores; the current content becomes visible to all ranks.
  void reset(uint64_t seed, const MemoryParameters& parameters);

  char* of_rank(uint32_t rank) { return reinterpret_cast<char*>(bytes_.data()) + rank * bytes_of_rank_; }
  uint64_t bytes_of_rank() const { return bytes_of_rank_; }
  bool contains(const void* address) const { return offset_of(address) < size(); }
  uint64_t offset_of(const void* address) const {
    return static_cast<uint64_t>(static_cast<const char*>(address) - reinterpret_cast<const char*>(bytes_.data()));
  }

  void load(ThreadMemory& thread, uint64_t now, const void* address, void* to, uint32_t bytes, uint32_t unit,
            Order order, Alias alias);
  void store(ThreadMemory& thread, uint64_t now, void* address, const void* from, uint32_t bytes, uint32_t unit,
             Order order, Alias alias);
  uint64_t modify(ThreadMemory& thread, uint64_t now, void* address, uint32_t bytes,
                  uint64_t (*update)(uint64_t, const void*), const void* arguments, Alias alias);
  void fence(ThreadMemory& thread);
  // Halves of a fence, without the total order of fences. An acquire joins what earlier relaxed loads and
  // read-modify-writes carry. A release takes a snapshot when it begins; later relaxed stores carry the snapshot once the
  // release has ended.
  void acquire(ThreadMemory& thread);
  uint32_t begin_release(const ThreadMemory& thread) { return take_snapshot(thread); }
  static void end_release(ThreadMemory& thread, uint32_t snapshot) { thread.fenced = snapshot; }
  void fence_aliases(ThreadMemory& thread, uint64_t now);

  ViewId new_view();
  void free_view(ViewId view) { free_views_.push_back(view); }
  void join_into_view(ViewId from, ViewId to);
  void join_into_rank(ViewId from, uint32_t rank);
  // All grids of the rank with numbers below `grids` have ended.
  void end_grids(uint32_t rank, uint64_t grids, uint64_t now) { grid_ends_[rank].resize(grids, now); }

  // If set, loads return the newest store that has arrived. Used when all threads wait and only time can help.
  void set_fresh(bool fresh) { fresh_ = fresh; }

  // Time of the newest store to a word; 0 if there is none since reset().
  uint64_t last_store(const void* address) const {
    const uint32_t at = location_at_[offset_of(address) / sizeof(uint32_t)];
    return at == 0 ? 0 : locations_[at - 1].history.back().time;
  }

  // Arrivals caused by stores since the last call.
  std::vector<Arrival>& arrivals() { return arrivals_; }
  // Description of the first undefined access; empty if there is none.
  const std::string& error() const { return error_; }
  void fail(const std::string& error) { error_ = error; }

 private:
  using Stamp = uint64_t;                              // position in the coherence order of a location
  static constexpr Stamp kStampStep = Stamp{1} << 32;  // leaves room for stores placed in between
  // Newest store of a location that its owner must have seen, for each alias.
  struct Bound {
    Stamp by[2] = {0, 0};  // indexed by Alias

    void join(const Bound& other) {
      for (int i = 0; i < 2; ++i) by[i] = by[i] < other.by[i] ? other.by[i] : by[i];
    }
    bool holds(const Bound& other) const { return by[0] >= other.by[0] && by[1] >= other.by[1]; }
  };
  static Bound bound_by(Alias alias, Stamp stamp) {
    Bound bound;
    bound.by[static_cast<int>(alias)] = stamp;
    return bound;
  }
  using Snapshot = std::vector<std::pair<uint32_t, Bound>>;

  struct Message {
    Stamp stamp;
    uint64_t value;
    uint64_t time;
    uint64_t grid;
    uint64_t fate;  // hashed into delays
    uint32_t rank;
    uint32_t snapshot;  // 0: none
    bool is_update;     // by a read-modify-write: no store is placed between it and the value that it read
    Alias alias;
  };
  struct Seen {
    ViewId view;
    Bound bound;
  };
  struct Location {
    std::vector<Message> history;
    std::vector<Seen> seen;
    std::array<Bound, kMaxRanks> rank_view;
    uint64_t offset;
    uint32_t bytes;
    uint32_t home;
  };

  uint64_t size() const { return bytes_.size() * sizeof(Line); }
  Location& location(uint64_t offset, uint32_t unit);
  void widen(Location& low);
  uint32_t number(const Location& location) const { return static_cast<uint32_t>(&location - locations_.data()); }
  uint64_t delay(const Message& message, uint32_t to) const;
  bool is_visible(const Message& message, uint32_t rank, uint64_t now) const;
  bool is_performed(const Location& location, const Message& message, uint64_t now) const;
  Bound view(const Location& location, const ThreadMemory& thread) const;
  Stamp view(const Location& location, const ThreadMemory& thread, Alias alias) const {
    return view(location, thread).by[static_cast<int>(alias)];
  }
  const std::vector<Bound>& view_of_all(const ThreadMemory& thread);
  void raise(Location& location, ViewId view, const Bound& bound);
  const Message& choose(const Location& location, const ThreadMemory& thread, uint64_t now, Alias alias);
  void insert(Location& location, ThreadMemory& thread, uint64_t now, uint64_t value, uint64_t fate, uint32_t snapshot,
              bool is_update, Alias alias);
  uint32_t carried(const Location& location, const ThreadMemory& thread) const;
  uint32_t merge(uint32_t a, uint32_t b);
  void write_back(const Location& location);
  uint32_t take_snapshot(const ThreadMemory& thread);
  void join_snapshot(ThreadMemory& thread, uint32_t snapshot);

  uint64_t bytes_of_rank_;
  std::vector<Line> bytes_;            // newest value of each location
  std::vector<uint32_t> location_at_;  // by 4-byte word: 1 + number of its location; 0: none
  std::vector<Location> locations_;
  uint32_t used_locations_ = 0;
  std::vector<std::vector<uint32_t>> locations_of_view_;
  std::vector<ViewId> free_views_;
  std::vector<Snapshot> snapshots_;
  std::vector<Bound> bounds_;                               // last result of view_of_all()
  uint32_t last_fence_ = 0;                                 // snapshot of the last fence of any thread
  std::array<std::vector<uint64_t>, kMaxRanks> grid_ends_;  // end time of each grid of a rank
  std::vector<Arrival> arrivals_;
  MemoryParameters parameters_;
  Random random_{0};
  uint64_t salt_ = 0;
  uint64_t stores_ = 0;
  bool fresh_ = false;
  std::string error_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
