// Which tuning table serves a device, and the rows of devices without one: one rule for Communicator and for the NCCL library.
//
// In this order: the file that option `table` names; the user's installed file for the device and number of ranks; a shipped table of both;
// for emulated GPUs their own table; a shipped table of a near device; the general table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/tables.h"

namespace llm_comm::host {

// A table that was found for a device.
struct FoundTable {
  Table table;
  // "option table", "user's directory", "shipped", "emulated", "nearest" or "general".
  std::string origin;
  std::string path = {};                  // of its file; nothing where there is none
  bool is_tuned = true;                   // for this device and number of ranks; emulated GPUs are not tuned for
  std::string passed_over = {};           // the user's installed file, where that cannot be used
  std::vector<std::string> remarks = {};  // warnings that this process has not had yet
};

// `named`: the file of option `table`; nothing without that option. `compute_capability`: 90 for 9.0; 0 where it is not known, and then
// no device is near. Throws FileError where the named file cannot be used.
FoundTable find_table(const std::string& named, const std::string& device, uint32_t world, uint32_t sm_count,
                      uint32_t compute_capability);

// The user's directory of tables: LLM_COMM_TABLE_DIR, else llm_comm/tables in XDG_CONFIG_HOME or ~/.config; nothing for a user without a
// home. It need not exist.
std::optional<std::string> table_directory();
// End of the names of files in that directory. A build that would misread the tables of this one takes another number.
inline constexpr const char* kTableSuffix = ".format1.yaml";
// The file in that directory: "nvidia_h200_8.format1.yaml".
std::string table_file_name(const std::string& device, uint32_t world);

// Rows of all_gather or reduce_scatter for tables that have none.
std::vector<Row> rows_of_parts(const std::string& operation, uint32_t sm_count);

}  // namespace llm_comm::host
