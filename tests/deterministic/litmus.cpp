// Litmus tests of the model of memory: what PTX forbids must not be seen in any of many schedules, what it allows and a
// kernel could stumble over must be seen in some. Exit status: 0 both, 1 not.
#include <cstdio>
#include <functional>
#include <vector>

#include "emulator/deterministic/machine.h"

namespace {

using namespace llm_comm;            // NOLINT: a test of it
using namespace llm_comm::emulator;  // NOLINT

constexpr uint64_t kBytes = 4096;
constexpr uint32_t kSchedules = 2000;

// Memory of rank 0, the same of all, and what the threads saw.
struct Cells {
  uint32_t* x;
  uint32_t* y;
  Line* line;
  uint32_t* seen;
  MulticastAddress all;  // x, of every rank
  Machine* machine;

  MulticastAddress all_lines() const { return {all.all, all.each, all.count, 128}; }
  uint32_t* x_of(uint32_t rank) const { return reinterpret_cast<uint32_t*>(all.each[rank]); }
};

using Kernel = std::function<void(const Cells&)>;

struct Litmus {
  const char* name;
  std::vector<std::vector<Kernel>> streams;  // by rank: grids of one thread each
  bool (*outcome)(const uint32_t* seen);     // the one in question
  bool is_allowed;
};

ScheduleParameters draw_schedule_parameters(Random& random) {
  ScheduleParameters parameters;
  parameters.memory.stale = random.pick({0u, 64u, 160u});
  parameters.memory.overtake = random.pick({0u, 128u, 256u});
  parameters.memory.delay = random.pick({0u, 4u, 32u});
  parameters.memory.local_delay = random.pick({0u, 4u, 32u});
  parameters.scheduler.preempt = random.pick({0u, 128u, 256u});
  return parameters;
}

// In how many schedules the outcome was seen.
uint32_t count(const Litmus& litmus) {
  uint32_t count = 0;
  const auto ranks = static_cast<uint32_t>(litmus.streams.size());
  Machine machine(ranks, kBytes, 1000);
  for (uint32_t seed = 0; seed < kSchedules; ++seed) {
    Random random(seed);
    std::vector<uint32_t> seen(8, 0);
    for (uint32_t rank = 0; rank < ranks; ++rank) std::memset(machine.memory().of_rank(rank), 0, kBytes);
    machine.reset(random.next(), ranks, draw_schedule_parameters(random));
    char* const home = machine.memory().of_rank(0);
    char* each[kMaxRanks] = {};
    for (uint32_t rank = 0; rank < ranks; ++rank) each[rank] = machine.memory().of_rank(rank);
    const Cells cells{reinterpret_cast<uint32_t*>(home),
                      reinterpret_cast<uint32_t*>(home + 64),
                      reinterpret_cast<Line*>(home + 128),
                      seen.data(),
                      {home, each, ranks, 0},
                      &machine};
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      for (const Kernel& kernel : litmus.streams[rank]) {
        machine.launch(rank, {1, 1, 0}, [&] { grid_dependency_wait(), kernel(cells); }, true);
      }
    }
    if (machine.run() != Ending::kDone) return kSchedules + 1;
    // The last value of x in coherence order.
    seen[7] = *cells.x;
    count += litmus.outcome(seen.data());
  }
  return count;
}

