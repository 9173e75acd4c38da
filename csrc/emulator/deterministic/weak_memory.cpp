#include "emulator/deterministic/weak_memory.h"

#include <algorithm>

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

namespace {

// Maximum age in steps of a value that a load may still return after a newer store has arrived. PTX has no such bound,
// but without one no time-out would be meaningful.
constexpr uint64_t kMostStale = 8192;

}  // namespace

WeakMemory::WeakMemory(uint32_t ranks, uint64_t bytes_of_rank)
    : bytes_of_rank_(bytes_of_rank),
      bytes_(ranks * bytes_of_rank / sizeof(Line)),
      location_at_(ranks * bytes_of_rank / sizeof(uint32_t)) {}

void WeakMemory::reset(uint64_t seed, const MemoryParameters& parameters) {
  for (uint32_t i = 0; i < used_locations_; ++i) {
    const Location& used = locations_[i];
    location_at_[used.offset / 4] = location_at_[used.offset / 4 + used.bytes / 8] = 0;
  }
  used_locations_ = 0;
  free_views_.clear();
  for (ViewId view = 0; view < locations_of_view_.size(); ++view) {
    locations_of_view_[view].clear();
    free_views_.push_back(view);
  }
  snapshots_.assign(1, {});  // snapshot 0 means none
  for (auto& ends : grid_ends_) ends.clear();
  arrivals_.clear();
  parameters_ = parameters;
  random_ = Random(seed);
  salt_ = random_.next();
  last_fence_ = 0;
  stores_ = 0;
  fresh_ = false;
  error_.clear();
}

// ---- Locations -----------------------------------------------------------------------------------------------------

WeakMemory::Location& WeakMemory::location(uint64_t offset, uint32_t unit) {
  uint32_t& at = location_at_[offset / 4];
  if (at == 0) {
    if (used_locations_ == locations_.size()) locations_.emplace_back();
    Location& fresh = locations_[used_locations_++];
    at = used_locations_;
    fresh.offset = offset;
    fresh.bytes = 4;
    fresh.home = static_cast<uint32_t>(offset / bytes_of_rank_);
    fresh.rank_view.fill({});
    fresh.seen.clear();
    uint32_t value;
    std::memcpy(&value, reinterpret_cast<const char*>(bytes_.data()) + offset, sizeof(value));
    fresh.history.assign(1, {kStampStep, value, 0, 0, 0, fresh.home, 0, false, Alias::kOwn});
  }
  if (unit == 8 && locations_[at - 1].bytes == 4) {
    location(offset + 4, 4);  // creates the upper half
    widen(locations_[location_at_[offset / 4] - 1]);
  }
  return locations_[location_at_[offset / 4] - 1];
}

// Merges two locations, whose words have only been read until then, into one of 8 bytes.
void WeakMemory::widen(Location& low) {
  uint32_t& high_at = location_at_[low.offset / 4 + 1];
  const Location& high = locations_[high_at - 1];
  if (low.history.size() != 1 || high.history.size() != 1 || low.offset % 8 != 0) {
    error_ = "8 bytes at offset " + std::to_string(low.offset % bytes_of_rank_) + " of rank " +
             std::to_string(low.home) +
             " are accessed as a unit after 4 of them were stored: the order of accesses of mixed width is undefined";
    return;
  }
  low.bytes = 8;
  low.history[0].value |= high.history[0].value << 32;
  high_at = location_at_[low.offset / 4];
}

void WeakMemory::write_back(const Location& location) {
  std::memcpy(reinterpret_cast<char*>(bytes_.data()) + location.offset, &location.history.back().value, location.bytes);
}

// ---- Visibility ----------------------------------------------------------------------------------------------------

uint64_t WeakMemory::delay(const Message& message, uint32_t to) const {
  uint64_t scale = message.rank == to ? parameters_.local_delay : parameters_.delay;
  if (scale == 0 || message.fate == 0) return 0;
  if (parameters_.slow_links >> (8 * message.rank + to) % 64 & 1) scale *= 16;
  const uint64_t hash = mix(message.fate + to * 0x632BE59BD9B4E019u + salt_);
  switch (hash & 7) {
    case 0:
      return (hash >> 8) % (8 * scale);
    case 1:
    case 2:
    case 3:
      return (hash >> 8) % (scale / 8 + 1);
    default:
      return (hash >> 8) % scale;
  }
}

