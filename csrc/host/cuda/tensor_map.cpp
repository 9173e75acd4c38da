#include "host/cuda/tensor_map.h"

#include <cstring>

#include "host/cuda/driver.h"

namespace llm_comm::host {

// Dimensions, innermost first: elements of a tile row, rows of a part, parts (unless the matrix is plain), tiles. One
// fetch copies several tiles, each row by row. Rows beyond a part are filled with zeros and never read from the next
// part.
void encode_tensor_map(MatrixView& matrix, uint32_t parts, uint32_t box_parts, uint32_t box_rows, uint32_t boxes,
                       BoxUse use) {
  // TMA only moves elements, so bf16 stands for every type: for fp16, and for two FP8 elements.
  constexpr uint32_t kBoxElements = kBoxRowBytes / 2;
  const bool is_plain = box_parts == 0;
  const uint32_t parts_of_box = is_plain ? 1 : box_parts;
  const uint32_t outermost = is_plain ? 2 : 3;
  const uint64_t row_bytes = matrix.row_bytes;
  cuuint64_t sizes[] = {kBoxElements, matrix.rows, parts, 0};
  cuuint64_t strides[] = {row_bytes, matrix.rows * row_bytes, 0};  // of all dimensions but the innermost
  cuuint32_t box[] = {kBoxElements, box_rows / parts_of_box, parts_of_box, 0};
  sizes[outermost] = matrix.row_bytes / kBoxRowBytes;
  strides[outermost - 1] = kBoxRowBytes;
  box[outermost] = boxes;
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  static_assert(sizeof(map) == sizeof(matrix.map));
  check(Driver::get().tensor_map_encode_tiled(
            &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, outermost + 1, const_cast<void*>(matrix.data), sizes, strides, box,
            steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
            use == BoxUse::kOnce ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  std::memcpy(matrix.map, &map, sizeof(map));
}

}  // namespace llm_comm::host
