# The NCCL library's part that is the same wherever it is built: its sources, and the tuning tables of configs/ compiled in.
#
# llm_comm_nccl_sources(<list variable>)         what does not know the device; cuda/device.cpp or
#                                                emulated/device.cpp comes beside it
# llm_comm_nccl_link_options(<target>)           exports NCCL's API and nothing else
set(LLM_COMM_NCCL_ROOT "${CMAKE_CURRENT_LIST_DIR}/..")
get_filename_component(LLM_COMM_NCCL_ROOT "${LLM_COMM_NCCL_ROOT}" ABSOLUTE)

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
  set(exports "${LLM_COMM_NCCL_ROOT}/csrc/nccl/exports.map")
  # nodelete: threads of it may be running when somebody closes it.
  target_link_options(${target} PRIVATE -Wl,--version-script,${exports} -Wl,--exclude-libs,ALL -Wl,-z,nodelete -Wl,-z,defs)
  set_target_properties(${target} PROPERTIES LINK_DEPENDS "${exports}" CXX_VISIBILITY_PRESET hidden
                        VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${target} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
endfunction()
