#include "nccl/selection.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "algorithms/shards.h"
#include "host/planner.h"
#include "host/yaml.h"
#include "nccl/failure.h"
#include "nccl/log.h"

namespace llm_comm::nccl {

namespace {

// Operations of the registry that this library serves.
constexpr const char* kServed[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"};

// Maximum bytes of a shard of an all-to-all of which the table has no row. Nothing larger has been measured.
constexpr uint64_t kMaxUnmeasuredAllToAll = 1 << 20;

// Maximum bytes that the root of a broadcast sends. World size 2: as far as an all-gather of such shards, which sends
// as much, is clearly faster than NCCL's broadcast (docs/results/2026-11-25_h100x2_nccl_tests.json). Larger worlds: not
// measured. There the root stores to each rank in turn, while NCCL's ranks pass the data on.
constexpr uint64_t max_broadcast_bytes(uint32_t world) { return world == 2 ? 8 << 20 : 1 << 20; }

std::optional<DataType> summed_type(ncclDataType_t type) {
  switch (type) {
    case ncclBfloat16:
      return DataType::kBFloat16;
    case ncclFloat16:
      return DataType::kFloat16;
    case ncclFloat32:
      return DataType::kFloat32;
    default:
      return std::nullopt;
  }
}

// Operation of the registry that implements it. A broadcast is an all-gather in which only the root has a shard.
const char* registered(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kAllToAll:
      return "all_to_all";
    case Operation::kAllGather:
    case Operation::kBroadcast:
      break;
  }
  return "all_gather";
}

// True if an algorithm may be used without a table row that names it.
bool needs_no_row(const host::Algorithm& algorithm, const std::string& operation) {
  return algorithm.operation->name == operation && algorithm.info->symmetric == 0 && !algorithm.info->needs_row();
}

// True if this library can execute a row.
bool can_run(const Row& row) {
  const host::Algorithm& algorithm = host::algorithms()[row.algorithm];
  const bool is_served = std::find(std::begin(kServed), std::end(kServed), row.operation) != std::end(kServed);
  const bool is_lossy = *algorithm.info->wire != 0;
  return is_served && row.program.empty() && algorithm.info->symmetric == 0 && !algorithm.info->uses_multimem &&
         !is_lossy;
}

}  // namespace

Table find_table(const std::string& path, const std::string& device, uint32_t world, uint32_t sm_count,
                 uint32_t compute_capability) {
  try {
    host::FoundTable found = host::find_table(path, device, world, sm_count, compute_capability);
    for (const std::string& remark : found.remarks) warn(remark);
    Table table = std::move(found.table);
    const size_t left_out = std::erase_if(table.rows, [](const Row& row) { return !can_run(row); });
    if (left_out > 0) {
      inform("tuning table " + table.name + ": rows that cannot run here are left out: " + std::to_string(left_out));
    }
    return table;
  } catch (const host::FileError& error) {
    throw Failure(ncclInvalidArgument,
                  "option table (LLM_COMM_TABLE): tuning table " + path.substr(0, 200) + ": " + error.what());
  }
}

std::string digest_of(const Table& table) {
  std::ostringstream text;
  text << table.max_message_bytes;
  for (const Row& row : table.rows) {
    const TuningParameters& tuning = row.tuning;
    text << '|' << row.operation << ' ' << row.up_to << ' ' << row.algorithm << ' ' << tuning.blocks << ' '
         << tuning.threads << ' ' << tuning.tile_lines << ' ' << tuning.depth;
  }
  // FNV-1a is sufficient: ranks compare their own choices, not data of an adversary.
  uint64_t hash = 14695981039346656037u;
  for (const char byte : text.str()) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return table.name + " " + std::to_string(hash);
}

uint64_t Message::shard_bytes() const { return count * bytes_of(type); }

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return "AllReduce";
    case Operation::kAllGather:
      return "AllGather";
    case Operation::kReduceScatter:
      return "ReduceScatter";
    case Operation::kAllToAll:
      return "AlltoAll";
    case Operation::kBroadcast:
      return "Broadcast";
  }
  return "?";
}

uint64_t bytes_of(ncclDataType_t type) {
  constexpr uint64_t kBytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  const auto index = static_cast<unsigned>(type);
  return index < ncclNumTypes ? kBytes[index] : 0;
}

