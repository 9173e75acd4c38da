# The NCCL library's part that is the same wherever it is built: its sources.
#
# llm_comm_nccl_sources(<list variable>)         what does not know the device; cuda/device.cpp or
#                                                emulated/device.cpp comes beside it
# llm_comm_nccl_link_options(<target>)           exports NCCL's API and nothing else
set(LLM_COMM_NCCL_ROOT "${CMAKE_CURRENT_LIST_DIR}/..")
get_filename_component(LLM_COMM_NCCL_ROOT "${LLM_COMM_NCCL_ROOT}" ABSOLUTE)
include("${LLM_COMM_NCCL_ROOT}/cmake/shared_library.cmake")

function(llm_comm_nccl_sources variable)
  set(sources agreement api bootstrap communicator communicators descriptors group hub interface log options own
              peer_watch real_library selection sockets unique_id workspaces)
  list(TRANSFORM sources PREPEND "${LLM_COMM_NCCL_ROOT}/csrc/nccl/")
  list(TRANSFORM sources APPEND ".cpp")
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()

function(llm_comm_nccl_link_options target)
  llm_comm_shared_library(${target} "${LLM_COMM_NCCL_ROOT}/csrc/nccl/exports.map")
endfunction()
