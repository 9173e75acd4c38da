// One emulated GPU: runs a grid of GPU threads as fibers of the calling OS thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "llm_comm/platform_emulator.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

struct LaunchConfig {
  uint32_t blocks;
  uint32_t threads;  // of a block
  size_t shared_bytes;
  uint32_t cluster_blocks = 1;  // neighbours that run at once and reach each other's shared memory
};

// Driver "processes": every rank is a process with one Executor, and threads that wait for another rank let
// the operating system run it. Clusters of blocks start as far as kResidentThreads allows, in the order of their numbers, in
// the opposite one, or in any, as CUDA promises none: a kernel whose blocks wait for blocks that have not started hangs here
// as it would on a GPU. Not thread-safe.
class Executor {
 public:
  static constexpr uint32_t kResidentThreads = 1024;

  // The orders follow from the seed.
  explicit Executor(uint32_t seed = 0);
  ~Executor();

  // Runs `kernel` once for each thread of the grid and returns when all have ended. Throws
  // std::invalid_argument for an empty grid, a block of more than 1024 threads or a grid that is not whole clusters.
  // `kernel` must not throw.
  void run(const LaunchConfig& config, const std::function<void()>& kernel);

  // Blocks of such grids that run at once: those of one cluster at least.
  static uint32_t resident_blocks(uint32_t threads, uint32_t cluster_blocks) {
    if (cluster_blocks == 0) cluster_blocks = 1;
    const uint32_t clusters = threads == 0 ? 1 : kResidentThreads / (threads * cluster_blocks);
    return (clusters == 0 ? 1 : clusters) * cluster_blocks;
  }

 private:
  struct Block;
  struct Cluster;
  void draw_order(uint32_t clusters);
  void start_clusters(const LaunchConfig& config, const std::function<void()>& kernel);
  bool advance(Cluster& cluster);
  bool advance(Cluster& cluster, Block& block);

  std::vector<std::unique_ptr<Cluster>> resident_;
  std::vector<std::unique_ptr<Block>> idle_;
  std::minstd_rand random_;
  std::vector<uint32_t>
      order_;  // of the clusters of the grid that runs: those that have not started, the next one last
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
