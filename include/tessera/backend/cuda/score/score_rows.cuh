// The scores of a batch on the device, as pooling, budgets and selectors read them.
#pragma once

#include "../../../core/prompt/prompt_reach.hpp"
#include "../../../core/types.hpp"
#include "../../../core/views.hpp"
#include "../device/check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Scores of every stored slot by row = sequence * kv_heads + head; every pointer is a device pointer. The newest
/// `tail` slots of a row are kept whatever their score; the others are its candidates. The device's layer_scores.
struct score_rows {
  struct batch_strides {
    offset_t sequence = 0;
    offset_t head = 0;
  };

  const float* scores = nullptr;
  const offset_t* offsets = nullptr;  ///< [rows], where a row begins; null: row * row_stride
  offset_t row_stride = 0;
  index_t sequences = 0;
  index_t kv_heads = 0;
  const index_t* lengths = nullptr;  ///< as kv_view has them
  batch_strides length_strides{};
  index_t tail = 0;
  const index_t* tails = nullptr;  ///< [sequences], in place of `tail` where turns differ; null: one for all
  const index_t* budgets =
      nullptr;  ///< [sequences], in place of the budget's tokens where plans differ; null: the same
  const index_t* settled = nullptr;     ///< [rows], first slots of each that stay and do not compete; null: none
  const index_t* earlier = nullptr;     ///< [rows], of those the ones from before this turn; goes with `settled`
  const prompt_reach* reach = nullptr;  ///< [sequences]; goes with `settled`

  TESSERA_HD offset_t begin(index_t row) const { return offsets ? offsets[row] : row * row_stride; }
  TESSERA_HD index_t tokens(index_t sequence, index_t head) const {
    return lengths[sequence * length_strides.sequence + head * length_strides.head];
  }
  TESSERA_HD index_t protected_tail(index_t sequence) const { return tails ? tails[sequence] : tail; }
  TESSERA_HD index_t longest(index_t sequence) const {
    index_t most = 0;
    for (index_t h = 0; h < kv_heads; ++h) {
      const index_t stored = tokens(sequence, h);
      most = stored > most ? stored : most;
    }
    return most;
  }
  TESSERA_HD index_t candidates(index_t sequence, index_t head) const {
    const index_t stored = tokens(sequence, head), kept = protected_tail(sequence);
    return stored > kept ? stored - kept : 0;
  }
  TESSERA_HD index_t settled_of(index_t row) const { return settled ? settled[row] : 0; }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
