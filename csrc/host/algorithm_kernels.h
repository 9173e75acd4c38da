// From a call of an algorithm to its kernels and grids on this device.
#pragma once

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "algorithms/kernels.h"
#include "algorithms/registry.h"
#include "host/launch_queue.h"

namespace llm_comm::host {

// Blocks of the largest cluster that every algorithm's kernel can have here. 1: the device has no clusters.
template <class Launcher>
uint32_t most_cluster_blocks(Launcher& launcher, uint32_t world_size) {
  uint32_t most = launcher.max_cluster_blocks();
  Registry::for_each([&]<class Algorithm>() {
    if constexpr (requires { Algorithm::widest_cluster(); }) {
      Grid grid = Algorithm::widest_cluster();
      const auto kernel = find_kernel<Algorithm>(types_of<Algorithm>().front(), world_size, grid.variant);
      if (kernel == nullptr) {  // a world of one
        most = 1;
        return;
      }
      const auto function = launcher.function(kernel);
      for (; most > 1; most /= 2) {
        grid.blocks = grid.cluster_blocks = most;
        if (launcher.has_room_for_cluster(function, grid)) break;
      }
    }
  });
  return most;
}

// The kernel of a grid, which learns how it takes its blocks.
template <class Algorithm, class Launcher>
auto function_of(Launcher& launcher, const Problem& problem, Grid& grid) {
  const auto function = launcher.function(find_kernel<Algorithm>(problem.type, problem.world, grid.variant));
  if (!launcher.has_room_for_cluster(function, grid)) {
    throw std::invalid_argument("this device has no room for clusters of " + std::to_string(grid.cluster_blocks) +
                                " blocks of " + std::to_string(grid.threads) + " threads and " +
                                std::to_string(grid.shared_bytes) + " bytes of shared memory: lower cluster");
  }
  grid.takes_tickets = launcher.resident_blocks(function, grid) < grid.blocks;
  if (grid.takes_tickets && grid.shared_bytes < sizeof(Line)) grid.shared_bytes = sizeof(Line);
  return function;
}

// `comm`: with the ranks' workspaces. Throws std::invalid_argument for a call, or a tiling of it, that the workspace or the
// device does not take.
template <class Algorithm, class Launcher>
std::unique_ptr<PreparedCall> prepare_algorithm(LaunchQueue<Launcher>& queue, Launcher& launcher,
                                                const Segments& segments, const DeviceComm& comm,
                                                const Problem& problem, const Tiling& tiling) {
  using Operation = typename Algorithm::Operation;
  if (Algorithm::kInfo.by_switch && comm.multicast == nullptr) {
    throw std::invalid_argument(std::string(Algorithm::kInfo.title) + ": NVLink multicast is not set up");
  }
  const Limits limits{comm.slot_bytes, 0, launcher.max_cluster_blocks(), 0, comm.staging_bytes};
  Shape shape = shape_of<Algorithm>(problem, tiling, limits);
  const auto whole = function_of<Algorithm>(launcher, problem, shape.whole);
  const auto last = function_of<Algorithm>(launcher, problem, shape.last);
  typename Operation::Args args = Operation::arguments(problem, tiling, shape.whole);
  args.comm = comm;
  CallSignature call{static_cast<uint32_t>(kKindOf<Algorithm>),
                     static_cast<uint16_t>(problem.type),
                     static_cast<uint16_t>(problem.row),
                     0,
                     0,
                     0,
                     {}};
  static_assert(sizeof(call.parameter_bits) == sizeof(problem.parameter));
  std::memcpy(call.parameter_bits, problem.parameter, sizeof(problem.parameter));
  return std::make_unique<PreparedLaunches<Launcher, Operation>>(queue, segments, args, call, problem, shape, whole,
                                                                 last, Algorithm::kInfo.symmetric);
}

}  // namespace llm_comm::host