bool WeakMemory::is_visible(const Message& message, uint32_t rank, uint64_t now) const {
  return message.time + delay(message, rank) <= now;
}

bool WeakMemory::is_performed(const Location& location, const Message& message, uint64_t now) const {
  const bool is_local = message.rank == location.home;
  const auto& ends = grid_ends_[message.rank];
  const bool has_ended = message.grid < ends.size() && ends[message.grid] <= now;
  if (is_local && parameters_.grid_end_performs && has_ended) return true;
  return is_visible(message, location.home, now);
}

// ---- Views ---------------------------------------------------------------------------------------------------------

WeakMemory::Bound WeakMemory::view(const Location& location, const ThreadMemory& thread) const {
  Bound bound = location.rank_view[thread.rank];
  for (const Seen& seen : location.seen) {
    if (seen.view == thread.thread || seen.view == thread.block) bound.join(seen.bound);
  }
  return bound;
}

// View of a thread of all locations, by their numbers. Iterates over what the thread and its block have seen, which is
// little compared with what all threads have seen of a location.
const std::vector<WeakMemory::Bound>& WeakMemory::view_of_all(const ThreadMemory& thread) {
  bounds_.resize(used_locations_);
  for (uint32_t i = 0; i < used_locations_; ++i) bounds_[i] = locations_[i].rank_view[thread.rank];
  for (const ViewId view : {thread.thread, thread.block}) {
    for (const uint32_t i : locations_of_view_[view]) {
      for (const Seen& seen : locations_[i].seen) {
        if (seen.view == view) bounds_[i].join(seen.bound);
      }
    }
  }
  return bounds_;
}

void WeakMemory::raise(Location& location, ViewId view, const Bound& bound) {
  for (Seen& seen : location.seen) {
    if (seen.view != view) continue;
    seen.bound.join(bound);
    return;
  }
  location.seen.push_back({view, bound});
  locations_of_view_[view].push_back(number(location));
}

ViewId WeakMemory::new_view() {
  if (free_views_.empty()) {
    locations_of_view_.emplace_back();
    return static_cast<ViewId>(locations_of_view_.size() - 1);
  }
  const ViewId view = free_views_.back();
  free_views_.pop_back();
  return view;
}

void WeakMemory::join_into_view(ViewId from, ViewId to) {
  for (const uint32_t i : locations_of_view_[from]) {
    Location& location = locations_[i];
    const auto seen =
        std::find_if(location.seen.begin(), location.seen.end(), [&](const Seen& s) { return s.view == from; });
    const Bound bound = seen->bound;
    *seen = location.seen.back();
    location.seen.pop_back();
    raise(location, to, bound);
  }
  locations_of_view_[from].clear();
}

void WeakMemory::join_into_rank(ViewId from, uint32_t rank) {
  for (const uint32_t i : locations_of_view_[from]) {
    Location& location = locations_[i];
    const auto seen =
        std::find_if(location.seen.begin(), location.seen.end(), [&](const Seen& s) { return s.view == from; });
    location.rank_view[rank].join(seen->bound);
    *seen = location.seen.back();
    location.seen.pop_back();
  }
  locations_of_view_[from].clear();
  free_views_.push_back(from);
}

uint32_t WeakMemory::take_snapshot(const ThreadMemory& thread) {
  Snapshot snapshot;
  const std::vector<Bound>& bounds = view_of_all(thread);
  for (uint32_t i = 0; i < used_locations_; ++i) {
    if (!Bound{}.holds(bounds[i])) snapshot.emplace_back(i, bounds[i]);
  }
  snapshots_.push_back(std::move(snapshot));
  return static_cast<uint32_t>(snapshots_.size() - 1);
}

