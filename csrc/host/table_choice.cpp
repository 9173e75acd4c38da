#include "host/table_choice.h"

#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string_view>

#include "host/planner.h"

namespace llm_comm::host {

namespace {

// Devices that can use each other's tables. A table depends on three properties, which must be equal: compute
// capability (which kernels run), number of SMs (how many blocks run at once), and links between devices (when two hops
// beat one).
// Only the driver's device name identifies the links: H800 and H100 NVL have the capability and SMs of H100 SXM, but
// fewer or other NVLinks. H20 (78 SMs), H100 PCIe, H200 NVL, MIG instances, A100 and B200 are similar to no listed
// device.
struct NearDevice {
  const char* device;
  const char* short_name;
  uint32_t compute_capability;
  uint32_t sm_count;
  int group;
};
constexpr NearDevice kNearDevices[] = {
    // Both have 18 fourth-generation NVLinks, all to switches. Their memory bandwidths differ, which affects linear
    // layers but no collective.
    {"NVIDIA H100 80GB HBM3", "H100", 90, 132, 0},
    {"NVIDIA H200", "H200", 90, 132, 0},
};

// Blocks per SM of fused operations, for tables without a measured bound. The best value on H200.
constexpr uint32_t kFusedBlocksOfMultiprocessor = 3;

const NearDevice* near_device(const std::string& device) {
  for (const NearDevice& one : kNearDevices) {
    if (device == one.device) return &one;
  }
  return nullptr;
}

Row row(const char* operation, uint64_t up_to, const char* algorithm, const char* protocol,
        const TuningParameters& tuning) {
  const auto& all = algorithms();
  for (uint32_t number = 0; number < all.size(); ++number) {
    if (all[number].operation->name == std::string_view(operation) &&
        all[number].info->name == std::string_view(algorithm) &&
        all[number].info->protocol == std::string_view(protocol)) {
      return {operation, up_to, number, tuning};
    }
  }
  throw std::logic_error(std::string("no algorithm ") + algorithm + " of " + operation);
}

const char* set_variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

std::optional<std::string> home() {
  if (const char* const value = std::getenv("HOME")) return value;
  char buffer[4096];
  passwd entry;
  passwd* found = nullptr;
  getpwuid_r(getuid(), &entry, buffer, sizeof(buffer), &found);
  if (found == nullptr) return std::nullopt;
  return found->pw_dir;
}

// Table of devices without one. It has rows of all_reduce only; rows_of_shards() covers operations with shards.
//
// One-shot sends (N-1) * bytes in one hop, two-shot 2 * (N-1)/N * bytes in two. By the H200 tables they break even near
// 400 KiB / (N-1), which reflects the latency of an NVLink hop. Tiles and grids are the H200's too.
Table general_table(uint32_t world, uint32_t sm_count) {
  const uint64_t one_shot = 400 * kKiB / std::max(1u, world - 1);
  return {.name = "general table",
          .max_message_bytes = 8 * kMiB,
          .rows = {row("all_reduce", one_shot, "one_shot", "LL", {.blocks = 2 * sm_count, .tile_lines = 16}),
                   row("all_reduce", 512 * kKiB, "two_shot", "LL", {.blocks = 4 * sm_count, .tile_lines = 16}),
                   row("all_reduce", 64 * kMiB, "two_shot", "LL", {.blocks = 8 * sm_count, .tile_lines = 32})},
          .content = read_yaml("fused_blocks: " + std::to_string(kFusedBlocksOfMultiprocessor * sm_count))};
}

// Small blocks, because an emulated GPU runs few threads; rows cover every code path.
Table emulated_table() {
  constexpr uint64_t kSmall = 8 * kKiB;
  constexpr uint64_t kLarge = 64 * kMiB;
  constexpr const char* kFused = "all_reduce_add_rms_norm";
  Table table{.name = "emulated",
              .max_message_bytes = kLarge,
              .rows = {row("all_reduce", kSmall, "one_shot", "LL", {.blocks = 2, .tile_lines = 16}),
                       row("all_reduce", kLarge, "two_shot", "LL", {.blocks = 4, .tile_lines = 16, .depth = 1}),
                       row(kFused, kSmall, "one_shot", "LL", {.blocks = 4, .threads = 128, .cluster = 2}),
                       row(kFused, kLarge, "two_shot", "LL", {.blocks = 4, .threads = 128, .cluster = 2, .depth = 1}),
                       row("all_reduce", kLarge, "two_shot_pull_hb", "HB", {.blocks = 3, .tile_lines = 16}),
                       row("all_gather", kLarge, "direct_push_hb", "HB", {.blocks = 3, .tile_lines = 16})}};
  for (const char* const operation : {"all_gather", "reduce_scatter", "all_to_all"}) {
    table.rows.push_back(row(operation, kSmall, "one_shot", "LL", {.blocks = 2, .tile_lines = 16}));
    table.rows.push_back(row(operation, kLarge, "push_hb", "HB", {.blocks = 4, .tile_lines = 64, .depth = 2}));
  }
  std::string content = "max_fused_bytes: 67108864\nmin_symmetric_bytes: 0\nnodes:";
  for (int nodes = 2; nodes <= 8; ++nodes) {
    const std::string pieces = nodes > 2 ? "all_to_all" : "all_gather";
    for (const std::string& way :
         {std::string("32768, exchange: all_gather, chunk_bytes: 0"), "65536, exchange: " + pieces + ", chunk_bytes: 0",
          "1048576, exchange: " + pieces + ", chunk_bytes: 32768",
          "67108864, exchange: " + pieces + ", chunk_bytes: 4194304"}) {
      content += "\n- {nodes: " + std::to_string(nodes) + ", up_to: " + way + ", is_faster: true}";
    }
  }
  table.content = read_yaml(content);
  return table;
}

// Adds a warning once per process.
void remark(FoundTable& found, const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> said;
  const std::lock_guard<std::mutex> lock(mutex);
  if (said.insert(text).second) found.remarks.push_back(text);
}

// Looks for the user's installed table for the device and number of ranks. Warns about an unusable one.
bool find_installed(FoundTable& found, const std::string& device, uint32_t world) {
  const auto directory = table_directory();
  const std::string file = table_file_name(device, world);
  const std::string path = directory.value_or("") + "/" + file;
  struct stat status{};
  if (!directory || (stat(path.c_str(), &status) != 0 && (errno == ENOENT || errno == ENOTDIR))) return false;
  try {
    found.table = read_table(path);
    if (found.table.device != device || found.table.world != world) {
      throw FileError("it is for " + std::to_string(found.table.world) + " of " + found.table.device +
                      ", and its name says " + std::to_string(world) + " of " + device);
    }
    found.origin = "user's directory";
    found.path = path;
    return true;
  } catch (const FileError& error) {
    found.passed_over = path;
    remark(found, "tuning table " + path + ": " + error.what() +
                      ". It is passed over. `llm-comm tune --install` measures it anew, `llm-comm tune --remove " +
                      file + "` removes it");
    return false;
  }
}

void find_shipped(FoundTable& found, const std::string& device, uint32_t world, uint32_t sm_count,
                  uint32_t compute_capability) {
  const std::vector<Table>& shipped = shipped_tables();
  const auto first = [&](auto is_wanted) { return std::find_if(shipped.begin(), shipped.end(), is_wanted); };
  const auto own = first([&](const Table& one) { return one.device == device && one.world == world; });
  if (own != shipped.end()) {
    found.table = *own;
    found.origin = "shipped";
    return;
  }
  if (device == "emulated") {
    found.table = emulated_table();
    found.origin = "emulated";
    return;
  }
  found.is_tuned = false;
  const NearDevice* const here = near_device(device);
  const bool is_known = here != nullptr && here->compute_capability == compute_capability && here->sm_count == sm_count;
  const auto near = first([&](const Table& one) {
    const NearDevice* const there = near_device(one.device);
    return is_known && there != nullptr && there->group == here->group && one.world == world;
  });
  if (near == shipped.end()) {
    found.table = general_table(world, sm_count);
    found.origin = "general";
    return;
  }
  found.table = *near;
  found.table.name += std::string(", nearest: ") + near_device(near->device)->short_name;
  found.origin = "nearest";
  // Linear layers involve no other rank, so measurements of the same device with any number of ranks are valid.
  // Measurements of a similar device are not: its memory bandwidth may differ.
  const auto alike = first([&](const Table& one) { return one.device == device; });
  const Node* const layers = alike == shipped.end() ? nullptr : alike->content.find("layers");
  auto& entries = found.table.content.entries;
  std::erase_if(entries, [](const auto& entry) { return entry.first == "layers"; });
  if (layers != nullptr) entries.emplace_back("layers", *layers);
}

}  // namespace

FoundTable find_table(const std::string& named, const std::string& device, uint32_t world, uint32_t sm_count,
                      uint32_t compute_capability) {
  FoundTable found;
  if (named.empty()) {
    if (!find_installed(found, device, world)) find_shipped(found, device, world, sm_count, compute_capability);
    return found;
  }
  found.table = read_table(named);
  found.origin = "option table";
  found.path = named;
  const bool is_for_this = found.table.device == device && found.table.world == world;
  found.is_tuned = is_for_this || device == "emulated";
  if (!is_for_this) {
    remark(found, named + " was measured on " + std::to_string(found.table.world) + " ranks of " + found.table.device +
                      ", not on " + std::to_string(world) + " of " + device +
                      ": sums are right, the choice may not be the fastest");
  }
  return found;
}

std::optional<std::string> table_directory() {
  if (const char* const chosen = set_variable("LLM_COMM_TABLE_DIR")) return chosen;
  const char* const base = set_variable("XDG_CONFIG_HOME");
  if (base != nullptr) return std::string(base) + "/llm_comm/tables";
  const auto of_user = home();
  if (!of_user) return std::nullopt;
  return *of_user + "/.config/llm_comm/tables";
}

std::string table_file_name(const std::string& device, uint32_t world) {
  std::string name;
  for (const char character : device) {
    const bool is_upper = character >= 'A' && character <= 'Z';
    const char lower = is_upper ? static_cast<char>(character - 'A' + 'a') : character;
    if ((lower >= 'a' && lower <= 'z') || (lower >= '0' && lower <= '9')) {
      name += lower;
    } else if (!name.empty() && name.back() != '_') {
      name += '_';
    }
  }
  if (!name.empty() && name.back() == '_') name.pop_back();
  return name + "_" + std::to_string(world) + kTableSuffix;
}

// Measured on two H200, where LL is faster up to 24 MiB, about one launch there. With more ranks each has a smaller
// share of a slot: with six, shards of 4 MiB take one launch.
std::vector<Row> rows_of_shards(const std::string& operation, uint32_t sm_count) {
  const uint32_t sms = std::max(1u, sm_count);
  const char* const name = operation.c_str();
  return {row(name, 64 * kKiB, "one_shot", "LL", {.blocks = sms, .tile_lines = 32}),
          row(name, kMiB, "one_shot", "LL", {.blocks = 8 * sms, .tile_lines = 32}),
          row(name, 4 * kMiB, "one_shot", "LL", {.blocks = 8 * sms, .tile_lines = 128}),
          row(name, 64 * kMiB, "push_hb", "HB", {.blocks = sms, .tile_lines = 1024, .depth = 2})};
}

}  // namespace llm_comm::host
