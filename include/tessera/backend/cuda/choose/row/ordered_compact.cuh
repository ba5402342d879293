// The chosen keys of a row in the order of the row, by one thread block or by a cluster of them.
#pragma once

#include "row_keys.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// The key that separates: everything above it is chosen, and the first `ties` of the `equal` ones.
struct cut {
  unsigned key;
  index_t ties, equal;
};

template <class Storage, int Span>
struct row_compact {
  using storage = Storage;
  using team = block_team<Span>;
  static constexpr int threads = storage::threads, warps = storage::warps;

  /// Counts of the warps before this one, and of the whole block.
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

  /// Calls emit(rank among the chosen, index in the row, equal ones before it, equal) for every chosen key, indices
  /// ascending with the rank.
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
      // Pushed, not pulled: behind the barrier nobody needs this block's shared memory, so it may leave.
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
      if (quads > tile_quads) {  // the counts above are of all tiles, the masks of the last
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
