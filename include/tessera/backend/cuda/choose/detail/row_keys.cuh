// The ordered keys of a row's tokens or blocks, which a selection ranks, split over the thread blocks of a cluster; and
// the chosen keys in the order of the row.
#pragma once

#include "../../../../core/types.hpp"
#include "../../../../math/ordered.hpp"
#include "../../device/alignment.cuh"
#include "../../device/cluster.cuh"
#include "../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A digit of a 32-bit key: 11, 11 and 10 bits, the leading one first. Selections find the key of a rank digit by
/// digit. They count each digit among the keys that share the digits before it.
struct key_digit {
  int shift;  ///< number of bits below this digit
  int above;  ///< number of bits below the previous digit

  TESSERA_HD static constexpr key_digit of_pass(int pass) {
    return pass == 0 ? key_digit{21, 32} : pass == 1 ? key_digit{10, 21} : key_digit{0, 10};
  }
  TESSERA_HD constexpr int bits() const { return shift ? 11 : 10; }
  TESSERA_HD constexpr unsigned operator()(unsigned key) const { return (key >> shift) & (shift ? 2047u : 1023u); }
  /// Whether a key has the digits `prefix` before this one.
  TESSERA_HD constexpr bool shares(unsigned key, unsigned prefix) const {
    return above == 32 || key >> above == prefix;
  }
};

inline constexpr int quads_each = 8;  // per thread and tile: a bit for each of its 32 keys fills a register

