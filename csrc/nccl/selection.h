// Which calls are served, and how: from a table to what the core prepares. A pure function of what all ranks have alike.
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

// The tuning table of a device, by the rule of Communicator (host/table_choice.h), without the rows that cannot run here: of operations that
// this library does not serve, of algorithms for symmetric tensors or by the NVLink switch, and of programs of llm_comm.dsl. `path`: the file
// of LLM_COMM_TABLE, or nothing. Throws Failure (ncclInvalidArgument) where that cannot be used.
Table find_table(const std::string& path, const std::string& device, uint32_t world, uint32_t sm_count,
                 uint32_t compute_capability);
// What ranks compare: all that is chosen by.
std::string digest_of(const Table& table);

enum class Operation { kAllReduce, kAllGather, kReduceScatter, kBroadcast };

// A collective call as far as all ranks give the same.
struct Message {
  Operation operation;
  ncclDataType_t type;
  uint64_t count;  // as the call has it: of an operation on parts, elements of a part
  int reduction = ncclSum;
  int root = 0;

  bool operator==(const Message&) const = default;
  uint64_t part_bytes() const;
};

const char* name_of(Operation operation);
uint64_t bytes_of(ncclDataType_t type);  // 0: there is no such type

struct Plan {
  uint32_t algorithm;  // its number in the registry
  Problem problem;
  Tiling tiling;
};

struct Decision {
  std::optional<Plan> plan;
  std::string why;  // or why not
};

class Selection {
 public:
  // `serves_all`: also messages that are larger than the table goes, because there is nobody else to do them.
  Selection(Table table, uint32_t world, const Limits& limits, bool serves_all)
      : table_(std::move(table)), world_(world), limits_(limits), serves_all_(serves_all) {}

  Decision decide(const Message& message) const;
  // Numbers of all algorithms that it can choose.
  std::vector<uint32_t> algorithms() const;

 private:
  // The table's, or those for tables that have none of the operation; none for an all-reduce.
  std::vector<Row> rows_of(const std::string& operation) const;
  // An algorithm by its number, and how it is launched; nothing where no algorithm serves the message.
  std::optional<std::pair<uint32_t, Choice>> choose(const std::string& operation, const Problem& problem,
                                                    uint64_t bytes) const;

  Table table_;
  uint32_t world_;
  Limits limits_;
  bool serves_all_;
};

}  // namespace llm_comm::nccl