void WeakMemory::join_snapshot(ThreadMemory& thread, uint32_t snapshot) {
  if (snapshot == thread.joined) return;
  thread.joined = snapshot;
  for (const auto& [i, bound] : snapshots_[snapshot]) {
    Location& location = locations_[i];
    if (location.rank_view[thread.rank].holds(bound)) continue;  // cheap test first: part of the thread's view
    if (!view(location, thread).holds(bound)) raise(location, thread.thread, bound);
  }
}

// Snapshot that a strong store of the thread carries: its view at its last fence, or at its last release of the
// location. A thread's view only grows, so the snapshot with the higher number includes the other.
uint32_t WeakMemory::carried(const Location& location, const ThreadMemory& thread) const {
  uint32_t latest = thread.fenced;
  for (const auto& [released, snapshot] : thread.released) {
    if (released == number(location)) latest = std::max(latest, snapshot);
  }
  return latest;
}

// Union of the snapshots of two threads.
uint32_t WeakMemory::merge(uint32_t a, uint32_t b) {
  if (a == 0 || b == 0 || a == b) return a == 0 ? b : a;
  Snapshot merged;
  auto right = snapshots_[b].begin();
  for (const auto& [i, bound] : snapshots_[a]) {  // both are sorted by location
    while (right != snapshots_[b].end() && right->first < i) merged.push_back(*right++);
    const bool in_both = right != snapshots_[b].end() && right->first == i;
    merged.emplace_back(i, bound);
    if (in_both) merged.back().second.join((right++)->second);
  }
  merged.insert(merged.end(), right, snapshots_[b].end());
  snapshots_.push_back(std::move(merged));
  return static_cast<uint32_t>(snapshots_.size() - 1);
}

// ---- Accesses ------------------------------------------------------------------------------------------------------

const WeakMemory::Message& WeakMemory::choose(const Location& location, const ThreadMemory& thread, uint64_t now,
                                              Alias alias) {
  const Stamp bound = view(location, thread, alias);
  const auto& history = location.history;
  size_t newest = history.size() - 1;
  while (newest > 0 && history[newest].stamp > bound && !is_visible(history[newest], thread.rank, now)) --newest;
  if (fresh_ || !random_.chance(parameters_.stale)) return history[newest];
  size_t oldest = newest;
  while (oldest > 0 && history[oldest].stamp > bound && history[oldest].time + kMostStale > now) --oldest;
  return history[oldest + random_.below(newest - oldest + 1)];
}

void WeakMemory::load(ThreadMemory& thread, uint64_t now, const void* address, void* to, uint32_t bytes, uint32_t unit,
                      Order order, Alias alias) {
  const uint64_t offset = offset_of(address);
  for (uint32_t done = 0; done < bytes; done += unit) {
    Location& from = location(offset + done, unit);
    const Message& message = choose(from, thread, now, alias);
    const uint64_t value = message.value >> 8 * (offset + done - from.offset);
    std::memcpy(static_cast<char*>(to) + done, &value, unit);
    if (message.snapshot != 0 && order == Order::kAcquire) join_snapshot(thread, message.snapshot);
    if (message.snapshot != 0 && order == Order::kRelaxed) thread.observed.push_back(message.snapshot);
    raise(from, thread.thread, bound_by(alias, message.stamp));
  }
}

void WeakMemory::insert(Location& location, ThreadMemory& thread, uint64_t now, uint64_t value, uint64_t fate,
                        uint32_t snapshot, bool is_update, Alias alias) {
  auto& history = location.history;
  size_t at = history.size();
  if (random_.chance(parameters_.overtake)) {
    const Stamp bound = view(location, thread, alias);
    // A store through the other alias counts as performed only if it was so at the thread's last alias fence.
    const auto is_before = [&](const Message& other) {
      return is_performed(location, other, other.alias == alias ? now : thread.aliases_fenced);
    };
    size_t lowest = at;
    while (history[lowest - 1].stamp > bound && !is_before(history[lowest - 1])) --lowest;
    at = lowest + random_.below(at - lowest + 1);
    while (at < history.size() && history[at].is_update) ++at;
  }
  const Stamp before = history[at - 1].stamp;
  const Stamp stamp = at == history.size() ? before + kStampStep : before + (history[at].stamp - before) / 2;
  if (stamp == before) error_ = "a location was overtaken too often for the model's stamps";
  const Message message{stamp, value, now, thread.grid, fate, thread.rank, snapshot, is_update, alias};
  history.insert(history.begin() + static_cast<std::ptrdiff_t>(at), message);
  raise(location, thread.thread, bound_by(alias, stamp));
  write_back(location);
  arrivals_.push_back({now + delay(message, location.home), static_cast<uint32_t>(location.offset / sizeof(Line))});
}

