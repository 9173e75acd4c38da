# Compiles the algorithms for GPUs of AMD, to assembly that tools/check_gcn.py reads and the interpreter of
# tests/deterministic/gcn runs (LLM_COMM_HIP=CHECK). Nothing of it is linked or installed.
#
#   cmake -S . -B build/amd -DLLM_COMM_HIP=CHECK -DLLM_COMM_CUDA=OFF -DLLM_COMM_PYTHON=OFF -DLLM_COMM_HIP_COMPILER=clang++-19
#   cmake --build build/amd --target hip_gfx942
#
# Targets: hip_<architecture>, all algorithms; hip_<architecture>_<descriptor>, one. Files: <build>/hip/<architecture>/
# kernels_<descriptor>.s. Algorithms by NVLink multicast and linear layers have no kernels there.
set(LLM_COMM_HIP_COMPILER clang++ CACHE STRING "Command of clang 19 or later, with a semicolon between its words")
set(LLM_COMM_HIP_ARCHS gfx942 gfx950 CACHE STRING "Architectures")
set(LLM_COMM_HIP_FLAGS "" CACHE STRING "More flags, for tests: include directories ahead of those of the sources, for example")

llm_comm_algorithm_sources(hip_sources cpp)
list(FILTER hip_sources EXCLUDE REGEX "Switch|LdReduce")
foreach(arch IN LISTS LLM_COMM_HIP_ARCHS)
  set(assemblies "")
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/hip/${arch}")
  foreach(source IN LISTS hip_sources)
    get_filename_component(name "${source}" NAME_WE)
    set(assembly "${PROJECT_BINARY_DIR}/hip/${arch}/${name}.s")
    add_custom_command(
      OUTPUT "${assembly}"
      # -ffp-contract=off: results are the same bits on all targets.
      COMMAND ${LLM_COMM_HIP_COMPILER} -x hip -std=c++20 --offload-arch=${arch} --cuda-device-only -nogpulib -nogpuinc
              -O3 -DNDEBUG -ffp-contract=off -Wall -Wextra -Werror ${LLM_COMM_HIP_FLAGS} -I "${PROJECT_SOURCE_DIR}/csrc/include"
              -I "${PROJECT_SOURCE_DIR}/csrc" -I "${LLM_COMM_GENERATED}" -S
              # The driver makes no list of headers of a device; the compiler behind it does.
              -Xclang -dependency-file -Xclang "${assembly}.d" -Xclang -MT -Xclang "${assembly}" -o "${assembly}" "${source}"
      DEPENDS "${source}"
      DEPFILE "${assembly}.d"
      COMMENT "${arch}/${name}.s"
      VERBATIM)
    list(APPEND assemblies "${assembly}")
    string(REPLACE "kernels_" "hip_${arch}_" target "${name}")
    add_custom_target(${target} DEPENDS "${assembly}")
  endforeach()
  add_custom_target(hip_${arch} DEPENDS ${assemblies})
endforeach()
