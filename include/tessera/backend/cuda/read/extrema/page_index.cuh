// The index of paged retrieval on the GPU: extrema of pages, built from keys and folded in place as tokens arrive, and
// the problem of a choice by them.
#pragma once

#include <limits>
#include <string>

#include "../../../../core/error.hpp"
#include "../../../../core/logit_rule.hpp"
#include "../../../../core/plan/stage_plan.hpp"
#include "../../../../core/stored/page_extrema.hpp"
#include "../../../../core/views.hpp"
#include "../../device/check.cuh"
#include "../../device/whole_numbers.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The input and output of a step's choice. Every pointer is a device pointer; lengths are read on the device.
template <class View>
struct page_problem {
  static_assert(check_device_rows<View>());
  using T = typename View::element_type;
  View view;                                  ///< what steps may read; lengths count the step's own tokens
  const read_plan* plans = nullptr;           ///< [sequences], in the view's order of sequences
  page_extrema_view<T, View::k_dim> index{};  ///< of the view
  index_t unfolded = 0;                       ///< how many newest slots of every row are not in the index yet
  rows_view<const T> q;                       ///< [sequences, tokens, q_heads, k_dim]
  const index_t* first_position = nullptr;    ///< [sequences], position of the step's first token
  logit_rule rule;
  index_t* out = nullptr;  ///< [rows, out_stride], ascending slots of the view; row = sequence * kv_heads + head
  offset_t out_stride = 0;
  index_t* counts = nullptr;  ///< [rows]
  float* mass =
      nullptr;  ///< [rows, tokens * group] or null: the share of the estimated probabilities that the chosen slots hold
};

namespace detail {

inline constexpr int max_step_tokens = 8;
inline constexpr int max_query_rows = 128;  // of a group: step tokens times query heads

struct slot_run {
  index_t begin, end;
};

/// The slots that a query at some position sees, by one warp. They are a run, because positions ascend. A probe of 32
/// slots costs one access to memory. Most runs end at the last slot; `last` is the position of slot n - 1.
template <class View>
__device__ slot_run visible_run(const View& view, index_t sequence, index_t head, const logit_rule& rule, index_t n,
                                index_t last, index_t query, int lane) {
  const auto first_above = [&](index_t position) -> index_t {
    if (!view.positions) return (min)((max)(position + 1, 0), n);
    if (last <= position) return n;
    return first_where_in_warp(n - 1, lane, [&](index_t i) { return view.position(sequence, head, i) > position; });
  };
  return {rule.sliding_window > 0 ? first_above(query - rule.sliding_window) : 0, first_above(query)};
}

/// Loads a plan in two loads that neighbouring lanes share.
__device__ inline read_plan load_plan(const read_plan* plan) {
  uint4 words[2];
  words[0] = __ldg(reinterpret_cast<const uint4*>(plan));
  words[1] = __ldg(reinterpret_cast<const uint4*>(plan) + 1);
  read_plan loaded;
  __builtin_memcpy(&loaded, words, sizeof(loaded));
  return loaded;
}

inline constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// Folds slots [from, n) of one (sequence, kv_head) into those of their pages that lie in [first_page, end_page). Each
/// thread has a channel and folds its slots in order, so the bits equal the CPU's. A page of one slot is the slot's
/// key.
template <class View, class T, int D>
__device__ __noinline__ void fold_slots(const View& view, index_t sequence, index_t head,
                                        const page_extrema_view<T, D>& index, const read_plan& plan, index_t from,
                                        index_t n, index_t first_page, index_t end_page, int channel) {
  const offset_t row = offset_t(sequence) * view.kv_heads + head;
  T* const low = index.lower(row, channel);
  T* const high = plan.page == 1 ? low : index.upper(row, channel);
#pragma unroll 1
  for (index_t slot = from; slot < n; ++slot) {
    const index_t p = plan.page_of(slot);
    if (p < first_page || p >= end_page) continue;
    const T fresh = view.key_element(sequence, head, slot, channel);
    if (plan.page == 1) {
      low[p] = fresh;
      continue;
    }
    const bool first = slot == p * plan.page;
    low[p] = T(lower_with(first ? not_a_number : float(low[p]), float(fresh)));
    high[p] = T(upper_with(first ? not_a_number : float(high[p]), float(fresh)));
  }
}

template <class View, int D>
__global__ void __launch_bounds__(256)
    fold_entry(const __grid_constant__ View view, page_extrema_view<typename View::element_type, D> index,
               const read_plan* plans, index_t newest) {
  const index_t sequence = index_t(blockIdx.x) / view.kv_heads, head = index_t(blockIdx.x) % view.kv_heads;
  const index_t n = view.length(sequence, head);
  fold_slots(view, sequence, head, index, plans[sequence], (max)(0, n - newest), n, 0, n, int(threadIdx.x));
}

inline constexpr int built_pages = 32;  // that a block makes at a time

/// A block builds every gridDim.x-th run of pages of one (sequence, kv_head). A thread reads two channels of every slot
/// of a page, and the block transposes the pages by channel in shared memory.
template <class View, int D, int Threads>
__global__ void __launch_bounds__(Threads)
    build_entry(const __grid_constant__ View view, page_extrema_view<typename View::element_type, D> index,
                const read_plan* plans) {
  using T = typename View::element_type;
  constexpr int lanes = Threads / (D / 2);
  __shared__ T tile[2][D][built_pages + 2];
  const index_t sequence = index_t(blockIdx.y) / view.kv_heads, head = index_t(blockIdx.y) % view.kv_heads;
  const read_plan plan = load_plan(plans + sequence);
  const index_t n = view.length(sequence, head), pages = plan.pages_of(n);
  const int channel = int(threadIdx.x) % (D / 2) * 2, sides = plan.page == 1 ? 1 : 2;
  const offset_t row = blockIdx.y;
  for (index_t first = index_t(blockIdx.x) * built_pages; first < pages; first += index_t(gridDim.x) * built_pages) {
    const index_t count = (min)(built_pages, pages - first);
    for (index_t p = index_t(threadIdx.x) / (D / 2); p < count; p += lanes) {
      const index_t begin = (first + p) * plan.page, end = first + p + 1 == pages ? n : begin + plan.page;
      if (plan.page == 1) {
        tile[0][channel][p] = view.key_element(sequence, head, begin, channel);
        tile[0][channel + 1][p] = view.key_element(sequence, head, begin, channel + 1);
        continue;
      }
      float low[2] = {not_a_number, not_a_number}, high[2] = {not_a_number, not_a_number};
#pragma unroll 4
      for (index_t slot = begin; slot < end; ++slot) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float fresh = float(view.key_element(sequence, head, slot, channel + i));
          low[i] = lower_with(low[i], fresh);
          high[i] = upper_with(high[i], fresh);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        tile[0][channel + i][p] = T(low[i]);
        tile[1][channel + i][p] = T(high[i]);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < sides * D * built_pages; i += Threads) {
      const int p = i % built_pages, d = i / built_pages % D, side = i / (D * built_pages);
      if (p < count) (side == 0 ? index.lower(row, d) : index.upper(row, d))[first + p] = tile[side][d][p];
    }
    __syncthreads();  // before the next run of pages overwrites the tile
  }
}

}  // namespace detail

