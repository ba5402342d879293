// Tensor maps: how the copy engine of sm_90 finds boxes of rows in device memory, and how it lays them out in shared
// memory.
#pragma once

#include <cuda.h>

#include "../../../../../core/views.hpp"
#include "../../../device/copy.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Maps for boxes of `box_rows` neighbouring rows, 64 elements of each, for keys and for values. Without boxes, rows
/// are copied element by element.
struct row_maps {
  CUtensorMap k, v;
  index_t box_rows = 0;
  index_t head_step = 1, outer_step = 1;  ///< 0 where heads, or sequences, have no stride
};

/// How many neighbouring slots, at most `most`, are sure to be contiguous rows if the first is a multiple of that
/// number. 0: the table guarantees none.
template <class Table>
index_t rows_together(const Table& table, index_t most) {
  if constexpr (paged_table<Table>) {
    for (; most >= 8; most /= 2) {
      if (table.page % most == 0) return most;
    }
    return 0;
  } else {
    return std::is_same_v<Table, contiguous> || std::is_same_v<Table, ragged> ? most : 0;
  }
}

/// The map of rows of two-byte elements. A box has 128 bytes of each row, whose 16-byte chunks are swizzled as products
/// of four warps read them. Returns false if the copy engine does not accept the strides.
inline bool map_rows(CUtensorMap& map, const void* rows, int dim, const row_strides& strides, index_t box_rows) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(error == cudaSuccess ? found : nullptr);
  }();
  if (!encode || strides.dim != 1) return false;
  constexpr cuuint64_t many = 0x7fffffff;  // only the device knows how many rows are stored
  const cuuint64_t sizes[4] = {cuuint64_t(dim), many, many, many};
  cuuint64_t bytes[3];
  const offset_t steps[3] = {strides.token, strides.head, strides.outer};
  for (int i = 0; i < 3; ++i) {
    if (steps[i] < 0 || steps[i] % 8 != 0 || steps[i] >> 38 != 0) return false;
    bytes[i] = steps[i] > 0 ? cuuint64_t(steps[i]) * 2 : 16;  // no stride: the index that it multiplies is 0
  }
  const cuuint32_t box[4] = {64, cuuint32_t(box_rows), 1, 1}, each[4] = {1, 1, 1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(rows), sizes, bytes, box, each,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// The maps of a view, with boxes of at most `most` rows. No maps if the copy engine cannot read its rows.
template <class View>
row_maps map_rows_of(const View& view, index_t most) {
  row_maps maps;
  if constexpr (View::is_raw && sizeof(typename View::element_type) == 2) {
    const row_strides &k = view.k_strides, &v = view.v_strides;
    const index_t together = rows_together(view.table, most);
    if (together == 0 || k.token == 0 || v.token == 0) return maps;
    if ((k.head == 0) != (v.head == 0) || (k.outer == 0) != (v.outer == 0)) return maps;
    if (!map_rows(maps.k, view.k, View::k_dim, k, together)) return maps;
    if (!map_rows(maps.v, view.v, View::v_dim, v, together)) return maps;
    maps.box_rows = together, maps.head_step = k.head != 0, maps.outer_step = k.outer != 0;
  }
  return maps;
}

/// Copies 64 elements from `element` on, of `box_rows` rows, to shared memory; `barrier` counts their bytes.
__device__ __forceinline__ void copy_box(std::uint32_t to, const CUtensorMap& map, int element, offset_t row,
                                         index_t head, offset_t outer, std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(&map), "r"(element), "r"(int(row)), "r"(head), "r"(int(outer)), "r"(barrier)
      : "memory");
#endif
}

}  // namespace cuda
TESSERA_NAMESPACE_END
