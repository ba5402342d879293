// Which slots a step reads, from pages' logits: exact selection by one thread block a row.
#pragma once

#include "../../../device/warp.cuh"
#include "page_items.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int choose_threads = 512;

/// Keys [low, high], of which only the first `need` units are chosen; all keys above are chosen. high is low - 1 if no
/// units are left to distribute.
struct key_range {
  unsigned low, high, need;
};

/// Finds the bin in which the `need`-th largest unit lies, and clears the histogram.
__device__ inline void find_bin(page_choice_storage& s, unsigned need) {
  constexpr int lookers = page_choice_storage::bins / 4;
  const int thread = int(threadIdx.x), lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  __syncthreads();
  unsigned mine[4], before = 0;
  if (thread < lookers) {
    uint4& bins = reinterpret_cast<uint4*>(s.histogram)[lookers - 1 - thread];
    mine[0] = bins.w, mine[1] = bins.z, mine[2] = bins.y, mine[3] = bins.x;
    bins = make_uint4(0, 0, 0, 0);
    const unsigned sum = mine[0] + mine[1] + mine[2] + mine[3], in_warp = inclusive_sum(sum, lane);
    if (lane == 31) s.warp_total[warp] = in_warp;
    before = in_warp - sum;
  }
  if (thread == 0) s.listed = 0;
  __syncthreads();
  if (thread < lookers) {
    before += __reduce_add_sync(~0u, lane < warp ? s.warp_total[lane] : 0u);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (before < need && before + mine[j] >= need) {
        s.bin = unsigned(page_choice_storage::bins - 1 - (thread * 4 + j));
        s.above = before;
        s.in_bin = mine[j];
      }
      before += mine[j];
    }
  }
  __syncthreads();
}

/// How many loads of keys a thread has in flight. A launch that also attends fetches much more code and is faster with
/// fewer loads here (14.1 us instead of 14.6, RocketKV's step at 32K). One that only chooses is 3 % slower with fewer
/// (H200, CUDA 13.0).
inline constexpr int keys_at_once = 5, keys_at_once_with_attention = 4;

/// Calls of(key, i) for the items below `count` whose keys are not 0.
template <int AtOnce, class F>
__device__ void for_keys(const unsigned* keys, index_t count, const F& of) {
  const int threads = int(blockDim.x);
#pragma unroll 1
  for (index_t base = index_t(threadIdx.x); base < count; base += threads * AtOnce) {
    unsigned key[AtOnce];
#pragma unroll
    for (int u = 0; u < AtOnce; ++u) key[u] = base + u * threads < count ? keys[base + u * threads] : 0;
#pragma unroll
    for (int u = 0; u < AtOnce; ++u) {
      if (key[u] != 0) of(key[u], base + u * threads);
    }
  }
}

/// Finds the cut that leaves `room` units of the items with keys in [low, high], 0 < room < all of them. It counts keys
/// in bins over the range, then in bins over the bin of the cut, and so on, until that bin has few items or one value.
/// The histogram is clear before and after.
template <int AtOnce, class Items>
__device__ key_range find_cut(page_choice_storage& s, const Items& of, const unsigned* keys, unsigned low,
                              unsigned high, unsigned room) {
  constexpr int bits = 10;
  static_assert(page_choice_storage::bins == 1 << bits);
  const unsigned few = (page_choice_storage::max_listed - 1) * of.usual_weight();
  for (unsigned need = room;;) {
    const int shift = (max)(0, 32 - bits - __clz(int(high - low)));
    for_keys<AtOnce>(keys, of.items, [&](unsigned key, index_t i) {
      if (key >= low && key <= high) atomicAdd(&s.histogram[(key - low) >> shift], of.weight(i));
    });
    find_bin(s, need);
    need -= s.above;
    const unsigned in = s.in_bin;
    low += s.bin << shift;
    high = low + ((1u << shift) - 1u);
    if (in == need) return {low, low - 1u, 0};
    if (shift == 0) return {low, high, need};
    if (in > few) continue;
    for_keys<AtOnce>(keys, of.items, [&](unsigned key, index_t i) {
      if (key >= low && key <= high) s.list[atomicAdd(&s.listed, 1u)] = make_uint2(key, of.weight(i));
    });
    __syncthreads();
    const unsigned listed = s.listed, lane = threadIdx.x % 32;
    const unsigned mine = lane < listed ? s.list[lane].x : 0u;
    unsigned above = 0, equal = 0;
#pragma unroll 2
    for (unsigned i = 0; i < listed; ++i) {
      const uint2 other = s.list[i];
      above += other.x > mine ? other.y : 0u;
      equal += other.x == mine ? other.y : 0u;
    }
    const int at = __ffs(int(__ballot_sync(~0u, lane < listed && above < need && above + equal >= need))) - 1;
    const unsigned cut = __shfl_sync(~0u, mine, at);
    return {cut, cut, need - __shfl_sync(~0u, above, at)};
  }
}

