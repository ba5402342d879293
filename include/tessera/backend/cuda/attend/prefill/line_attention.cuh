// Attention of a prompt chunk along lines on the GPU: the host's calls.
#pragma once

#include <algorithm>
#include <string>

#include "detail/line_tiles.cuh"
#include "prefill_attention.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A kernel of prefill attention over line_tiles. The list uses the shared memory that the resident blocks leave free.
template <class Kernel, bool Hopper>
struct line_kernel {
  using kernel = Kernel;
  using tiles = line_tiles<Kernel, Hopper ? 7168 : 2048>;
  static constexpr int threads = Kernel::threads, resident = Kernel::resident;
  static constexpr int block_rows = Kernel::block_rows, Dv = Kernel::Dv;
  static constexpr int shared_bytes = Kernel::shared_bytes + tiles::memory_bytes;
};
template <class View, class Out, bool Hopper = compiled_for_hopper && fits_hopper_prefill<View>>
using line_kernel_of = line_kernel<prefill_kernel_of<View, Out, Hopper>, Hopper>;

/// As small_prefill_kernel_of, with room for the list, which takes no more memory in blocks of fewer warps.
template <class View, class Out>
struct small_line_kernel {
  using usual = line_kernel_of<View, Out, false>;
  using without_list = line_kernel<small_prefill_kernel<View, Out, small_prefill_warps<View>(0)>, false>;
  static constexpr int warps = small_prefill_warps<View>(without_list::tiles::memory_bytes);
  using type = std::conditional_t<(usual::shared_bytes <= least_shared_memory), usual,
                                  line_kernel<small_prefill_kernel<View, Out, warps>, false>>;
};
template <class View, class Out>
using small_line_kernel_of = typename small_line_kernel<View, Out>::type;

template <class View, class Out>
__global__ void __launch_bounds__((line_kernel_of<View, Out>::threads), (line_kernel_of<View, Out>::resident))
    line_attention_entry(const __grid_constant__ prefill_problem<View, Out> problem, prefill_parts parts,
                         const __grid_constant__ row_maps maps, const __grid_constant__ line_argument lines) {
  using kernel = prefill_kernel_of<View, Out>;
  kernel::template run<typename line_kernel_of<View, Out>::tiles>(problem, parts, maps, lines);
}

template <class View, class Out>
__global__ void __launch_bounds__((small_prefill_threads<small_line_kernel_of<View, Out>>))
    small_line_entry(const __grid_constant__ prefill_problem<View, Out> problem, prefill_parts parts,
                     const __grid_constant__ row_maps maps, const __grid_constant__ line_argument lines) {
  using along = small_line_kernel_of<View, Out>;
  if constexpr (!compiled_for_hopper) along::kernel::template run<typename along::tiles>(problem, parts, maps, lines);
}

/// Merges parts: one warp per query row of every head; a head has `blocks` query blocks.
template <class View, class Out>
__global__ void __launch_bounds__(128)
    merge_line_attention_entry(const __grid_constant__ prefill_problem<View, Out> p, prefill_parts parts,
                               const index_t* order, index_t blocks) {
  const index_t rows = p.q.tokens, warp = index_t(blockIdx.x) * 4 + index_t(threadIdx.x) / 32;
  if (warp >= rows * p.q.heads) return;
  const index_t place = warp / rows, row = warp % rows;
  // In the order of line_tiles: head after head, and the last rows of each head first.
  prefill_kernel<View, Out>::merge(p, parts, place * blocks + blocks - 1 - row / parts.block_rows,
                                   row % parts.block_rows, 0, row, order ? order[place] : place, int(threadIdx.x % 32));
}

}  // namespace detail

/// Causal attention of one sequence's prompt chunk along the lines of each query head.
///
/// Shapes   as prefill_problem with one sequence: all rows of the chunk that the lines were chosen for.
/// Returns  as prefill_attention; a row that no line gives a key gives 0 and -infinity, unless it has a sink logit.
/// Errors   as prefill_attention; tables of another size or without memory: tessera::error.
/// Cost     as prefill_attention for the chunks of 32 slots that slash lines of any of 128 neighbouring rows meet, and
///          for each vertical line. In addition, each of those blocks examines once the bits of every chunk that it
///          sees. The host needs no length.
/// Same input, same bits.
template <class View, class Out = float>
class line_attention {
  using kernel = detail::prefill_kernel<View, Out>;

 public:
  line_attention(index_t kv_heads, index_t q_heads, const device_info& device)
      : kv_heads_(kv_heads),
        q_heads_(q_heads),
        launch_(detail::line_attention_entry<View, Out>, small_entry(), device) {
    require_head_counts(q_heads, kv_heads);
  }

  std::size_t workspace_bytes() const { return launch_.workspace_bytes(); }

  /// `workspace` as prefill_attention's. `columns` is scratch too: a row of K and of V for each vertical line of each
  /// query head, and two tiles. It may be null, or too small for all heads. The Hopper kernel fetches gathered rows
  /// faster. The same size of memory gives the same bits; if all values are finite, any size does.
  void run(const prefill_problem<View, Out>& problem, const line_tables& lines, void* workspace, cudaStream_t stream,
           const column_memory& columns = {}) const {
    const index_t blocks = detail::check_prefill(problem, 1, kv_heads_, q_heads_, 1, launch_.size.block_rows);
    if (blocks == 0) return;
    require(lines.words > 0 && lines.dense_rows >= 0, "words of the lines", lines.words, "at least 1",
            "make tables for every position up to the chunk's last");
    require(lines.slash && lines.vertical && lines.columns && lines.column_counts, "lines", "null",
            "slash, vertical, columns and column_counts", "pass device memory");
    require_aligned("workspace", workspace, 16);
    watch_order(problem.view, stream);
    const detail::prefill_parts parts = launch_.cut(blocks, workspace, stream);
    row_maps maps;
    detail::line_argument argument{lines, {}, 0};
    if (launch_.on_hopper) {
      maps = map_rows_of(problem.view, kernel::chunk_slots);
      require_aligned("columns", columns.data, 16);
      detail::gather_columns<View, hopper_tile>(problem.view, q_heads_, columns, argument, stream);
    }
    launch_.run(parts, stream, "launch of attention along lines", problem, parts, maps, argument);
    if (parts.splits == 1) return;
    detail::merge_line_attention_entry<View, Out>
        <<<unsigned(ceil_div(problem.q.tokens * q_heads_, 4)), 128, 0, stream>>>(problem, parts, lines.order,
                                                                                 blocks / q_heads_);
    check(cudaGetLastError(), "launch of the merge of attention along lines");
  }

 private:
  static constexpr int hopper_tile = 128;  // the kernel's

  template <bool Hopper>
  using kernel_of = detail::line_kernel_of<View, Out, Hopper>;
  using hopper = std::conditional_t<detail::fits_hopper_prefill<View>, kernel_of<true>, void>;
  using small_kernel = detail::small_line_kernel_of<View, Out>;
  static constexpr auto small_entry() -> decltype(&detail::line_attention_entry<View, Out>) {
    if constexpr (std::is_same_v<small_kernel, kernel_of<false>>)
      return nullptr;
    else
      return detail::small_line_entry<View, Out>;
  }
  index_t kv_heads_, q_heads_;
  detail::prefill_launch<kernel_of<false>, small_kernel, hopper, prefill_problem<View, Out>, detail::prefill_parts,
                         row_maps, detail::line_argument>
      launch_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
