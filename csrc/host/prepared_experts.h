// PreparedExperts: experts whose kernels, tilings and launch configurations are fixed. A call adds addresses only.
#pragma once

#include <mutex>
#include <stdexcept>

#include "algorithms/linear/experts.h"
#include "algorithms/linear/experts_args.h"
#include "host/launch_queue.h"

namespace llm_comm::host {

template <class Launcher>
class PreparedExperts final : public PreparedCall {
 public:
  // `turn`: serialises the launches of the communicator; run() holds it. Throws std::invalid_argument for a problem
  // that is not supported.
  PreparedExperts(Launcher& launcher, std::mutex& turn, const HostMailbox& mailbox, const experts::Problem& problem,
                  const experts::Choice& gate_up, const experts::Choice& down)
      : launcher_(launcher),
        turn_(turn),
        mailbox_(mailbox),
        problem_(problem),
        gate_up_(layer(true, gate_up)),
        down_(layer(false, down)) {}

  // `buffers`: see experts::kBuffers. `intermediate` has room for [tokens * top_k, columns of the down-projection].
  // Throws std::invalid_argument for an address that is not aligned, or scales that do not go with the weights. Returns
  // kFailed if the communicator has failed.
  Outcome run(const uint64_t* buffers, uint64_t stream) override {
    const uint64_t x = buffers[0], gate_up = buffers[1], down = buffers[2], intermediate = buffers[5], out = buffers[6];
    if ((x | gate_up | down | intermediate | out) % sizeof(Line) != 0) {
      throw std::invalid_argument("experts: a tensor does not begin at a multiple of 16 bytes");
    }
    if ((buffers[3] | buffers[4] | buffers[7] | buffers[8]) % sizeof(uint32_t) != 0) {
      throw std::invalid_argument("experts: topk_ids, topk_weights or scales do not begin at a multiple of 4 bytes");
    }
    if (is_fp8() != (buffers[7] != 0) || is_fp8() != (buffers[8] != 0)) {
      throw std::invalid_argument("experts: both weights have scales if they are FP8, or else none has");
    }
    const std::lock_guard<std::mutex> turn(turn_);
    if (has_failed(mailbox_)) return Outcome::kFailed;
    const uint32_t experts = problem_.experts;
    for (Layer* const one : {&gate_up_, &down_}) {
      one->args.ids = reinterpret_cast<const uint32_t*>(buffers[3]);
      one->args.factors = reinterpret_cast<const uint32_t*>(buffers[4]);
    }
    gate_up_.args.x = reinterpret_cast<const void*>(x);
    gate_up_.args.weight = view(gate_up_, gate_up, problem_.intermediate, problem_.hidden, 2 * experts, 2);
    gate_up_.args.scales = scales(buffers[7], problem_.gate_up_scale_strides);
    gate_up_.args.out = reinterpret_cast<void*>(intermediate);
    down_.args.x = reinterpret_cast<const void*>(intermediate);
    down_.args.weight = view(down_, down, problem_.hidden, problem_.intermediate, experts, 1);
    down_.args.scales = scales(buffers[8], problem_.down_scale_strides);
    down_.args.out = reinterpret_cast<void*>(out);
    launcher_.launch(gate_up_.function, gate_up_.args, gate_up_.grid, stream);
    const bool is_captured = launcher_.launch(down_.function, down_.args, down_.grid, stream);
    return is_captured ? Outcome::kCaptured : Outcome::kEnqueued;
  }

 private:
  struct Layer {
    experts::Choice choice;
    Grid grid;
    typename Launcher::template Function<ExpertsArgs> function;
    ExpertsArgs args{};
  };

  Layer layer(bool is_gated, const experts::Choice& wanted) {
    if (is_fp8() && !launcher_.multiplies_fp8()) {
      throw std::invalid_argument("experts: FP8 needs a GPU of sm_89 or later, and a build with kernels for it");
    }
    const experts::Choice choice =
        experts::choose(problem_, is_gated, wanted, launcher_.sm_count(), launcher_.max_shared_bytes());
    Layer found{choice, experts::grid(problem_, is_gated, choice, launcher_.sm_count(), launcher_.max_shared_bytes()),
                launcher_.function(
                    find_experts_kernel(problem_.weights, problem_.type, is_gated, experts::group_rows(problem_)))};
    launcher_.permit_shared_bytes(found.function);
    found.args.epilogue = problem_.epilogue;
    found.args.scaling_factor = problem_.scaling_factor;
    found.args.tokens = problem_.tokens;
    found.args.top_k = problem_.top_k;
    found.args.experts = problem_.experts;
    found.args.first_expert = problem_.first_expert;
    found.args.layout = experts::layout(problem_, is_gated, choice);
    found.args.block_outputs = choice.block_outputs;
    found.args.unit_rows = experts::unit_rows(is_gated, choice);
    found.args.stages = choice.stages;
    found.args.stage_boxes = choice.stage_boxes;
    return found;
  }

  // Kernel parameter for matrices of `rows` rows. It includes the TMA map, which depends on the address.
  MatrixView view(const Layer& layer, uint64_t address, uint32_t rows, uint32_t columns, uint32_t parts,
                  uint32_t box_parts) const {
    MatrixView matrix{{}, reinterpret_cast<const void*>(address), rows, columns * operand_bytes(problem_.weights)};
    // Fetches of one KiB of a row miss line by line: those of 256 bytes at once, which kOnce asks for, took 3 % longer.
    launcher_.map_matrix(matrix, parts, box_parts, layer.args.unit_rows, layer.choice.stage_boxes, BoxUse::kShared);
    return matrix;
  }

  bool is_fp8() const { return problem_.weights == OperandType::kFloat8; }

  static ScaleView scales(uint64_t address, const experts::ScaleStrides& strides) {
    return {reinterpret_cast<const float*>(address), strides[0], strides[1], strides[2]};
  }

  Launcher& launcher_;
  std::mutex& turn_;
  const HostMailbox& mailbox_;
  experts::Problem problem_;
  Layer gate_up_;
  Layer down_;
};

}  // namespace llm_comm::host
