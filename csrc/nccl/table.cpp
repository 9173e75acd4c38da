#include "nccl/table.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include "host/planner.h"
#include "nccl/failure.h"
#include "nccl/log.h"

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

// Whether this library has what a row asks for.
bool can_run(const Row& row) {
  const host::Algorithm& algorithm = host::algorithms()[row.algorithm];
  const bool is_served =
      row.operation == "all_reduce" || row.operation == "all_gather" || row.operation == "reduce_scatter";
  return is_served && algorithm.info->symmetric == 0 && !algorithm.info->by_switch;
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

bool is_in(const std::string& text, std::initializer_list<const char*> list) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

// A row of a file, and how it is compared with others: rows of one `key` are sorted by size.
struct FileRow {
  Row row;
  std::string key;
  bool by_switch = false;
  bool can_run = false;
};

using Entry = std::map<std::string, std::string>;

std::string take(Entry& entry, const char* key) {
  const auto at = entry.find(key);
  if (at == entry.end()) throw LineError(std::string("it lacks ") + key);
  std::string value = at->second;
  entry.erase(at);
  return value;
}

uint64_t size_of(Entry& entry) {
  const uint64_t up_to = number("up_to", take(entry, "up_to"));
  if (up_to == 0) throw LineError("up_to is 0");
  return up_to;
}

FileRow row_of_program(Entry entry) {
  const std::string operation = take(entry, "operation");
  if (!is_in(operation, {"all_reduce", "all_gather", "reduce_scatter"})) {
    throw LineError("programs are not selected for " + operation.substr(0, 40));
  }
  return {{operation, size_of(entry), 0, {}}, operation + " by programs"};
}

// `section`: under which key of the file it stands. Files of before have a list for each operation, without protocols.
FileRow row_of(std::string_view text, const std::string& section) {
  text = trimmed(text);
  if (text.size() < 2 || text.front() != '{' || text.back() != '}') {
    throw LineError("a row must be {key: value, ...} on one line, as `llm-comm tune` writes it");
  }
  Entry entry = pairs(text.substr(1, text.size() - 2));
  const auto program = entry.find("algorithm");
  if (program != entry.end() && program->second.rfind("dsl:", 0) == 0) return row_of_program(std::move(entry));
  if (section != "rows") {
    entry.emplace("operation", section == "fused" ? "all_reduce_add_rms_norm" : section);
    entry.emplace("protocol", "LL");
  }
  const std::string operation = take(entry, "operation");
  Row row{operation, size_of(entry), 0, {}};
  const std::string name = take(entry, "algorithm");
  const std::string protocol = take(entry, "protocol");
  const auto& all = host::algorithms();
  const auto found = std::find_if(all.begin(), all.end(), [&](const host::Algorithm& algorithm) {
    return operation == algorithm.operation->name && name == algorithm.info->name &&
           protocol == algorithm.info->protocol;
  });
  if (found == all.end()) throw LineError(operation + " has no algorithm " + name + " " + protocol);
  row.algorithm = static_cast<uint32_t>(found - all.begin());
  for (const Tunable& tunable : found->tunables->tunable) {
    if (tunable.name == nullptr) break;
    const uint64_t value = number(tunable.name, take(entry, tunable.name));
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
  const bool is_symmetric = found->info->symmetric != 0;
  FileRow of_file{std::move(row), operation + (is_symmetric ? " of symmetric tensors" : ""), found->info->by_switch};
  of_file.can_run = can_run(of_file.row);
  return of_file;
}

// Of a rank, or of several in one process, said once.
void warn_once(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> said;
  const std::lock_guard<std::mutex> lock(mutex);
  if (said.insert(text).second) warn(text);
}

Table of_rows(std::string name, uint64_t max_message_bytes, std::vector<Row> rows) {
  Table table;
  table.name = std::move(name);
  table.max_message_bytes = max_message_bytes;
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(table.rows), can_run);
  return table;
}

const std::vector<Table>& shipped_tables() {
  static const std::vector<Table> tables = [] {
    std::vector<Table> found;
    for (const EmbeddedTable& embedded : embedded_tables()) found.push_back(parse_table(embedded.name, embedded.text));
    return found;
  }();
  return tables;
}

// The installed table for a device and number of ranks. One that cannot be used is passed over with a warning.
std::optional<Table> installed_table(const std::string& device, uint32_t world) {
  const auto directory = host::table_directory();
  if (!directory) return std::nullopt;
  const std::string file = host::table_file_name(device, world);
  const std::string path = *directory + "/" + file;
  struct stat status{};
  if (stat(path.c_str(), &status) != 0 && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  try {
    Table table = read_table(path, "");
    if (table.device != device || table.world != world) {
      throw Failure(ncclInvalidArgument, "tuning table " + path + ": it is for " + std::to_string(table.world) +
                                             " of " + table.device + ", and its name says " + std::to_string(world) +
                                             " of " + device);
    }
    table.name = file;
    return table;
  } catch (const Failure& failure) {
    warn_once(std::string(failure.what()) + ". It is passed over. `llm-comm tune --install` measures it anew");
    return std::nullopt;
  }
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
  std::set<std::string> sections;
  std::map<std::string, FileRow> previous;  // by key
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
        // A limit that is misspelt would not hold.
        if (!is_in(section,
                   {"device", "world_size", "max_message_bytes", "rows", "all_reduce", "fused", "max_fused_bytes",
                    "fused_blocks", "min_symmetric_bytes", "measured", "multicast", "layers", "nodes"})) {
          throw LineError("it has no such key as " + section.substr(0, 40));
        }
        sections.insert(is_in(section, {"all_reduce", "fused"}) ? "rows" : section);
        const std::string value = unquoted(line.substr(colon + 1));
        if (section == "device") table.device = value;
        if (section == "world_size") table.world = static_cast<uint32_t>(number(section, value));
        if (section == "max_message_bytes") table.max_message_bytes = number(section, value);
        continue;
      }
      if (!is_in(section, {"rows", "all_reduce", "fused"})) continue;
      std::string_view entry = trimmed(line);
      if (entry.substr(0, 2) != "- ") throw LineError("expected '- {...}'");
      const FileRow found = row_of(entry.substr(2), section);
      const auto before = previous.find(found.key);
      if (before != previous.end()) {
        const uint64_t least = before->second.row.up_to;
        // A row by the switch may have one of its size behind it, for where the switch is not used.
        if (found.row.up_to < least || (found.row.up_to == least && !before->second.by_switch)) {
          throw LineError("rows of " + found.key + " must be sorted by up_to");
        }
      }
      previous.insert_or_assign(found.key, found);
      if (found.can_run) {
        table.rows.push_back(found.row);
      } else {
        inform("tuning table " + name + ", line " + std::to_string(line_number) +
               ": a row that cannot run here is left out");
      }
    } catch (const LineError& error) {
      throw Failure(ncclInvalidArgument,
                    "tuning table " + name + ", line " + std::to_string(line_number) + ": " + error.what());
    }
  }
  for (const char* const key : {"device", "world_size", "max_message_bytes", "rows"}) {
    if (sections.count(key) == 0) throw Failure(ncclInvalidArgument, "tuning table " + name + " lacks " + key);
  }
  if (previous.empty()) throw Failure(ncclInvalidArgument, "tuning table " + name + " has no rows");
  return table;
}