/// Calls put(index, slot) for the chosen slots of items [from, to), with ascending indices and slots. Every item with a
/// key above the cut is chosen, and the first `need` units of the items at the cut. The block with the last item writes
/// the row's count.
template <int AtOnce, class Items, class Put>
__device__ void write_chosen(page_choice_storage& s, const Items& of, const page_bounds& b, index_t page,
                             const unsigned* keys, const key_range& cut, index_t from, index_t to, const Put& put) {
  const int thread = int(threadIdx.x), lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0),
            warps = int(blockDim.x) / 32;
  // An odd number of neighbouring items per thread: their loads use different banks.
  const index_t each = ceil_div(to - from, index_t(blockDim.x)) | 1, first = from + thread * each;
  uint2 before = make_uint2(0, 0), within = make_uint2(0, 0);  // units above the cut and at it
  const auto count = [&](unsigned key, index_t i, uint2& sum) {
    if (key > cut.high) {
      sum.x += of.weight(i);
    } else if (key >= cut.low) {
      sum.y += of.weight(i);
    }
  };
  for_keys<AtOnce>(keys, from, [&](unsigned key, index_t i) { count(key, i, before); });
#pragma unroll 1
  for (index_t i = first; i < (min)(first + each, to); ++i) count(keys[i], i, within);
  before = make_uint2(__reduce_add_sync(~0u, before.x), __reduce_add_sync(~0u, before.y));
  const uint2 up_to = inclusive_sum(within, lane);
  if (lane == 31) s.earlier[warp] = before, s.within[warp] = up_to;
  __syncthreads();
  before = lane < warps ? s.earlier[lane] : make_uint2(0, 0);
  if (lane < warp) before.x += s.within[lane].x, before.y += s.within[lane].y;
  unsigned above = __reduce_add_sync(~0u, before.x) + up_to.x - within.x;
  unsigned equal = __reduce_add_sync(~0u, before.y) + up_to.y - within.y;
  const bool together = page > 16;  // a warp writes an item
#pragma unroll 1
  for (index_t j = 0; j < each; ++j) {
    const index_t i = first + j;
    const unsigned key = i < to ? keys[i] : 0u;
    index_t count = 0, slot = 0;
    const index_t place = index_t(above + (min)(equal, cut.need)) * (of.tokens ? 1 : b.unit);
    if (key >= cut.low && i < to) {
      const unsigned weight = of.weight(i);
      unsigned taken = weight;
      if (key > cut.high) {
        above += weight;
      } else {
        taken = equal < cut.need ? (min)(cut.need - equal, weight) : 0u;
        equal += weight;
      }
      slot = of.begin(i);
      count = of.tokens ? index_t(taken) : taken ? of.end(i) - slot : 0;
    }
    if (i + 1 == of.items && i < to) of.p.counts[of.row] = b.count(count > 0);
    if (!together) {
#pragma unroll 1
      for (index_t k = 0; k < count; ++k) put(place + k, slot + k);
      continue;
    }
    for (unsigned left = __ballot_sync(~0u, count > 0); left; left &= left - 1) {
      const int owner = __ffs(int(left)) - 1;
      const index_t its_count = __shfl_sync(~0u, count, owner), its_slot = __shfl_sync(~0u, slot, owner),
                    its_place = __shfl_sync(~0u, place, owner);
      for (index_t k = lane; k < its_count; k += 32) put(its_place + k, its_slot + k);
    }
  }
}

/// Writes the forced slots of a row, behind all others.
template <class Put>
__device__ void write_forced(const page_bounds& b, const Put& put) {
  const index_t before = b.units_to_choose * b.unit;
#pragma unroll 1
  for (index_t slot = b.limit + index_t(threadIdx.x); slot < b.n; slot += int(blockDim.x)) {
    put(before + slot - b.limit, slot);
  }
}

