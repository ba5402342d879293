// Which slots a step reads, from the logits of pages: softmax, sums over the group and exact selection, one block a row.
#pragma once

#include "../../core/units.hpp"
#include "page_scores.cuh"
#include "radix_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int choose_threads = 512;

/// What a choice needs beside the scratch.
struct page_choice {
  const index_t* lengths;
  offset_t sequence_stride, head_stride;
  index_t kv_heads, group, tokens;
  index_t page, tail;
  selection_unit unit;
  bool normalised;
  const float* sink_logits;
  index_t* out;
  offset_t out_stride;
  index_t* counts;
  float* mass;          // null: not wanted
  unsigned* keys;       // [rows, key_stride], where they do not fit into shared memory
  offset_t key_stride;

  __device__ index_t length(index_t row) const {
    return lengths[row / kv_heads * sequence_stride + row % kv_heads * head_stride];
  }
};

struct page_choice_storage : select_storage<choose_threads, 1> {
  static constexpr int most_cuts = 2 * most_step_tokens;
  float top[most_query_rows], inverse[most_query_rows];  // of a row's softmax; 0 and 1 where there is none
  bool speaks[most_query_rows];  // false: its query is not finite, or it sees no page with a finite logit
  slot_run runs[most_step_tokens];
  bool sees[most_step_tokens];     // where every page is seen whole or not at all
  index_t cuts[most_cuts];         // ascending slots within pages at which some row begins or ends to see
  index_t cut_items[most_cuts];    // the item that begins there
  index_t cut_count;
  bool uniform;  // every token of the step sees all items or none
  float sums[warps][4];
};

/// The pages of one row as a selection sees them. Items are what is ranked: pages, or where single tokens are chosen what
/// is left of pages when they are cut where some row begins or ends to see.
struct page_items {
  page_choice_storage& s;
  const page_choice& p;
  const page_scratch& from;
  index_t row;
  index_t limit;  // slots before the forced ones
  index_t items;
  bool tokens;    // an item counts its slots

  __device__ float weigh(float logit, index_t r) const {
    return p.normalised ? fast_exp(logit - s.top[r]) * s.inverse[r] : logit;
  }

  /// The first slot of an item.
  __device__ index_t begin(index_t item) const {
    if (!tokens || s.cut_count == 0) return item * p.page;
    index_t before = 0;
    while (before < s.cut_count && s.cut_items[before] <= item) ++before;
    if (before > 0 && s.cut_items[before - 1] == item) return s.cuts[before - 1];
    return (item - before) * p.page;
  }
  __device__ index_t end(index_t item) const { return item + 1 == items ? limit : begin(item + 1); }
  __device__ unsigned weight(index_t item) const {
    if (!tokens) return 1;
    return unsigned(s.cut_count == 0 ? min(p.page, limit - item * p.page) : end(item) - begin(item));
  }

  __device__ unsigned key_of_slot(index_t slot) const {
    float sum = 0;
    bool any = false;
    for (index_t t = 0; t < p.tokens; ++t) {
      if (slot < s.runs[t].begin || slot >= s.runs[t].end) continue;
      any = true;
      for (index_t r = t * p.group; r < (t + 1) * p.group; ++r) {
        const float logit = from.logits_of(row, r)[slot / p.page];
        if (s.speaks[r]) sum += weigh(logit, r);
      }
    }
    return ordered_bits(any ? sum : -infinity);
  }
  __device__ unsigned key(index_t item) const {
    const index_t first = begin(item);
    unsigned best = key_of_slot(first);
    for (index_t i = 0; !tokens && i < s.cut_count; ++i) {
      if (s.cuts[i] / p.page == item) best = max(best, key_of_slot(s.cuts[i]));
    }
    return best;
  }
  /// Four neighbouring items where all that is seen is seen whole; 0 beyond the end.
  __device__ uint4 quad(index_t q) const {
    float4 sum = make_float4(0, 0, 0, 0);
    bool any = false;
    for (index_t t = 0; t < p.tokens; ++t) {
      if (!s.sees[t]) continue;
      any = true;
      for (index_t r = t * p.group; r < (t + 1) * p.group; r += 4) {
        float4 x[4];
        const index_t held = min(index_t(4), (t + 1) * p.group - r);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < held) x[i] = reinterpret_cast<const float4*>(from.logits_of(row, r + i))[q];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i >= held || !s.speaks[r + i]) continue;
          sum.x += weigh(x[i].x, r + i);
          sum.y += weigh(x[i].y, r + i);
          sum.z += weigh(x[i].z, r + i);
          sum.w += weigh(x[i].w, r + i);
        }
      }
    }
    const index_t at = q * 4;
    const auto key = [&](float x, index_t item) { return item < items ? ordered_bits(any ? x : -infinity) : 0u; };
    return make_uint4(key(sum.x, at), key(sum.y, at + 1), key(sum.z, at + 2), key(sum.w, at + 3));
  }
};

