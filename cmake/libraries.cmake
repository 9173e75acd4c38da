# What does not depend on Python, as targets: llm_comm_emulator, llm_comm_deterministic, llm_comm_host, llm_comm_nccl_emulated,
# and with CUDA llm_comm_cuda and llm_comm_nccl. A build of another version of Python takes them from this one by LLM_COMM_BUILT,
# through the two files that are written at the end.
include(cmake/algorithms.cmake)
include(cmake/nccl.cmake)
include(cmake/tables.cmake)
llm_comm_write_registry()
llm_comm_algorithm_sources(LLM_COMM_EMULATED_KERNELS cpp)
llm_comm_algorithm_sources(LLM_COMM_CUDA_KERNELS cu)
llm_comm_linear_sources(LLM_COMM_EMULATED_LINEAR cpp)
llm_comm_linear_sources(LLM_COMM_CUDA_LINEAR cu)
llm_comm_table_sources(LLM_COMM_TABLE_SOURCES)
list(APPEND LLM_COMM_EMULATED_KERNELS ${LLM_COMM_EMULATED_LINEAR})

set(LLM_COMM_BOUNDED_WAITS 1)
if(LLM_COMM_UNBOUNDED_WAITS)
  set(LLM_COMM_BOUNDED_WAITS 0)
endif()
configure_file(csrc/host/build_config.h.in "${PROJECT_BINARY_DIR}/generated/host/build_config.h" @ONLY)

# Include roots: <llm_comm/...> for what is installed, "algorithms/...", "host/..." and "emulator/..." within csrc.
add_library(llm_comm_headers INTERFACE)
target_include_directories(llm_comm_headers INTERFACE
  "${PROJECT_SOURCE_DIR}/csrc/include" "${PROJECT_SOURCE_DIR}/csrc" "${PROJECT_BINARY_DIR}/generated")
if(LLM_COMM_UNBOUNDED_WAITS)
  target_compile_definitions(llm_comm_headers INTERFACE LLM_COMM_UNBOUNDED_WAITS=1)
endif()
if(LLM_COMM_WERROR)
  # nvcc hands each flag to the host compiler; its own diagnostics are made errors separately.
  target_compile_options(llm_comm_headers INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Werror;-Werror=all-warnings>")
endif()

add_library(llm_comm_emulator STATIC ${LLM_COMM_EMULATOR_SOURCES})
target_link_libraries(llm_comm_emulator PUBLIC llm_comm_headers Threads::Threads rt)
target_compile_definitions(llm_comm_emulator PUBLIC LLM_COMM_EMULATOR=1)

# Not linked with anything here: Python links it with kernels that it compiles.
add_library(llm_comm_deterministic STATIC ${LLM_COMM_DETERMINISTIC_SOURCES})
target_link_libraries(llm_comm_deterministic PRIVATE llm_comm_headers)
target_compile_definitions(llm_comm_deterministic PRIVATE LLM_COMM_EMULATOR=1 LLM_COMM_DETERMINISTIC=1)

# They are most of the time of a build on many cores, and no time of theirs matters: emulated GPUs are for being right.
set_source_files_properties(${LLM_COMM_EMULATED_KERNELS} PROPERTIES COMPILE_OPTIONS "${LLM_COMM_QUICK_TO_COMPILE}")

# What the Python module and the NCCL library share.
add_library(llm_comm_host STATIC ${LLM_COMM_HOST_SOURCES} ${LLM_COMM_LINEAR_HOST} ${LLM_COMM_TABLE_SOURCES} ${LLM_COMM_EMULATED_KERNELS})
# UCX is loaded at run time, by name.
target_link_libraries(llm_comm_host PUBLIC llm_comm_headers llm_comm_emulator ${CMAKE_DL_LIBS})

if(LLM_COMM_HAS_CUDA)
  # Linear layers have instructions of sm_90 alone (wgmma), for which its code is made, and none that runs elsewhere. Where PTX is
  # to be made of sm_90 it is made without them.
  set(linear_archs ${CMAKE_CUDA_ARCHITECTURES})
  list(TRANSFORM linear_archs REPLACE "^90$" "90a-real;90-virtual")
  list(TRANSFORM linear_archs REPLACE "^90-real$" "90a-real")
  add_library(llm_comm_linear OBJECT ${LLM_COMM_CUDA_LINEAR})
  set_target_properties(llm_comm_linear PROPERTIES CUDA_ARCHITECTURES "${linear_archs}")
  target_link_libraries(llm_comm_linear PUBLIC llm_comm_headers)

  # All code for GPUs, and all that uses the CUDA runtime, once for the Python module and the NCCL library.
  add_library(llm_comm_cuda SHARED ${LLM_COMM_CUDA_SOURCES} ${LLM_COMM_CUDA_KERNELS} $<TARGET_OBJECTS:llm_comm_linear>)
  target_link_libraries(llm_comm_cuda PRIVATE llm_comm_headers $<LINK_ONLY:llm_comm_host> CUDA::cudart_static)
  llm_comm_shared_library(llm_comm_cuda csrc/host/cuda/exports.map)
  if(LLM_COMM_PTXAS_VERBOSE)
    foreach(target llm_comm_cuda llm_comm_linear)
      target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>")
    endforeach()
  endif()
endif()

# The library that stands in for NCCL, and the same over emulated GPUs, for tests.
llm_comm_nccl_sources(LLM_COMM_NCCL_SOURCES)
add_library(llm_comm_nccl_emulated SHARED ${LLM_COMM_NCCL_SOURCES} csrc/nccl/emulated/choice.cpp
            csrc/nccl/emulated/device.cpp)
target_link_libraries(llm_comm_nccl_emulated PRIVATE llm_comm_host)
llm_comm_nccl_link_options(llm_comm_nccl_emulated)
if(LLM_COMM_HAS_CUDA)
  add_library(llm_comm_nccl SHARED ${LLM_COMM_NCCL_SOURCES})
  # What selects is host code that does not know the target: it takes the emulator's, as the Python module does.
  target_compile_definitions(llm_comm_nccl PRIVATE LLM_COMM_EMULATOR=1)
  target_link_libraries(llm_comm_nccl PRIVATE llm_comm_headers llm_comm_cuda $<LINK_ONLY:llm_comm_host>)
  llm_comm_nccl_link_options(llm_comm_nccl)
endif()

# For LLM_COMM_BUILT. What it has to know beside the targets is what cmake/cuda.cmake has found.
set(targets llm_comm_headers llm_comm_emulator llm_comm_deterministic llm_comm_host llm_comm_nccl_emulated)
if(LLM_COMM_HAS_CUDA)
  list(APPEND targets llm_comm_cuda llm_comm_nccl)
endif()
export(TARGETS ${targets} FILE "${PROJECT_BINARY_DIR}/llm_comm_targets.cmake")
set(facts "set(LLM_COMM_BUILT_VERSION [[${LLM_COMM_VERSION}]])\n")
foreach(fact LLM_COMM_HAS_CUDA LLM_COMM_NVCC_VERSION LLM_COMM_CUDA_ARCHS LLM_COMM_CUDA_PTX_ARCHS no_cuda_reason)
  string(APPEND facts "set(${fact} [[${${fact}}]])\n")
endforeach()
llm_comm_write("${PROJECT_BINARY_DIR}/llm_comm_build.cmake" "${facts}")