/// The score of an ordered key, except NaN and -0.
__device__ inline float score_of(unsigned key) { return bits_as<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

/// Candidate tokens of one row as ordered keys, 0 (below every key) beyond the end.
struct token_keys {
  static constexpr bool single = true;
  const float* row;
  index_t count;
  bool aligned;
  __device__ token_keys(const float* row_, index_t count_) : row(row_), count(count_), aligned(on_16_bytes(row_)) {}
  __device__ unsigned key(index_t i) const { return i < count ? ordered_bits(row[i]) : 0u; }
  __device__ bool whole(index_t i) const { return aligned && i + 4 <= count; }
  __device__ uint4 quad(index_t i) const {
    if (!whole(i)) return make_uint4(key(i), key(i + 1), key(i + 2), key(i + 3));
    return ordered(__ldg(reinterpret_cast<const float4*>(row + i)));
  }
  /// Four scores, NaN beyond the end.
  __device__ float4 scores(index_t i) const {
    if (whole(i)) return __ldg(reinterpret_cast<const float4*>(row + i));
    const auto at = [&](index_t j) { return j < count ? row[j] : bits_as<float>(0x7fffffffu); };
    return make_float4(at(i), at(i + 1), at(i + 2), at(i + 3));
  }
  __device__ static uint4 ordered(const float4& s) {
    return make_uint4(ordered_bits(s.x), ordered_bits(s.y), ordered_bits(s.z), ordered_bits(s.w));
  }
};

/// Candidate blocks of one row. One thread sums a block's score in slot order, so its bits equal the CPU's.
struct block_keys {
  static constexpr bool single = false;
  const float* row;
  index_t tokens, block, count;
  __device__ block_keys(const float* row_, index_t tokens_, index_t block_)
      : row(row_), tokens(tokens_), block(block_), count(ceil_div(tokens_, block_)) {}
  __device__ unsigned key(index_t b) const {
    if (b >= count) return 0;
    float sum = 0;
    bool any = false;
    const index_t end = b + 1 == count ? tokens : (b + 1) * block;
#pragma unroll 8
    for (index_t i = b * block; i < end; ++i) {
      const float score = row[i];
      const bool counts = score > -infinity;  // false for NaN
      sum += counts ? score : 0;
      any |= counts;
    }
    return ordered_bits(any ? sum : -infinity);
  }
  __device__ uint4 quad(index_t b) const { return make_uint4(key(b), key(b + 1), key(b + 2), key(b + 3)); }
};

/// The part of a row that one thread block works on: keys in shared memory as far as they fit.
template <class Keys>
struct row_part {
  Keys keys;
  index_t begin, count;  // begin is a multiple of 4
  const uint4* cache;
  index_t cached;  // a multiple of 4
  __device__ index_t quads() const { return (count + 3) / 4; }
  __device__ uint4 quad(index_t q) const { return q * 4 < cached ? cache[q] : keys.quad(begin + q * 4); }
  __device__ unsigned key(index_t i) const {
    return i < cached ? reinterpret_cast<const unsigned*>(cache)[i] : keys.key(begin + i);
  }
  /// Calls see(bit of the first of four, keys) for a thread's `rounds` quads of a tile: `first`, `first` + 32, ...
  template <class See>
  __device__ void each_quad(index_t first, int rounds, const See& see) const {
    if (cached >= count) {
#pragma unroll
      for (int i = 0; i < quads_each; ++i) {
        if (i < rounds && first + i * 32 < quads()) see(i * 4, cache[first + i * 32]);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < rounds; ++i) {
        if (first + i * 32 < quads()) see(i * 4, quad(first + i * 32));
      }
    }
  }
};

/// How many quads of a tile a thread has. It is chosen so that all warps have work. A warp's quads lie together.
template <int Threads>
__device__ int rounds_for(index_t quads) {
  return int((min)(index_t(quads_each), (quads + Threads - 1) / Threads));
}

/// Four bits: whether `holds` is true of each of four keys.
template <class Holds>
__device__ inline unsigned four(const uint4& k, const Holds& holds) {
  return unsigned(holds(k.x)) | unsigned(holds(k.y)) << 1 | unsigned(holds(k.z)) << 2 | unsigned(holds(k.w)) << 3;
}

/// Ranks of a thread's 4 * Rounds bits in the order quad round, lane, bit. Counts are packed, one byte per round:
/// `earlier` counts the lower lanes, `total` counts all lanes.
template <int Rounds = quads_each>
struct round_counts {
  static constexpr int halves = (Rounds + 3) / 4;
  unsigned earlier[halves], total[halves];
  __device__ round_counts(unsigned mask, int lane) {
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      unsigned counts = mask >> (half * 16) & 0xffffu;
      counts -= counts >> 1 & 0x5555u;
      counts = (counts & 0x3333u) + (counts >> 2 & 0x3333u);
      counts = (counts & 0xfu) | (counts & 0xf0u) << 4 | (counts & 0xf00u) << 8 | (counts & 0xf000u) << 12;
      const unsigned to_lane = inclusive_sum(counts, lane);  // a byte reaches 128 at most
      earlier[half] = to_lane - counts;
      total[half] = __shfl_sync(~0u, to_lane, 31);
    }
  }
  // `round` may be known only at run time, and registers cannot be indexed.
  __device__ unsigned before_in(int round) const {
    return (round < 4 ? earlier[0] : earlier[halves - 1]) >> (round % 4 * 8) & 0xffu;
  }
  __device__ unsigned total_in(int round) const {
    return (round < 4 ? total[0] : total[halves - 1]) >> (round % 4 * 8) & 0xffu;
  }
  __device__ unsigned all() const {
    unsigned sum = 0;
#pragma unroll
    for (int round = 0; round < Rounds; ++round) sum += total_in(round);
    return sum;
  }
};

// The chosen keys of a row in the order of the row, by one thread block or by a cluster of them.

/// The cut: keys above `key` are chosen, and the first `ties` of the `equal` ones.
struct cut {
  unsigned key;
  index_t ties, equal;
};

template <class Storage, int Span>
struct row_compact {
  using storage = Storage;
  using team = block_team<Span>;
  static constexpr int threads = storage::threads, warps = storage::warps;

