// Memory of several GPUs as weak as PTX makes it, in the form of an abstract machine with views.
//
// A location (a word of 4 or 8 bytes, whichever is accessed as a unit) holds all its stores in coherence order. A view
// says, for each location, the newest store that somebody is bound to have seen:
//
//   * a load may return any store that is not older than the thread's view of the location, and raises the view;
//   * a store goes behind the thread's view. It may go before stores that are not performed yet and not in the view:
//     one that is still under way is overtaken;
//   * a release attaches the thread's view to the store, and to the thread's relaxed stores to that location after it; an
//     acquire that reads one joins that view. A fence does so for the relaxed stores behind it, and for the relaxed loads
//     and read-modify-writes before it; weak ones are not strong enough for either. Fences have an order, in which each
//     joins the view of the one before (fence.sc);
//   * a read-modify-write reads the newest store, nothing ever goes between the two, and it carries on the view that is
//     attached to what it read;
//   * a block barrier joins the views of the block's threads, the end of a grid those of its blocks into the view that
//     later grids of the rank start from.
//
// These are the rules of the promising semantics (Kang et al., POPL 2017) without promises. Of the PTX model (PTX ISA,
// "Memory Consistency Model"; Lustig et al., ASPLOS 2019) they give coherence per location and causality order through
// release, acquire, fences, barriers and stream order, and nothing more; stores become visible to each rank at a time
// of its own. Not modelled: a load that returns a value stored only later in program order (load buffering).
//
// Aliases (NVLink multicast; PTX ISA, "Proxies" and "Proxy-preserved base causality order"): memory of a rank has an address of
// its own and the one of all ranks. A view bounds accesses by each of the two apart: what a thread is bound to have seen by one
// address says nothing of the other. A fence of aliases in a thread takes the larger of both, for all that the thread's view holds,
// and views that are joined later hold it too: the fence may lie anywhere on the path. An access by the address of all goes, and is
// torn, as any other, once for each rank. A store by either address overtakes one by the other, though that is performed, unless the
// thread has made a fence of aliases since. What a load has returned is seen by the address that it used, whichever the store used.
//
// One thing the PTX model does not say is assumed, and can be switched off (grid_end_performs): when a later grid of a
// rank has passed grid_dependency_wait(), the stores of the grids before it to the rank's own memory are performed, so
// that no store made afterwards, by whomever, goes before them. griddepcontrol.wait promises "performed and made
// visible to the current grid"; that it then holds for peers too follows from the L2 of the GPU that owns the memory
// being the one place where its own and its peers' stores meet. Of stores to peers nothing is assumed.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "emulator/deterministic/random.h"
#include "llm_comm/platform_emulator_multicast.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

inline constexpr uint32_t kMaxRanks = 8;

using ViewId = uint32_t;

// What a thread brings to an access. It is bound to what its rank, its block and it itself have seen.
struct ThreadMemory {
  uint32_t rank = 0;
  uint64_t grid = 0;  // number of the grid on its rank
  ViewId block = 0;
  ViewId thread = 0;
  uint32_t fenced = 0;                                  // snapshot that stores after a fence carry
  std::vector<uint32_t> observed;                       // snapshots on what relaxed loads returned, for the next fence
  std::vector<std::pair<uint32_t, uint32_t>> released;  // location and snapshot of the thread's own releases
  uint32_t joined = 0;                                  // the snapshot that it has joined last
  uint64_t aliases_fenced = 0;                          // when it made its last fence of aliases
};

// How weak memory is in a schedule.
struct MemoryTemper {
  uint32_t stale = 0;        // of 256 loads: return any permitted store rather than the newest that has arrived
  uint32_t overtake = 0;     // of 256 stores: go before any that they may overtake
  uint32_t delay = 0;        // steps until a store is visible to another rank, about; a few take eight times as long
  uint32_t local_delay = 0;  // the same within a rank
  uint64_t slow_links = 0;   // bit 8 * from + to: delays are sixteen times as long
  bool grid_end_performs = true;
};

// A store that will be visible at home at `time`.
struct Arrival {
  uint64_t time;
  uint32_t line;  // offset / 16
};

class WeakMemory {
 public:
  // Every rank's memory lies in one block of `ranks` times `bytes_of_rank`.
  WeakMemory(uint32_t ranks, uint64_t bytes_of_rank);
  WeakMemory(const WeakMemory&) = delete;
  WeakMemory& operator=(const WeakMemory&) = delete;

  // Forgets all stores; what the memory holds is visible to everybody.
  void reset(uint64_t seed, const MemoryTemper& temper);

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
  void fence_aliases(ThreadMemory& thread, uint64_t now);

  ViewId new_view();
  void free_view(ViewId view) { free_views_.push_back(view); }
  void join_into_view(ViewId from, ViewId to);
  void join_into_rank(ViewId from, uint32_t rank);
  // All grids of the rank below `grids` have ended.
  void end_grids(uint32_t rank, uint64_t grids, uint64_t now) { grid_ends_[rank].resize(grids, now); }

  // Loads return the newest store that has arrived. For when everybody waits and only time can help.
  void set_fresh(bool fresh) { fresh_ = fresh; }

  // When the newest store to a word was made; 0 if none has been since reset().
  uint64_t last_store(const void* address) const {
    const uint32_t at = location_at_[offset_of(address) / sizeof(uint32_t)];
    return at == 0 ? 0 : locations_[at - 1].history.back().time;
  }

  // What stores have put on their way since the last call.
  std::vector<Arrival>& arrivals() { return arrivals_; }
  // What was wrong with an access, if anything ever was.
  const std::string& error() const { return error_; }
  void fail(const std::string& error) { error_ = error; }

 private:
  using Stamp = uint64_t;                              // place in the coherence order of a location
  static constexpr Stamp kStampStep = Stamp{1} << 32;  // leaves room for stores that go before others
  // What somebody is bound to have seen of a location, by either address.
  struct Bound {
    Stamp by[2] = {0, 0};  // Alias

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
    bool is_update;     // by a read-modify-write: nothing comes between it and what it read
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
  std::vector<Line> bytes_;            // the newest value of each location
  std::vector<uint32_t> location_at_;  // by 4-byte word: 1 + number of its location, 0: none yet
  std::vector<Location> locations_;
  uint32_t used_locations_ = 0;
  std::vector<std::vector<uint32_t>> locations_of_view_;
  std::vector<ViewId> free_views_;
  std::vector<Snapshot> snapshots_;
  std::vector<Bound> bounds_;                               // what view_of_all() returned last
  uint32_t last_fence_ = 0;                                 // snapshot of the last fence of any thread
  std::array<std::vector<uint64_t>, kMaxRanks> grid_ends_;  // when each grid of a rank ended
  std::vector<Arrival> arrivals_;
  MemoryTemper temper_;
  Random random_{0};
  uint64_t salt_ = 0;
  uint64_t stores_ = 0;
  bool fresh_ = false;
  std::string error_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
