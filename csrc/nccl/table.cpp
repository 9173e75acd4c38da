#include "nccl/table.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>

#include "host/planner.h"
#include "nccl/failure.h"

namespace llm_comm::nccl {

namespace {

constexpr uint64_t kMaxFileBytes = 1 << 20;

class LineError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\r')) text.remove_suffix(1);
  return text;
}

std::string_view without_comment(std::string_view line) {
  if (!line.empty() && line.front() == '#') return {};
  const size_t comment = line.find(" #");
  return comment == std::string_view::npos ? line : line.substr(0, comment);
}

std::string unquoted(std::string_view text) {
  text = trimmed(text);
  if (text.size() >= 2 && (text.front() == '\'' || text.front() == '"') && text.back() == text.front()) {
    text = text.substr(1, text.size() - 2);
  }
  return std::string(text);
}

uint64_t number(const std::string& key, const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw LineError(key + " is '" + text.substr(0, 40) + "'; it must be a whole number");
  }
  return value;
}

// "key: value, key: value", where a value may be {...} again, which is left as it is.
std::map<std::string, std::string> pairs(std::string_view text) {
  std::map<std::string, std::string> found;
  while (!(text = trimmed(text)).empty()) {
    int depth = 0;
    size_t end = 0;
    for (; end < text.size() && (depth > 0 || text[end] != ','); ++end) {
      depth += text[end] == '{' ? 1 : text[end] == '}' ? -1 : 0;
      if (depth < 0) throw LineError("there is a } without its {");
    }
    const std::string_view pair = text.substr(0, end);
    const size_t colon = pair.find(':');
    if (colon == std::string_view::npos)
      throw LineError("'" + std::string(pair.substr(0, 40)) + "' is no 'key: value'");
    const std::string key(trimmed(pair.substr(0, colon)));
    if (!found.emplace(key, unquoted(pair.substr(colon + 1))).second) throw LineError(key + " is there twice");
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return found;
}

bool is_served(const std::string& operation) {
  return operation == "all_reduce" || operation == "all_gather" || operation == "reduce_scatter";
}

// Nothing where the row is not for this library.
std::optional<Row> row_of(std::string_view text) {
  text = trimmed(text);
  if (text.size() < 2 || text.front() != '{' || text.back() != '}') {
    throw LineError("a row must be {key: value, ...} on one line, as `llm-comm tune` writes it");
  }
  auto entry = pairs(text.substr(1, text.size() - 2));
  const auto take = [&](const char* key) {
    const auto at = entry.find(key);
    if (at == entry.end()) throw LineError(std::string("it lacks ") + key);
    std::string value = at->second;
    entry.erase(at);
    return value;
  };
  Row row{take("operation"), number("up_to", take("up_to")), 0, {}};
  if (row.up_to == 0) throw LineError("up_to is 0");
  const std::string name = take("algorithm");
  const std::string protocol = take("protocol");
  if (!is_served(row.operation)) return std::nullopt;
  const auto& all = host::algorithms();
  const auto found = std::find_if(all.begin(), all.end(), [&](const host::Algorithm& algorithm) {
    return row.operation == algorithm.operation->name && name == algorithm.info->name &&
           protocol == algorithm.info->protocol;
  });
  if (found == all.end()) throw LineError(row.operation + " has no algorithm " + name + " " + protocol);
  if (found->info->symmetric != 0 || found->info->by_switch) return std::nullopt;
  row.algorithm = static_cast<uint32_t>(found - all.begin());
  for (const Tunable& tunable : found->tunables->tunable) {
    if (tunable.name == nullptr) break;
    const uint64_t value = number(tunable.name, take(tunable.name));
    const bool is_power = (value & (value - 1)) == 0;
    if (value < tunable.min || value > tunable.max || (tunable.is_power_of_two && !is_power)) {
      throw LineError(std::string(tunable.name) + " is " + std::to_string(value) + "; it must be " +
                      std::to_string(tunable.min) + " to " + std::to_string(tunable.max) +
                      (tunable.is_power_of_two ? " and a power of two" : ""));
    }
    const std::string field = tunable.name;
    const auto stored = static_cast<uint32_t>(value);
    if (field == "blocks") row.choice.blocks = stored;
    if (field == "threads") row.choice.threads = stored;
    if (field == "tile_lines") row.choice.tile_lines = stored;
    if (field == "cluster") row.choice.cluster = stored;
    if (field == "depth") row.choice.depth = stored;
  }
  entry.erase("us");
  entry.erase("runner_up");
  if (!entry.empty()) throw LineError("unknown key " + entry.begin()->first.substr(0, 40));
  return row;
}

uint32_t algorithm_number(const std::string& operation, const std::string& name, const std::string& protocol) {
  const auto& all = host::algorithms();
  for (uint32_t i = 0; i < all.size(); ++i) {
    if (operation == all[i].operation->name && name == all[i].info->name && protocol == all[i].info->protocol) return i;
  }
  throw std::logic_error("no algorithm " + name + " of " + operation);
}

}  // namespace

