# llm_comm_table_sources(<list variable>)   what reads and chooses tuning tables, with those of configs/ compiled in; needs
#                                           cmake/algorithms.cmake
set(LLM_COMM_CONFIGS "${CMAKE_CURRENT_LIST_DIR}/../configs")

function(llm_comm_table_sources variable)
  set(sources table_choice tables yaml)
  list(TRANSFORM sources PREPEND "${LLM_COMM_CSRC}/host/")
  list(TRANSFORM sources APPEND ".cpp")

  file(GLOB tables CONFIGURE_DEPENDS "${LLM_COMM_CONFIGS}/tune_*.yaml")
  set(rows "")
  foreach(table IN LISTS tables)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${table}")
    get_filename_component(name "${table}" NAME)
    file(READ "${table}" text)
    string(APPEND rows "      {\"${name}\", R\"yaml(${text})yaml\"},\n")
  endforeach()
  set(embedded "${LLM_COMM_GENERATED}/host/embedded_tables.cpp")
  llm_comm_write("${embedded}"
"// Written by cmake/tables.cmake from configs/.
#include \"host/tables.h\"

namespace llm_comm::host {

const std::vector<EmbeddedTable>& embedded_tables() {
  static const std::vector<EmbeddedTable> tables = {
${rows}  };
  return tables;
}

}  // namespace llm_comm::host
")
  set(${variable} ${sources} "${embedded}" PARENT_SCOPE)
endfunction()
