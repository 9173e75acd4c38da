// An example: an operation and an algorithm for it, in one file. With its row in registry.def it is built, planned,
// listed and tested like those of the library (docs/develop/architecture.md, "Add an algorithm").
//
// Broadcast: every rank gets what the root has put in. Direct (LL): the root sends each line to every rank itself, one
// hop. Slot: [sender][line], as LLSession divides it; all but the root use their first line only.
//
// The rules of operation.cuh, by which a slot may be used again:
//   R1  A rank ends only after it has received line 0 from every peer. That would not follow from the data, which only
//       the root sends: the root would end, and begin the operation after next, while another rank has not begun this
//       one. So the others send line 0 too, a greeting that says nothing else.
//   R2  The thread that receives a line resets it to the sentinel, before it ends.
//
// A word whose bits are all ones stands for "not arrived" (line.cuh) and is sent as the NaN beside it. The root keeps
// what it sends, so that all ranks end up with the same bits; expect() says so too.
#pragma once

#include <algorithm>

#include "algorithms/all_reduce/message.cuh"
#include "llm_comm/ll_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// For errors and comparisons of calls. Unlike that of every other algorithm of a build, which the registry checks.
inline constexpr OperationKind kBroadcastDirect = kKindOf<struct BroadcastDirect>;

struct BroadcastArgs {
  DeviceComm comm;
  const void* input;    // of the root; element-aligned, as is the output
  void* output;         // may be `input`
  uint64_t count;       // elements, at least 1, the same on all ranks, as is the root
  uint32_t tile_lines;  // that a block handles at a time
  uint32_t root;
};

// Thread (k, c) of a block exchanges column c of each of the block's tiles with peer k; (root, c) makes the root's
// copy.
template <DataType D>
LLM_COMM_KERNEL(kMaxBlockThreads)
broadcast_direct(LLM_COMM_KERNEL_PARAM BroadcastArgs args) {
  using Storage = typename Element<D>::Storage;
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(Storage);

  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t peer = thread_index() / args.tile_lines;
  const uint32_t column = thread_index() % args.tile_lines;
  const uint64_t lines = (args.count + kPerLine - 1) / kPerLine;
  const uint64_t greeting = 1;
  const uint64_t sent = rank == args.root ? lines : greeting;
  const uint64_t received = peer == args.root ? lines : greeting;
  LLSession session(args.comm, kBroadcastDirect, args.count * sizeof(Storage), rank, peer);
  session.divide_slots(lines);

  session.wait_for_grids_before(sent, received);  // what is computed before it takes no time after it
  // Once the communicator has failed, nothing is sent any more. What such a thread would have done is missed by this
  // rank only, which has an error, and by its peers, whose waits end with one.
  if (!session.begin()) return;
  session.enter_slot();

  // Any count and alignment, element by element. What is to be fast reads whole lines where it can (message.cuh).
  const auto load = [&](uint64_t line) {
    const uint64_t first = line * kPerLine;
    return load_elements<D>(static_cast<const Storage*>(args.input) + first, args.count - first);
  };
  const auto store = [&](uint64_t line, Line value) {
    const uint64_t first = line * kPerLine;
    store_elements<D>(static_cast<Storage*>(args.output) + first, args.count - first, value);
  };

  const uint64_t stride = static_cast<uint64_t>(block_count()) * args.tile_lines;
  for (uint64_t line = block * args.tile_lines + column; line < lines; line += stride) {
    if (peer == rank) {
      if (rank == args.root) store(line, encode_sentinel(load(line)));
      continue;
    }
    // A thread sends before it waits: so no two ranks wait for each other.
    if (line < sent) session.send(line, rank == args.root ? load(line) : Line{});
    if (line < received) {
      const Line value = session.receive(line, 0);
      if (peer == args.root) store(line, value);
      session.reset(line);
    }
  }
  // Every block once, when all its threads have begun: the number of the operation then stands for the next one.
  block_sync();
  if (thread_index() == 0) session.arrive();
}

// ---- What is computed: the descriptor of the operation -------------------------------------------------------------

