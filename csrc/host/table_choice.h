// Which tuning table serves a device, and the rows of devices without one: one rule for Communicator and for the NCCL library.
//
// In this order: the file that option `table` names; the user's installed file for the device and number of ranks; a shipped table of both;
// for emulated GPUs their own table; a shipped table of a near device; the general table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/launch_shape.h"

namespace llm_comm::host {

// A row of a tuning table: how messages of up to `up_to` bytes run; of an operation on parts, bytes of the largest part.
struct Row {
  std::string operation;
  uint64_t up_to;
  uint32_t algorithm;  // its number in the registry
  Choice choice;
};

// What a table was measured on.
struct MeasuredOn {
  std::string device;  // by the driver's name
  uint32_t world;
};

struct TableChoice {
  enum class Kind { kShipped, kEmulated, kNearest, kGeneral };
  Kind kind;
  size_t shipped = 0;        // of kShipped and kNearest: index of the table
  const char* nearest = "";  // of kNearest: short name of its device
};

// The table of a device where no file of the user's serves it. `compute_capability`: 90 for 9.0; 0 where it is not known, and then no
// device is near.
TableChoice choose_table(const std::string& device, uint32_t world, uint32_t sm_count, uint32_t compute_capability,
                         const std::vector<MeasuredOn>& shipped);

// The user's directory of tables: LLM_COMM_TABLE_DIR, else llm_comm/tables in XDG_CONFIG_HOME or ~/.config; nothing for a user without a
// home. It need not exist.
std::optional<std::string> table_directory();
// End of the names of files in that directory. A build that would misread the tables of this one takes another number.
inline constexpr const char* kTableSuffix = ".format1.yaml";
// The file in that directory: "nvidia_h200_8.format1.yaml".
std::string table_file_name(const std::string& device, uint32_t world);

struct DefaultTable {
  uint64_t max_message_bytes;
  std::vector<Row> rows;
};
// For devices without a table. It has rows of all_reduce alone: rows_of_parts serves the operations on parts.
DefaultTable general_table(uint32_t world, uint32_t sm_count);
// Small blocks: an emulated GPU has few lanes, and every path is to be taken.
DefaultTable emulated_table();
// Rows of all_gather or reduce_scatter for tables that have none.
std::vector<Row> rows_of_parts(const std::string& operation, uint32_t sm_count);

}  // namespace llm_comm::host
