#include "host/tables.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>

#include "algorithms/linear/layer.h"
#include "host/planner.h"
#include "host/yaml.h"

namespace llm_comm::host {

namespace {

using Names = std::vector<std::string>;

constexpr uint64_t kMaxNumber = INT64_MAX;
constexpr double kLongestUs = 1e9;
constexpr size_t kLongestName = 80;  // that somebody may have meant by another
constexpr size_t kLongestProgram = 200;
constexpr uint64_t kMaxProgramBlocks = 65535;
constexpr uint64_t kMinChunkBytes = 16 * kKiB;  // smaller ones are bound by latency
constexpr uint64_t kMaxNodes = 1 << 16;
constexpr uint64_t kMaxNodeBytes = uint64_t{1} << 60;

const Names kOfEveryRow{"operation", "up_to", "algorithm", "protocol"};
const Names kFigures{"us", "runner_up"};
const Names kOperationsOfPrograms{"all_reduce", "all_gather", "reduce_scatter"};

std::string joined(const Names& names, const char* between = ", ") {
  std::string found;
  for (const std::string& name : names) found += (found.empty() ? "" : between) + name;
  return found.empty() ? "none" : found;
}

bool is_among(const std::string& name, const Names& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Names operator+(Names some, const Names& more) {
  some.insert(some.end(), more.begin(), more.end());
  return some;
}

// Characters to change, insert or leave out for one name to become the other.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({changed, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row.back();
}

// " (did you mean ...?)", or nothing where no valid name is close.
std::string guess(const std::string& name, const Names& valid) {
  if (name.empty() || name.size() > kLongestName || valid.empty()) return "";
  const auto closest = std::min_element(valid.begin(), valid.end(), [&](const std::string& a, const std::string& b) {
    return distance(name, a) < distance(name, b);
  });
  const bool is_close = distance(name, *closest) <= std::max<size_t>(1, name.size() / 3);
  return is_close ? " (did you mean " + *closest + "?)" : "";
}

[[noreturn]] void refuse(const std::string& name, const Node& value, const std::string& valid) {
  throw FileError(name + " is " + shown(value) + "; it must be " + valid, value.line);
}

// A value that is one of some names.
std::string known(const std::string& name, const Node& value, const Names& valid) {
  if (value.kind == Node::Kind::kWord && is_among(value.word, valid)) return value.word;
  throw FileError(name + " is " + shown(value) + guess(value.word, valid) + "; valid: " + joined(valid), value.line);
}

void require_keys(const Node& node, const Names& keys, const Names& optional) {
  Names missing;
  for (const std::string& key : keys) {
    if (node.find(key) == nullptr) missing.push_back(key);
  }
  const std::string valid = "; keys: " + joined(keys) + "; optional: " + joined(optional);
  if (!missing.empty()) throw FileError("it lacks " + joined(missing) + valid);
}

// That a mapping has the keys that it needs, and no others: a number under a misspelt key would not hold.
void check_keys(const Node& node, const Names& keys, const Names& optional) {
  require_keys(node, keys, optional);
  const Names all = keys + optional;
  for (const auto& [key, value] : node.entries) {
    if (is_among(key, all)) continue;
    throw FileError("it has no such key as " + shortened(key, kLongestName) + guess(key, all) +
                        "; keys: " + joined(keys) + "; optional: " + joined(optional),
                    value.line);
  }
}

std::optional<uint64_t> number_in(const Node& value) {
  const std::string& word = value.word;
  uint64_t found = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), found);
  // YAML takes 010 for eight.
  const bool is_octal = word.size() > 1 && word[0] == '0';
  const bool is_whole = error == std::errc() && end == word.data() + word.size() && !value.is_quoted && !is_octal;
  return is_whole ? std::optional(found) : std::nullopt;
}

// A number under a key; `otherwise` where there is no such key.
uint64_t number(const Node& node, const std::string& key, uint64_t least, uint64_t most, const std::string& valid,
                uint64_t otherwise = 0, uint64_t multiple = 1) {
  const Node* const value = node.find(key);
  if (value == nullptr) return otherwise;
  const auto found = number_in(*value);
  if (!found || *found < least || *found > most || *found % multiple != 0) refuse(key, *value, valid);
  return *found;
}