struct Broadcast {
  using Args = BroadcastArgs;
  enum Parameter { kRoot };
  static constexpr OperationInfo kInfo{.name = "broadcast",
                                       .title = "broadcast",
                                       .buffers = {{"input"}, {.name = "output", .is_output = true}},
                                       .parameters = {{.name = "root", .is_rank = true}}};

  static constexpr bool serves(DataType type) { return is_number(type); }
  static void check(const Problem&) {}  // beyond what kInfo says: that there are elements, and that the root is a rank

  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid&) {
    Args args{};
    args.tile_lines = tiling.tile_lines;
    args.root = static_cast<uint32_t>(problem.parameter[kRoot]);
    return args;
  }

  static void set_launch(Args& args, const Problem& problem, const uint64_t* buffers, uint64_t first, uint64_t units) {
    const uint64_t skipped = first * problem.unit_bytes();
    args.input = reinterpret_cast<const void*>(buffers[0] + skipped);
    args.output = reinterpret_cast<void*>(buffers[1] + skipped);
    args.count = units;
  }

  // Launches are whole lines, so elements 2n and 2n + 1 of 2 bytes share a word, whose lower half comes first.
  template <class Input>
  static uint32_t expect(const Problem& problem, uint32_t, uint64_t i, Input input) {
    const auto root = static_cast<uint32_t>(problem.parameter[kRoot]);
    const uint32_t value = input(root, i);
    if (problem.type == DataType::kFloat32) return value == kSentinel ? value - 1 : value;
    const bool is_sentinel = i % 2 == 0 && i + 1 < problem.count && value == 0xFFFF && input(root, i + 1) == 0xFFFF;
    return is_sentinel ? value - 1 : value;
  }
};

// ---- How: the descriptor of the algorithm --------------------------------------------------------------------------

struct BroadcastDirect {
  using Operation = Broadcast;
  static constexpr AlgorithmInfo kInfo{"direct", "LL", "direct broadcast"};
  static constexpr Tunables kTunables{
      {{"blocks", 1, kArrivalsPerOperation - 1}, {"tile_lines", 1, kMaxBlockThreads / 2}}};

  // One kernel for all worlds.
  static constexpr uint32_t kVariants = 1;
  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &broadcast_direct<D>;
  }

  static constexpr uint64_t kMaxLines = 1 << 28;  // of a launch, whose elements are counted in 32 bits

  // What a launch of so many lines takes of a slot: a part for each sender.
  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) { return lines * world * sizeof(Line); }

  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    const uint64_t fitting = most_units(limits.slot_bytes, [&](uint64_t n) { return slot_bytes(n, problem.world); });
    const uint64_t lines = std::min(fitting, kMaxLines);
    const uint32_t tile_lines = std::min(tuning.tile_lines, kMaxBlockThreads / problem.world);
    return {tuning.blocks, tile_lines, 1, 0, lines * sizeof(Line) / element_bytes(problem.type)};
  }

  // Of one launch. Checks everything: a tiling may come from elsewhere.
  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    const uint64_t lines = divide_up(units * element_bytes(problem.type), sizeof(Line));
    const uint64_t threads = uint64_t{problem.world} * tiling.tile_lines;
    const auto refuse = [](const char* why) { throw std::invalid_argument(why); };
    if (lines > kMaxLines || slot_bytes(lines, problem.world) > limits.slot_bytes) refuse("a launch exceeds its slot");
    if (threads == 0 || threads > kMaxBlockThreads) refuse("tile_lines must be 1 to 1024 / world");
    if (tiling.blocks == 0 || tiling.blocks >= kArrivalsPerOperation) refuse("blocks must be 1 to 65535");
    // expect() counts words from the beginning of the message.
    const bool is_cut = tiling.launch_units < problem.units();
    if (is_cut && tiling.launch_units * element_bytes(problem.type) % sizeof(Line) != 0)
      refuse("launches must be whole lines");
    const uint64_t tiles = divide_up(lines, uint64_t{tiling.tile_lines});
    return {static_cast<uint32_t>(std::min<uint64_t>(tiling.blocks, tiles)), static_cast<uint32_t>(threads), 0};
  }

  static std::vector<TuningParameters> candidates(const Problem&, const Limits&) {
    return {{.blocks = 1, .tile_lines = 32}, {.blocks = 8, .tile_lines = 32}, {.blocks = 32, .tile_lines = 64}};
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
