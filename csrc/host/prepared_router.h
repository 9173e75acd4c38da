// PreparedRouter: a router of experts whose kernel and launch configuration are fixed. A call adds addresses only.
#pragma once

#include <mutex>
#include <stdexcept>
#include <string>

#include "algorithms/linear/router.h"
#include "algorithms/linear/router_args.h"
#include "host/launch_queue.h"

namespace llm_comm::host {

template <class Launcher>
class PreparedRouter final : public PreparedCall {
 public:
  // `turn`: serialises the launches of the communicator; run() holds it. Throws std::invalid_argument for a problem
  // that is not supported.
  PreparedRouter(Launcher& launcher, std::mutex& turn, const HostMailbox& mailbox, const router::Problem& problem)
      : launcher_(launcher), turn_(turn), mailbox_(mailbox), element_bytes_(element_bytes(problem.type)) {
    router::check(problem);
    args_.tokens = problem.tokens;
    args_.experts = problem.experts;
    args_.top_k = problem.top_k;
    args_.row_bytes = problem.hidden * static_cast<uint32_t>(element_bytes_);
    args_.division = router::divide(problem, launcher.max_cluster_blocks());
    args_.block_tokens = router::block_tokens(problem, args_.division);
    args_.renormalize = problem.renormalize;
    grid_ = router::grid(problem, args_.division, launcher.max_shared_bytes());
    function_ = launcher.function(find_router_kernel(problem.type, problem.tokens));
    launcher.permit_shared_bytes(function_);
    if (!launcher.has_room_for_cluster(function_, grid_)) {
      throw std::invalid_argument("router: this device has no room for clusters of " +
                                  std::to_string(grid_.cluster_blocks) + " blocks with " +
                                  std::to_string(grid_.shared_bytes) + " bytes of shared memory");
    }
  }

  // `buffers`: addresses of x, weight, bias (0: none), logits, topk_weights and topk_ids. Throws std::invalid_argument
  // for an address that is not aligned. Returns kFailed if the communicator has failed.
  Outcome run(const uint64_t* buffers, uint64_t stream) override {
    if ((buffers[0] | buffers[1]) % sizeof(Line) != 0) {
      throw std::invalid_argument("router: x or weight does not begin at a multiple of 16 bytes");
    }
    if ((buffers[2] | buffers[3]) % element_bytes_ != 0 || (buffers[4] | buffers[5]) % sizeof(uint32_t) != 0) {
      throw std::invalid_argument("router: a tensor does not begin at a multiple of its elements' size");
    }
    const std::lock_guard<std::mutex> turn(turn_);
    if (has_failed(mailbox_)) return Outcome::kFailed;
    args_.x = reinterpret_cast<const char*>(buffers[0]);
    args_.weight = reinterpret_cast<const char*>(buffers[1]);
    args_.bias = reinterpret_cast<const uint16_t*>(buffers[2]);
    args_.logits = reinterpret_cast<uint16_t*>(buffers[3]);
    args_.weights = reinterpret_cast<uint32_t*>(buffers[4]);
    args_.ids = reinterpret_cast<uint32_t*>(buffers[5]);
    const bool is_captured = launcher_.launch(function_, args_, grid_, stream);
    return is_captured ? Outcome::kCaptured : Outcome::kEnqueued;
  }

 private:
  Launcher& launcher_;
  std::mutex& turn_;
  const HostMailbox& mailbox_;
  uint64_t element_bytes_;
  RouterArgs args_{};
  Grid grid_{};
  typename Launcher::template Function<RouterArgs> function_{};
};

}  // namespace llm_comm::host