uint64_t size(const Node& node) { return number(node, "up_to", 1, kMaxNumber, "a number of bytes above 0"); }

bool truth(const Node& node, const std::string& key) {
  const Node& value = *node.find(key);
  if (!value.is_quoted && is_among(value.word, {"true", "True"})) return true;
  if (!value.is_quoted && is_among(value.word, {"false", "False"})) return false;
  refuse(key, value, "true or false");
}

// Microseconds. A time that another was taken off can be negative.
std::optional<double> time(const Node& node, const std::string& key, const std::string& name) {
  const Node* const value = node.find(key);
  if (value == nullptr) return std::nullopt;
  double found = 0;
  const char* const end = value->word.data() + value->word.size();
  const auto [last, error] = std::from_chars(value->word.data(), end, found);
  const bool is_within = found >= -kLongestUs && found <= kLongestUs;
  if (value->is_quoted || error != std::errc() || last != end || !is_within) {
    refuse(name, *value, "a number of microseconds");
  }
  return found;
}
std::optional<double> time(const Node& node, const std::string& key) { return time(node, key, key); }

bool is_program(const Node* name) {
  constexpr std::string_view kPrefix = "dsl:";
  if (name == nullptr || name->word.rfind(kPrefix, 0) != 0) return false;
  const auto is_of_name = [](unsigned char c) { return c == '_' || (c < 0x80 && std::isalnum(c) != 0); };
  const std::string& word = name->word;
  return word.size() > kPrefix.size() && word.size() <= kLongestProgram &&
         std::all_of(word.begin() + kPrefix.size(), word.end(), is_of_name);
}

std::optional<RunnerUp> runner_up(const Node& row, const std::string& operation) {
  const Node* const value = row.find("runner_up");
  if (value == nullptr) return std::nullopt;
  const Names keys{"algorithm", "protocol", "us"};
  const bool has_keys = value->entries.size() == keys.size() &&
                        std::all_of(keys.begin(), keys.end(), [&](auto& key) { return value->find(key) != nullptr; });
  if (!has_keys) throw FileError("runner_up is " + shown(*value) + "; it must have " + joined(keys));
  const Node &algorithm = *value->find("algorithm"), &protocol = *value->find("protocol");
  if (!is_program(&algorithm) || protocol.word != "DSL" || !is_among(operation, kOperationsOfPrograms)) {
    Names valid;
    for (const Algorithm& one : algorithms()) {
      if (one.operation->name == operation) valid.push_back(std::string(one.info->name) + " " + one.info->protocol);
    }
    Node both;
    both.word = algorithm.word + " " + protocol.word;
    known("runner_up", both, valid);
  }
  return RunnerUp{algorithm.word, protocol.word, *time(*value, "us", "us of runner_up")};
}

// A row that names a program of llm_comm.dsl. Whether there is such a program, and whether it can be launched with so many blocks and
// threads, is found out when a communicator is made.
Row row_of_program(const Node& node) {
  check_keys(node, {"operation", "up_to", "algorithm"}, Names{"protocol", "blocks", "threads"} + kFigures);
  const Node& operation = *node.find("operation");
  if (!is_among(operation.word, kOperationsOfPrograms)) {
    throw FileError("operation is " + shown(operation) + "; programs are selected for " +
                    joined(kOperationsOfPrograms));
  }
  if (const Node* const protocol = node.find("protocol"); protocol != nullptr && protocol->word != "DSL") {
    throw FileError("protocol is " + shown(*protocol) + "; that of programs is DSL");
  }
  const auto tunable = [&](const char* name, uint64_t most) {
    const std::string valid = "a whole number from 1 to " + std::to_string(most) + ". Without it the program chooses";
    return static_cast<uint32_t>(number(node, name, 1, most, valid));
  };
  Row row{operation.word, size(node), 0, {}, node.find("algorithm")->word};
  row.choice.blocks = tunable("blocks", kMaxProgramBlocks);
  row.choice.threads = tunable("threads", kMaxBlockThreads);
  return row;
}