/// Every row's softmax from its tiles, in the order of the tiles.
__device__ inline void merge_tiles(page_choice_storage& s, const page_choice& p, const page_scratch& from, index_t row,
                                   index_t tiles) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const index_t rows = p.tokens * p.group;
  for (index_t r = warp; r < rows; r += page_choice_storage::warps) {
    float top = -infinity;
    const float2 mine = lane < tiles ? from.partial(row, lane, r) : make_float2(-infinity, 0);
    top = mine.x;
    for (index_t tile = lane + 32; tile < tiles; tile += 32) top = fmaxf(top, from.partial(row, tile, r).x);
    top = warp_max(top);
    const bool speaks = top > -infinity;
    const float sink = p.sink_logits ? p.sink_logits[row % p.kv_heads * p.group + r % p.group] : -infinity;
    float sum = 0;
    if (speaks && p.normalised) {
      top = fmaxf(top, sink);
      sum = mine.y > 0 ? mine.y * fast_exp(mine.x - top) : 0.0f;
      for (index_t tile = lane + 32; tile < tiles; tile += 32) {
        const float2 part = from.partial(row, tile, r);
        if (part.y > 0) sum += part.y * fast_exp(part.x - top);
      }
      sum = warp_sum(sum) + (sink > -infinity ? fast_exp(sink - top) : 0.0f);
    }
    if (lane == 0) {
      s.top[r] = speaks ? top : 0;
      s.inverse[r] = speaks && p.normalised ? 1 / sum : 1;
      s.speaks[r] = speaks;
    }
  }
}

/// Finds whether all tokens of the step see all items or none, and otherwise where pages must be cut. By one warp.
__device__ inline void find_cuts(page_choice_storage& s, const page_choice& p, index_t limit) {
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
    if (at <= 0 || at >= limit || at % p.page == 0) continue;
    index_t to = count;
    while (to > 0 && s.cuts[to - 1] >= at) --to;
    if (to < count && s.cuts[to] == at) continue;
    for (index_t j = count; j > to; --j) s.cuts[j] = s.cuts[j - 1];
    s.cuts[to] = at;
    ++count;
  }
  for (index_t i = 0; i < count; ++i) s.cut_items[i] = s.cuts[i] / p.page + 1 + i;
  s.cut_count = count;
}

/// What the chosen slots hold of each row's probabilities, in the order of a fixed split over threads.
__device__ inline void sum_mass(page_choice_storage& s, const page_items& rows_of, const index_t* out, index_t count) {
  const page_choice& p = rows_of.p;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const index_t rows = p.tokens * p.group;
  float* mass = p.mass + offset_t(rows_of.row) * rows;
  for (index_t first = 0; first < rows; first += 4) {
    float held[4] = {};
    for (index_t i = threadIdx.x; i < count; i += choose_threads) {
      const index_t slot = out[i], of_page = slot / p.page;
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const index_t r = first + u;
        if (r >= rows || !s.speaks[r]) continue;
        const slot_run& run = s.runs[r / p.group];
        const float weight = rows_of.weigh(rows_of.from.logits_of(rows_of.row, r)[of_page], r);
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
      for (int w = 0; w < page_choice_storage::warps; ++w) sum += s.sums[w][threadIdx.x];
      const index_t r = first + index_t(threadIdx.x);
      mass[r] = s.speaks[r] ? fminf(sum, 1.0f) : 1.0f;
    }
  }
}

