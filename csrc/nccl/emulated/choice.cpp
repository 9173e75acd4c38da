// Test hook: which algorithm the library chooses on a GPU that this machine lacks. The GPU library does not export it.
#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "host/planner.h"
#include "nccl/selection.h"

using namespace llm_comm;        // NOLINT: a C function
using namespace llm_comm::nccl;  // NOLINT

// Writes "<table>|<algorithm>|<protocol>|<blocks>|<tile_lines>|<cluster>|<depth>|<launch_units>", or "declined|<why>",
// or "error|<message>". `path`: option table, or "". `operation`: 0 all-reduce, 1 all-gather, 2 reduce-scatter.
extern "C" __attribute__((visibility("default"))) void llm_comm_nccl_choice(const char* path, const char* device,
                                                                            uint32_t world, const Limits* limits,
                                                                            int operation, int type, uint64_t count,
                                                                            char* text, size_t size) {
  std::string said;
  try {
    const Table table = find_table(path, device, world, limits->sm_count, limits->compute_capability);
    const Selection selection(table, world, *limits, false);
    const Decision decision =
        selection.decide({static_cast<Operation>(operation), static_cast<ncclDataType_t>(type), count});
    if (decision.plan) {
      const host::Algorithm& algorithm = host::algorithms()[decision.plan->algorithm];
      const Tiling& tiling = decision.plan->tiling;
      said = table.name + "|" + algorithm.info->name + "|" + algorithm.info->protocol;
      for (const uint64_t number : {uint64_t{tiling.blocks}, uint64_t{tiling.tile_lines}, uint64_t{tiling.cluster},
                                    uint64_t{tiling.depth}, tiling.launch_units}) {
        said.append("|").append(std::to_string(number));
      }
    } else {
      said = "declined|" + decision.why;
    }
  } catch (const std::exception& error) {
    said = std::string("error|") + error.what();
  }
  said.resize(std::min(said.size(), size - 1));
  std::memcpy(text, said.c_str(), said.size() + 1);
}