uint32_t& field_of(Choice& choice, std::string_view tunable) {
  if (tunable == "blocks") return choice.blocks;
  if (tunable == "threads") return choice.threads;
  if (tunable == "tile_lines") return choice.tile_lines;
  return tunable == "cluster" ? choice.cluster : choice.depth;
}

Row row_of_algorithm(const Node& node) {
  require_keys(node, kOfEveryRow, kFigures);
  const auto& all = algorithms();
  const auto names = [&](auto name, auto is_wanted) {
    Names found;
    for (const Algorithm& one : all) {
      if (is_wanted(one) && !is_among(name(one), found)) found.push_back(name(one));
    }
    return found;
  };
  const auto name_of_operation = [](const Algorithm& one) { return std::string(one.operation->name); };
  const auto name_of = [](const Algorithm& one) { return std::string(one.info->name); };
  const auto protocol_of = [](const Algorithm& one) { return std::string(one.info->protocol); };
  const std::string operation =
      known("operation", *node.find("operation"), names(name_of_operation, [](const Algorithm&) { return true; }));
  const auto is_of_operation = [&](const Algorithm& one) { return one.operation->name == operation; };
  const std::string name = known("algorithm", *node.find("algorithm"), names(name_of, is_of_operation));
  const auto is_of_name = [&](const Algorithm& one) { return is_of_operation(one) && one.info->name == name; };
  const std::string protocol = known("protocol", *node.find("protocol"), names(protocol_of, is_of_name));
  const auto found = std::find_if(
      all.begin(), all.end(), [&](const Algorithm& one) { return is_of_name(one) && one.info->protocol == protocol; });
  Names tunables;
  for (const Tunable& one : found->tunables->tunable) {
    if (one.name != nullptr) tunables.emplace_back(one.name);
  }
  check_keys(node, kOfEveryRow + tunables, kFigures);
  Row row{operation, size(node), static_cast<uint32_t>(found - all.begin()), {}};
  for (const Tunable& one : found->tunables->tunable) {
    if (one.name == nullptr) continue;
    const std::string valid =
        std::to_string(one.min) + " to " + std::to_string(one.max) + (one.is_power_of_two ? ", a power of two" : "");
    const uint64_t value = number(node, one.name, one.min, one.max, valid);
    if (one.is_power_of_two && (value & (value - 1)) != 0) refuse(one.name, *node.find(one.name), valid);
    field_of(row.choice, one.name) = static_cast<uint32_t>(value);
  }
  return row;
}

Row read_row(const Node& node) {
  Row row = is_program(node.find("algorithm")) ? row_of_program(node) : row_of_algorithm(node);
  row.us = time(node, "us");
  row.runner_up = runner_up(node, row.operation);
  return row;
}

LayerRow read_layer(const Node& node) {
  const Names tunables{"block_outputs", "stages", "stage_boxes"};
  check_keys(node, {"operation", "outputs", "inputs", "pdl", "up_to", "is_faster"},
             tunables + Names{"us", "cublas_us"});
  const std::string fp8 = "_fp8", linear = "linear", silu = "linear_silu_and_mul";
  const std::string operation = known("operation", *node.find("operation"), {linear, silu, linear + fp8, silu + fp8});
  const bool is_fp8 = operation == linear + fp8 || operation == silu + fp8;
  const auto features = [&](const char* name, uint64_t multiple) {
    return number(node, name, 1, linear::kMaxFeatures,
                  "a multiple of " + std::to_string(multiple) + " up to " + std::to_string(linear::kMaxFeatures), 0,
                  multiple);
  };
  const auto tunable = [&](const char* name, uint64_t most, uint64_t multiple) {
    const std::string steps = multiple > 1 ? " in steps of " + std::to_string(multiple) : "";
    return number(node, name, 0, most, "0 (as the kernel finds best) to " + std::to_string(most) + steps, 0, multiple);
  };
  const uint64_t outputs = features("outputs", linear::kMultiple);
  const uint64_t inputs = features("inputs", is_fp8 ? linear::inputs_multiple(FactorType::kFloat8) : linear::kMultiple);
  const bool pdl = truth(node, "pdl");
  const uint64_t up_to =
      number(node, "up_to", 1, linear::kMaxTokens, "a number of tokens, 1 to " + std::to_string(linear::kMaxTokens));
  return {operation,
          outputs,
          inputs,
          pdl,
          up_to,
          truth(node, "is_faster"),
          tunable("block_outputs", linear::kMaxBlockOutputs, linear::kLineElements),
          tunable("stages", linear::kMaxStages, 1),
          tunable("stage_boxes", linear::kMaxStageBoxes, 1),
          time(node, "us"),
          time(node, "cublas_us")};
}