/// Writes the chosen items' slots, ascending: every item with a larger key than the cut's, and of those with the same
/// the first, `room` units in all. `keys` may be read by every thread.
__device__ inline void write_chosen(page_choice_storage& s, const page_items& of, const unsigned* keys, unsigned lowest,
                                    bool ties, unsigned need, index_t* out) {
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // An odd number of neighbours a thread: their loads fall into different banks.
  const index_t each = ceil_div(of.items, choose_threads) | 1, first = thread * each;
  unsigned above = 0, equal = 0;
  for (index_t i = first; i < min(first + each, of.items); ++i) {
    const unsigned key = keys[i];
    if (key < lowest) continue;
    if (key > lowest || !ties)
      above += of.weight(i);
    else
      equal += of.weight(i);
  }
  const unsigned above_to = inclusive_sum(above, lane), equal_to = inclusive_sum(equal, lane);
  if (lane == 31) s.warp_above[warp] = above_to, s.warp_equal[warp] = equal_to;
  __syncthreads();
  const bool before = lane < warp && lane < page_choice_storage::warps;
  unsigned above_before = above_to - above + __reduce_add_sync(~0u, before ? s.warp_above[lane] : 0u);
  unsigned equal_before = equal_to - equal + __reduce_add_sync(~0u, before ? s.warp_equal[lane] : 0u);
  const bool together = of.p.page > 16;  // a warp writes an item
  for (index_t j = 0; j < each; ++j) {
    const index_t i = first + j;
    const unsigned key = i < of.items ? keys[i] : 0u;
    index_t count = 0, slot = 0;
    const index_t to = index_t(above_before + min(equal_before, need)) * (of.tokens ? 1 : of.p.page);
    if (key >= lowest && i < of.items) {
      const unsigned weight = of.weight(i);
      unsigned taken = weight;
      if (key > lowest || !ties) {
        above_before += weight;
      } else {
        taken = equal_before < need ? min(need - equal_before, weight) : 0u;
        equal_before += weight;
      }
      slot = of.begin(i);
      count = of.tokens ? index_t(taken) : taken ? of.end(i) - slot : 0;
    }
    if (!together) {
      for (index_t k = 0; k < count; ++k) out[to + k] = slot + k;
      continue;
    }
    for (unsigned left = __ballot_sync(~0u, count > 0); left; left &= left - 1) {
      const int owner = __ffs(int(left)) - 1;
      const index_t its_count = __shfl_sync(~0u, count, owner), its_slot = __shfl_sync(~0u, slot, owner),
                    its_to = __shfl_sync(~0u, to, owner);
      for (index_t k = lane; k < its_count; k += 32) out[its_to + k] = its_slot + k;
    }
  }
}

