// What a selection reads and writes on the GPU.
#pragma once

#include "../../../core/selection.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// One number a row, on the device: `data[row / rows_per_entry * stride]`, or `value` for every row where `data` is
/// null.
struct row_numbers {
  const index_t* data = nullptr;
  index_t value = 0;
  index_t rows_per_entry = 1;
  index_t stride = 1;  ///< between entries, which may lie in structs
  __device__ index_t of(index_t row) const {
    return data ? data[offset_t(rows_per_entry == 1 ? row : row / rows_per_entry) * stride] : value;
  }
};

/// Rows of scores and where their chosen slots go; every pointer is a device pointer.
/// Row r of scores begins at `score_offsets[r]`, or at r * score_stride without offsets; `out` alike.
struct select_problem {
  const float* scores = nullptr;
  offset_t score_stride = 0;
  const offset_t* score_offsets = nullptr;
  row_numbers n;     ///< slots of a row
  row_numbers keep;  ///< slots to choose, the tail included; above n chooses all
  row_numbers tail;  ///< newest slots that are always chosen
  const index_t* skip =
      /// [rows], first slots that `n` and `keep` count and that are left out: slots count from there; null: none
      nullptr;
  index_t* out = nullptr;
  offset_t out_stride = 0;
  const offset_t* out_offsets = nullptr;
  index_t* counts = nullptr;  ///< [rows], min(keep, n), without what is skipped
  index_t rows = 0;           ///< 0: as many as the operation was made for
  index_t pad_to = 0;         ///< fills out with -1 from a row's count up to here

  __device__ const float* score_row(index_t row) const {
    return scores + (score_offsets ? score_offsets[row] : row * score_stride) + skipped(row);
  }
  __device__ index_t* out_row(index_t row) const {
    return out + (out_offsets ? out_offsets[row] : row * out_stride) + skipped(row);
  }
  __device__ index_t skipped(index_t row) const { return skip ? skip[row] : 0; }
  /// How many slots of a row there are, how many are chosen, and how many of the newest are whatever their score.
  struct bounds {
    index_t n, keep, tail;
  };
  __device__ bounds bounds_of(index_t row) const {
    const index_t before = skipped(row), stored = (max)(n.of(row) - before, 0);
    const index_t kept = (min)((max)(keep.of(row) - before, 0), stored);
    return {stored, kept, (min)((max)(tail.of(row), 0), kept)};
  }

  /// What was chosen, for the consumers of a selection.
  selection_view chosen() const { return {out, counts, out_offsets, out_stride}; }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