NodeRow read_node_row(const Node& node) {
  check_keys(node, {"nodes", "up_to", "exchange", "chunk_bytes", "is_faster"}, {"us", "nccl_us"});
  const uint64_t nodes = number(node, "nodes", 2, kMaxNodes, "a number of at least 2");
  const uint64_t up_to = number(node, "up_to", 1, kMaxNodeBytes, "a number of bytes above 0");
  const Node& exchange = *node.find("exchange");
  const Names exchanges{"all_gather", "all_to_all"};
  if (!is_among(exchange.word, exchanges)) refuse("exchange", exchange, joined(exchanges, " or "));
  const std::string valid = "0 (one chunk) or at least " + std::to_string(kMinChunkBytes);
  const uint64_t chunk_bytes = number(node, "chunk_bytes", 0, kMaxNodeBytes, valid);
  if (chunk_bytes != 0 && chunk_bytes < kMinChunkBytes) refuse("chunk_bytes", *node.find("chunk_bytes"), valid);
  return {nodes, up_to, exchange.word, chunk_bytes, truth(node, "is_faster"), time(node, "us"), time(node, "nccl_us")};
}

// The rows under a key, those that `key_of` says belong together one behind the other and sorted by size. What is wrong with a row is said
// with its kind, number and line. `may_repeat`: a row behind which one of the same size may stand.
template <class Read, class KeyOf, class MayRepeat>
auto read_rows(const Node& content, const char* key, const char* kind, const char* unit, Read read, KeyOf key_of,
               MayRepeat may_repeat) {
  using R = decltype(read(content));
  std::vector<std::pair<std::string, std::vector<R>>> groups;
  const Node* const list = content.find(key);
  if (list != nullptr && !list->is_null() && list->kind != Node::Kind::kList) {
    throw FileError(std::string(key) + " is " + shown(*list) + "; it must be a list of rows", list->line);
  }
  const size_t count = list == nullptr ? 0 : list->items.size();
  for (size_t i = 0; i < count; ++i) {
    const Node& item = list->items[i];
    try {
      if (item.kind != Node::Kind::kMapping) throw FileError("it must be 'key: value' pairs");
      R row = read(item);
      const std::string name = key_of(row);
      auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& one) { return one.first == name; });
      if (group == groups.end()) group = groups.insert(group, {name, {}});
      if (!group->second.empty()) {
        const R& before = group->second.back();
        if (row.up_to < before.up_to || (row.up_to == before.up_to && !may_repeat(before))) {
          throw FileError("rows of " + name + " must be sorted by up_to, in " + unit + "; the one before says " +
                          std::to_string(before.up_to));
        }
      }
      group->second.push_back(std::move(row));
    } catch (const FileError& error) {
      throw FileError(std::string(kind) + " " + std::to_string(i + 1) + ", " + shown(item) + ": " + error.bare,
                      error.line == 0 ? item.line : error.line);
    }
  }
  std::vector<R> found;
  for (auto& [name, rows] : groups) std::move(rows.begin(), rows.end(), std::back_inserter(found));
  return found;
}

std::string key_of(const Row& row) {
  if (!row.program.empty()) return row.operation + " by programs";
  return row.operation + (algorithms()[row.algorithm].info->symmetric != 0 ? " of symmetric tensors" : "");
}

std::string key_of(const LayerRow& row) {
  return row.operation + " of " + std::to_string(row.outputs) + " outputs and " + std::to_string(row.inputs) +
         " inputs with pdl " + (row.pdl ? "on" : "off");
}

