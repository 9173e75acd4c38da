// Tuning tables as `llm-comm tune` writes them. The YAML of a table is read line by line, in just the form that it is written in:
// "key: value" at the top, and rows as "  - {key: value, ...}".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/table_choice.h"

namespace llm_comm::nccl {

using host::Row;

struct Table {
  std::string name;
  std::string device;
  uint32_t world = 0;
  uint64_t max_message_bytes = 0;
  std::vector<Row> rows;

  // What ranks compare: all that is chosen by.
  std::string digest() const;
};

// Rows that cannot run here are left out: of operations that this library does not serve, of algorithms for symmetric tensors or by the
// NVLink switch, and of programs of llm_comm.dsl. Throws Failure (ncclInvalidArgument) with the number of the line that is wrong.
Table parse_table(const std::string& name, const std::string& text);
// `where`: the option that names the file, or nothing.
Table read_table(const std::string& path, const std::string& where);

// The table of a file, where `path` names one; else that which Communicator would find (host/table_choice.h).
Table find_table(const std::string& path, const std::string& device, uint32_t world, uint32_t sm_count,
                 uint32_t compute_capability);

struct EmbeddedTable {
  const char* name;
  const char* text;
};
// Made of configs/ by the build.
const std::vector<EmbeddedTable>& embedded_tables();

}  // namespace llm_comm::nccl
