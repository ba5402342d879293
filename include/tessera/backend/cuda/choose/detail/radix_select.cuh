// Exact radix selection of the largest keys of a row by one thread block or by a cluster of them.
#pragma once

#include <algorithm>

#include "row_keys.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int radix_bins = 2048;    // digits of 11, 11 and 10 bits
inline constexpr int max_listed = 384;     // at most so many keys of a block are listed instead of counted again
inline constexpr int loads_in_flight = 4;  // 16-byte loads of a thread in the first pass

template <int Threads, int Blocks>
struct select_storage {
  static constexpr int threads = Threads, warps = Threads / 32,
                       few = 64;  // with more keys, comparing all pairs costs more than another digit
  alignas(16) unsigned histogram[radix_bins];
  unsigned list[Blocks == 1 ? few : max_listed];  // keys that share the digits found so far, in any order
  unsigned listed, few_listed;
  // Inclusive counts of this block's share of the bins, highest bin first. Later it holds the last few keys.
  unsigned slice[Blocks == 1 ? few : radix_bins / Blocks];
  unsigned slice_total[Blocks];
  block_scan<Threads, unsigned> scan;
  unsigned warp_above[warps], warp_equal[warps];
  unsigned team_above[Blocks], team_equal[Blocks];
  unsigned digit, above, in_digit;
  index_t trimmed, trimmed_at;
};

/// A search for the key of a rank.
struct rank_search {
  unsigned prefix;   ///< the digits found so far
  unsigned need;     ///< the rank among the keys that share them
  unsigned sharing;  ///< how many keys do
};

/// Radix selection over the parts of `Span` thread blocks, and the ordered compaction behind it.
template <class Storage, int Span>
struct row_select : row_compact<Storage, Span> {
  using storage = Storage;
  using team = block_team<Span>;
  static constexpr int threads = storage::threads, warps = storage::warps;

  __device__ static void count_digit(storage& s, unsigned key, unsigned prefix, key_digit digit) {
    if (digit.shares(key, prefix)) atomicAdd(&s.histogram[digit(key)], 1u);
  }
  __device__ static void count_four(storage& s, const uint4& k, unsigned prefix, key_digit digit) {
    count_digit(s, k.x, prefix, digit);
    count_digit(s, k.y, prefix, digit);
    count_digit(s, k.z, prefix, digit);
    count_digit(s, k.w, prefix, digit);
  }

  /// Counts the leading digit of every key of the part and keeps the keys.
  template <class Keys>
  __device__ static void load(storage& s, const row_part<Keys>& part) {
    uint4* cache = const_cast<uint4*>(part.cache);
    const index_t quads = part.quads();
    const auto take = [&](index_t q, const uint4& keys) {
      if (q * 4 < part.cached) cache[q] = keys;
      count_four(s, keys, 0, key_digit::of_pass(0));
    };
    if constexpr (Keys::single) {
      const index_t whole = part.keys.aligned ? part.count / 4 : 0;
      const float4* from = reinterpret_cast<const float4*>(part.keys.row + part.begin);
      for (index_t base = threadIdx.x; base < whole; base += threads * loads_in_flight) {
        float4 scores[loads_in_flight];
#pragma unroll
        for (int u = 0; u < loads_in_flight; ++u) {
          if (base + u * threads < whole) scores[u] = __ldg(from + base + u * threads);
        }
#pragma unroll
        for (int u = 0; u < loads_in_flight; ++u) {
          if (base + u * threads < whole) take(base + u * threads, Keys::ordered(scores[u]));
        }
      }
      for (index_t q = whole + index_t(threadIdx.x); q < quads; q += threads)
        take(q, part.keys.quad(part.begin + q * 4));
    } else {
      // One thread per block of tokens, not per four blocks, because there are few.
      for (index_t i = threadIdx.x; i < quads * 4; i += threads) {
        const unsigned key = part.keys.key(part.begin + i);
        if (i < part.cached) reinterpret_cast<unsigned*>(cache)[i] = key;
        count_digit(s, key, 0, key_digit::of_pass(0));
      }
    }
  }

