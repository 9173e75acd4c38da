#include "host/tables.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <numeric>
#include <utility>

#include "algorithms/linear/layer.h"
#include "host/planner.h"

namespace llm_comm::host {

namespace {

using Names = std::vector<std::string>;

constexpr uint64_t kMaxNumber = INT64_MAX;
constexpr double kLongestUs = 1e9;
constexpr size_t kLongestName = 80;  // longer names get no "did you mean"
constexpr size_t kLongestProgram = 200;
constexpr uint64_t kMaxProgramBlocks = 65535;
constexpr uint64_t kMinChunkBytes = 16 * kKiB;  // latency dominates below this size
constexpr uint64_t kMaxNodes = 1 << 16;
constexpr uint64_t kMaxNodeBytes = uint64_t{1} << 60;

const Names kOfEveryRow{"operation", "up_to", "algorithm", "protocol"};
const Names kFigures{"us", "runner_up"};
const Names kOperationsOfPrograms{"all_reduce", "all_gather", "reduce_scatter"};

std::string joined(const Names& names) {
  std::string found;
  for (const std::string& name : names) found += (found.empty() ? "" : ", ") + name;
  return found.empty() ? "none" : found;
}

bool is_among(const std::string& name, const Names& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Names operator+(Names some, const Names& more) {
  some.insert(some.end(), more.begin(), more.end());
  return some;
}

// Edit distance: characters to change, insert or delete to turn one name into the other.
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

// " (did you mean ...?)" with the closest valid name, or "" if none is close.
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

// Returns a value that must be one of `valid`.
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

// Requires `keys` and permits only `optional` besides: a value under a misspelt key would be ignored silently.
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

// Number under a key; 0 if the key is absent.
uint64_t number(const Node& node, const std::string& key, uint64_t least, uint64_t most, const std::string& valid,
                uint64_t multiple = 1) {
  const Node* const value = node.find(key);
  if (value == nullptr) return 0;
  const auto found = value->whole_number();
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

// Checks a time in microseconds, if present. May be negative: it can be a difference.
void check_time(const Node& node, const std::string& key, const std::string& name) {
  const Node* const value = node.find(key);
  if (value == nullptr) return;
  const auto found = value->number();
  if (!found || *found < -kLongestUs || *found > kLongestUs) refuse(name, *value, "a number of microseconds");
}

bool is_program(const Node* name) {
  constexpr std::string_view kPrefix = "dsl:";
  if (name == nullptr || name->word.rfind(kPrefix, 0) != 0) return false;
  const auto is_of_name = [](unsigned char c) { return c == '_' || (c < 0x80 && std::isalnum(c) != 0); };
  const std::string& word = name->word;
  return word.size() > kPrefix.size() && word.size() <= kLongestProgram &&
         std::all_of(word.begin() + kPrefix.size(), word.end(), is_of_name);
}

// Requires exactly `keys`.
void require_exactly(const std::string& name, const Node& value, const Names& keys) {
  const bool has_keys = std::all_of(keys.begin(), keys.end(), [&](auto& key) { return value.find(key) != nullptr; });
  if (has_keys && value.entries.size() == keys.size()) return;
  throw FileError(name + " is " + shown(value) + "; it must have " + joined(keys), value.line);
}

void check_figures(const Node& row, const std::string& operation) {
  check_time(row, "us", "us");
  const Node* const runner_up = row.find("runner_up");
  if (runner_up == nullptr) return;
  require_exactly("runner_up", *runner_up, {"algorithm", "protocol", "us"});
  const Node &algorithm = *runner_up->find("algorithm"), &protocol = *runner_up->find("protocol");
  if (!is_program(&algorithm) || protocol.word != "DSL" || !is_among(operation, kOperationsOfPrograms)) {
    Names valid;
    for (const Algorithm& one : algorithms()) {
      if (one.operation->name == operation) valid.push_back(std::string(one.info->name) + " " + one.info->protocol);
    }
    Node both = algorithm;
    both.word += " " + protocol.word;
    known("runner_up", both, valid);
  }
  check_time(*runner_up, "us", "us of runner_up");
}

// Row of a DSL kernel. The communicator checks at its start that the kernel exists and supports the blocks and threads.
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
  row.tuning.blocks = tunable("blocks", kMaxProgramBlocks);
  row.tuning.threads = tunable("threads", kMaxBlockThreads);
  return row;
}

uint32_t& field_of(TuningParameters& tuning, std::string_view tunable) {
  if (tunable == "blocks") return tuning.blocks;
  if (tunable == "threads") return tuning.threads;
  if (tunable == "tile_lines") return tuning.tile_lines;
  return tunable == "cluster" ? tuning.cluster : tuning.depth;
}

Row row_of_algorithm(const Node& node) {
  require_keys(node, kOfEveryRow, kFigures);
  std::vector<uint32_t> left(algorithms().size());
  std::iota(left.begin(), left.end(), 0);
  // Keeps the algorithms whose name matches the value of `key`.
  const auto narrow = [&](const char* key, auto name_of) {
    const auto name_at = [&](uint32_t number) { return std::string(name_of(algorithms()[number])); };
    Names valid;
    for (const uint32_t number : left) {
      if (!is_among(name_at(number), valid)) valid.push_back(name_at(number));
    }
    const std::string name = known(key, *node.find(key), valid);
    std::erase_if(left, [&](uint32_t number) { return name_at(number) != name; });
    return name;
  };
  const std::string operation = narrow("operation", [](const Algorithm& one) { return one.operation->name; });
  narrow("algorithm", [](const Algorithm& one) { return one.info->name; });
  narrow("protocol", [](const Algorithm& one) { return one.info->protocol; });
  const Tunables& tunables = *algorithms()[left.front()].tunables;
  Names names;
  for (const Tunable& one : tunables.tunable) {
    if (one.name != nullptr) names.emplace_back(one.name);
  }
  check_keys(node, kOfEveryRow + names, kFigures);
  Row row{operation, size(node), left.front(), {}};
  for (const Tunable& one : tunables.tunable) {
    if (one.name == nullptr) continue;
    const std::string valid =
        std::to_string(one.min) + " to " + std::to_string(one.max) + (one.is_power_of_two ? ", a power of two" : "");
    const uint64_t value = number(node, one.name, one.min, one.max, valid);
    if (one.is_power_of_two && (value & (value - 1)) != 0) refuse(one.name, *node.find(one.name), valid);
    field_of(row.tuning, one.name) = static_cast<uint32_t>(value);
  }
  return row;
}

Row read_row(const Node& node) {
  Row row = is_program(node.find("algorithm")) ? row_of_program(node) : row_of_algorithm(node);
  check_figures(node, row.operation);
  if (const Node* const us = node.find("us")) row.us = *us;
  if (const Node* const runner_up = node.find("runner_up")) row.runner_up = *runner_up;
  return row;
}

// Group of a row and its size. Rows of one group must be sorted by size.
struct RowKey {
  std::string of;
  uint64_t up_to;
  bool may_repeat = false;  // another row of the same size may follow
};

RowKey row_key_of(const Row& row) {
  if (!row.program.empty()) return {row.operation + " by programs", row.up_to};
  const AlgorithmInfo& info = *algorithms()[row.algorithm].info;
  // A row of a switch algorithm may be followed by one of the same size, for systems without multicast.
  std::string of = row.operation;
  if (info.symmetric != 0) of += " of symmetric tensors";
  if (*info.wire != 0) of += std::string(" with wire ") + info.wire;
  return {of, row.up_to, info.uses_multimem};
}

RowKey check_layer(const Node& node) {
  check_keys(node, {"operation", "outputs", "inputs", "pdl", "up_to", "is_faster"},
             {"block_outputs", "stages", "stage_boxes", "us", "cublas_us"});
  const Names of_fp8{"linear_fp8", "linear_silu_and_mul_fp8", "linear_fp8_blocks", "linear_silu_and_mul_fp8_blocks"};
  const std::string operation =
      known("operation", *node.find("operation"), Names{"linear", "linear_silu_and_mul"} + of_fp8);
  const auto features = [&](const char* name, uint64_t multiple) {
    const std::string valid = std::to_string(multiple) + " up to " + std::to_string(linear::kMaxFeatures);
    return std::to_string(number(node, name, 1, linear::kMaxFeatures, "a multiple of " + valid, multiple));
  };
  const auto check_tunable = [&](const char* name, uint64_t most, uint64_t multiple) {
    const std::string steps = multiple > 1 ? " in steps of " + std::to_string(multiple) : "";
    number(node, name, 0, most, "0 (as the kernel finds best) to " + std::to_string(most) + steps, multiple);
  };
  const std::string outputs = features("outputs", linear::kMultiple);
  const std::string inputs = features(
      "inputs", is_among(operation, of_fp8) ? linear::inputs_multiple(OperandType::kFloat8) : linear::kMultiple);
  const std::string with_pdl = truth(node, "pdl") ? " with pdl" : " without pdl";
  const uint64_t up_to =
      number(node, "up_to", 1, linear::kMaxTokens, "a number of tokens, 1 to " + std::to_string(linear::kMaxTokens));
  truth(node, "is_faster");
  check_tunable("block_outputs", linear::kMaxBlockOutputs, linear::kLineElements);
  check_tunable("stages", linear::kMaxStages, 1);
  check_tunable("stage_boxes", linear::kMaxStageBoxes, 1);
  for (const char* const name : {"us", "cublas_us"}) check_time(node, name, name);
  return {operation + " of " + outputs + " outputs and " + inputs + " inputs" + with_pdl, up_to};
}

RowKey check_row_of_nodes(const Node& node) {
  check_keys(node, {"nodes", "up_to", "exchange", "chunk_bytes", "is_faster"}, {"us", "nccl_us"});
  const uint64_t nodes = number(node, "nodes", 2, kMaxNodes, "a number of at least 2");
  const uint64_t up_to = number(node, "up_to", 1, kMaxNodeBytes, "a number of bytes above 0");
  const Node& exchange = *node.find("exchange");
  if (!is_among(exchange.word, {"all_gather", "all_to_all"})) refuse("exchange", exchange, "all_gather or all_to_all");
  const std::string valid = "0 (one chunk) or at least " + std::to_string(kMinChunkBytes);
  const uint64_t chunk_bytes = number(node, "chunk_bytes", 0, kMaxNodeBytes, valid);
  if (chunk_bytes != 0 && chunk_bytes < kMinChunkBytes) refuse("chunk_bytes", *node.find("chunk_bytes"), valid);
  truth(node, "is_faster");
  for (const char* const name : {"us", "nccl_us"}) check_time(node, name, name);
  return {std::to_string(nodes) + " nodes", up_to};
}

// Reads the list under a key. Errors name the kind, number and line of the row.
template <class Read>
void read_rows(const Node& content, const char* key, const std::string& kind, const char* unit, Read read) {
  std::map<std::string, RowKey> before;
  const Node* const list = content.find(key);
  if (list == nullptr || list->is_null()) return;
  if (list->kind != Node::Kind::kList) refuse(key, *list, "a list of rows");
  for (size_t i = 0; i < list->items.size(); ++i) {
    const Node& item = list->items[i];
    try {
      if (item.kind != Node::Kind::kMapping) throw FileError("it must be 'key: value' pairs");
      const RowKey row = read(item);
      const auto found = before.find(row.of);
      const uint64_t least = found == before.end() ? 0 : found->second.up_to + (found->second.may_repeat ? 0 : 1);
      if (row.up_to < least) {
        throw FileError("rows of " + row.of + " must be sorted by up_to, in " + unit + "; the one before says " +
                        std::to_string(found->second.up_to));
      }
      before.insert_or_assign(row.of, row);
    } catch (const FileError& error) {
      throw FileError(kind + " " + std::to_string(i + 1) + ", " + shown(item) + ": " + error.bare,
                      error.line == 0 ? item.line : error.line);
    }
  }
}

// Accepts one number or one number per operation.
void check_min_symmetric(const Node& content) {
  const std::string key = "min_symmetric_bytes", valid = "a whole number of at least 0";
  const Node* const value = content.find(key);
  if (value == nullptr || value->kind != Node::Kind::kMapping) {
    number(content, key, 0, kMaxNumber, valid);
    return;
  }
  Names operations;
  for (const Algorithm& one : algorithms()) {
    if (!is_among(one.operation->name, operations)) operations.emplace_back(one.operation->name);
  }
  for (const auto& [operation, least] : value->entries) {
    if (!is_among(operation, operations)) {
      throw FileError(key + " names '" + shortened(operation, kLongestName) + "'; operations: " + joined(operations),
                      least.line);
    }
    const auto found = least.whole_number();
    if (!found || *found > kMaxNumber) refuse(key + " of " + operation, least, valid);
  }
}

void check_multicast(const Node* value) {
  if (value == nullptr) return;
  require_exactly("multicast", *value, {"device", "driver", "world_size", "date"});
  const Node& world = *value->find("world_size");
  if (!world.whole_number()) refuse("world_size of multicast", world, "a number");
}

}  // namespace

Table read_table(const std::string& path) { return parse_table(path.substr(path.rfind('/') + 1), read_file(path)); }

Table parse_table(const std::string& name, std::string_view text) {
  Node content = read_yaml(text);
  if (content.kind != Node::Kind::kMapping) throw FileError("expected 'key: value' lines, found " + shown(content));
  check_keys(content, {"device", "world_size", "max_message_bytes", "rows"},
             {"max_fused_bytes", "large_fused_bytes", "fused_blocks", "min_symmetric_bytes", "measured", "multicast",
              "layers", "nodes"});
  const auto limit = [&](const char* key) {
    return number(content, key, 0, kMaxNumber, "a whole number of at least 0");
  };
  const Node& device = *content.find("device");
  if (device.kind != Node::Kind::kWord) refuse("device", device, "a name");
  Table table{name, device.word, limit("world_size"), limit("max_message_bytes")};
  for (const char* const key : {"max_fused_bytes", "large_fused_bytes", "fused_blocks"}) limit(key);
  check_min_symmetric(content);
  check_multicast(content.find("multicast"));
  read_rows(content, "rows", "row", "bytes", [&](const Node& node) {
    table.rows.push_back(read_row(node));
    return row_key_of(table.rows.back());
  });
  if (table.rows.empty()) throw FileError("no rows");
  read_rows(content, "layers", "layer", "tokens", check_layer);
  read_rows(content, "nodes", "row of nodes", "bytes", check_row_of_nodes);
  std::erase_if(content.entries, [](const auto& entry) { return entry.first == "rows"; });
  table.content = std::move(content);
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
