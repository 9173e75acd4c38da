// Reader of tuning tables, shared by Communicator and the NCCL library. Each user skips rows that it cannot run: the
// NCCL library runs no fused operation, no DSL kernel and no switch algorithm.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "algorithms/launch_shape.h"
#include "host/yaml.h"

namespace llm_comm::host {

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;

// Algorithm and tuning parameters for messages of up to `up_to` bytes. For operations with shards `up_to` bounds
// the largest shard.
struct Row {
  std::string operation;
  uint64_t up_to;
  uint32_t algorithm;  // registry number; 0 for a DSL kernel
  TuningParameters tuning;
  std::string program = {};  // DSL kernel, "dsl:NAME"; else empty
  // Measured times, for readers of the table; null if absent. The selection does not depend on them.
  Node us = {};
  Node runner_up = {};
};

struct Table {
  std::string name;
  std::string device = {};  // name as the driver reports it
  uint64_t world = 0;
  uint64_t max_message_bytes = 0;
  std::vector<Row> rows = {};  // rows of one operation are sorted by size
  // Everything else of the file, checked: limits, rows of linear layers, and rows for several machines.
  Node content = {};
};

// Reads a table from a file or from text. Throws FileError with the valid alternatives.
Table read_table(const std::string& path);
Table parse_table(const std::string& name, std::string_view text);

struct EmbeddedTable {
  const char* name;
  const char* text;
};
// Tables of configs/, embedded by the build.
const std::vector<EmbeddedTable>& embedded_tables();
// embedded_tables(), parsed.
const std::vector<Table>& shipped_tables();

}  // namespace llm_comm::host
