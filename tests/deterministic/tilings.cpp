#include "tilings.h"

#include <algorithm>
#include <stdexcept>

#include "algorithms/all_reduce_add_rms_norm/operation.cuh"
#include "world.h"

namespace drill {

const host::Algorithm& info_of(uint32_t algorithm) { return host::algorithms()[algorithm]; }

std::string name_of(uint32_t algorithm) {
  return std::string(info_of(algorithm).operation->name) + "/" + info_of(algorithm).info->name;
}

std::string text(const Tiling& tiling) {
  return "blocks " + std::to_string(tiling.blocks) +
         (tiling.cluster > 1 ? ", clusters of " + std::to_string(tiling.cluster) : "") + ", tile lines " +
         std::to_string(tiling.tile_lines) + ", depth " + std::to_string(tiling.depth) + ", launches of " +
         std::to_string(tiling.launch_units);
}

uint64_t launches(const Problem& problem, const Tiling& tiling) {
  return divide_up(problem.units(), tiling.launch_units);
}

namespace {

// A small value of a tunable: schedules are to have few threads, which do more than one thing each.
uint32_t draw_tunable(const Tunable& tunable, Random& random) {
  uint32_t value = std::min(tunable.max, tunable.min + random.below(4));
  if (tunable.is_power_of_two) value = floor_power_of_two(value);
  return value;
}

}  // namespace

Tiling draw_tiling(uint32_t number, const Problem& problem, Random& random, uint32_t tile_lines) {
  const host::Algorithm& algorithm = info_of(number);
  for (int attempt = 0;; ++attempt) {
    TuningParameters choice;
    for (const Tunable& tunable : algorithm.tunables->tunable) {
      if (tunable.name == nullptr) continue;
      const std::string name = tunable.name;
      const uint32_t value = attempt == 20 ? tunable.min : draw_tunable(tunable, random);
      if (name == "blocks") choice.blocks = value;
      if (name == "threads") choice.threads = value;
      if (name == "tile_lines") choice.tile_lines = tile_lines != 0 ? tile_lines : value;
      // Machine code of AMD's GPUs: blocks of several waves. HB algorithms have them from a wave of lines on.
      if (name == "tile_lines" && tile_lines == 0 && kWarpThreads == 64 && random.chance(64)) {
        choice.tile_lines = std::clamp(kWarpThreads, tunable.min, tunable.max);
      }
      if (name == "cluster") choice.cluster = value;
      if (name == "depth") choice.depth = value;
    }
    Limits limits{kSlotBytes, 132, kMaxClusterBlocks, 0, staging_bytes_of(problem.world)};
    const bool is_cut = random.chance(96);
    if (is_cut) limits.slot_bytes = problem.world * sizeof(Line) * random.between(1, 8);
    if (attempt == 20) {
      const std::vector<TuningParameters> found = algorithm.candidates(problem, limits);
      if (!found.empty()) choice = found[0];
      limits.slot_bytes = kSlotBytes;
    }
    try {
      const Shape shape = algorithm.shape(problem, choice, limits);
      if (shape.launches <= 4) return shape.tiling;
    } catch (const std::invalid_argument&) {
      if (attempt == 20) throw;
    }
  }
}

}  // namespace drill