/// Chooses and writes the slots to read of a row that has more slots than are read, by one block. The histogram must be
/// clear. `ready`: the keys are already computed. Not inlined: it would double the code of a kernel that seldom runs
/// it, and alternating kernels wait for their instructions.
__device__ __noinline__ inline void choose_row(page_choice_storage& s, const page_items& of, const page_bounds& b,
                                               unsigned* keys, bool ready) {
  const page_choice& p = of.p;
  const int thread = int(threadIdx.x), lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0),
            threads = int(blockDim.x);
  index_t* const out = p.out + of.row * p.out_stride;
  const auto put = [&](index_t place, index_t slot) { out[place] = slot; };
  if (b.whole()) {
    for (index_t slot = thread; slot < b.n; slot += threads) out[slot] = slot;
  } else {
    write_forced(b, put);
  }
  if (b.whole() || b.units_to_choose == 0) {
    if (thread == 0) p.counts[of.row] = b.whole() ? b.n : b.count(false);
  } else {
    unsigned low = ~0u, high = 0;
    const auto note = [&](unsigned key, index_t i) {
      if (i < of.items) low = (min)(low, key), high = (max)(high, key);
    };
    if (!ready && s.uniform) {
      for (index_t q = thread; q < ceil_div(of.items, 4); q += threads) {
        const uint4 four = of.quad(q);
        reinterpret_cast<uint4*>(keys)[q] = four;
        note(four.x, q * 4), note(four.y, q * 4 + 1), note(four.z, q * 4 + 2), note(four.w, q * 4 + 3);
      }
    } else {
      for (index_t i = thread; i < of.items; i += threads) {
        if (!ready) keys[i] = of.key(i);
        note(keys[i], i);
      }
    }
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (lane == 0) s.warp_low[warp] = low, s.warp_high[warp] = high;
    __syncthreads();
    const int other = lane < threads / 32 ? lane : 0;
    low = __reduce_min_sync(~0u, s.warp_low[other]), high = __reduce_max_sync(~0u, s.warp_high[other]);
    const auto choose = [&](const auto& items) {
      write_chosen<keys_at_once>(s, items, b, of.plan.page, keys,
                                 find_cut<keys_at_once>(s, items, keys, low, high, unsigned(b.units_to_choose)), 0,
                                 items.items, put);
    };
    if (s.uniform)
      choose(even_items(p, of.plan, of.row, b));
    else
      choose(of);
  }
  if (p.mass) {
    __syncthreads();
    sum_mass(s, of, out, p.counts[of.row]);
  }
}

/// Writes all slots of a row that is read whole.
__device__ __noinline__ inline void choose_all(const page_choice& p, index_t row, index_t n) {
  const index_t rows = p.tokens * p.group;
  const int threads = int(blockDim.x);
  for (index_t slot = threadIdx.x; slot < n; slot += threads) p.out[row * p.out_stride + slot] = slot;
  if (threadIdx.x == 0) p.counts[row] = n;
  for (index_t r = threadIdx.x; p.mass && r < rows; r += threads) p.mass[offset_t(row) * rows + r] = 1;
}

template <bool Resident>
__global__ void __launch_bounds__(choose_threads, 1)
    choose_pages_entry(const __grid_constant__ page_choice p, const __grid_constant__ page_scratch from) {
  extern __shared__ uint4 page_memory[];
  __shared__ page_choice_storage s;
  const int thread = int(threadIdx.x);
  const index_t row = index_t(blockIdx.x), n = p.length(row);
  const read_plan plan = load_plan(p.plans + row / p.kv_heads);
  if (n <= plan.read) return choose_all(p, row, n);
  for (int bin = thread; bin < page_choice_storage::bins; bin += choose_threads) s.histogram[bin] = 0;
  if (thread < p.tokens) s.runs[thread] = from.runs[row * max_step_tokens + thread];
  const page_bounds bounds(p, plan, n);
  merge_tiles(s, p, from, row, ceil_div(bounds.pages, tile_pages));
  if (thread < 32) {
    __syncwarp();
    find_cuts(s, p, p.plans[row / p.kv_heads], bounds.limit);
  }
  __syncthreads();
  const read_plan& held = p.plans[row / p.kv_heads];
  const page_items of{s,
                      p,
                      from,
                      held,
                      row,
                      bounds.limit,
                      plan.pages_of(bounds.limit) + (bounds.tokens ? s.cut_count : 0),
                      bounds.tokens};
  choose_row(s, of, bounds, Resident ? reinterpret_cast<unsigned*>(page_memory) : p.keys + row * p.key_stride, false);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
