// Tuning tables: what a file says, read and checked once for Communicator and for the NCCL library.
//
// A face that cannot run a row (the NCCL library runs no fused operation, no program, nothing by the NVLink switch) leaves it out itself.
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

// How messages of up to `up_to` bytes run; of an operation on parts, bytes of the largest part.
struct Row {
  std::string operation;
  uint64_t up_to;
  uint32_t algorithm;  // its number in the registry; of a row for a program 0
  Choice choice;
  std::string program = {};  // of llm_comm.dsl, "dsl:NAME"; else empty
  // Figures of the measurement, for people; null where there is none. Nothing is chosen by them.
  Node us = {};
  Node runner_up = {};
};

struct Table {
  std::string name;
  std::string device = {};  // by the driver's name
  uint64_t world = 0;
  uint64_t max_message_bytes = 0;
  std::vector<Row> rows = {};  // those of one operation are sorted by size
  Node content = {};  // all else that the file says, checked: limits, rows of linear layers and of several nodes
};

// The table of a file, or of its text. Throws FileError, which says what would be valid.
Table read_table(const std::string& path);
Table parse_table(const std::string& name, std::string_view text);

struct EmbeddedTable {
  const char* name;
  const char* text;
};
// Made of configs/ by the build.
const std::vector<EmbeddedTable>& embedded_tables();
// The tables that come with llm_comm.
const std::vector<Table>& shipped_tables();

}  // namespace llm_comm::host
