# From the lists of algorithms (csrc/algorithms/registry.def, csrc/optional/registry.def, and lists of the user's own) to sources in
# <build>/generated/algorithms:
#
#   registry.h                              the list as a C++ type, for everybody who asks what there is
#   kinds.h                                 the OperationKind of each algorithm: its place in the list, from 1
#   kernels_<descriptor>_<type>_<half>.cu   kernels for GPUs, of one data type and half of the worlds: they take nvcc long
#   kernels_<descriptor>.cu                 all of an algorithm, in place of those (LLM_COMM_SPLIT_KERNELS=OFF)
#   kernels_<descriptor>.cpp                the same for the emulator
#   linear_<operands>_<type>_<parts>.cu, .cpp   kernels of linear layers, of one type of operands and of results, and number of parts of the weight
#   linear_<operands>_<type>_<parts>_blocks.cu, .cpp   the same with scales of blocks
#   experts_<operands>_<type>.cu, .cpp             kernels of experts, of their router, and of layers of q, k and v
#
# llm_comm_algorithm_sources(<list variable> cu|cpp) and llm_comm_linear_sources name the sources to compile; include directories are csrc,
# csrc/include and <build>/generated. The files that a list names are relative to its own directory, or to csrc.
option(LLM_COMM_SPLIT_KERNELS "A source for GPUs for each algorithm, data type and half of the worlds, for many cores; one source takes less CPU time" ON)
set(LLM_COMM_EXTRA_ALGORITHMS "" CACHE STRING "Lists of more algorithms, in the format of csrc/algorithms/registry.def")

get_filename_component(LLM_COMM_CSRC "${CMAKE_CURRENT_LIST_DIR}/../csrc" ABSOLUTE)
set(LLM_COMM_GENERATED "${CMAKE_CURRENT_BINARY_DIR}/generated")
set(LLM_COMM_WORLDS kEven kOdd)
# Of x and weight, and of results; whether scales are those of blocks.
set(LLM_COMM_LINEAR_TYPES kBFloat16/kBFloat16/false kFloat16/kFloat16/false kFloat8/kBFloat16/false
    kFloat8/kFloat16/false kFloat8/kBFloat16/true kFloat8/kFloat16/true)
set(LLM_COMM_LINEAR_WEIGHT_PARTS 1 2)
# Host code of linear layers, experts, routers, and layers of q, k and v.
set(LLM_COMM_LINEAR_HOST experts.cpp layer.cpp rope.cpp router.cpp)
list(TRANSFORM LLM_COMM_LINEAR_HOST PREPEND "${LLM_COMM_CSRC}/algorithms/linear/")
set(LLM_COMM_ALGORITHM_LISTS "${LLM_COMM_CSRC}/algorithms/registry.def" "${LLM_COMM_CSRC}/optional/registry.def"
    ${LLM_COMM_EXTRA_ALGORITHMS})

# Sets in the caller: headers, descriptors, and types: those of a descriptor with a space between them.
function(llm_comm_read_algorithms)
  set(headers "")
  set(descriptors "")
  set(types "")
  foreach(list IN LISTS LLM_COMM_ALGORITHM_LISTS)
    get_filename_component(list "${list}" ABSOLUTE)
    get_filename_component(directory "${list}" DIRECTORY)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${list}")
    file(STRINGS "${list}" rows REGEX "^[A-Z]")
    foreach(row IN LISTS rows)
      if(NOT row MATCHES "^LLM_COMM_ALGORITHM\\(([^ ,]+), *([A-Za-z0-9_]+), *(k[A-Za-z0-9 ]+)\\)$")
        message(FATAL_ERROR "${list}: '${row}' is not LLM_COMM_ALGORITHM(file, descriptor, data types)")
      endif()
      list(APPEND descriptors "${CMAKE_MATCH_2}")
      list(APPEND types "${CMAKE_MATCH_3}")
      if(EXISTS "${directory}/${CMAKE_MATCH_1}")
        list(APPEND headers "${directory}/${CMAKE_MATCH_1}")
      else()
        list(APPEND headers "${CMAKE_MATCH_1}")
      endif()
    endforeach()
  endforeach()
  set(headers "${headers}" PARENT_SCOPE)
  set(descriptors "${descriptors}" PARENT_SCOPE)
  set(types "${types}" PARENT_SCOPE)
endfunction()

# Leaves a file alone that would not change, so that nothing is compiled again.
function(llm_comm_write file content)
  if(EXISTS "${file}")
    file(READ "${file}" present)
    if(present STREQUAL content)
      return()
    endif()
  endif()
  file(WRITE "${file}" "${content}")
endfunction()

