// Pages as a choice treats them: softmax over them, sums over the group, and the cuts that single slots require.
#pragma once

#include "../../../../../core/units.hpp"
#include "../../../device/whole_numbers.cuh"
#include "page_scores.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {
/// What a choice needs beside the scratch.
struct page_choice {
  const index_t* lengths;
  offset_t sequence_stride, head_stride;
  const read_plan* plans;
  index_t kv_heads, group, tokens;
  quick_divisor by_group;
  selection_unit unit;
  bool normalised;
  const float* sink_logits;
  index_t* out;
  offset_t out_stride;
  index_t* counts;
  float* mass;     // null: not wanted
  unsigned* keys;  // [rows, key_stride], where they do not fit into shared memory
  offset_t key_stride;

  /// The newest slots that are read whatever their score: those that the plan names, and the step's own.
  __device__ index_t tail(const read_plan& plan) const { return (max)(tokens > 1 ? tokens : 0, plan.tail); }

  __device__ index_t length(index_t row) const {
    return lengths[row / kv_heads * sequence_stride + row % kv_heads * head_stride];
  }
};

/// The softmax of one row; 0 and 1 if there is none.
struct alignas(16) row_softmax {
  float top, inverse;
  int speaks;  // 0: its query is not finite, or it sees no page with a finite logit
  __device__ float weigh(float logit, bool normalised) const {
    return normalised ? fast_exp(logit - top) * inverse : logit;
  }
};

/// The softmax of a group's rows, and where their pages must be cut; in shared memory.
struct page_rows {
  static constexpr int max_cuts = 2 * max_step_tokens;
  row_softmax softmax[max_query_rows];
  slot_run runs[max_step_tokens];
  bool sees[max_step_tokens];   // where every page is seen whole or not at all
  index_t cuts[max_cuts];       // ascending slots within pages at which some row begins or ends to see
  index_t cut_items[max_cuts];  // the item that begins there
  index_t cut_count;
  bool uniform;  // every token of the step sees all items or none
};

/// Shared memory of a block of 256 to 1,024 threads that makes a choice.
struct page_choice_storage : page_rows {
  static constexpr int max_warps = 32, bins = 1024, max_listed = 32;
  alignas(16) unsigned histogram[bins];
  unsigned warp_total[max_warps], warp_low[max_warps], warp_high[max_warps];
  uint2 earlier[max_warps], within[max_warps];  // units above the cut and at it
  unsigned bin, above, in_bin, listed;
  uint2 list[max_listed];  // keys of a bin, in any order, and their units
  float sums[max_warps][4];
};

/// How many slots and pages of a row are ranked. The newest ones are forced: they are read without ranking.
struct page_bounds {
  index_t n, pages, forced, limit, units_to_choose,
      wanted;             // `limit`: slots before the forced ones; `units_to_choose`: beside the forced ones
  index_t unit, missing;  // slots of a unit, and those that the last page lacks
  bool tokens;
  __device__ page_bounds(const page_choice& p, const read_plan& plan, index_t n_) : n(n_) {
    pages = plan.pages_of(n);
    tokens = p.unit == selection_unit::token;
    const index_t tail = (min)(p.tail(plan), tokens ? plan.read : n);
    forced = tokens || tail == 0 ? 0 : pages - plan.page_of(n - tail);
    limit = tokens ? n - tail : (min)(n, (pages - forced) * plan.page);
    wanted = (min)((max)(forced, plan.pages_of(plan.read)), pages);
    units_to_choose = tokens ? plan.read - tail : wanted - forced;
    unit = tokens ? 1 : plan.page;
    missing = pages * plan.page - n;
  }
  __device__ bool whole() const { return !tokens && wanted == pages; }
  /// The number of chosen slots. If pages are forced, the other chosen pages are full. `last`: the last item is among
  /// them.
  __device__ index_t count(bool last) const {
    return units_to_choose * unit + n - limit - (!tokens && forced == 0 && last ? missing : 0);
  }
};

/// The pages of one row as items that a selection ranks. Usually an item is a page. If single tokens are chosen, pages
/// are cut where some row begins or ends to see, and the parts are items.
struct page_items {
  page_rows& s;
  const page_choice& p;
  const page_scratch& scratch;
  const read_plan& plan;  // in device memory
  index_t row;
  index_t limit;  // slots before the forced ones
  index_t items;
  bool tokens;  // an item counts its slots