Table read_table(const std::string& path, const std::string& where) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.eof() || file.bad()) {
    throw Failure(ncclInvalidArgument, where + path.substr(0, 200) + " cannot be read, or is larger than 1 MiB");
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return parse_table(path, text);
}

Table find_table(const std::string& path, const std::string& device, uint32_t world, uint32_t sm_count,
                 uint32_t compute_capability) {
  if (!path.empty()) {
    Table table = read_table(path, "LLM_COMM_TABLE=");
    if (table.device != device || table.world != world) {
      warn_once(path + " was measured on " + std::to_string(table.world) + " ranks of " + table.device + ", not on " +
                std::to_string(world) + " of " + device + ": sums are right, the choice may not be the fastest");
    }
    return table;
  }
  if (auto installed = installed_table(device, world)) return *installed;
  const std::vector<Table>& shipped = shipped_tables();
  std::vector<host::MeasuredOn> measured_on;
  for (const Table& table : shipped) measured_on.push_back({table.device, table.world});
  const host::TableChoice choice = host::choose_table(device, world, sm_count, compute_capability, measured_on);
  switch (choice.kind) {
    case host::TableChoice::Kind::kShipped:
      return shipped[choice.shipped];
    case host::TableChoice::Kind::kNearest: {
      Table table = shipped[choice.shipped];
      table.name += std::string(", nearest: ") + choice.nearest;
      return table;
    }
    case host::TableChoice::Kind::kEmulated: {
      host::DefaultTable found = host::emulated_table();
      return of_rows("emulated", found.max_message_bytes, std::move(found.rows));
    }
    case host::TableChoice::Kind::kGeneral:
      break;
  }
  host::DefaultTable found = host::general_table(world, sm_count);
  return of_rows("general table", found.max_message_bytes, std::move(found.rows));
}

}  // namespace llm_comm::nccl