std::string key_of(const NodeRow& row) { return std::to_string(row.nodes) + " nodes"; }

// Numbers of a mapping by operation, or of all operations.
void read_min_symmetric(const Node& value, Table& table) {
  const std::string key = "min_symmetric_bytes", valid = "a whole number of at least 0";
  Names operations;
  for (const Algorithm& one : algorithms()) operations.emplace_back(one.operation->name);
  for (const auto& [operation, least] : value.entries) {
    if (!is_among(operation, operations)) {
      operations.erase(std::unique(operations.begin(), operations.end()), operations.end());
      throw FileError(key + " names '" + shortened(operation, kLongestName) + "'; operations: " + joined(operations),
                      least.line);
    }
    const auto number = number_in(least);
    if (!number || *number > kMaxNumber) refuse(key + " of " + operation, least, valid);
    table.min_symmetric_of[operation] = *number;
  }
}

MulticastEntry read_multicast(const Node& value) {
  const Names keys{"device", "driver", "world_size", "date"};
  if (value.kind != Node::Kind::kMapping || value.entries.size() != keys.size() ||
      std::any_of(keys.begin(), keys.end(), [&](const std::string& key) { return value.find(key) == nullptr; })) {
    throw FileError("multicast is " + shown(value) + "; it must have " + joined(keys), value.line);
  }
  const Node& world = *value.find("world_size");
  const auto found = number_in(world);
  if (!found || *found > kMaxNumber) refuse("world_size of multicast", world, "a number");
  return {value.find("device")->word, value.find("driver")->word, *found, value.find("date")->word};
}

}  // namespace

Table read_table(const std::string& path) { return parse_table(path.substr(path.rfind('/') + 1), read_file(path)); }

Table parse_table(const std::string& name, std::string_view text) {
  const Node content = read_yaml(text);
  if (content.kind != Node::Kind::kMapping) throw FileError("expected 'key: value' lines, found " + shown(content));
  Table table{name};
  const Names limits{"world_size", "max_message_bytes", "max_fused_bytes", "fused_blocks", "min_symmetric_bytes"};
  check_keys(content, {"device", "world_size", "max_message_bytes", "rows"},
             {"max_fused_bytes", "fused_blocks", "min_symmetric_bytes", "measured", "multicast", "layers", "nodes"});
  uint64_t* const places[] = {&table.world, &table.max_message_bytes, &table.max_fused_bytes, &table.fused_blocks,
                              &table.min_symmetric_bytes};
  for (size_t i = 0; i < limits.size(); ++i) {
    const Node* const value = content.find(limits[i]);
    if (value == nullptr) continue;
    if (places[i] == &table.min_symmetric_bytes && value->kind == Node::Kind::kMapping) {
      read_min_symmetric(*value, table);
    } else {
      *places[i] = number(content, limits[i], 0, kMaxNumber, "a whole number of at least 0");
    }
  }
  const Node& device = *content.find("device");
  if (device.kind != Node::Kind::kWord) refuse("device", device, "a name");
  table.device = device.word;
  if (const Node* const value = content.find("multicast")) table.multicast = read_multicast(*value);
  const auto never = [](const auto&) { return false; };
  const auto key = [](const auto& row) { return key_of(row); };
  // Behind a row by the switch may stand one of its size, for where the switch is not used.
  const auto is_by_switch = [](const Row& row) {
    return row.program.empty() && algorithms()[row.algorithm].info->by_switch;
  };
  table.rows = read_rows(content, "rows", "row", "bytes", read_row, key, is_by_switch);
  if (table.rows.empty()) throw FileError("no rows");
  table.layers = read_rows(content, "layers", "layer", "tokens", read_layer, key, never);
  table.nodes = read_rows(content, "nodes", "row of nodes", "bytes", read_node_row, key, never);
  if (const Node* const measured = content.find("measured")) {
    for (const auto& [about, value] : measured->entries) {
      table.measured.emplace_back(about, value.kind == Node::Kind::kWord ? value.word : shown(value));
    }
  }
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

}  // namespace llm_comm::host