template <bool Resident>
__global__ void __launch_bounds__(choose_threads, 1)
    choose_pages_entry(const __grid_constant__ page_choice p, const __grid_constant__ page_scratch from) {
  extern __shared__ uint4 key_memory[];
  using storage = page_choice_storage;
  using select = row_select<storage, 1>;
  __shared__ storage s;
  const int thread = int(threadIdx.x);
  const index_t row = index_t(blockIdx.x), n = p.length(row), rows = p.tokens * p.group;
  index_t* out = p.out + row * p.out_stride;
  if (n <= from.read) {
    for (index_t slot = thread; slot < n; slot += choose_threads) out[slot] = slot;
    if (thread == 0) p.counts[row] = n;
    for (index_t r = thread; p.mass && r < rows; r += choose_threads) p.mass[offset_t(row) * rows + r] = 1;
    return;
  }
  const index_t pages = ceil_div(n, p.page);
  const bool tokens = p.unit == selection_unit::token;
  const index_t tail = min(p.tail, tokens ? from.read : n);
  const index_t forced = tokens || tail == 0 ? 0 : pages - (n - tail) / p.page;  // pages
  const index_t limit = tokens ? n - tail : min(n, (pages - forced) * p.page);
  const index_t wanted = min(max(forced, from.read / p.page + (from.read % p.page > 0)), pages);
  const index_t room = tokens ? from.read - tail : wanted - forced;
  for (int bin = thread; bin < radix_bins; bin += choose_threads) s.histogram[bin] = 0;
  if (thread < p.tokens) s.runs[thread] = from.runs[row * most_step_tokens + thread];
  merge_tiles(s, p, from, row, ceil_div(pages, tile_pages));
  if (thread < 32) {
    __syncwarp();
    find_cuts(s, p, limit);
  }
  __syncthreads();
  page_items of{s, p, from, row, limit, 0, tokens};
  of.items = ceil_div(limit, p.page) + (tokens ? s.cut_count : 0);
  index_t count;
  if (!tokens && wanted == pages) {
    for (index_t slot = thread; slot < n; slot += choose_threads) out[slot] = slot;
    count = n;
  } else {
    // All forced slots stand behind the others; where pages are forced, the others are full ones.
    const index_t before = tokens ? room : room * p.page;
    for (index_t slot = limit + thread; slot < n; slot += choose_threads) out[before + slot - limit] = slot;
    count = before + n - limit;
    if (room > 0) {
      unsigned* const keys = Resident ? reinterpret_cast<unsigned*>(key_memory) : p.keys + row * p.key_stride;
      const index_t quads = ceil_div(of.items, 4);
      const auto take = [&](index_t i, unsigned key, int above_shift, int shift, unsigned prefix, unsigned mask) {
        if ((above_shift == 32 ? 0u : key >> above_shift) == prefix && i < of.items) {
          atomicAdd(&s.histogram[key >> shift & mask], of.weight(i));
        }
      };
      const auto take_quad = [&](index_t q, const uint4& k, int above_shift, int shift, unsigned prefix, unsigned mask) {
        take(q * 4, k.x, above_shift, shift, prefix, mask);
        take(q * 4 + 1, k.y, above_shift, shift, prefix, mask);
        take(q * 4 + 2, k.z, above_shift, shift, prefix, mask);
        take(q * 4 + 3, k.w, above_shift, shift, prefix, mask);
      };
      if (s.uniform) {
        for (index_t q = thread; q < quads; q += choose_threads) {
          const uint4 four = of.quad(q);
          reinterpret_cast<uint4*>(keys)[q] = four;
          take_quad(q, four, 32, 21, 0, 2047u);
        }
      } else {
        for (index_t i = thread; i < quads * 4; i += choose_threads) {
          const unsigned key = i < of.items ? of.key(i) : 0u;
          keys[i] = key;
          take(i, key, 32, 21, 0, 2047u);
        }
      }
      unsigned lowest = 0, need = unsigned(room);
      bool ties = false;  // not all items equal to the lowest are chosen whole
#pragma unroll
      for (int pass = 0; pass < 3; ++pass) {
        const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, above_shift = pass == 1 ? 21 : 10;
        if (pass > 0) {
          for (index_t q = thread; q < quads; q += choose_threads) {
            take_quad(q, reinterpret_cast<const uint4*>(keys)[q], above_shift, shift, lowest, pass == 2 ? 1023u : 2047u);
          }
        }
        select::find_digit(s, need);
        lowest = lowest << (pass == 2 ? 10 : 11) | s.digit;
        need -= s.above;
        ties = s.in_digit != need;
        if (!ties) {  // everything of this digit is chosen: the lower digits do not matter
          lowest <<= shift;
          break;
        }
      }
      write_chosen(s, of, keys, lowest, ties, need, out);
      if (!tokens && forced == 0) {  // is the last page chosen, which may be short?
        const index_t last = of.items - 1, missing = pages * p.page - n;
        __syncthreads();
        if (missing > 0) {
          // It is if its first slot was written where the last chosen page stands.
          if (out[before - p.page] == last * p.page) count = before - missing;
        }
      }
    }
  }
  if (thread == 0) p.counts[row] = count;
  if (p.mass) {
    __syncthreads();
    sum_mass(s, of, out, count);
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
