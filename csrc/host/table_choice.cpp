#include "host/table_choice.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "host/planner.h"

namespace llm_comm::host {

namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;

// Devices that serve each other with their tables, because nothing that a table is measured for differs: the compute capability (which
// kernels run), the multiprocessors (how many blocks run at once), and the links between devices (when two hops are faster than one). Links
// are known by the driver's name alone: H800 and H100 NVL have both numbers of H100 SXM, and fewer or other NVLinks. H20 (78 multiprocessors),
// H100 PCIe, H200 NVL, parts of a GPU (MIG), A100 and B200 are near to nothing.
struct NearDevice {
  const char* device;
  const char* short_name;
  uint32_t compute_capability;
  uint32_t sm_count;
  int group;
};
constexpr NearDevice kNearDevices[] = {
    // 18 NVLinks of the fourth generation each, all to switches. Their memories differ in speed, which bounds linear layers and no
    // collective.
    {"NVIDIA H100 80GB HBM3", "H100", 90, 132, 0},
    {"NVIDIA H200", "H200", 90, 132, 0},
};

const NearDevice* near_device(const std::string& device) {
  for (const NearDevice& one : kNearDevices) {
    if (device == one.device) return &one;
  }
  return nullptr;
}

Row row(const char* operation, uint64_t up_to, const char* algorithm, const char* protocol, const Choice& choice) {
  const auto& all = algorithms();
  for (uint32_t number = 0; number < all.size(); ++number) {
    if (all[number].operation->name == std::string_view(operation) &&
        all[number].info->name == std::string_view(algorithm) &&
        all[number].info->protocol == std::string_view(protocol)) {
      return {operation, up_to, number, choice};
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

}  // namespace

TableChoice choose_table(const std::string& device, uint32_t world, uint32_t sm_count, uint32_t compute_capability,
                         const std::vector<MeasuredOn>& shipped) {
  using Kind = TableChoice::Kind;
  for (size_t i = 0; i < shipped.size(); ++i) {
    if (shipped[i].device == device && shipped[i].world == world) return {Kind::kShipped, i};
  }
  if (device == "emulated") return {Kind::kEmulated};
  const NearDevice* const here = near_device(device);
  if (here == nullptr || here->compute_capability != compute_capability || here->sm_count != sm_count) {
    return {Kind::kGeneral};
  }
  for (size_t i = 0; i < shipped.size(); ++i) {
    const NearDevice* const there = near_device(shipped[i].device);
    if (there != nullptr && there->group == here->group && shipped[i].world == world) {
      return {Kind::kNearest, i, there->short_name};
    }
  }
  return {Kind::kGeneral};
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

// One-shot sends (N-1) x bytes in one hop, two-shot 2 (N-1)/N x bytes in two: by the H200 tables they break even near 400 KiB / (N-1),
// which is the time of a hop on NVLink. Tiles and grids are the H200's too.
DefaultTable general_table(uint32_t world, uint32_t sm_count) {
  const uint64_t one_shot = 400 * kKiB / std::max(1u, world - 1);
  return {8 * kMiB,
          {row("all_reduce", one_shot, "one_shot", "LL", {.blocks = 2 * sm_count, .tile_lines = 16}),
           row("all_reduce", 512 * kKiB, "two_shot", "LL", {.blocks = 4 * sm_count, .tile_lines = 16}),
           row("all_reduce", 64 * kMiB, "two_shot", "LL", {.blocks = 8 * sm_count, .tile_lines = 32})}};
}

DefaultTable emulated_table() {
  constexpr uint64_t kSmall = 8 * kKiB;
  constexpr uint64_t kLarge = 64 * kMiB;
  constexpr const char* kFused = "all_reduce_add_rms_norm";
  DefaultTable table{kLarge,
                     {row("all_reduce", kSmall, "one_shot", "LL", {.blocks = 2, .tile_lines = 16}),
                      row("all_reduce", kLarge, "two_shot", "LL", {.blocks = 4, .tile_lines = 16, .depth = 1}),
                      row(kFused, kSmall, "one_shot", "LL", {.blocks = 4, .threads = 128, .cluster = 2}),
                      row(kFused, kLarge, "two_shot", "LL", {.blocks = 4, .threads = 128, .cluster = 2, .depth = 1}),
                      row("all_reduce", kLarge, "two_shot_pull_hb", "HB", {.blocks = 3, .tile_lines = 16}),
                      row("all_gather", kLarge, "direct_push_hb", "HB", {.blocks = 3, .tile_lines = 16})}};
  for (const char* const operation : {"all_gather", "reduce_scatter"}) {
    table.rows.push_back(row(operation, kSmall, "one_shot", "LL", {.blocks = 2, .tile_lines = 16}));
    table.rows.push_back(row(operation, kLarge, "push_hb", "HB", {.blocks = 4, .tile_lines = 64, .depth = 2}));
  }
  return table;
}

// As measured on two H200, where LL is faster up to 24 MiB, which is about one launch there. Where there are more ranks, each has a smaller
// share of a slot: parts of 4 MiB take one launch with six.
std::vector<Row> rows_of_parts(const std::string& operation, uint32_t sm_count) {
  const uint32_t sms = std::max(1u, sm_count);
  const char* const name = operation.c_str();
  return {row(name, 64 * kKiB, "one_shot", "LL", {.blocks = sms, .tile_lines = 32}),
          row(name, kMiB, "one_shot", "LL", {.blocks = 8 * sms, .tile_lines = 32}),
          row(name, 4 * kMiB, "one_shot", "LL", {.blocks = 8 * sms, .tile_lines = 128}),
          row(name, 64 * kMiB, "push_hb", "HB", {.blocks = sms, .tile_lines = 1024, .depth = 2})};
}

}  // namespace llm_comm::host
