// PreparedLinear: a linear layer whose kernel, tiling and launch configuration are fixed. A call adds addresses only.
#pragma once

#include <mutex>
#include <stdexcept>

#include "algorithms/linear/kernels.h"
#include "algorithms/linear/layer.h"
#include "host/launch_queue.h"

namespace llm_comm::host {

template <class Launcher>
class PreparedLinear final : public PreparedCall {
 public:
  // `turn`: serialises the launches of the communicator; run() holds it. Throws std::invalid_argument for a problem or
  // tiling that is not supported, or FP8 on a GPU or build without it.
  PreparedLinear(Launcher& launcher, std::mutex& turn, const HostMailbox& mailbox, const LinearProblem& problem,
                 const LinearChoice& choice)
      : launcher_(launcher),
        turn_(turn),
        mailbox_(mailbox),
        problem_(problem),
        choice_(linear::complete(problem, choice, launcher.sm_count(), launcher.max_shared_bytes())),
        grid_(linear::grid(problem, choice_)),
        function_(
            launcher.function(find_linear_kernel(problem.operands, problem.type, problem.epilogue,
                                                 has_block_scales(problem), linear::token_rows(problem.tokens)))) {
    if (is_scaled() && !launcher.multiplies_fp8()) {
      throw std::invalid_argument("linear layer: FP8 needs a GPU of sm_89 or later, and a build with kernels for it");
    }
    launcher.permit_shared_bytes(function_);
    args_.epilogue = problem.epilogue;
    args_.x_scale_of = problem.x_scale;
    args_.weight_scale_of = problem.weight_scale;
    args_.x_scale_token_stride = problem.x_scale_token_stride;
    args_.x_scale_block_stride = problem.x_scale_block_stride;
    args_.block_outputs = choice_.block_outputs;
    args_.stages = choice_.stages;
    args_.stage_boxes = choice_.stage_boxes;
    args_.stage_bytes = linear::stage_bytes(problem, choice_);
    args_.token_tiles = linear::token_tiles(problem.tokens);
  }

  // `buffers`: addresses of x, weight, out, bias (0: none) and, for FP8, x_scale and weight_scale. Throws
  // std::invalid_argument for an address that is not aligned. Returns kFailed if the communicator has failed.
  Outcome run(const uint64_t* buffers, uint64_t stream) override {
    const uint64_t x = buffers[0], weight = buffers[1], out = buffers[2], bias = buffers[3];
    if ((x | weight | out) % sizeof(Line) != 0) {
      throw std::invalid_argument("linear layer: a tensor does not begin at a multiple of 16 bytes");
    }
    if (bias % element_bytes(problem_.type) != 0) {
      throw std::invalid_argument("linear layer: the bias does not begin at a multiple of its elements' size");
    }
    if (is_scaled() && (buffers[4] | buffers[5]) % sizeof(float) != 0) {
      throw std::invalid_argument("linear layer: a scale does not begin at a multiple of 4 bytes");
    }
    const std::lock_guard<std::mutex> turn(turn_);
    if (has_failed(mailbox_)) return Outcome::kFailed;
    args_.x = view(x, problem_.tokens, linear::token_rows(problem_.tokens), 1, BoxUse::kShared);
    args_.weight = view(weight, problem_.outputs, choice_.block_outputs, weight_parts(problem_.epilogue),
                        linear::use_of_weight(problem_.tokens));
    args_.out = reinterpret_cast<void*>(out);
    args_.bias = reinterpret_cast<const void*>(bias);
    if (is_scaled()) {
      args_.x_scale = reinterpret_cast<const float*>(buffers[4]);
      args_.weight_scale = reinterpret_cast<const float*>(buffers[5]);
    }
    const bool is_captured = launcher_.launch(function_, args_, grid_, stream);
    return is_captured ? Outcome::kCaptured : Outcome::kEnqueued;
  }

 private:
  bool is_scaled() const { return problem_.operands == OperandType::kFloat8; }

  // Kernel parameter for a matrix of `rows` rows. It includes the TMA map, which depends on the address.
  MatrixView view(uint64_t address, uint32_t rows, uint32_t box_rows, uint32_t parts, BoxUse use) const {
    MatrixView matrix{
        {}, reinterpret_cast<const void*>(address), rows, problem_.inputs * operand_bytes(problem_.operands)};
    launcher_.map_matrix(matrix, parts, parts == 1 ? 0 : parts, box_rows, choice_.stage_boxes, use);
    return matrix;
  }

  Launcher& launcher_;
  std::mutex& turn_;
  const HostMailbox& mailbox_;
  LinearProblem problem_;
  LinearChoice choice_;
  Grid grid_;
  typename Launcher::template Function<LinearArgs> function_;
  LinearArgs args_{};
};

}  // namespace llm_comm::host