  /// Finds the digit of the `need`-th largest key from the histograms of the whole team, and clears them.
  __device__ static void find_digit(storage& s, unsigned need) {
    constexpr int share = radix_bins / Span, each = share > threads ? share / threads : 1;
    const int thread = threadIdx.x, lane = thread % 32;
    team::sync();
    unsigned mine[each], sum = 0;
    if constexpr (Span == 1 && each == 4) {
      uint4& bins = reinterpret_cast<uint4*>(s.histogram)[threads - 1 - thread];  // one access: four conflict in banks
      mine[0] = bins.w, mine[1] = bins.z, mine[2] = bins.y, mine[3] = bins.x;
      bins = make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll
      for (int j = 0; j < each; ++j) {
        const int bin = radix_bins - 1 - team::rank() * share - (thread * each + j);
        mine[j] = 0;
        if (thread * each < share) {
          if constexpr (Span == 1) {
            mine[j] = s.histogram[bin];
            s.histogram[bin] = 0;
          } else {
#pragma unroll
            for (int block = 0; block < Span; ++block) mine[j] += team::load(s.histogram[bin], block);
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < each; ++j) sum += mine[j];
    unsigned before = s.scan.exclusive_sum(sum);
    if constexpr (Span == 1) {
#pragma unroll
      for (int j = 0; j < each; ++j) {
        if (before < need && before + mine[j] >= need) {
          s.digit = unsigned(radix_bins - 1 - (thread * each + j));
          s.above = before;
          s.in_digit = mine[j];
        }
        before += mine[j];
      }
    } else {
      static_assert(Span == 1 || each == 1, "tessera: a cluster's block has a thread for each of its bins");
      if (thread < share) s.slice[thread] = before + sum;
      const unsigned total = s.scan.total();
      if (thread < Span) team::store(s.slice_total[team::rank()], thread, total);
      team::sync();
      for (int bin = thread; bin < radix_bins; bin += threads) s.histogram[bin] = 0;
      if (thread == 0) s.listed = s.few_listed = 0;
      if (thread < share) {
        const unsigned of_block = lane < Span ? s.slice_total[lane] : 0u;
        const unsigned to_lane = inclusive_sum(of_block, lane);
        const int owner = __ffs(int(__ballot_sync(~0u, lane < Span && to_lane >= need))) - 1;
        const unsigned base = __shfl_sync(~0u, to_lane - of_block, owner);
        const unsigned here = base + team::load(s.slice[thread], owner);
        const unsigned previous = base + (thread ? team::load(s.slice[thread - 1], owner) : 0u);
        if (previous < need && here >= need) {
          s.digit = unsigned(radix_bins - 1 - owner * share - thread);
          s.above = previous;
          s.in_digit = here - previous;
        }
      }
    }
    __syncthreads();
  }

  /// Finds the search's next digit from the histograms of the whole team, and clears them.
  __device__ static void descend(storage& s, rank_search& search, int bits) {
    find_digit(s, search.need);
    search.prefix = search.prefix << bits | s.digit;
    search.need -= s.above;
    search.sharing = s.in_digit;
  }

  /// Lists the keys that share the digits found, and ends the search among them: see `finish_listed`.
  template <bool Exact, class Keys>
  __device__ static bool finish_among_few(storage& s, const row_part<Keys>& part, rank_search& search,
                                          int known_shift) {
    const int lane = threadIdx.x % 32, rounds = rounds_for<threads>(part.quads());
    for (index_t tile = 0; tile < part.quads(); tile += threads * rounds) {
      const index_t first = tile + index_t(threadIdx.x) / 32 * (32 * rounds) + lane;
      unsigned mask = 0;
      part.each_quad(first, rounds, [&](int bit, const uint4& k) {
        mask |= four(k, [&](unsigned key) { return key >> known_shift == search.prefix; }) << bit;
      });
      if (!__any_sync(~0u, mask != 0)) continue;
      const unsigned to_lane = inclusive_sum(__popc(mask), lane);
      unsigned at = 0;
      if (lane == 31) at = atomicAdd(&s.listed, to_lane);
      at = __shfl_sync(~0u, at, 31) + to_lane - __popc(mask);
      for (; mask; mask &= mask - 1, ++at) {
        const int bit = __ffs(int(mask)) - 1;
        if (at < max_listed) s.list[at] = part.key((first + bit / 4 * 32) * 4 + bit % 4);
      }
    }
    return finish_listed<Exact>(s, search, known_shift);
  }

  /// Exchanges the keys that every block has listed. Every block then finishes the search among them by itself, which
  /// saves the barriers and counts of the remaining digits. The prefix becomes the cut, and the rank becomes the number
  /// of its ties. Returns false in every block if some block has too many keys; then neither changes.
  template <bool Exact>
  __device__ static bool finish_listed(storage& s, rank_search& search, int known_shift) {
    team::sync();
    if constexpr (Span == 1) {
      rank_few(s, s.list, s.listed, search);
      return true;
    } else {
      unsigned counts[Span];
      bool fits = true;
#pragma unroll
      for (int block = 0; block < Span; ++block) counts[block] = team::load(s.listed, block);
#pragma unroll
      for (int block = 0; block < Span; ++block) fits &= counts[block] <= max_listed;
      if (!fits) return false;
      static_assert(max_listed <= threads, "tessera: a thread takes one key of every block");
      unsigned mine[Span];
#pragma unroll
      for (int block = 0; block < Span; ++block) {
        mine[block] = threadIdx.x < counts[block] ? team::load(s.list[threadIdx.x % max_listed], block)
                                                  : 0u;  // no key has these digits
      }
      using alone = row_select<Storage, 1>;
      for (int shift = known_shift == 21 ? 10 : 0;; shift = 0) {
        const key_digit digit{shift, shift ? 21 : 10};
#pragma unroll
        for (int block = 0; block < Span; ++block) count_digit(s, mine[block], search.prefix, digit);
        alone::descend(s, search, digit.bits());
        if (shift == 0) return true;
        const unsigned left = search.sharing;
        if (!Exact && left == search.need) {
          search.prefix = (search.prefix << shift) - 1u, search.need = 0;
          return true;
        }
        if (left <= unsigned(storage::few)) {
#pragma unroll
          for (int block = 0; block < Span; ++block) {
            if (mine[block] >> shift == search.prefix) s.slice[atomicAdd(&s.few_listed, 1u)] = mine[block];
          }
          __syncthreads();
          rank_few(s, s.slice, left, search);
          return true;
        }
      }
    }
  }

  /// Ends a search among a few keys by counting, for each, those above it.
  __device__ static void rank_few(storage& s, const unsigned* keys, unsigned count, rank_search& search) {
    const unsigned need = search.need;
    if (threadIdx.x < count) {
      const unsigned key = keys[threadIdx.x];
      unsigned above = 0, equal = 0;
#pragma unroll 4
      for (unsigned i = 0; i < count; ++i) {
        above += keys[i] > key;
        equal += keys[i] == key;
      }
      if (above < need && need <= above + equal) {  // equal keys write the same value
        s.digit = key;
        s.above = above;
        s.in_digit = equal;
      }
    }
    __syncthreads();
    search.prefix = s.digit;
    search.need -= s.above;
  }

  /// The cut that leaves `want` keys, 0 < want < keys of the team. The histogram already holds the leading digits if
  /// `counted`. With `Exact` the cut is the want-th largest key itself. Without, it is any value below that key with no
  /// other key in between.
  template <bool Exact, class Keys>
  __device__ static cut threshold(storage& s, const row_part<Keys>& part, index_t want, bool counted) {
    rank_search search{0, unsigned(want), 0};
#pragma unroll
    for (int pass = 0; pass < 3; ++pass) {
      const key_digit digit = key_digit::of_pass(pass);
      if (pass > 0 || !counted) {
        const index_t quads = part.quads();
        for (index_t q = threadIdx.x; q < quads; q += threads) count_four(s, part.quad(q), search.prefix, digit);
      }
      descend(s, search, digit.bits());
      // Every key of this digit is chosen, so the lower digits do not matter.
      if (!Exact && pass < 2 && search.sharing == search.need) return {(search.prefix << digit.shift) - 1u, 0, 0};
      if (pass < 2 && search.sharing <= unsigned(Span == 1 ? storage::few : Span * max_listed)) {
        if constexpr (Span == 1) {
          if (threadIdx.x == 0) s.listed = 0;
          __syncthreads();
        }
        if (finish_among_few<Exact>(s, part, search, digit.shift))
          return {search.prefix, index_t(search.need), index_t(s.in_digit)};
      }
    }
    return {search.prefix, index_t(search.need), index_t(search.sharing)};
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
