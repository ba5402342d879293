// Which slots a step reads, from pages' logits: softmax, sums over the group, exact selection, one block a row.
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
  float* mass;     // null: not wanted
  unsigned* keys;  // [rows, key_stride], where they do not fit into shared memory
  offset_t key_stride;

  __device__ index_t length(index_t row) const {
    return lengths[row / kv_heads * sequence_stride + row % kv_heads * head_stride];
  }
};

/// What the rows of a group make of logits, and where their pages must be cut; in shared memory.
struct page_rows {
  static constexpr int most_cuts = 2 * most_step_tokens;
  float top[most_query_rows], inverse[most_query_rows];  // of a row's softmax; 0 and 1 where there is none
  bool speaks[most_query_rows];  // false: its query is not finite, or it sees no page with a finite logit
  slot_run runs[most_step_tokens];
  bool sees[most_step_tokens];   // where every page is seen whole or not at all
  index_t cuts[most_cuts];       // ascending slots within pages at which some row begins or ends to see
  index_t cut_items[most_cuts];  // the item that begins there
  index_t cut_count;
  bool uniform;  // every token of the step sees all items or none
};

template <int Threads>
struct page_choice_storage : page_rows {
  static constexpr int warps = Threads / 32, bins = 4 * Threads;
  alignas(16) unsigned histogram[bins];
  unsigned warp_total[warps], warp_low[warps], warp_high[warps], warp_above[warps], warp_equal[warps];
  unsigned bin, above, in_bin;
  float sums[warps][4];
};

/// How many slots and pages of a row are ranked; the newest are forced.
struct page_bounds {
  index_t n, pages, forced, limit, room, wanted;  // `limit`: slots before the forced ones; `room`: units to choose
  bool tokens;
  __device__ page_bounds(const page_choice& p, index_t read, index_t n_) : n(n_) {
    pages = ceil_div(n, p.page);
    tokens = p.unit == selection_unit::token;
    const index_t tail = min(p.tail, tokens ? read : n);
    forced = tokens || tail == 0 ? 0 : pages - (n - tail) / p.page;
    limit = tokens ? n - tail : min(n, (pages - forced) * p.page);
    wanted = min(max(forced, read / p.page + (read % p.page > 0)), pages);
    room = tokens ? read - tail : wanted - forced;
  }
};

/// The pages of one row as a selection sees them. Items are what is ranked: pages, or where single tokens are chosen
/// what is left of pages when they are cut where some row begins or ends to see.
struct page_items {
  page_rows& s;
  const page_choice& p;
  const page_scratch& from;
  index_t row;
  index_t limit;  // slots before the forced ones
  index_t items;
  bool tokens;  // an item counts its slots

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
  __device__ uint4 quad(index_t q) const {
    return quad(q, 0,
                [&](index_t r, index_t at) { return reinterpret_cast<const float4*>(from.logits_of(row, r))[at]; });
  }
  /// Keys of four neighbouring items from `first` + 4 q on, where all that is seen is seen whole; 0 beyond the end.
  /// logits_of(r, q): theirs of row r.
  template <class Logits>
  __device__ uint4 quad(index_t q, index_t first, const Logits& logits_of) const {
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
          if (i < held) x[i] = logits_of(r + i, q);
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
    const index_t at = first + q * 4;
    const auto key = [&](float x, index_t item) { return item < items ? ordered_bits(any ? x : -infinity) : 0u; };
    return make_uint4(key(sum.x, at), key(sum.y, at + 1), key(sum.z, at + 2), key(sum.w, at + 3));
  }
};

/// One row's softmax from the largest logit that it sees and the lanes' sums of exp(logit - top), given that top.
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
    s.top[r] = speaks ? top : 0;
    s.inverse[r] = 1 / sum;
    s.speaks[r] = speaks;
  }
}

/// Every row's softmax from its tiles, in the order of the tiles.
__device__ inline void merge_tiles(page_rows& s, const page_choice& p, const page_scratch& from, index_t row,
                                   index_t tiles) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  for (index_t r = warp; r < p.tokens * p.group; r += choose_threads / 32) {
    const float2 mine = lane < tiles ? from.partial(row, lane, r) : make_float2(-infinity, 0);
    float top = mine.x;
    for (index_t tile = lane + 32; tile < tiles; tile += 32) top = fmaxf(top, from.partial(row, tile, r).x);
    finish_row(s, p, row, r, warp_max(top), [&](float most) {
      float sum = mine.y > 0 ? mine.y * fast_exp(mine.x - most) : 0.0f;
      for (index_t tile = lane + 32; tile < tiles; tile += 32) {
        const float2 part = from.partial(row, tile, r);
        if (part.y > 0) sum += part.y * fast_exp(part.x - most);
      }
      return sum;
    });
  }
}