Decision Selection::decide(const Message& message) const {
  const auto forwarded = [](const std::string& why) { return Decision{std::nullopt, why}; };
  const bool sums = message.operation == Operation::kAllReduce || message.operation == Operation::kReduceScatter;
  if (sums && message.reduction != ncclSum) return forwarded("no sum");
  Problem problem{message.count, 0, DataType::kByte, world_, {}};
  if (sums) {
    const auto type = summed_type(message.type);
    if (!type) return forwarded("its type is none of bfloat16, float16 and float32");
    problem.type = *type;
  } else {
    problem.count *= bytes_of(message.type);
  }
  const uint64_t bytes = message.shard_bytes();
  if (bytes > table_.max_message_bytes && !serves_all_) return forwarded("larger than " + table_.name + " goes");
  if (message.operation == Operation::kBroadcast && bytes * (world_ - 1) > max_broadcast_bytes(world_) &&
      !serves_all_) {
    return forwarded("a large broadcast");
  }
  if (message.operation == Operation::kAllToAll && bytes > kMaxUnmeasuredAllToAll && !serves_all_ &&
      std::none_of(table_.rows.begin(), table_.rows.end(),
                   [](const Row& row) { return row.operation == "all_to_all"; })) {
    return forwarded("a large all-to-all, and " + table_.name + " has no row for it");
  }
  if (message.operation != Operation::kAllReduce) {
    problem.parameter[kRows] = 1;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      const bool has_shard = message.operation != Operation::kBroadcast || static_cast<int>(rank) == message.root;
      problem.parameter[kFirstSize + rank] = has_shard ? static_cast<double>(problem.count) : 0;
    }
  }
  const auto chosen = choose(registered(message.operation), problem, bytes);
  if (!chosen) return forwarded(table_.name + " has no row for it");
  const host::Algorithm& algorithm = host::algorithms()[chosen->first];
  try {
    const Shape shape = algorithm.shape(problem, chosen->second, limits_);
    return {Plan{chosen->first, problem, shape.tiling},
            std::string(algorithm.info->name) + " " + algorithm.info->protocol + " (" + table_.name + ")"};
  } catch (const std::invalid_argument& error) {
    return forwarded(error.what());
  }
}

std::vector<uint32_t> Selection::algorithms() const {
  std::vector<uint32_t> found;
  for (const char* const operation : kServed) {
    const std::vector<Row> rows = rows_of(operation);
    for (const Row& row : rows) found.push_back(row.algorithm);
    for (uint32_t number = 0; number < host::algorithms().size(); ++number) {
      if (rows.empty() && needs_no_row(host::algorithms()[number], operation)) found.push_back(number);
    }
  }
  return found;
}

std::vector<Row> Selection::rows_of(const std::string& operation) const {
  std::vector<Row> rows;
  for (const Row& row : table_.rows) {
    if (row.operation == operation) rows.push_back(row);
  }
  if (rows.empty() && operation != "all_reduce") rows = host::rows_of_shards(operation, limits_.sm_count);
  return rows;
}

// Rule of llm_comm/planning/selection.py for a communicator with default options.
std::optional<std::pair<uint32_t, TuningParameters>> Selection::choose(const std::string& operation,
                                                                       const Problem& problem, uint64_t bytes) const {
  const auto& all = host::algorithms();
  const auto has_type = [&](const host::Algorithm& algorithm) {
    return std::find(algorithm.types.begin(), algorithm.types.end(), problem.type) != algorithm.types.end();
  };
  const std::vector<Row> rows = rows_of(operation);
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const Row& one) { return bytes <= one.up_to; });
  if (!rows.empty()) {
    const Row& of_size = row == rows.end() ? rows.back() : *row;
    if (has_type(all[of_size.algorithm])) return std::pair(of_size.algorithm, of_size.tuning);
  }
  for (uint32_t number = 0; number < all.size(); ++number) {
    if (!needs_no_row(all[number], operation) || !has_type(all[number])) continue;
    const auto candidates = all[number].candidates(problem, limits_);
    if (!candidates.empty()) return std::pair(number, candidates.front());
  }
  return std::nullopt;
}

}  // namespace llm_comm::nccl
