// Every fused kernel by algorithm, data type and world size. All have one signature.
#pragma once

#include "kernels/all_reduce/kernels.cuh"
#include "kernels/fused/one_shot.cuh"
#include "kernels/fused/two_shot.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

using AddRmsNormKernel = void (*)(AddRmsNormArgs);

template <DataType D, int World, bool Quantized>
AddRmsNormKernel add_rms_norm_kernel(AllReduceAlgorithm algorithm, bool single_tile) {
  if (algorithm == AllReduceAlgorithm::kOneShot) {
    return single_tile ? &add_rms_norm_one_shot<D, World, true, Quantized>
                       : &add_rms_norm_one_shot<D, World, false, Quantized>;
  }
  return single_tile ? &add_rms_norm_two_shot<D, World, true, Quantized>
                     : &add_rms_norm_two_shot<D, World, false, Quantized>;
}

template <DataType D, int World>
AddRmsNormKernel add_rms_norm_kernel(AllReduceAlgorithm algorithm, bool single_tile, bool quantized) {
  return quantized ? add_rms_norm_kernel<D, World, true>(algorithm, single_tile)
                   : add_rms_norm_kernel<D, World, false>(algorithm, single_tile);
}

template <DataType D>
AddRmsNormKernel add_rms_norm_kernel(AllReduceAlgorithm algorithm, int world_size, bool single_tile, bool quantized) {
  switch (world_size) {
    case 2:
      return add_rms_norm_kernel<D, 2>(algorithm, single_tile, quantized);
    case 3:
      return add_rms_norm_kernel<D, 3>(algorithm, single_tile, quantized);
    case 4:
      return add_rms_norm_kernel<D, 4>(algorithm, single_tile, quantized);
    case 5:
      return add_rms_norm_kernel<D, 5>(algorithm, single_tile, quantized);
    case 6:
      return add_rms_norm_kernel<D, 6>(algorithm, single_tile, quantized);
    case 7:
      return add_rms_norm_kernel<D, 7>(algorithm, single_tile, quantized);
    case 8:
      return add_rms_norm_kernel<D, 8>(algorithm, single_tile, quantized);
    default:
      return nullptr;
  }
}

// `single_tile`: the grid has a block for every tile. `quantized`: the normed rows are FP8. nullptr for a combination that does not exist.
inline AddRmsNormKernel add_rms_norm_kernel(AllReduceAlgorithm algorithm, DataType type, int world_size,
                                            bool single_tile, bool quantized) {
  switch (type) {
    case DataType::kBFloat16:
      return add_rms_norm_kernel<DataType::kBFloat16>(algorithm, world_size, single_tile, quantized);
    case DataType::kFloat16:
      return add_rms_norm_kernel<DataType::kFloat16>(algorithm, world_size, single_tile, quantized);
    case DataType::kFloat32:
      break;
  }
  return nullptr;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
