// Shapes do not depend on the target: those of the emulator's build serve all.
#include "host/planner.h"

#include "algorithms/registry.h"

namespace llm_comm::host {

const std::vector<Algorithm>& algorithms() {
  static const std::vector<Algorithm> list = [] {
    std::vector<Algorithm> found;
    Registry::for_each([&]<class A>() {
      found.push_back({&A::Operation::kInfo, &A::kInfo, &A::kTunables, types_of<A>(),
                       [](const Problem& problem, const Choice& choice, const Limits& limits) {
                         check_problem<typename A::Operation>(problem);
                         return shape_of<A>(problem, A::tile(problem, choice, limits), limits);
                       },
                       &A::candidates});
    });
    return found;
  }();
  return list;
}

}  // namespace llm_comm::host
