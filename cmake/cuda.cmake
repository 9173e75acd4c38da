# Looks for a CUDA compiler, where LLM_COMM_CUDA is not OFF, and enables the language. Sets
#
#   LLM_COMM_HAS_CUDA           1 or 0
#   LLM_COMM_NVCC_VERSION       13.0.88; empty without CUDA, as the next two
#   LLM_COMM_CUDA_ARCHS         80,90: compute capabilities with machine code
#   LLM_COMM_CUDA_PTX_ARCHS     90: those with PTX
#   no_cuda_reason              why there are no CUDA kernels
set(LLM_COMM_HAS_CUDA 0)
set(LLM_COMM_NVCC_VERSION "")
set(no_cuda_reason "LLM_COMM_CUDA=OFF")

if(NOT LLM_COMM_CUDA STREQUAL "OFF")
  # The toolkit's usual place is often not on PATH.
  find_program(LLM_COMM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
  # A command, as CXX is: "ccache nvcc", or nvcc with options.
  separate_arguments(from_environment UNIX_COMMAND "$ENV{CUDACXX}")
  if(CMAKE_CUDA_COMPILER)
    set(nvcc "${CMAKE_CUDA_COMPILER}")
  elseif(NOT from_environment STREQUAL "")
    set(nvcc "${from_environment}")
    list(GET nvcc 0 first_word)
    get_filename_component(first_word "${first_word}" NAME)
    if(NOT first_word MATCHES nvcc AND nvcc MATCHES ";")
      list(POP_FRONT nvcc launcher)
      set(CMAKE_CUDA_COMPILER_LAUNCHER "${launcher}" CACHE STRING "What runs nvcc, by CUDACXX")
    endif()
  elseif(LLM_COMM_NVCC)
    set(nvcc "${LLM_COMM_NVCC}")
  else()
    set(nvcc "")
  endif()

  # enable_language() ends with an error where nvcc does not work, and check_language() takes as long as it: two seconds.
  set(nvcc_works FALSE)
  if(nvcc)
    set(probe "${CMAKE_BINARY_DIR}/CMakeFiles/nvcc_probe")
    file(WRITE "${probe}.cu" "__global__ void probe() {}\n")
    set(host_compiler "")
    if(CMAKE_CUDA_HOST_COMPILER)
      set(host_compiler -ccbin "${CMAKE_CUDA_HOST_COMPILER}")
    elseif(NOT "$ENV{CUDAHOSTCXX}" STREQUAL "")
      set(host_compiler -ccbin "$ENV{CUDAHOSTCXX}")
    endif()
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER_LAUNCHER} ${nvcc} ${host_compiler} -c "${probe}.cu" -o "${probe}.o" RESULT_VARIABLE nvcc_failed
                    OUTPUT_FILE "${probe}.log" ERROR_FILE "${probe}.log")
    if(nvcc_failed EQUAL 0)
      set(nvcc_works TRUE)
    endif()
  endif()

  list(JOIN nvcc " " nvcc_command)
  if(nvcc_works)
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE nvcc_banner ERROR_QUIET)
    if(nvcc_banner MATCHES "V([0-9]+\\.[0-9]+\\.[0-9]+)")
      set(LLM_COMM_NVCC_VERSION "${CMAKE_MATCH_1}")
    endif()
    if(LLM_COMM_NVCC_VERSION VERSION_GREATER_EQUAL 12.4)
      set(LLM_COMM_HAS_CUDA 1)
    else()
      set(no_cuda_reason "${nvcc_command} is not nvcc 12.4 or newer, whose assembler knows FP8 in mma.sync")
      set(LLM_COMM_NVCC_VERSION "")
    endif()
  elseif(nvcc)
    set(no_cuda_reason "${nvcc_command} does not compile a test program: the host compiler may be too new for it (CUDAHOSTCXX "
                       "names another), and ${CMAKE_BINARY_DIR}/CMakeFiles/nvcc_probe.log holds what they said")
    list(JOIN no_cuda_reason "" no_cuda_reason)
  else()
    set(no_cuda_reason "no nvcc (looked at CUDACXX, PATH, CUDA_HOME, CUDA_PATH and /usr/local/cuda)")
  endif()
  if(LLM_COMM_CUDA STREQUAL "ON" AND NOT LLM_COMM_HAS_CUDA)
    message(FATAL_ERROR "LLM_COMM_CUDA=ON, but ${no_cuda_reason}. "
                        "Set CUDACXX to the path of nvcc, or LLM_COMM_CUDA=OFF for the emulator alone.")
  elseif(nvcc AND NOT LLM_COMM_HAS_CUDA)
    # Whoever has nvcc expects CUDA kernels, and would notice only where an engine does not use them.
    message(WARNING "There will be no CUDA kernels: ${no_cuda_reason}. "
                    "LLM_COMM_CUDA=ON makes this an error, OFF asks for the emulator alone.")
  endif()
endif()

set(LLM_COMM_CUDA_ARCHS "")
set(LLM_COMM_CUDA_PTX_ARCHS "")
if(LLM_COMM_HAS_CUDA)
  # Chosen before enable_language(), which would otherwise fill in the compiler's own default.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    if(LLM_COMM_NVCC_VERSION VERSION_GREATER_EQUAL 12.8)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
    else()  # sm_100 is not known yet; its GPUs run the PTX of sm_90.
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    endif()
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${nvcc}")
  endif()
  enable_language(CUDA)
  # The toolkit that belongs to this nvcc. Its runtime is linked statically: the module then works beside whichever
  # runtime torch brings, and the driver's functions are asked for at run time, so that it loads without a driver.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  find_package(CUDAToolkit 12.4 REQUIRED)

  foreach(arch IN LISTS CMAKE_CUDA_ARCHITECTURES)
    if(NOT arch MATCHES "^([0-9]+[af]?)(-real|-virtual)?$")
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES holds '${arch}': "
                          "name compute capabilities, for example 90-real or 80-real;90")
    endif()
    if(NOT CMAKE_MATCH_2 STREQUAL "-virtual")
      list(APPEND LLM_COMM_CUDA_ARCHS "${CMAKE_MATCH_1}")
    endif()
    if(NOT CMAKE_MATCH_2 STREQUAL "-real")
      list(APPEND LLM_COMM_CUDA_PTX_ARCHS "${CMAKE_MATCH_1}")
    endif()
  endforeach()
  list(JOIN LLM_COMM_CUDA_ARCHS "," LLM_COMM_CUDA_ARCHS)
  list(JOIN LLM_COMM_CUDA_PTX_ARCHS "," LLM_COMM_CUDA_PTX_ARCHS)
endif()
