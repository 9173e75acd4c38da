// Two-shot all-reduce + residual add + RMSNorm: reduce-scatter, then all-gather, both by pushed lines, in one kernel.
//
// Rank k owns segment k of every row, not whole rows: so the threads that collect a row's sums hold the whole row between
// them, and norm it without another exchange. The wire carries what all_reduce/two_shot.cuh sends. Segments are whole
// chunks (args.cuh), so the last ones may be short or empty. Slot: [phase][rank][row][line of segment], where rank is the
// sender in phase 0 (scatter) and the owner in phase 1 (gather): again the sender.
//
// The rules of device_comm.cuh: R1, segment 0 is never empty and its owner sums it only after a line of every rank has
// come, and every rank ends after it has received those sums (the owner: made them); R2, the thread that receives a line
// re-arms it.
#pragma once

#include "kernels/all_reduce/args.cuh"
#include "kernels/fused/rms_norm.cuh"
#include "llm_comm/memory_channel.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// `SingleTile`: the grid has a block for every tile.
template <DataType D, int World, bool SingleTile, bool Quantized>
LLM_COMM_KERNEL(kMaxTwoShotThreads)
add_rms_norm_two_shot(LLM_COMM_KERNEL_PARAM AddRmsNormArgs args) {
  using Norm = RmsNorm<D, kElementsPerLine, SingleTile, Quantized>;
  using Values = typename Norm::Values;

  grid_dependency_trigger();
  const auto self = RowThread::of<World>(args);
  const uint32_t rank = args.comm.rank;
  const bool is_own = self.peer == rank;
  const uint32_t segment = args.segment_lines;
  const uint32_t round_lines = args.tile_lines * args.cluster_blocks;
  const uint32_t tiles = SingleTile ? 1 : (segment + round_lines - 1) / round_lines;
  const Elements<D> input(args, args.input);
  Norm norm(args, shared_memory<float>(), args.segment_lines);
  Line* const contributions = shared_memory<Line>() + kPartialBytes / sizeof(Line);  // [rank][column]
  Line* const sums = contributions + World * args.tile_lines;                        // [column]
  // Set by threads of the block whose wait ended in vain: there is no sum to send then.
  uint32_t* const incomplete = (sums + args.tile_lines)->word;
  if (thread_index() == 0) *incomplete = 0;

  Operation op(args.comm, OperationKind::kAddRmsNormTwoShot,
               static_cast<uint64_t>(args.rows) * args.row_lines * sizeof(Line));
  const uint64_t sent_lines = static_cast<uint64_t>(args.rows) * segment;  // by a rank to another, in a phase
  Line* outgoing = op.slots(self.peer) + rank * sent_lines;
  Line* incoming = op.slots(rank) + self.peer * sent_lines;
  const uint64_t gather = World * sent_lines;  // where phase 1 starts in a slot

  // Lines of segments: whether the tile's column exists there, and its place in the segment's part of a slot.
  const auto line_of = [&](const TileCursor& at) { return at.first + self.member * args.tile_lines + self.column; };
  const auto has_line = [&](const TileCursor& at, uint32_t owner) {
    return self.has_line && line_of(at) < segment && owner * segment + line_of(at) < args.row_lines;
  };
  const auto slot_index = [&](const TileCursor& at) { return at.row * segment + line_of(at); };
  const auto line_index = [&](const TileCursor& at, uint32_t owner) {
    return at.row * args.row_lines + owner * segment + line_of(at);
  };
  // The line of the row that this thread collects and norms.
  const auto place_of = [&](uint32_t first) -> typename Norm::Place {
    const TileCursor at{0, first};
    return {(self.peer * segment + line_of(at)) * kElementsPerLine, has_line(at, self.peer)};
  };

  // Whether this warp has values to norm: in the first tile of a row if in any.
  const bool norms = any_lane(place_of(0).exists);

  TileCursor scattering{self.cluster, 0};
  TileCursor reducing = scattering;
  TileCursor collecting = scattering;
  LineLoad<D> coming = input.load_of_line(has_line(scattering, self.peer), line_index(scattering, self.peer));
  auto first_residual = norm.residual_load(collecting.row, place_of(0));
  auto first_weight = norm.weight_load(place_of(0));
  grid_dependency_wait_after(reinterpret_cast<uint64_t>(outgoing) + reinterpret_cast<uint64_t>(incoming) +
                             coming.fingerprint() + first_residual.fingerprint() + first_weight.fingerprint() +
                             norm.fingerprint() + op.fingerprint() + slot_index(scattering) +
                             reinterpret_cast<uint64_t>(contributions));
  // The next line to send is always on its way; the first beside the operation's number, which is as far away, as is what
  // the sums meet later. Nothing is waited for in between.
  const Line state = op.load_state();
  coming.begin();
  first_residual.begin();
  first_weight.begin();
  Values residual{};
  Values weight{};
  const float static_scale = norm.load_scale();
  // A thread that may not begin goes on without waiting, sending, or storing results: those that have begun, in its block
  // and in others of the cluster, wait for what it delivers.
  norm.set_begun(op.begin(state));
  outgoing = op.in_slot(outgoing);
  incoming = op.in_slot(incoming);

  Line line{};  // sent last
  const auto scatter = [&] {
    line = __builtin_bit_cast(Line, coming.end());
    if (!is_own && has_line(scattering, self.peer) && !op.in_vain()) send_line(outgoing + slot_index(scattering), line);
    if (SingleTile) return;
    scattering.advance(segment, round_lines, self.clusters);
    const bool has_next = scattering.row < args.rows && has_line(scattering, self.peer);
    coming = input.load_of_line(has_next, line_index(scattering, self.peer));
    coming.begin();
  };
  bool is_first = true;
  const auto reduce = [&] {
    const bool has = has_line(reducing, rank);
    const uint64_t index = slot_index(reducing);
    if (is_first) norm.meet();  // while the first lines are on their way
    if (has) {
      contributions[thread_index()] = is_own ? (SingleTile ? line : input.load_line(line_index(reducing, rank)))
                                             : receive_line(incoming + index, op, self.peer, 0);
    }
    block_sync();
    if (op.in_vain()) *incomplete = 1;  // between the barriers: it has been zero before, and is read after
    if (is_first && thread_index() == 0) op.arrive();
    is_first = false;
    constexpr uint32_t kWidth = kSumWidth<D, World>;
    const uint32_t tile_packs = args.tile_lines * kElementsPerLine / kWidth;
    const auto* const packs = reinterpret_cast<const Pack<D, kWidth>*>(contributions);
    for_each_pack<D, World>(tile_packs, [&](uint32_t i) {
      reinterpret_cast<Pack<D, kWidth>*>(sums)[i] = sum_in_rank_order<D, World>(packs + i, tile_packs);
    });
    // The sums are read before the next tile's first block_sync() and written after it; contributions are written after
    // this one and read before it.
    block_sync();
    if (has && *incomplete == 0) {
      // Where a row takes several tiles, or comes later, the owner collects from its own slot as the others do.
      if (!is_own || !SingleTile) send_line(outgoing + gather + index, sums[self.column]);
      if (!is_own) re_arm_line(incoming + index);
    }
    if (!SingleTile) reducing.advance(segment, round_lines, self.clusters);
  };
  bool is_first_collected = true;
  const auto collect = [&] {
    const auto at = place_of(collecting.first);
    const uint64_t index = gather + slot_index(collecting);
    if (is_first_collected) {
      residual = first_residual.end();
      weight = first_weight.end();
    } else {
      residual = norm.load_residual(collecting.row, at);
      if (tiles > 1) weight = norm.load_weight(at);
    }
    is_first_collected = false;
    const bool receives = at.exists && (!is_own || !SingleTile);
    Line sum = armed_line();
    if (receives) {
      sum = receive_line(incoming + index, op, self.peer, 1);
    } else if (at.exists) {
      sum = sums[self.column];
    }
    const Values values = norms ? norm.add(collecting.row, at, as_pack<D>(sum), residual) : Values{};
    // While the squares are on their way to the other blocks.
    if (receives) re_arm_line(incoming + index);
    if (SingleTile || collecting.is_last_of_row(segment, round_lines)) {
      if (norms || thread_index() < kWarpThreads) {
        norm.finish(
            collecting.row, tiles, [&](uint32_t tile) { return place_of(tile * round_lines); }, values, weight,
            static_scale);
      }
    }
    if (!SingleTile) collecting.advance(segment, round_lines, self.clusters);
  };

  if constexpr (SingleTile) {
    scatter();
    reduce();
    collect();
  } else {
    // Reducing runs `depth` tiles behind scattering and collecting as far behind reducing, so that the links carry later
    // tiles while earlier ones wait for their answer.
    for (uint32_t ahead = 0; ahead < args.depth; ++ahead) {
      if (scattering.row < args.rows) scatter();
    }
    for (uint32_t behind = 0; collecting.row < args.rows; ++behind) {
      if (scattering.row < args.rows) scatter();
      if (reducing.row < args.rows) reduce();
      if (behind >= args.depth) collect();
    }
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