void WeakMemory::store(ThreadMemory& thread, uint64_t now, void* address, const void* from, uint32_t bytes,
                       uint32_t unit, Order order, Alias alias) {
  const uint64_t offset = offset_of(address);
  // Half of the stores arrive as a whole, the others in parts.
  const uint64_t fate = (++stores_) << 3;
  const bool is_torn = mix(fate + salt_) & 1;
  // Several releases of one call share one snapshot, taken before the first.
  const uint32_t common = order == Order::kRelease && bytes > unit ? take_snapshot(thread) : 0;
  for (uint32_t done = 0; done < bytes; done += unit) {
    Location& to = location(offset + done, unit);
    if (to.bytes != unit) {
      error_ = "4 bytes at offset " + std::to_string(to.offset % bytes_of_rank_) + " of rank " +
               std::to_string(to.home) +
               " are stored to where 8 are accessed as a unit: the order of accesses of mixed width is undefined";
      return;
    }
    uint64_t value = 0;
    std::memcpy(&value, static_cast<const char*>(from) + done, unit);
    const uint32_t attached = order == Order::kWeak ? 0 : common != 0 ? common : carried(to, thread);
    insert(to, thread, now, value, fate + (is_torn ? done / 4 : 0), attached, false, alias);
    if (common != 0) thread.released.emplace_back(number(to), common);
    if (order != Order::kRelease || common != 0) continue;
    const uint32_t snapshot = take_snapshot(thread);  // includes the store itself
    const Stamp own = view(to, thread, alias);
    std::find_if(to.history.begin(), to.history.end(), [&](const Message& m) { return m.stamp == own; })->snapshot =
        snapshot;
    thread.released.emplace_back(number(to), snapshot);
  }
}

uint64_t WeakMemory::modify(ThreadMemory& thread, uint64_t now, void* address, uint32_t bytes,
                            uint64_t (*update)(uint64_t, const void*), const void* arguments, Alias alias) {
  Location& at = location(offset_of(address), bytes);
  const Message newest = at.history.back();
  const uint64_t mask = bytes == 8 ? ~uint64_t{0} : 0xFFFFFFFFu;
  const uint64_t value = update(newest.value, arguments) & mask;
  raise(at, thread.thread, bound_by(alias, newest.stamp));
  if (newest.snapshot != 0) thread.observed.push_back(newest.snapshot);
  // A read-modify-write continues the release of the value that it replaces.
  if (value != newest.value) {
    insert(at, thread, now, value, (++stores_) << 3, merge(carried(at, thread), newest.snapshot), true, alias);
  }
  return newest.value;
}

void WeakMemory::acquire(ThreadMemory& thread) {
  for (const uint32_t snapshot : thread.observed) join_snapshot(thread, snapshot);
  thread.observed.clear();
}

void WeakMemory::fence(ThreadMemory& thread) {
  acquire(thread);
  join_snapshot(thread, last_fence_);
  last_fence_ = thread.fenced = take_snapshot(thread);
}

void WeakMemory::fence_aliases(ThreadMemory& thread, uint64_t now) {
  thread.aliases_fenced = now;
  const std::vector<Bound>& bounds = view_of_all(thread);
  for (uint32_t i = 0; i < used_locations_; ++i) {
    const Bound& bound = bounds[i];
    if (bound.by[0] == bound.by[1]) continue;
    const Stamp most = std::max(bound.by[0], bound.by[1]);
    raise(locations_[i], thread.thread, {{most, most}});
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
