// Executor: one emulated GPU, which runs a grid of GPU threads as fibers of the calling OS thread.
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
  uint32_t threads;  // per block
  size_t shared_bytes;
  uint32_t cluster_blocks = 1;  // neighbouring blocks that run at once and access each other's shared memory
  uint32_t fiber_threads = 1;   // neighbouring threads that one fiber runs (deterministic driver only): 1, or a warp's
};

// Driver "processes": every rank is a process with one Executor. Threads that wait for another rank yield to the
// operating system. Clusters start as far as kResidentThreads allows, in ascending, descending or random order, because
// CUDA guarantees none. A kernel whose blocks wait for blocks that have not started hangs here as on a GPU. Not
// thread-safe.
class Executor {
 public:
  static constexpr uint32_t kResidentThreads = 1024;

  // `seed` determines the order in which clusters start.
  explicit Executor(uint32_t seed = 0);
  ~Executor();

  // Runs `kernel` once for each thread of the grid and returns when all have ended. `kernel` must not throw. Throws
  // std::invalid_argument for an empty grid, a block of more than 1024 threads, or a grid that is not whole clusters.
  void run(const LaunchConfig& config, const std::function<void()>& kernel);

  // Blocks of such a grid that run at once; at least one cluster.
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
  std::vector<uint32_t> order_;  // clusters that have not started, the next one last
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
