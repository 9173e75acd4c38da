// Every all-reduce kernel by algorithm, data type and world size. All have one signature.
#pragma once

#include "kernels/all_reduce/one_shot.cuh"
#include "kernels/all_reduce/two_shot.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

enum class AllReduceAlgorithm : uint32_t { kOneShot = 0, kTwoShot = 1 };

using AllReduceKernel = void (*)(AllReduceArgs);

template <DataType D, int World>
AllReduceKernel all_reduce_kernel(AllReduceAlgorithm algorithm, bool single_tile) {
  if (algorithm == AllReduceAlgorithm::kOneShot) {
    return single_tile ? &all_reduce_one_shot<D, World, true> : &all_reduce_one_shot<D, World, false>;
  }
  return single_tile ? &all_reduce_two_shot<D, World, true> : &all_reduce_two_shot<D, World, false>;
}

template <DataType D>
AllReduceKernel all_reduce_kernel(AllReduceAlgorithm algorithm, int world_size, bool single_tile) {
  switch (world_size) {
    case 2:
      return all_reduce_kernel<D, 2>(algorithm, single_tile);
    case 3:
      return all_reduce_kernel<D, 3>(algorithm, single_tile);
    case 4:
      return all_reduce_kernel<D, 4>(algorithm, single_tile);
    case 5:
      return all_reduce_kernel<D, 5>(algorithm, single_tile);
    case 6:
      return all_reduce_kernel<D, 6>(algorithm, single_tile);
    case 7:
      return all_reduce_kernel<D, 7>(algorithm, single_tile);
    case 8:
      return all_reduce_kernel<D, 8>(algorithm, single_tile);
    default:
      return nullptr;
  }
}

// `single_tile`: the grid has a block for every tile. nullptr for a combination that does not exist.
inline AllReduceKernel all_reduce_kernel(AllReduceAlgorithm algorithm, DataType type, int world_size,
                                         bool single_tile) {
  switch (type) {
    case DataType::kBFloat16:
      return all_reduce_kernel<DataType::kBFloat16>(algorithm, world_size, single_tile);
    case DataType::kFloat16:
      return all_reduce_kernel<DataType::kFloat16>(algorithm, world_size, single_tile);
    case DataType::kFloat32:
      return all_reduce_kernel<DataType::kFloat32>(algorithm, world_size, single_tile);
  }
  return nullptr;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