  __device__ float weigh(float logit, index_t r) const { return s.softmax[r].weigh(logit, p.normalised); }

  /// The first slot of an item.
  __device__ __noinline__ index_t begin(index_t item) const {
    if (!tokens || s.cut_count == 0) return item * plan.page;
    index_t before = 0;
    while (before < s.cut_count && s.cut_items[before] <= item) ++before;
    if (before > 0 && s.cut_items[before - 1] == item) return s.cuts[before - 1];
    return (item - before) * plan.page;
  }
  __device__ index_t end(index_t item) const { return item + 1 == items ? limit : begin(item + 1); }
  __device__ unsigned weight(index_t item) const { return tokens ? unsigned(end(item) - begin(item)) : 1u; }
  /// How many units every item except a short last one has; 1 if that is not known.
  __device__ unsigned usual_weight() const { return 1; }

  __device__ __noinline__ unsigned key_of_slot(index_t slot) const {
    float sum = 0;
    bool any = false;
    for (index_t t = 0; t < p.tokens; ++t) {
      if (slot < s.runs[t].begin || slot >= s.runs[t].end) continue;
      any = true;
      for (index_t r = t * p.group; r < (t + 1) * p.group; ++r) {
        const float logit = scratch.logits_of(row, r)[plan.page_of(slot)];
        if (s.softmax[r].speaks) sum += weigh(logit, r);
      }
    }
    return ordered_bits(any ? sum : -infinity);
  }
  __device__ unsigned key(index_t item) const {
    const index_t first = begin(item);
    unsigned best = key_of_slot(first);
    for (index_t i = 0; !tokens && i < s.cut_count; ++i) {
      if (plan.page_of(s.cuts[i]) == item) best = (max)(best, key_of_slot(s.cuts[i]));
    }
    return best;
  }
  /// Keys of four neighbouring items, where every item is seen whole or not at all; 0 beyond the end.
  __device__ uint4 quad(index_t q) const {
    float4 sum = make_float4(0, 0, 0, 0);
    bool any = false;
    for (index_t t = 0; t < p.tokens; ++t) {
      if (!s.sees[t]) continue;
      any = true;
      for (index_t r = t * p.group; r < (t + 1) * p.group; r += 4) {
        float4 x[4];
        const index_t held = (min)(index_t(4), (t + 1) * p.group - r);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < held) x[i] = reinterpret_cast<const float4*>(scratch.logits_of(row, r + i))[q];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i >= held || !s.softmax[r + i].speaks) continue;
          sum.x += weigh(x[i].x, r + i);
          sum.y += weigh(x[i].y, r + i);
          sum.z += weigh(x[i].z, r + i);
          sum.w += weigh(x[i].w, r + i);
        }
      }
    }
    const auto key = [&](float x, index_t item) { return item < items ? ordered_bits(any ? x : -infinity) : 0u; };
    return make_uint4(key(sum.x, q * 4), key(sum.y, q * 4 + 1), key(sum.z, q * 4 + 2), key(sum.w, q * 4 + 3));
  }
};

/// The same where every page is seen whole or not at all: items are pages.
struct even_items {
  const page_choice& p;
  index_t row, limit, items, page, full, last;  // slots or pages that an item counts, and those of the last one
  bool tokens;
  __device__ even_items(const page_choice& p_, const read_plan& plan, index_t row_, const page_bounds& b)
      : p(p_), row(row_), limit(b.limit), items(plan.pages_of(b.limit)), page(plan.page), tokens(b.tokens) {
    full = tokens ? page : 1, last = tokens ? limit - (items - 1) * page : 1;
  }
  __device__ index_t begin(index_t item) const { return item * page; }
  __device__ index_t end(index_t item) const { return item + 1 == items ? limit : (item + 1) * page; }
  __device__ unsigned weight(index_t item) const { return unsigned(item + 1 == items ? last : full); }
  __device__ unsigned usual_weight() const { return unsigned(full); }
};

/// Computes one row's softmax from the largest logit that it sees and the lanes' sums of exp(logit - top).
template <class Sum>
__device__ void finish_row(page_rows& s, const page_choice& p, index_t row, index_t r, float top, const Sum& sum_for) {
  const bool speaks = top > -infinity;
  float sum = 1;
  if (speaks && p.normalised) {
    const float sink = p.sink_logits ? p.sink_logits[row % p.kv_heads * p.group + r % p.group] : -infinity;
    top = fmaxf(top, sink);
    sum = warp_sum(sum_for(top)) + (sink > -infinity ? fast_exp(sink - top) : 0.0f);
  }
  if (threadIdx.x % 32 == 0) {
    s.softmax[r] = {speaks ? top : 0, __fdividef(1.0f, sum), speaks};
  }
}

