// Chooses the tuning table for a device, and provides rows for devices without one. Communicator and the NCCL library
// share this rule. Order of preference:
// - the file of option `table`
// - the user's installed file for the device and number of ranks
// - a shipped table for both
// - the built-in table of emulated GPUs
// - a shipped table of a similar device
// - the general table
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/tables.h"

namespace llm_comm::host {

// The table that was chosen for a device.
struct FoundTable {
  Table table;
  // "option table", "user's directory", "shipped", "emulated", "nearest" or "general".
  std::string origin;
  std::string path = {};                  // of the table's file; empty if it is not a file
  bool is_tuned = true;                   // for this device and number of ranks, or the device is emulated
  std::string passed_over = {};           // the user's installed file, if it exists but is unusable
  std::vector<std::string> remarks = {};  // warnings that this process has not issued yet
};

// `named`: file of option `table`, or empty. `compute_capability`: 90 for 9.0; 0 if unknown, and then no device counts
// as similar. Throws FileError if the named file is unusable.
FoundTable find_table(const std::string& named, const std::string& device, uint32_t world, uint32_t sm_count,
                      uint32_t compute_capability);

// The user's table directory: LLM_COMM_TABLE_DIR, else llm_comm/tables in XDG_CONFIG_HOME or ~/.config. Empty for a
// user without a home directory. It need not exist.
std::optional<std::string> table_directory();
// Suffix of the files in that directory. A build that would misread tables of this format uses another number.
inline constexpr const char* kTableSuffix = ".format1.yaml";
// File name in that directory, for example "nvidia_h200_8.format1.yaml".
std::string table_file_name(const std::string& device, uint32_t world);

// Rows for an operation with shards, for tables without such rows.
std::vector<Row> rows_of_shards(const std::string& operation, uint32_t sm_count);

}  // namespace llm_comm::host