function(llm_comm_write_registry)
  llm_comm_read_algorithms()
  set(includes "")
  foreach(header IN LISTS headers)
    string(APPEND includes "#include \"${header}\"\n")
  endforeach()
  set(kinds "")
  set(kind 0)
  set(extern "")
  foreach(descriptor types_of_one IN ZIP_LISTS descriptors types)
    math(EXPR kind "${kind} + 1")
    string(APPEND kinds "struct ${descriptor};\ntemplate <>\ninline constexpr OperationKind kKindOf<${descriptor}>{${kind}};\n")
    string(REPLACE " " ";" types_of_one "${types_of_one}")
    list(JOIN types_of_one ", DataType::" arguments)
    string(APPEND extern "static_assert(serves_exactly<${descriptor}, DataType::${arguments}>(), \"data types in the row\");\n")
    foreach(type IN LISTS types_of_one)
      foreach(half IN LISTS LLM_COMM_WORLDS)
        string(APPEND extern "extern template struct Kernels<${descriptor}, DataType::${type}, Worlds::${half}>;\n")
      endforeach()
    endforeach()
  endforeach()
  llm_comm_write("${LLM_COMM_GENERATED}/algorithms/kinds.h"
"// Written by cmake/algorithms.cmake.
#pragma once

#include \"algorithms/algorithm.h\"

namespace llm_comm::inline LLM_COMM_TARGET {

${kinds}
}  // namespace llm_comm::inline LLM_COMM_TARGET
")
  list(JOIN descriptors ", " all)
  llm_comm_write("${LLM_COMM_GENERATED}/algorithms/registry.h"
"// Written by cmake/algorithms.cmake: the algorithms of this build.
#pragma once

#include \"algorithms/kernels.h\"
${includes}
namespace llm_comm::inline LLM_COMM_TARGET {

using Registry = AlgorithmList<${all}>;

${extern}
}  // namespace llm_comm::inline LLM_COMM_TARGET
")
endfunction()

function(llm_comm_write_kernels source header instantiations)
  llm_comm_write("${source}"
"// Written by cmake/algorithms.cmake.
#include \"algorithms/kernels.h\"
#include \"${header}\"

namespace llm_comm::inline LLM_COMM_TARGET {

${instantiations}
}  // namespace llm_comm::inline LLM_COMM_TARGET
")
endfunction()

function(llm_comm_algorithm_sources variable extension)
  llm_comm_read_algorithms()
  set(split OFF)
  if(extension STREQUAL "cu" AND LLM_COMM_SPLIT_KERNELS)
    set(split ON)
  endif()
  set(sources "")
  foreach(header descriptor types_of_one IN ZIP_LISTS headers descriptors types)
    set(all "")
    string(REPLACE " " ";" types_of_one "${types_of_one}")
    foreach(type IN LISTS types_of_one)
      foreach(half IN LISTS LLM_COMM_WORLDS)
        set(one "template struct Kernels<${descriptor}, DataType::${type}, Worlds::${half}>;\n")
        string(APPEND all "${one}")
        if(split)
          set(source "${LLM_COMM_GENERATED}/algorithms/kernels_${descriptor}_${type}_${half}.cu")
          llm_comm_write_kernels("${source}" "${header}" "${one}")
          list(APPEND sources "${source}")
        endif()
      endforeach()
    endforeach()
    if(NOT split)
      set(source "${LLM_COMM_GENERATED}/algorithms/kernels_${descriptor}.${extension}")
      llm_comm_write_kernels("${source}" "${header}" "${all}")
      list(APPEND sources "${source}")
    endif()
  endforeach()
  set(${variable} "${sources}" PARENT_SCOPE)
endfunction()

function(llm_comm_linear_sources variable extension)
  set(sources "")
  foreach(types IN LISTS LLM_COMM_LINEAR_TYPES)
    string(REPLACE "/" ";" types "${types}")
    list(GET types 0 operands)
    list(GET types 1 type)
    list(GET types 2 block_scales)
    set(suffix "")
    if(block_scales)
      set(suffix "_blocks")
    endif()
    foreach(parts IN LISTS LLM_COMM_LINEAR_WEIGHT_PARTS)
      set(source "${LLM_COMM_GENERATED}/algorithms/linear_${operands}_${type}_${parts}${suffix}.${extension}")
      llm_comm_write("${source}"
"// Written by cmake/algorithms.cmake.
#include \"algorithms/linear/kernel.cuh\"

namespace llm_comm::inline LLM_COMM_TARGET {

template struct LinearKernels<OperandType::${operands}, DataType::${type}, ${parts}, ${block_scales}>;

}  // namespace llm_comm::inline LLM_COMM_TARGET
")
      list(APPEND sources "${source}")
    endforeach()
    if(NOT block_scales)
      set(others "")
      if(operands STREQUAL type)
        set(others "template struct RouterKernels<OperandType::${operands}, DataType::${type}>;\n")
        string(APPEND others "template struct RopeKernels<OperandType::${operands}, DataType::${type}>;\n")
      endif()
      set(source "${LLM_COMM_GENERATED}/algorithms/experts_${operands}_${type}.${extension}")
      llm_comm_write("${source}"
"// Written by cmake/algorithms.cmake.
#include \"algorithms/linear/experts.cuh\"
#include \"algorithms/linear/rope.cuh\"
#include \"algorithms/linear/router.cuh\"

namespace llm_comm::inline LLM_COMM_TARGET {

template struct ExpertsKernels<OperandType::${operands}, DataType::${type}>;
${others}
}  // namespace llm_comm::inline LLM_COMM_TARGET
")
      list(APPEND sources "${source}")
    endif()
  endforeach()
  set(${variable} "${sources}" PARENT_SCOPE)
endfunction()
