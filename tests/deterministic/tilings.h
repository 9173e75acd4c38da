// How the calls of a schedule are launched.
#pragma once

#include <cstdint>
#include <string>

#include "emulator/deterministic/random.h"
#include "host/planner.h"

namespace drill {

using namespace llm_comm;  // NOLINT: a test of its kernels
using emulator::Random;

const host::Algorithm& info_of(uint32_t algorithm);

std::string name_of(uint32_t algorithm);

std::string text(const Tiling& tiling);

uint64_t launches(const Problem& problem, const Tiling& tiling);

// Of any algorithm, from what its descriptor says of itself. The slots are often small ones, so that a message takes several
// launches. `tile_lines`: in place of a small number of lines, if the algorithm has this tunable; 0: none.
Tiling draw_tiling(uint32_t number, const Problem& problem, Random& random, uint32_t tile_lines = 0);

}  // namespace drill