/// Finds whether all tokens of the step see all items or none, and otherwise where pages must be cut. By one warp.
__device__ inline void find_cuts(page_rows& s, const page_choice& p, index_t limit) {
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
template <int Threads>
__device__ void sum_mass(page_choice_storage<Threads>& s, const page_items& rows_of, const index_t* out,
                         index_t count) {
  const page_choice& p = rows_of.p;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const index_t rows = p.tokens * p.group;
  float* mass = p.mass + offset_t(rows_of.row) * rows;
  for (index_t first = 0; first < rows; first += 4) {
    float held[4] = {};
    for (index_t i = threadIdx.x; i < count; i += Threads) {
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
      for (int w = 0; w < page_choice_storage<Threads>::warps; ++w) sum += s.sums[w][threadIdx.x];
      const index_t r = first + index_t(threadIdx.x);
      mass[r] = s.speaks[r] ? fminf(sum, 1.0f) : 1.0f;
    }
  }
}

/// Keys [low, high] of which only the first `need` units are chosen; everything above is. high is low - 1 where nothing
/// is left to share out.
struct key_range {
  unsigned low, high, need;
};

/// Finds the bin in which the `need`-th largest unit lies, and clears the histogram.
template <int Threads>
__device__ void find_bin(page_choice_storage<Threads>& s, unsigned need) {
  using storage = page_choice_storage<Threads>;
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  __syncthreads();
  uint4& bins = reinterpret_cast<uint4*>(s.histogram)[Threads - 1 - thread];
  const unsigned mine[4] = {bins.w, bins.z, bins.y, bins.x};
  bins = make_uint4(0, 0, 0, 0);
  const unsigned sum = mine[0] + mine[1] + mine[2] + mine[3];
  const unsigned in_warp = inclusive_sum(sum, lane);
  if (lane == 31) s.warp_total[warp] = in_warp;
  __syncthreads();
  unsigned before = in_warp - sum + __reduce_add_sync(~0u, lane < warp ? s.warp_total[lane % storage::warps] : 0u);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (before < need && before + mine[j] >= need) {
      s.bin = unsigned(storage::bins - 1 - (thread * 4 + j));
      s.above = before;
      s.in_bin = mine[j];
    }
    before += mine[j];
  }
  __syncthreads();
}

/// The cut that leaves `room` units of the items with keys in [low, high], 0 < room < all of them: bins over the range,
/// again over the bin that holds the cut, until it holds one item or one value. The histogram is clear before and
/// after.
template <int Threads>
__device__ key_range find_cut(page_choice_storage<Threads>& s, const page_items& of, const unsigned* keys, unsigned low,
                              unsigned high, unsigned room) {
  constexpr int bits = Threads == 512 ? 11 : 10;
  static_assert(page_choice_storage<Threads>::bins == 1 << bits);
  const index_t quads = ceil_div(of.items, 4);
  // Where all items but a short last one are alike, this many units are one item.
  const unsigned one = !of.tokens ? 1u : s.cut_count == 0 ? unsigned(of.p.page) : 0u;
  for (unsigned need = room;;) {
    const int shift = max(0, 32 - bits - __clz(int(high - low)));
    for (index_t q = threadIdx.x; q < quads; q += Threads) {
      const uint4 k = reinterpret_cast<const uint4*>(keys)[q];
      const auto take = [&](unsigned key, index_t i) {
        if (key >= low && key <= high && i < of.items) atomicAdd(&s.histogram[(key - low) >> shift], of.weight(i));
      };
      take(k.x, q * 4), take(k.y, q * 4 + 1), take(k.z, q * 4 + 2), take(k.w, q * 4 + 3);
    }
    find_bin(s, need);
    need -= s.above;
    const unsigned in = s.in_bin;
    low += s.bin << shift;
    high = low + ((1u << shift) - 1u);
    if (in == need) return {low, low - 1u, 0};
    if (shift == 0 || in <= one) return {low, high, need};
  }
}

