// Shapes do not depend on the target, so the emulator's build of the registry serves all targets.
#include "host/planner.h"

#include "algorithms/registry.h"

namespace llm_comm::host {

const std::vector<Algorithm>& algorithms() {
  static const std::vector<Algorithm> list = [] {
    std::vector<Algorithm> found;
    Registry::for_each([&]<class A>() {
      found.push_back({&A::Operation::kInfo, &A::kInfo, &A::kTunables, types_of<A>(),
                       [](const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
                         check_problem<typename A::Operation>(problem);
                         check_bounds(A::kTunables, tuning);
                         if (limits.max_cluster == 0)
                           throw std::invalid_argument("max_cluster is 0; without clusters it is 1");
                         return shape_of<A>(problem, A::tile(problem, tuning, limits), limits);
                       },
                       [](const Problem& problem, const Limits& limits) {
                         check_problem<typename A::Operation>(problem);
                         return A::candidates(problem, limits);
                       }});
    });
    return found;
  }();
  return list;
}

}  // namespace llm_comm::host
