// Tuning tables: what a file says, read and checked once for Communicator and for the NCCL library.
//
// A face that cannot run a row (the NCCL library runs no fused operation, no program, nothing by the NVLink switch) leaves it out itself.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "algorithms/launch_shape.h"

namespace llm_comm::host {

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;

// The fastest of the other algorithms where a row was measured.
struct RunnerUp {
  std::string algorithm;
  std::string protocol;
  double us;  // a call
};

// How messages of up to `up_to` bytes run; of an operation on parts, bytes of the largest part.
struct Row {
  std::string operation;
  uint64_t up_to;
  uint32_t algorithm;  // its number in the registry; of a row for a program 0
  Choice choice;
  std::string program = {};  // of llm_comm.dsl, "dsl:NAME"; else empty
  // Figures of the measurement, for people. Nothing is chosen by them.
  std::optional<double> us = {};  // a call
  std::optional<RunnerUp> runner_up = {};
};

// How a linear layer of up to `up_to` tokens runs, and whether that is faster than cuBLAS. Tunables of 0: as the kernel finds best.
struct LayerRow {
  std::string operation;
  uint64_t outputs;
  uint64_t inputs;
  bool pdl;
  uint64_t up_to;
  bool is_faster;
  uint64_t block_outputs;
  uint64_t stages;
  uint64_t stage_boxes;
  std::optional<double> us;
  std::optional<double> cublas_us;
};

// How an all-reduce of up to `up_to` bytes goes over so many nodes, and whether that is faster than NCCL over all ranks.
struct NodeRow {
  uint64_t nodes;
  uint64_t up_to;
  std::string exchange;
  uint64_t chunk_bytes;
  bool is_faster;
  std::optional<double> us = {};
  std::optional<double> nccl_us = {};
};

// On what algorithms by the NVLink switch were tested.
struct MulticastEntry {
  std::string device;
  std::string driver;
  uint64_t world;
  std::string date;
};

struct Table {
  std::string name;
  std::string device = {};  // by the driver's name
  uint64_t world = 0;
  uint64_t max_message_bytes = 0;
  uint64_t max_fused_bytes = kMiB;
  uint64_t fused_blocks = 0;
  uint64_t min_symmetric_bytes = kMiB;                    // of operations that are not in the next one
  std::map<std::string, uint64_t> min_symmetric_of = {};  // by operation
  std::optional<MulticastEntry> multicast = {};
  std::vector<Row> rows = {};  // those of one operation are sorted by size
  std::vector<LayerRow> layers = {};
  std::vector<NodeRow> nodes = {};
  std::vector<std::pair<std::string, std::string>> measured = {};  // when, and by what
};

// The table of a file, or of its text. Throws FileError (yaml.h), which says what would be valid.
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
