// Prepares a call of an algorithm for this device: finds its kernels and computes its grids. Used by CoreImpl.
#pragma once

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "algorithms/kernels.h"
#include "algorithms/registry.h"
#include "host/launch_queue.h"

namespace llm_comm::host {

// Largest cluster, in blocks, that every algorithm's kernel can run with on this device. 1: the device has no clusters.
template <class Launcher>
uint32_t most_cluster_blocks(Launcher& launcher, uint32_t world_size) {
  uint32_t most = launcher.max_cluster_blocks();
  Registry::for_each([&]<class Algorithm>() {
    if constexpr (requires { Algorithm::widest_cluster(); }) {
      Grid grid = Algorithm::widest_cluster();
      const auto kernel = find_kernel<Algorithm>(types_of<Algorithm>().front(), world_size, grid.variant);
      if (kernel == nullptr) {  // world size 1 has no kernels
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

// Loads an algorithm's kernels of all data types for a world size.
template <class Algorithm, class Launcher>
void load_kernels(Launcher& launcher, uint32_t world_size) {
  for (const DataType type : types_of<Algorithm>()) {
    for (uint32_t variant = 0; variant < Algorithm::kVariants; ++variant) {
      if (const auto kernel = find_kernel<Algorithm>(type, world_size, variant)) launcher.function(kernel);
    }
  }
}

// Returns the kernel for a grid. Sets grid.takes_tickets if not all blocks run at once (P2 of operation.cuh).
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

// `comm` holds the addresses of the ranks' workspaces. Throws std::invalid_argument if the workspace or the device does
// not support the call or its tiling.
template <class Algorithm, class Launcher>
std::unique_ptr<PreparedCall> prepare_algorithm(LaunchQueue<Launcher>& queue, Launcher& launcher,
                                                const Windows& windows, const DeviceComm& comm, const Problem& problem,
                                                const Tiling& tiling) {
  using Operation = typename Algorithm::Operation;
  if (Algorithm::kInfo.uses_multimem && comm.multicast == nullptr) {
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
  return std::make_unique<PreparedLaunches<Launcher, Operation>>(queue, windows, args, call, problem, shape, whole,
                                                                 last, Algorithm::kInfo.symmetric);
}

}  // namespace llm_comm::host