/// Fills the index of a view's keys, by the plan of each sequence. The values have the bits of cpu::page_index. Encoded
/// rows give the values of the decoded keys, each rounded to the element type.
///
/// Lengths and plans are read on the device, so a captured launch can be replayed while they change. A row's room must
/// hold its pages.
/// Errors   newest below 1.   Workspace  none.
/// Cost     build: one read of the keys and one write of the index; fold: O(newest * k_dim) a row.
template <class View>
class index_pages {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim;

 public:
  using index_type = page_extrema_view<T, D>;

  std::size_t workspace_bytes() const { return 0; }

  /// Builds every page of every row. `pages`: the usual number of pages of a row; rows with more are built completely
  /// too.
  void build(const View& view, const index_type& index, const read_plan* plans, index_t pages,
             cudaStream_t stream) const {
    check_call(view, index, plans);
    const index_t rows = view.sequences * view.kv_heads;
    if (rows == 0 || pages <= 0) return;
    constexpr int threads = 256 / (D / 2) * (D / 2);
    const unsigned tiles = unsigned(ceil_div(pages, detail::built_pages));
    detail::build_entry<View, D, threads><<<dim3(tiles, unsigned(rows)), threads, 0, stream>>>(view, index, plans);
    check(cudaGetLastError(), "launch of build_pages");
  }

  /// Folds in the newest slots of every row; the view's lengths count them.
  void fold(const View& view, const index_type& index, const read_plan* plans, index_t newest,
            cudaStream_t stream) const {
    check_call(view, index, plans);
    require(newest >= 1, "newest", newest, "at least 1", "pass how many tokens were appended");
    const index_t rows = view.sequences * view.kv_heads;
    if (rows == 0) return;
    detail::fold_entry<View, D><<<unsigned(rows), D, 0, stream>>>(view, index, plans, newest);
    check(cudaGetLastError(), "launch of fold_pages");
  }

 private:
  static void check_call(const View& view, const index_type& index, const read_plan* plans) {
    require(plans != nullptr, "plans of the sequences", "null", "one read_plan a sequence, on the device",
            "write each sequence's plan when its prompt ends");
    require(index.data != nullptr, "data of the page index", "null", "memory for the extrema of every page",
            "allocate the index before it is filled: page_row_elements a row");
    require(view.sequences * offset_t(view.kv_heads) <= 65535, "sequences * kv_heads",
            offset_t(view.sequences) * view.kv_heads, "at most 65535", "split the batch");
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
