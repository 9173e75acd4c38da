// One emulated GPU: runs a grid of GPU threads as fibers of the calling OS thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
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
// the operating system run it. Blocks start in order as far as kResidentThreads allows, like on a GPU, so a
// kernel whose blocks wait for later blocks of their own grid hangs here as it would there. Not thread-safe.
class Executor {
 public:
  static constexpr uint32_t kResidentThreads = 4096;

  Executor();
  ~Executor();

  // Runs `kernel` once for each thread of the grid and returns when all have ended. Throws
  // std::invalid_argument for an empty grid, a block of more than 1024 threads or a grid that is not whole clusters.
  // `kernel` must not throw.
  void run(const LaunchConfig& config, const std::function<void()>& kernel);

 private:
  struct Block;
  struct Cluster;
  void start_clusters(const LaunchConfig& config, const std::function<void()>& kernel);
  bool advance(Cluster& cluster);
  bool advance(Cluster& cluster, Block& block);

  std::vector<std::unique_ptr<Cluster>> resident_;
  std::vector<std::unique_ptr<Block>> idle_;
  uint32_t next_block_ = 0;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