/// Writes the chosen items' slots, ascending: every item with a key above the cut, and of those within it the first,
/// `need` units of them.
template <int Threads>
__device__ void write_chosen(page_choice_storage<Threads>& s, const page_items& of, const unsigned* keys,
                             const key_range& cut, index_t* out) {
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // An odd number of neighbours a thread: their loads fall into different banks.
  const index_t each = ceil_div(of.items, Threads) | 1, first = thread * each;
  unsigned above = 0, equal = 0;
  for (index_t i = first; i < min(first + each, of.items); ++i) {
    const unsigned key = keys[i];
    if (key < cut.low) continue;
    if (key > cut.high)
      above += of.weight(i);
    else
      equal += of.weight(i);
  }
  const unsigned above_to = inclusive_sum(above, lane), equal_to = inclusive_sum(equal, lane);
  if (lane == 31) s.warp_above[warp] = above_to, s.warp_equal[warp] = equal_to;
  __syncthreads();
  const bool before = lane < warp && lane < page_choice_storage<Threads>::warps;
  unsigned above_before = above_to - above + __reduce_add_sync(~0u, before ? s.warp_above[lane] : 0u);
  unsigned equal_before = equal_to - equal + __reduce_add_sync(~0u, before ? s.warp_equal[lane] : 0u);
  const bool together = of.p.page > 16;  // a warp writes an item
  for (index_t j = 0; j < each; ++j) {
    const index_t i = first + j;
    const unsigned key = i < of.items ? keys[i] : 0u;
    index_t count = 0, slot = 0;
    const index_t to = index_t(above_before + min(equal_before, cut.need)) * (of.tokens ? 1 : of.p.page);
    if (key >= cut.low && i < of.items) {
      const unsigned weight = of.weight(i);
      unsigned taken = weight;
      if (key > cut.high) {
        above_before += weight;
      } else {
        taken = equal_before < cut.need ? min(cut.need - equal_before, weight) : 0u;
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

/// Chooses and writes what is read of one row of more slots than that. The histogram is clear; `ready`: the keys are
/// made.
template <int Threads>
__device__ void choose_row(page_choice_storage<Threads>& s, const page_items& of, const page_bounds& b, unsigned* keys,
                           bool ready) {
  const page_choice& p = of.p;
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  index_t* out = p.out + of.row * p.out_stride;
  index_t count;
  if (!b.tokens && b.wanted == b.pages) {
    for (index_t slot = thread; slot < b.n; slot += Threads) out[slot] = slot;
    count = b.n;
  } else {
    // All forced slots stand behind the others; where pages are forced, the others are full ones.
    const index_t before = b.tokens ? b.room : b.room * p.page;
    for (index_t slot = b.limit + thread; slot < b.n; slot += Threads) out[before + slot - b.limit] = slot;
    count = before + b.n - b.limit;
    if (b.room > 0) {
      unsigned low = ~0u, high = 0;
      const auto note = [&](unsigned key, index_t i) {
        if (i < of.items) low = min(low, key), high = max(high, key);
      };
      if (ready || s.uniform) {
        for (index_t q = thread; q < ceil_div(of.items, 4); q += Threads) {
          uint4& kept = reinterpret_cast<uint4*>(keys)[q];
          const uint4 four = ready ? kept : of.quad(q);
          if (!ready) kept = four;
          note(four.x, q * 4), note(four.y, q * 4 + 1), note(four.z, q * 4 + 2), note(four.w, q * 4 + 3);
        }
      } else {
        for (index_t i = thread; i < of.items; i += Threads) {
          keys[i] = of.key(i);
          note(keys[i], i);
        }
      }
      low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
      if (lane == 0) s.warp_low[warp] = low, s.warp_high[warp] = high;
      __syncthreads();
      constexpr int warps = page_choice_storage<Threads>::warps;
      low = __reduce_min_sync(~0u, s.warp_low[lane % warps]), high = __reduce_max_sync(~0u, s.warp_high[lane % warps]);
      write_chosen(s, of, keys, find_cut(s, of, keys, low, high, unsigned(b.room)), out);
      const index_t last = of.items - 1, missing = b.pages * p.page - b.n;
      if (!b.tokens && b.forced == 0 && missing > 0) {  // is the last page chosen, which is short?
        __syncthreads();
        if (out[before - p.page] == last * p.page) count = before - missing;
      }
    }
  }
  if (thread == 0) p.counts[of.row] = count;
  if (p.mass) {
    __syncthreads();
    sum_mass(s, of, out, count);
  }
}

/// A row that is read whole.
template <int Threads>
__device__ void choose_all(const page_choice& p, index_t row, index_t n) {
  const index_t rows = p.tokens * p.group;
  for (index_t slot = threadIdx.x; slot < n; slot += Threads) p.out[row * p.out_stride + slot] = slot;
  if (threadIdx.x == 0) p.counts[row] = n;
  for (index_t r = threadIdx.x; p.mass && r < rows; r += Threads) p.mass[offset_t(row) * rows + r] = 1;
}

template <bool Resident>
__global__ void __launch_bounds__(choose_threads, 1)
    choose_pages_entry(const __grid_constant__ page_choice p, const __grid_constant__ page_scratch from) {
  extern __shared__ uint4 page_memory[];
  using storage = page_choice_storage<choose_threads>;
  __shared__ storage s;
  const int thread = int(threadIdx.x);
  const index_t row = index_t(blockIdx.x), n = p.length(row);
  if (n <= from.read) return choose_all<choose_threads>(p, row, n);
  for (int bin = thread; bin < storage::bins; bin += choose_threads) s.histogram[bin] = 0;
  if (thread < p.tokens) s.runs[thread] = from.runs[row * most_step_tokens + thread];
  const page_bounds bounds(p, from.read, n);
  merge_tiles(s, p, from, row, ceil_div(bounds.pages, tile_pages));
  if (thread < 32) {
    __syncwarp();
    find_cuts(s, p, bounds.limit);
  }
  __syncthreads();
  const page_items of{
      s, p, from, row, bounds.limit, ceil_div(bounds.limit, p.page) + (bounds.tokens ? s.cut_count : 0), bounds.tokens};
  choose_row(s, of, bounds, Resident ? reinterpret_cast<unsigned*>(page_memory) : p.keys + row * p.key_stride, false);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
