// Tuning tables as `llm-comm tune` writes them. The YAML of a table is read line by line, in just the form that it is written in:
// "key: value" at the top, and rows as "  - {key: value, ...}".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "algorithms/launch_shape.h"

namespace llm_comm::nccl {

struct Row {
  std::string operation;
  uint64_t up_to;      // bytes: of an operation on parts, of the largest part
  uint32_t algorithm;  // its number in the registry
  Choice choice;
};

struct Table {
  std::string name;
  std::string device;
  uint32_t world = 0;
  uint64_t max_message_bytes = 0;
  std::vector<Row> rows;

  // What ranks compare: all that is chosen by.
  std::string digest() const;
};

// Rows of operations that this library does not serve, of algorithms for symmetric tensors and of those by the NVLink switch are left
// out. Throws Failure (ncclInvalidArgument) with the number of the line that is wrong.
Table parse_table(const std::string& name, const std::string& text);
Table read_table(const std::string& path);

// Of a file, where one is named; else the one that was compiled in for such a device; else that for any device.
Table find_table(const std::string& path, const std::string& device, uint32_t world, uint32_t sm_count);

// For devices without one of their own: that of llm_comm/planning/default_tables.py.
Table general_table(uint32_t world, uint32_t sm_count);

struct EmbeddedTable {
  const char* name;
  const char* text;
};
// Made of configs/ by the build.
const std::vector<EmbeddedTable>& embedded_tables();

}  // namespace llm_comm::nccl