  /// Counts of earlier warps, and of the whole block.
  struct warp_offsets {
    unsigned above, equal, all_above, all_equal;
  };
  __device__ static warp_offsets offsets(storage& s, unsigned above, unsigned equal) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    above = warp_sum(above);
    equal = warp_sum(equal);
    if (lane == 0) s.warp_above[warp] = above, s.warp_equal[warp] = equal;
    __syncthreads();
    const unsigned a = lane < warps ? s.warp_above[lane] : 0u, e = lane < warps ? s.warp_equal[lane] : 0u;
    const unsigned before = lane < warp ? ~0u : 0u;
    return {warp_sum(a & before), warp_sum(e & before), warp_sum(a), warp_sum(e)};
  }

  /// Calls emit(rank among the chosen, index in the row, number of equal keys before it, equal) for every chosen key.
  /// Indices ascend with the rank.
  template <class Keys, class Emit>
  __device__ static void compact(storage& s, const row_part<Keys>& part, const cut& at, const Emit& emit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const index_t quads = part.quads();
    const int rounds = rounds_for<threads>(quads);
    const index_t tile_quads = threads * rounds;
    unsigned above_mask = 0, equal_mask = 0;
    const auto first_of = [&](index_t tile) { return tile + warp * (32 * rounds) + lane; };
    const auto compare = [&](index_t tile) {
      above_mask = equal_mask = 0;
      part.each_quad(first_of(tile), rounds, [&](int bit, const uint4& k) {
        above_mask |= four(k, [&](unsigned key) { return key > at.key; }) << bit;
        equal_mask |= four(k, [&](unsigned key) { return key == at.key; }) << bit;
      });
    };
    unsigned above = 0, equal = 0;
    for (index_t tile = 0; tile < quads; tile += tile_quads) {
      compare(tile);
      above += __popc(above_mask);
      equal += __popc(equal_mask);
    }
    warp_offsets warp_at = offsets(s, above, equal);
    unsigned team_above = 0, team_equal = 0;
    if constexpr (Span > 1) {
      // Counts are pushed to the other blocks. After the barrier no block reads this block's shared memory, so it may
      // end.
      if (warp == 0 && lane < Span) {
        team::store(s.team_above[team::rank()], lane, warp_at.all_above);
        team::store(s.team_equal[team::rank()], lane, warp_at.all_equal);
      }
      team::sync();
      const bool before = lane < team::rank();
      team_above = warp_sum(before ? s.team_above[lane] : 0u);
      team_equal = warp_sum(before ? s.team_equal[lane] : 0u);
    }
    for (index_t tile = 0; tile < quads; tile += tile_quads) {
      if (quads > tile_quads) {  // the counts above cover all tiles, the masks only the last
        __syncthreads();
        compare(tile);
        warp_at = offsets(s, __popc(above_mask), __popc(equal_mask));
      }
      unsigned equal_before = team_equal + warp_at.equal,
               to = team_above + warp_at.above + (min)(equal_before, unsigned(at.ties));
      team_above += warp_at.all_above;
      team_equal += warp_at.all_equal;
      unsigned chosen = above_mask, equal_rank = equal_before;
      const bool ties = __any_sync(~0u, equal_mask != 0);
      const round_counts<> equals(ties ? equal_mask : 0u, lane);
      if (ties) {
#pragma unroll 1
        for (int round = 0; round < quads_each; ++round) {
          if (round >= rounds) break;
          unsigned rank = equal_rank + equals.before_in(round);
#pragma unroll
          for (int bit = round * 4; bit < round * 4 + 4; ++bit) {
            if (equal_mask >> bit & 1u) chosen |= unsigned(rank++ < unsigned(at.ties)) << bit;
          }
          equal_rank += equals.total_in(round);
        }
      }
      const round_counts<> ranks(chosen, lane);
#pragma unroll 1
      for (int round = 0; round < quads_each; ++round) {
        if (round >= rounds) break;
        const unsigned here = chosen >> (round * 4) & 15u, here_equal = equal_mask >> (round * 4) & 15u;
        if (here) {
          const index_t index = part.begin + (first_of(tile) + round * 32) * 4;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (here >> j & 1u) {
              const unsigned lower = (1u << j) - 1u;
              emit(index_t(to + ranks.before_in(round) + __popc(here & lower)), index + j,
                   index_t(equal_before + equals.before_in(round) + __popc(here_equal & lower)),
                   bool(here_equal >> j & 1u));
            }
          }
        }
        to += ranks.total_in(round);
        equal_before += equals.total_in(round);
      }
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