/// Every row's softmax from its tiles, in the order of the tiles.
__device__ inline void merge_tiles(page_rows& s, const page_choice& p, const page_scratch& from, index_t row,
                                   index_t tiles) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  for (index_t r = warp; r < p.tokens * p.group; r += int(blockDim.x) / 32) {
    const float2 mine = lane < tiles ? from.partial(row, lane, r) : make_float2(-infinity, 0);
    float top = mine.x;
    for (index_t tile = lane + 32; tile < tiles; tile += 32) top = fmaxf(top, from.partial(row, tile, r).x);
    finish_row(s, p, row, r, warp_max(top), [&](float largest) {
      float sum = mine.y > 0 ? mine.y * fast_exp(mine.x - largest) : 0.0f;
      for (index_t tile = lane + 32; tile < tiles; tile += 32) {
        const float2 part = from.partial(row, tile, r);
        if (part.y > 0) sum += part.y * fast_exp(part.x - largest);
      }
      return sum;
    });
  }
}

/// Finds out whether all tokens of the step see all items or none. If not, finds where pages must be cut. One warp
/// calls it.
__device__ __noinline__ inline void find_cuts(page_rows& s, const page_choice& p, const read_plan& plan,
                                              index_t limit) {
  const int lane = int(threadIdx.x) % 32;
  bool alike = true, sees = false;
  if (lane < p.tokens) {
    const slot_run run = s.runs[lane];
    sees = run.begin <= 0 && run.end >= limit;
    alike = sees || run.end <= run.begin || run.begin >= limit;
    s.sees[lane] = sees;
  }
  alike = __all_sync(~0u, alike);
  if (lane != 0) return;
  s.uniform = alike;
  index_t count = 0;
  for (index_t i = 0; !alike && i < 2 * p.tokens; ++i) {
    const index_t at = i % 2 ? s.runs[i / 2].end : s.runs[i / 2].begin;
    if (at <= 0 || at >= limit || at == plan.page_of(at) * plan.page) continue;
    index_t to = count;
    while (to > 0 && s.cuts[to - 1] >= at) --to;
    if (to < count && s.cuts[to] == at) continue;
    for (index_t j = count; j > to; --j) s.cuts[j] = s.cuts[j - 1];
    s.cuts[to] = at;
    ++count;
  }
  for (index_t i = 0; i < count; ++i) s.cut_items[i] = plan.page_of(s.cuts[i]) + 1 + i;
  s.cut_count = count;
}

/// Sums the probabilities of the chosen slots for each row, in an order fixed by the split over threads.
__device__ inline void sum_mass(page_choice_storage& s, const page_items& rows_of, const index_t* out, index_t count) {
  const page_choice& p = rows_of.p;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const index_t rows = p.tokens * p.group;
  float* mass = p.mass + offset_t(rows_of.row) * rows;
  for (index_t first = 0; first < rows; first += 4) {
    float held[4] = {};
    for (index_t i = threadIdx.x; i < count; i += int(blockDim.x)) {
      const index_t slot = out[i], of_page = rows_of.plan.page_of(slot);
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const index_t r = first + u;
        if (r >= rows || !s.softmax[r].speaks) continue;
        const slot_run& run = s.runs[r / p.group];
        const float weight = rows_of.weigh(rows_of.scratch.logits_of(rows_of.row, r)[of_page], r);
        if (slot >= run.begin && slot < run.end && weight == weight) held[u] += weight;
      }
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) held[u] = warp_sum(held[u]);
    __syncthreads();
    if (lane == 0) {
#pragma unroll
      for (int u = 0; u < 4; ++u) s.sums[warp][u] = held[u];
    }
    __syncthreads();
    if (threadIdx.x < 4 && first + index_t(threadIdx.x) < rows) {
      float sum = 0;
      for (int w = 0; w < int(blockDim.x) / 32; ++w) sum += s.sums[w][threadIdx.x];
      const index_t r = first + index_t(threadIdx.x);
      mass[r] = s.softmax[r].speaks ? fminf(sum, 1.0f) : 1.0f;
    }
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
