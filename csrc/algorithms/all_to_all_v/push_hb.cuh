// All-to-all of unequal parts by push (HB): every rank stores each part, chunk by chunk, to the staging memory of its
// rank. That rank copies it to its place in the output. step_pipeline.cuh proves that the buffers may be reused, and R1
// and R2 of operation.cuh. The steps are those of parts of max_rows rows; chunks of shorter parts are empty.
//
// Greetings (all_to_all_v/operation.cuh) travel through the second half of the staging memory, [sender], which the
// chunks do not use. Block 0 stores them in step `depth`, after it has waited for each peer (H2 of hb_session.cuh). It
// reads them after its steps: it has then waited for step `depth` of each peer, since there is at least one chunk.
#pragma once

#include "algorithms/all_to_all_v/operation.cuh"
#include "algorithms/step_pipeline.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllToAllVPushHB = kKindOf<struct AllToAllVPushHB>;
inline constexpr uint32_t kAllToAllVTeams = 2;  // one sends, one copies to the output

// Shared memory of a block: parts and greetings by rank.
template <int World>
struct AllToAllVShared {
  Line incomplete;
  Line greeting[World];
  Part sent[World];
  Part received[World];
};

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kAllToAllVTeams))
all_to_all_v_push_hb(LLM_COMM_KERNEL_PARAM AllToAllVArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t world = args.comm.world_size;
  const uint32_t peer = thread_index();
  auto* const shared = shared_memory<AllToAllVShared<World>>();
  const auto source_of = [&](uint32_t owner) { return view_of_part<D>(args, args.sent, shared->sent[owner]); };
  const auto target_of = [&](uint32_t owner) { return view_of_part<D>(args, args.received, shared->received[owner]); };

  HBSession session(args.comm, kAllToAllVPushHB, ShardView<D>::bytes_of(args.range.count),
                    SignalRow::of<CommonSignals>(block), &shared->incomplete);
  const StepPipeline<D, World> steps(session, args.comm, block, args.tile_lines, args.depth,
                                     ShardView<D>::lines_of(args.range.count));
  // Greeting of `sender` in the staging memory of `receiver`.
  const auto greeting = [&](uint32_t receiver, uint32_t sender) {
    return session.staging(receiver, kSecondHop) + among_others(sender, receiver);
  };
  session.wait_for_grids_before();
  if (peer < world) {
    const PartsOfPeer parts(args, peer);
    shared->greeting[peer] = parts.greeting();
    shared->sent[peer] = parts.sent();
    shared->received[peer] = parts.received();
  }
  session.begin();  // its barriers let all threads see the parts
  steps.run([&](const Team& team, uint32_t t) { steps.stage(team, t, source_of); },
            [&](const Team& team, uint32_t t) {
              if (block == 0 && t == 0) {
                for (uint32_t to = team.thread; to < world; to += team.threads) {
                  if (to != rank) store_line(greeting(to, rank), shared->greeting[to]);
                }
              }
              steps.copy(team, t, source_of(rank), target_of(rank));
              steps.collect(team, kFirstHop, t, target_of);
            });
  if (block != 0 || peer >= world || session.has_ended_early()) return;
  const Line own = shared->greeting[peer];
  const SizesError error = compare_greetings(rank, own, peer, peer == rank ? own : load_line(greeting(rank, peer)));
  if (error.fault != SizesFault::kNone) fail_for_sizes(args.comm, session.in_wait(), error);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllToAllVPushHB : Chunked<AllToAllVPushHB> {
  using Operation = AllToAllV;
  static constexpr AlgorithmInfo kInfo{"push_hb", "HB", "all-to-all of unequal parts by push (HB)"};
  static constexpr uint32_t kTeams = kAllToAllVTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_to_all_v_push_hb<D, World>;
  }

  static constexpr uint64_t shared_bytes() { return sizeof(AllToAllVShared<kMaxWorldSize>); }
  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
