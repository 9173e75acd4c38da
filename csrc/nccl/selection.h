// Selection: decides which calls llm_comm serves, and how. A pure function of values that all ranks share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/table_choice.h"
#include "nccl/nccl_types.h"

namespace llm_comm::nccl {

using host::Row;
using host::Table;

// Tuning table of a device, by the same rule as Communicator (host/table_choice.h), without rows that cannot run here:
// other operations, algorithms for symmetric tensors or with the NVLink switch, DSL kernels. `path`: file of
// LLM_COMM_TABLE, or empty. Throws Failure (ncclInvalidArgument) if that file is unusable.
Table find_table(const std::string& path, const std::string& device, uint32_t world, uint32_t sm_count,
                 uint32_t compute_capability);
// Digest of everything that choices depend on; ranks compare it.
std::string digest_of(const Table& table);

enum class Operation { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBroadcast };

// Arguments of a collective call that all ranks share.
struct Message {
  Operation operation;
  ncclDataType_t type;
  uint64_t count;  // as in the call: elements of one shard, for operations with shards
  int reduction = ncclSum;
  int root = 0;

  bool operator==(const Message&) const = default;
  uint64_t shard_bytes() const;
};

const char* name_of(Operation operation);
uint64_t bytes_of(ncclDataType_t type);  // 0: unknown type

struct Plan {
  uint32_t algorithm;  // registry number
  Problem problem;
  Tiling tiling;
};

struct Decision {
  std::optional<Plan> plan;
  std::string why;  // explanation of the choice or of the refusal
};

class Selection {
 public:
  // `serves_all`: also serve messages larger than the table covers, because there is no real NCCL library.
  Selection(Table table, uint32_t world, const Limits& limits, bool serves_all)
      : table_(std::move(table)), world_(world), limits_(limits), serves_all_(serves_all) {}

  Decision decide(const Message& message) const;
  // Registry numbers of all algorithms that decide() can choose.
  std::vector<uint32_t> algorithms() const;

 private:
  // Rows of the table for an operation. If it has none: the default rows; for all_reduce an empty list.
  std::vector<Row> rows_of(const std::string& operation) const;
  // Registry number and tuning parameters; empty if no algorithm supports the message.
  std::optional<std::pair<uint32_t, TuningParameters>> choose(const std::string& operation, const Problem& problem,
                                                              uint64_t bytes) const;

  Table table_;
  uint32_t world_;
  Limits limits_;
  bool serves_all_;
};

}  // namespace llm_comm::nccl
