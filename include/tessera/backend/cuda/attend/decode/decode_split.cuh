// Which blocks of decode attention read which rows, decided ahead: when the lengths of a batch change shape, not in a
// step.
#pragma once

#include "decode_plan.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// When the rows of a batch are split among the blocks of decode attention.
enum class decode_split {
  each_step,  ///< by every block, in every launch: even pieces, which may go on from one row into the next
  ahead       ///< by `decode_attention::split`, which whoever changes lengths by much calls: rows in whole blocks
};

namespace detail {

/// The split of a row of `tiles` tiles into parts of at most `most`.
__device__ inline index_t parts_in(index_t tiles, index_t most) { return (max)(1, (tiles + most - 1) / most); }

/// Makes `split [blocks]` from the lengths that the problem has now, by one warp. Every row gets a number of blocks of
/// its own such that the longest part is as short as possible: blocks begin no second row, and parts stay even while
/// rows grow. (TANGRAM, arXiv:2606.06302, algorithm 1, rounds each row's share of the blocks, which may need more of
/// them than there are.) Where even pieces are shorter, with what beginning a row costs them, or rows are many or
/// short, each step cuts for itself.
template <class View, class Out>
__global__ void __launch_bounds__(32)
    split_entry(const __grid_constant__ decode_problem<View, Out> p, split_piece* split, index_t blocks) {
  using block = decode_block<View, Out>;
  __shared__ index_t tiles[most_rows];
  const index_t lane = index_t(threadIdx.x), rows = p.view.sequences * p.view.kv_heads;
  index_t sum = 0, longest = 1;
  for (index_t row = lane; row < rows; row += 32) {
    tiles[row] = block::tiles_of(block::count_of(p, row));
    sum += tiles[row];
    longest = (max)(longest, tiles[row]);
  }
  sum = warp_sum(sum);
  longest = __reduce_max_sync(~0u, longest);
  __syncwarp();
  // The least length of a part with which all parts have a block.
  index_t least = (max)((sum + blocks - 1) / blocks, 1), most = longest;
  while (least < most) {
    const index_t middle = (least + most) / 2;
    index_t parts = 0;
    for (index_t row = lane; row < rows; row += 32) parts += parts_in(tiles[row], middle);
    if (warp_sum(parts) <= blocks) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  const index_t of_even_pieces = (sum + block::restart_tiles * rows + blocks - 1) / blocks;
  const bool ahead = rows <= blocks && most <= of_even_pieces && sum > 4 * rows;
  index_t done = 0;
  for (index_t first = 0; ahead && first < rows; first += 32) {
    const index_t row = first + lane, parts = row < rows ? parts_in(tiles[row], most) : 0;
    const index_t end = done + inclusive_sum(parts, int(lane));
    for (index_t part = 0; part < parts; ++part)
      split[end - parts + part] = {row, part, parts, split_piece::part_of_row};
    done = __shfl_sync(~0u, end, 31);
  }
  for (index_t piece = done + lane; piece < blocks; piece += 32)
    split[piece] = {0, 0, 0, ahead ? split_piece::nothing : split_piece::cut_each_step};
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