const Kernel kStoreBoth = [](const Cells& c) { store_relaxed(c.x, 1u), store_relaxed(c.y, 1u); };
const Kernel kStoreAndRelease = [](const Cells& c) { store_relaxed(c.x, 1u), store_release(c.y, 1u); };
const Kernel kLoadBoth = [](const Cells& c) { c.seen[0] = load_relaxed(c.y), c.seen[1] = load_relaxed(c.x); };
const Kernel kAcquireAndLoad = [](const Cells& c) { c.seen[0] = load_acquire(c.y), c.seen[1] = load_relaxed(c.x); };
const Kernel kStoreFenceStore = [](const Cells& c) { store_relaxed(c.x, 1u), fence_system(), store_relaxed(c.y, 1u); };
const Kernel kLoadFenceLoad = [](const Cells& c) {
  c.seen[0] = load_relaxed(c.y), fence_system(), c.seen[1] = load_relaxed(c.x);
};
// Fences of one direction each.
const Kernel kStoreReleaseStore = [](const Cells& c) {
  store_relaxed(c.x, 1u), c.machine->end_release(c.machine->begin_release()), store_relaxed(c.y, 1u);
};
const Kernel kLoadAcquireLoad = [](const Cells& c) {
  c.seen[0] = load_relaxed(c.y), c.machine->acquire(), c.seen[1] = load_relaxed(c.x);
};
// The end of the grid would perform the stores.
const Kernel kStoreBothAndLinger = [](const Cells& c) {
  kStoreBoth(c);
  for (int i = 0; i < 20; ++i) load_relaxed(c.y);
};
const Kernel kStoreY = [](const Cells& c) { store_relaxed(c.y, 1u); };
const Kernel kSeeAndOverwrite = [](const Cells& c) {
  while (load_relaxed(c.y) == 0) spin_hint();
  c.seen[0] = 1;
  store_relaxed(c.x, 2u);
};
const Kernel kStoreX = [](const Cells& c) { store_relaxed(c.x, 1u); };

// ---- NVLink multicast ----
constexpr Line kOnes{{1, 1, 1, 1}};
constexpr float kLarge = 1e8f;
const Kernel kStoreToAllAndRelease = [](const Cells& c) { multicast_store_line(c.all, kOnes), store_release(c.y, 1u); };
const Kernel kStoreToAllFenceRelease = [](const Cells& c) {
  multicast_store_line(c.all, kOnes), fence_aliases(), store_release(c.y, 1u);
};
const Kernel kAcquireFenceLoad = [](const Cells& c) {
  c.seen[0] = load_acquire(c.y), fence_aliases(), c.seen[1] = load_relaxed(c.x);
};
const Kernel kFenceAndRelease = [](const Cells& c) { store_relaxed(c.x, 1u), fence_aliases(), store_release(c.y, 1u); };
// Bits of a subnormal: the sum of one such and zeros has the same.
const Kernel kAcquireAndSum = [](const Cells& c) {
  c.seen[0] = load_acquire(c.y), c.seen[1] = multicast_load_reduce_fp32(c.all).word[0];
};
const Kernel kSumOfThree = [](const Cells& c) {
  c.seen[0] = static_cast<uint32_t>(bits_to_float(multicast_load_reduce_fp32(c.all).word[0]));
};
const Kernel kStoreLarge = [](const Cells& c) { store_relaxed(c.x_of(1), float_to_bits(kLarge)); };
const Kernel kStoreSmall = [](const Cells& c) { store_relaxed(c.x_of(2), float_to_bits(-kLarge)); };
const Kernel kStoreOne = [](const Cells& c) { store_relaxed(c.x, float_to_bits(1.0f)); };
const std::vector<std::vector<Kernel>> kThreeSummands = {{kStoreOne, kSumOfThree}, {kStoreLarge}, {kStoreSmall}};
template <bool Fenced>
void see_and_overwrite_all(const Cells& c) {
  while (load_relaxed(c.y) == 0) spin_hint();
  c.seen[0] = 1;
  if (Fenced) fence_aliases();
  multicast_store_line(c.all, Line{{2, 2, 2, 2}});
}

bool flag_without_data(const uint32_t* seen) { return seen[0] == 1 && seen[1] == 0; }

