# The NCCL library's part that is the same wherever it is built: its sources, and the tuning tables of configs/ compiled in.
#
# llm_comm_nccl_sources(<list variable>)         what does not know the device; cuda/device.cpp or
#                                                emulated/device.cpp comes beside it
# llm_comm_nccl_link_options(<target>)           exports NCCL's API and nothing else
set(LLM_COMM_NCCL_ROOT "${CMAKE_CURRENT_LIST_DIR}/..")
get_filename_component(LLM_COMM_NCCL_ROOT "${LLM_COMM_NCCL_ROOT}" ABSOLUTE)
include("${LLM_COMM_NCCL_ROOT}/cmake/shared_library.cmake")

function(llm_comm_nccl_sources variable)
  set(sources agreement api bootstrap communicator communicators descriptors group hub interface log options own
              peer_watch real_library selection sockets table unique_id workspaces)
  list(TRANSFORM sources PREPEND "${LLM_COMM_NCCL_ROOT}/csrc/nccl/")
  list(TRANSFORM sources APPEND ".cpp")

  file(GLOB tables CONFIGURE_DEPENDS "${LLM_COMM_NCCL_ROOT}/configs/tune_*.yaml")
  set(rows "")
  foreach(table IN LISTS tables)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${table}")
    get_filename_component(name "${table}" NAME)
    file(READ "${table}" text)
    string(APPEND rows "      {\"${name}\", R\"yaml(${text})yaml\"},\n")
  endforeach()
  set(embedded "${CMAKE_CURRENT_BINARY_DIR}/generated/nccl/embedded_tables.cpp")
  llm_comm_write("${embedded}"
"// Written by cmake/nccl.cmake from configs/.
#include \"nccl/table.h\"

namespace llm_comm::nccl {

const std::vector<EmbeddedTable>& embedded_tables() {
  static const std::vector<EmbeddedTable> tables = {
${rows}  };
  return tables;
}

}  // namespace llm_comm::nccl
")
  set(${variable} ${sources} "${embedded}" PARENT_SCOPE)
endfunction()

function(llm_comm_nccl_link_options target)
  llm_comm_shared_library(${target} "${LLM_COMM_NCCL_ROOT}/csrc/nccl/exports.map")
endfunction()
