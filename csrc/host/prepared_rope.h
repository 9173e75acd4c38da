// PreparedRope: a layer of q, k and v whose kernel, tiling and launch configuration are fixed. A call adds addresses
// only.
#pragma once

#include <mutex>
#include <stdexcept>
#include <string>

#include "algorithms/linear/rope.h"
#include "algorithms/linear/rope_args.h"
#include "host/launch_queue.h"

namespace llm_comm::host {

template <class Launcher>
class PreparedRope final : public PreparedCall {
 public:
  // `turn`: serialises the launches of the communicator; run() holds it. Throws std::invalid_argument for a problem or
  // tiling that is not supported.
  PreparedRope(Launcher& launcher, std::mutex& turn, const HostMailbox& mailbox, const rope::Problem& problem,
               const rope::Choice& wanted)
      : launcher_(launcher), turn_(turn), mailbox_(mailbox), problem_(problem) {
    const rope::Choice choice = rope::choose(problem, wanted, launcher.sm_count(), launcher.max_shared_bytes());
    args_.tokens = problem.tokens;
    args_.row_bytes = problem.inputs * static_cast<uint32_t>(element_bytes(problem.type));
    args_.outputs = problem.outputs;
    args_.block_rows = choice.block_rows;
    args_.stages = choice.stages;
    args_.layout = rope::layout(problem, choice);
    args_.head_parts = 2 * problem.head_size / problem.rotary_size;
    args_.part_blocks = rope::part_blocks(problem, choice);
    args_.head_blocks = rope::head_blocks(problem, choice);
    args_.q_heads = problem.outputs / problem.head_size - 2 * problem.kv_heads;
    args_.kv_heads = problem.kv_heads;
    args_.is_interleaved = problem.is_interleaved;
    args_.has_fp32_angles = problem.has_fp32_angles;
    args_.has_64_bit_positions = problem.has_64_bit_positions;
    args_.has_64_bit_slots = problem.has_64_bit_slots;
    args_.angle_rows = problem.positions;
    args_.epsilon = problem.epsilon;
    args_.reciprocal_head_size = 1.0f / static_cast<float>(problem.head_size);
    args_.slot_count = problem.slots;
    args_.block_slots = problem.block_slots;
    args_.cache_slots = problem.blocks * problem.block_slots;
    args_.key.strides = problem.key;
    args_.value.strides = problem.value;
    grid_ = rope::grid(problem, choice);
    function_ = launcher.function(find_rope_kernel(problem.type, rope::token_rows(problem.tokens)));
    launcher.permit_shared_bytes(function_);
    if (!launcher.has_room_for_cluster(function_, grid_)) {
      throw std::invalid_argument("layer of q, k and v: norms take clusters of " +
                                  std::to_string(grid_.cluster_blocks) + " blocks, for which this device has no room");
    }
  }

  // `buffers`: see rope::kBuffers. Throws std::invalid_argument for an address that is not aligned, or a cache or norms
  // that the problem does not have. Returns kFailed if the communicator has failed.
  Outcome run(const uint64_t* buffers, uint64_t stream) override {
    const uint64_t x = buffers[0], weight = buffers[1], bias = buffers[2], out = buffers[3], positions = buffers[4];
    const uint64_t angles = buffers[5], q_norm = buffers[6], k_norm = buffers[7];
    const uint64_t keys = buffers[8], values = buffers[9], slots = buffers[10];
    if ((x | weight) % sizeof(Line) != 0) {
      throw std::invalid_argument("layer of q, k and v: x or weight does not begin at a multiple of 16 bytes");
    }
    const uint64_t of_elements = bias | out | q_norm | k_norm | keys | values;
    if (of_elements % element_bytes(problem_.type) != 0 || angles % (problem_.has_fp32_angles ? 4 : 2) != 0 ||
        positions % (problem_.has_64_bit_positions ? 8 : 4) != 0 || slots % (problem_.has_64_bit_slots ? 8 : 4) != 0) {
      throw std::invalid_argument("layer of q, k and v: a tensor does not begin at a multiple of its elements' size");
    }
    const bool has_cache = problem_.blocks != 0;
    if ((q_norm != 0) != problem_.has_norms || (k_norm != 0) != problem_.has_norms || (keys != 0) != has_cache ||
        (values != 0) != has_cache || (slots != 0) != has_cache) {
      throw std::invalid_argument("layer of q, k and v: norms and cache are given as a whole, if the layer has them");
    }
    const std::lock_guard<std::mutex> turn(turn_);
    if (has_failed(mailbox_)) return Outcome::kFailed;
    args_.x = reinterpret_cast<const char*>(x);
    args_.weight = {{}, reinterpret_cast<const void*>(weight), problem_.rotary_size / 2, args_.row_bytes};
    launcher_.map_matrix(args_.weight, problem_.outputs / args_.weight.rows, 2, args_.block_rows, rope::kStageBoxes,
                         BoxUse::kOnce);
    args_.bias = reinterpret_cast<const uint16_t*>(bias);
    args_.out = reinterpret_cast<uint16_t*>(out);
    args_.positions = reinterpret_cast<const void*>(positions);
    args_.angles = reinterpret_cast<const void*>(angles);
    args_.norm_weights[0] = reinterpret_cast<const uint16_t*>(q_norm);
    args_.norm_weights[1] = reinterpret_cast<const uint16_t*>(k_norm);
    args_.key.data = reinterpret_cast<uint16_t*>(keys);
    args_.value.data = reinterpret_cast<uint16_t*>(values);
    args_.slots = reinterpret_cast<const void*>(slots);
    const bool is_captured = launcher_.launch(function_, args_, grid_, stream);
    return is_captured ? Outcome::kCaptured : Outcome::kEnqueued;
  }

 private:
  Launcher& launcher_;
  std::mutex& turn_;
  const HostMailbox& mailbox_;
  rope::Problem problem_;
  RopeArgs args_{};
  Grid grid_{};
  typename Launcher::template Function<RopeArgs> function_{};
};

}  // namespace llm_comm::host