std::string Table::digest() const {
  std::ostringstream text;
  text << max_message_bytes;
  for (const Row& row : rows) {
    const Choice& choice = row.choice;
    text << '|' << row.operation << ' ' << row.up_to << ' ' << row.algorithm << ' ' << choice.blocks << ' '
         << choice.threads << ' ' << choice.tile_lines << ' ' << choice.depth;
  }
  // FNV-1a: ranks compare what they have chosen, not what somebody has made.
  uint64_t hash = 14695981039346656037u;
  for (const char byte : text.str()) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return name + " " + std::to_string(hash);
}

Table parse_table(const std::string& name, const std::string& text) {
  Table table;
  table.name = name;
  std::istringstream lines(text);
  std::string section;
  int line_number = 0;
  for (std::string whole; std::getline(lines, whole);) {
    ++line_number;
    try {
      const std::string_view line = without_comment(whole);
      if (trimmed(line).empty()) continue;
      const bool is_top = line.front() != ' ' && line.front() != '-';
      if (is_top) {
        const size_t colon = line.find(':');
        if (colon == std::string_view::npos) throw LineError("expected 'key: value'");
        section = std::string(trimmed(line.substr(0, colon)));
        const std::string value = unquoted(line.substr(colon + 1));
        if (section == "device") table.device = value;
        if (section == "world_size") table.world = static_cast<uint32_t>(number(section, value));
        if (section == "max_message_bytes") table.max_message_bytes = number(section, value);
        continue;
      }
      if (section != "rows") continue;
      std::string_view entry = trimmed(line);
      if (entry.substr(0, 2) != "- ") throw LineError("expected '- {...}'");
      if (auto row = row_of(entry.substr(2))) {
        for (const Row& before : table.rows) {
          if (before.operation == row->operation && before.up_to > row->up_to) {
            throw LineError("rows of one operation must be sorted by up_to");
          }
        }
        table.rows.push_back(std::move(*row));
      }
    } catch (const LineError& error) {
      throw Failure(ncclInvalidArgument,
                    "tuning table " + name + ", line " + std::to_string(line_number) + ": " + error.what());
    }
  }
  if (table.world == 0 || table.max_message_bytes == 0 || table.rows.empty()) {
    throw Failure(ncclInvalidArgument, "tuning table " + name + " lacks world_size, max_message_bytes or rows");
  }
  return table;
}

Table read_table(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.eof() || file.bad()) {
    throw Failure(ncclInvalidArgument,
                  "LLM_COMM_TABLE=" + path.substr(0, 200) + " cannot be read, or is larger than 1 MiB");
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return parse_table(path, text);
}

Table find_table(const std::string& path, const std::string& device, uint32_t world, uint32_t sm_count) {
  if (!path.empty()) return read_table(path);
  for (const EmbeddedTable& embedded : embedded_tables()) {
    Table table = parse_table(embedded.name, embedded.text);
    if (table.device == device && table.world == world) return table;
  }
  return general_table(world, sm_count);
}

Table general_table(uint32_t world, uint32_t sm_count) {
  constexpr uint64_t kKiB = 1024;
  constexpr uint64_t kMiB = 1024 * kKiB;
  Table table;
  table.name = "general table";
  table.world = world;
  table.max_message_bytes = 8 * kMiB;
  const auto add = [&](const char* operation, uint64_t up_to, const char* algorithm, const char* protocol,
                       uint32_t blocks_of_sm, uint32_t tile_lines, uint32_t depth = 0) {
    const Choice choice{.blocks = blocks_of_sm * sm_count, .tile_lines = tile_lines, .depth = depth};
    table.rows.push_back({operation, up_to, algorithm_number(operation, algorithm, protocol), choice});
  };
  add("all_reduce", 400 * kKiB / (world > 1 ? world - 1 : 1), "one_shot", "LL", 2, 16);
  add("all_reduce", 512 * kKiB, "two_shot", "LL", 4, 16);
  add("all_reduce", 64 * kMiB, "two_shot", "LL", 8, 32);
  for (const char* const operation : {"all_gather", "reduce_scatter"}) {
    add(operation, 64 * kKiB, "one_shot", "LL", 1, 32);
    add(operation, kMiB, "one_shot", "LL", 8, 32);
    add(operation, 4 * kMiB, "one_shot", "LL", 8, 128);
    add(operation, 64 * kMiB, "push_hb", "HB", 1, 1024, 2);
  }
  return table;
}

}  // namespace llm_comm::nccl