const Litmus kLitmus[] = {
    {"message passing, relaxed: the flag without the data", {{kStoreBoth}, {kLoadBoth}}, flag_without_data, true},
    {"the same with a release only", {{kStoreAndRelease}, {kLoadBoth}}, flag_without_data, true},
    {"the same with an acquire only", {{kStoreBoth}, {kAcquireAndLoad}}, flag_without_data, true},
    {"the same with release and acquire", {{kStoreAndRelease}, {kAcquireAndLoad}}, flag_without_data, false},
    {"the same with fences", {{kStoreFenceStore}, {kLoadFenceLoad}}, flag_without_data, false},
    {"the same with fences of one direction", {{kStoreReleaseStore}, {kLoadAcquireLoad}}, flag_without_data, false},
    {"the same with the first of them only", {{kStoreReleaseStore}, {kLoadBoth}}, flag_without_data, true},
    {"the same with the second of them only", {{kStoreBoth}, {kLoadAcquireLoad}}, flag_without_data, true},
    {"the same with a release that ends behind the flag",
     {{[](const Cells& c) {
        store_relaxed(c.x, 1u);
        const uint32_t snapshot = c.machine->begin_release();
        store_relaxed(c.y, 1u), c.machine->end_release(snapshot);
      }},
      {kLoadAcquireLoad}},
     flag_without_data,
     true},
    {"the same with a release that begins before the data",
     {{[](const Cells& c) {
        const uint32_t snapshot = c.machine->begin_release();
        store_relaxed(c.x, 1u), c.machine->end_release(snapshot), store_relaxed(c.y, 1u);
      }},
      {kLoadAcquireLoad}},
     flag_without_data,
     true},
    {"the same with an acquire before the flag is loaded",
     {{kStoreReleaseStore}, {[](const Cells& c) { c.machine->acquire(), kLoadBoth(c); }}},
     flag_without_data,
     true},
    {"coherence: newer, then older, of one word",
     {{kStoreX}, {[](const Cells& c) { c.seen[0] = load_relaxed(c.x), c.seen[1] = load_relaxed(c.x); }}},
     flag_without_data,
     false},
    {"a thread does not see its own store",
     {{[](const Cells& c) { store_relaxed(c.x, 1u), c.seen[0] = 1, c.seen[1] = load_relaxed(c.x); }}},
     flag_without_data,
     false},
    {"store buffering: neither sees the other's store",
     {{[](const Cells& c) { store_relaxed(c.x, 1u), c.seen[0] = load_relaxed(c.y); }},
      {[](const Cells& c) { store_relaxed(c.y, 1u), c.seen[1] = load_relaxed(c.x); }}},
     [](const uint32_t* seen) { return seen[0] == 0 && seen[1] == 0; },
     true},
    {"two readers disagree on the order of two stores",
     {{kStoreX},
      {[](const Cells& c) { store_relaxed(c.y, 1u); }},
      {[](const Cells& c) { c.seen[0] = load_acquire(c.x), c.seen[1] = load_acquire(c.y); }},
      {[](const Cells& c) { c.seen[2] = load_acquire(c.y), c.seen[3] = load_acquire(c.x); }}},
     [](const uint32_t* seen) { return seen[0] == 1 && seen[1] == 0 && seen[2] == 1 && seen[3] == 0; },
     true},
    {"a store overtakes one that it follows by a relaxed message",
     {{kStoreBothAndLinger}, {kSeeAndOverwrite}},
     [](const uint32_t* seen) { return seen[0] == 1 && seen[7] == 1; },
     true},
    {"the same across the end of a grid: it was performed",
     {{kStoreX, kStoreY}, {kSeeAndOverwrite}},
     [](const uint32_t* seen) { return seen[0] == 1 && seen[7] == 1; },
     false},
    {"the next grid does not see what the one before stored",
     {{kStoreX, [](const Cells& c) { c.seen[0] = 1, c.seen[1] = load_relaxed(c.x); }}},
     flag_without_data,
     false},
    {"a line arrives in words",
     {{[](const Cells& c) { store_line_relaxed(c.line, Line{{1, 1, 1, 1}}); }}, {[](const Cells& c) {
        const Line line = load_line_relaxed(c.line);
        c.seen[0] = line.word[1], c.seen[1] = line.word[0];
      }}},
     flag_without_data,
     true},
    {"a packet arrives in words",
     {{[](const Cells& c) { store_packet_relaxed(c.line, Line{{1, 1, 1, 1}}); }}, {[](const Cells& c) {
        const Line line = load_packet_relaxed(c.line);
        c.seen[0] = line.word[1], c.seen[1] = line.word[0];
      }}},
     flag_without_data,
     false},
    {"a packet arrives in halves",
     {{[](const Cells& c) { store_packet_relaxed(c.line, Line{{1, 1, 1, 1}}); }}, {[](const Cells& c) {
        const Line line = load_packet_relaxed(c.line);
        c.seen[0] = line.word[2], c.seen[1] = line.word[0];
      }}},
     flag_without_data,
     true},
    {"message passing by a fence and a weak store: the flag without the data",
     {{[](const Cells& c) { store_relaxed(c.x, 1u), fence_system(), store_plain(c.y, 1u); }}, {kAcquireAndLoad}},
     flag_without_data,
     true},
    {"message passing by a release that a relaxed store of the same thread replaces",
     {{[](const Cells& c) { store_relaxed(c.x, 1u), store_release(c.y, 1u), store_relaxed(c.y, 2u); }},
      {kAcquireAndLoad}},
     [](const uint32_t* seen) { return seen[0] == 2 && seen[1] == 0; },
     false},
    {"the same, and the relaxed store is another thread's",
     {{kStoreAndRelease}, {[](const Cells& c) { store_relaxed(c.y, 2u); }}, {[](const Cells& c) {
        c.seen[0] = load_acquire(c.y), c.seen[1] = load_relaxed(c.x);
      }}},
     [](const uint32_t* seen) { return seen[0] == 2 && seen[1] == 0; },
     true},
    {"message passing to a relaxed swap and a fence",
     {{kStoreAndRelease}, {[](const Cells& c) {
        c.seen[0] = compare_and_swap(c.y, 1u, 2u), fence_system(), c.seen[1] = load_relaxed(c.x);
      }}},
     flag_without_data,
     false},
    {"the same without the fence",
     {{kStoreAndRelease},
      {[](const Cells& c) { c.seen[0] = compare_and_swap(c.y, 1u, 2u), c.seen[1] = load_relaxed(c.x); }}},
     flag_without_data,
     true},
    {"message passing through a swap of a thread that has made a fence of its own",
     {{kStoreAndRelease}, {[](const Cells& c) { fence_system(), compare_and_swap(c.y, 1u, 2u); }}, {kAcquireAndLoad}},
     [](const uint32_t* seen) { return seen[0] == 2 && seen[1] == 0; },
     false},
    {"store buffering across fences",
     {{[](const Cells& c) { store_relaxed(c.x, 1u), fence_system(), c.seen[0] = load_relaxed(c.y); }},
      {[](const Cells& c) { store_relaxed(c.y, 1u), fence_system(), c.seen[1] = load_relaxed(c.x); }}},
     [](const uint32_t* seen) { return seen[0] == 0 && seen[1] == 0; },
     false},
    {"a store goes between what an addition reads and what it writes",
     {{[](const Cells& c) { store_relaxed(reinterpret_cast<uint64_t*>(c.x), uint64_t{10}); }},
      {[](const Cells& c) { add_relaxed(reinterpret_cast<uint64_t*>(c.x), 1); }}},
     [](const uint32_t* seen) { return seen[7] == 1; },
     false},
    {"a line that is stored to all ranks arrives at one of them first",
     {{[](const Cells& c) { multicast_store_line(c.all, kOnes); }},
      {[](const Cells& c) { c.seen[0] = load_relaxed(c.x_of(1)), c.seen[1] = load_relaxed(c.x); }}},
     flag_without_data,
     true},
    {"and at the other one first",
     {{[](const Cells& c) { multicast_store_line(c.all, kOnes); }},
      {[](const Cells& c) { c.seen[0] = load_relaxed(c.x), c.seen[1] = load_relaxed(c.x_of(1)); }}},
     flag_without_data,
     true},
    {"a line that is stored to all ranks arrives in words",
     {{[](const Cells& c) { multicast_store_line(c.all_lines(), kOnes); }}, {[](const Cells& c) {
        const Line line = load_line_relaxed(c.line);
        c.seen[0] = line.word[1], c.seen[1] = line.word[0];
      }}},
     flag_without_data,
     true},
    {"message passing from a store to all, without a fence of aliases",
     {{kStoreToAllAndRelease}, {kAcquireAndLoad}},
     flag_without_data,
     true},
    {"the same with one before the release", {{kStoreToAllFenceRelease}, {kAcquireAndLoad}}, flag_without_data, false},
    {"the same with one behind the acquire", {{kStoreToAllAndRelease}, {kAcquireFenceLoad}}, flag_without_data, false},
    {"message passing to a sum of all, without a fence of aliases",
     {{kStoreAndRelease}, {kAcquireAndSum}},
     flag_without_data,
     true},
    {"the same with one before the release", {{kFenceAndRelease}, {kAcquireAndSum}}, flag_without_data, false},
    {"a store to all overtakes one that was performed, without a fence of aliases",
     {{kStoreX, kStoreY}, {&see_and_overwrite_all<false>}},
     [](const uint32_t* seen) { return seen[0] == 1 && seen[7] == 1; },
     true},
    {"the same with one before it",
     {{kStoreX, kStoreY}, {&see_and_overwrite_all<true>}},
     [](const uint32_t* seen) { return seen[0] == 1 && seen[7] == 1; },
     false},
    {"a sum of all loses what is small beside the others", kThreeSummands,
     [](const uint32_t* seen) { return seen[0] == 0; }, true},
    {"and it does not, in another order", kThreeSummands, [](const uint32_t* seen) { return seen[0] == 1; }, true},
    {"additions to all ranks get lost",
     {{[](const Cells& c) { multicast_add_relaxed(c.all, 1u); }},
      {[](const Cells& c) { multicast_add_release(c.all, 1u); }}},
     [](const uint32_t* seen) { return seen[7] != 2; },
     false},
    {"message passing by an addition to all that is a release",
     {{[](const Cells& c) { store_relaxed(c.line->word, 1u), multicast_add_release(c.all, 1u); }},
      {[](const Cells& c) { c.seen[0] = load_acquire(c.x), c.seen[1] = load_relaxed(c.line->word); }}},
     flag_without_data,
     false},
    {"the same by one that is not",
     {{[](const Cells& c) { store_relaxed(c.line->word, 1u), multicast_add_relaxed(c.all, 1u); }},
      {[](const Cells& c) { c.seen[0] = load_acquire(c.x), c.seen[1] = load_relaxed(c.line->word); }}},
     flag_without_data,
     true},
    {"additions get lost",
     {{[](const Cells& c) { add_relaxed(reinterpret_cast<uint64_t*>(c.x), 1); }},
      {[](const Cells& c) { add_relaxed(reinterpret_cast<uint64_t*>(c.x), 1); }}},
     [](const uint32_t* seen) { return seen[7] != 2; },
     false},
};

}  // namespace

int main() {
  bool all = true;
  for (const Litmus& litmus : kLitmus) {
    const uint32_t seen = count(litmus);
    const bool right = seen <= kSchedules && litmus.is_allowed == (seen != 0);
    std::printf("%s: %s, seen in %u of %u schedules: %s\n", litmus.name, litmus.is_allowed ? "allowed" : "forbidden",
                seen, kSchedules, right ? "right" : "WRONG");
    all &= right;
  }
  return all ? 0 : 1;
}
