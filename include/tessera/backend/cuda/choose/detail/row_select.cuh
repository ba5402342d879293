// Selection in a row by one thread block. It holds all keys of a short row in registers, and of a long row the keys
// that may still be chosen.
#pragma once

#include "radix_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int register_threads = 512;
inline constexpr int register_keys = 16;  // per thread; they are neighbours, so one scan ranks all of them

/// Selects in a row of at most register_threads * register_keys candidates, 16 neighbours per thread. `room` of them
/// are chosen, 0 < room < candidates. It counts the three digits in turn, each among the keys that share the digits
/// before.
template <class Storage>
__device__ void register_row(Storage& s, const token_keys& keys, index_t room, index_t* out) {
  using select = row_select<Storage, 1>;
  const index_t first = index_t(threadIdx.x) * register_keys;
  uint4 mine[register_keys / 4];
  if (keys.aligned && first + register_keys <= keys.count) {
    float4 scores[register_keys / 4];
#pragma unroll
    for (int i = 0; i < register_keys / 4; ++i)
      scores[i] = __ldg(reinterpret_cast<const float4*>(keys.row + first) + i);
#pragma unroll
    for (int i = 0; i < register_keys / 4; ++i) mine[i] = token_keys::ordered(scores[i]);
  } else {
#pragma unroll
    for (int i = 0; i < register_keys / 4; ++i) mine[i] = keys.quad(first + i * 4);
  }
  rank_search search{0, unsigned(room), 0};
  bool ties = false;  // not all keys equal to the lowest are chosen
#pragma unroll
  for (int pass = 0; pass < 3; ++pass) {
    const key_digit digit = key_digit::of_pass(pass);
#pragma unroll
    for (int i = 0; i < register_keys / 4; ++i) select::count_four(s, mine[i], search.prefix, digit);
    select::descend(s, search, digit.bits());
    ties = search.sharing != search.need;
    if (!ties) {  // every key of this digit is chosen; lower digits do not matter
      search.prefix <<= digit.shift;
      break;
    }
  }
  const unsigned lowest = search.prefix, need = search.need;
  unsigned chosen = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < register_keys / 4; ++i) {
    chosen |= four(mine[i], [&](unsigned key) { return key >= lowest; }) << (i * 4);
    equal |= four(mine[i], [&](unsigned key) { return key == lowest; }) << (i * 4);
  }
  if (!ties) equal = 0;
  const unsigned counts = __popc(chosen ^ equal) | __popc(equal) << 16;  // 8,192 at most
  const unsigned before = s.scan.exclusive_sum(counts);
  const unsigned equal_before = before >> 16;
  index_t target = index_t((before & 0xffffu) + (ties ? (min)(equal_before, need) : 0u));
  for (unsigned left = need > equal_before ? need - equal_before : 0u; equal; equal &= equal - 1) {
    if (left > 0)
      --left;
    else
      chosen &= ~(equal & -equal);
  }
  for (; chosen; chosen &= chosen - 1) out[target++] = first + __ffs(int(chosen)) - 1;
}

// Selection in a long row by one thread block that reads it once and holds the keys that may still be chosen.

inline constexpr int stream_threads = 512;

/// Guesses a key that more than `room` and fewer than `most` candidates reach. It takes a rank between the two among
/// 8,192 candidates spread over the row. Any guess gives the right result; a poor one costs further reads of the row.
template <class Storage>
__device__ unsigned guess_lowest(Storage& s, const token_keys& keys, index_t candidates, index_t room, index_t most) {
  using select = row_select<Storage, 1>;
  constexpr int run = 4, runs = 512, each = run * runs / stream_threads;  // 64 bytes per run
  const index_t apart = candidates / 4 / runs, shifts = (max)(apart / run, 1);
  uint4 sample[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const index_t nth = (i * stream_threads + index_t(threadIdx.x)) / run;
    // Runs are shifted against each other, so that they do not all meet the same phase of a periodic row.
    const index_t begin = (nth * apart + nth * 5 % shifts * run) / run * run;
    sample[i] = keys.quad((begin + index_t(threadIdx.x) % run) * 4);
  }
  const float between = sqrtf(float(room) * float(most));
  const auto rank = unsigned((min)((max)(between * (runs * run * 4) / float(candidates), 1.0f), float(runs * run * 4)));
  rank_search search{0, rank, 0};
#pragma unroll
  for (int i = 0; i < each; ++i) select::count_four(s, sample[i], 0, key_digit::of_pass(0));
  select::descend(s, search, 11);
#pragma unroll
  for (int i = 0; i < each; ++i) select::count_four(s, sample[i], search.prefix, key_digit::of_pass(1));
  select::descend(s, search, 11);
  return search.prefix << 10;
}

/// Collects the candidates of at least `bound` in the order of the row: keys in `kept`, slots in `slots`. Returns their
/// number; stops with more than `most` when they do not fit.
template <class Storage>
__device__ index_t keep_from(Storage& s, const token_keys& keys, float bound, unsigned* kept, index_t* slots,
                             index_t most) {
  constexpr int rounds = 4, warps = stream_threads / 32;
  constexpr index_t tile_quads = stream_threads * rounds;
  using counts = round_counts<rounds>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t whole = keys.aligned ? keys.count / 4 : 0, quads = (keys.count + 3) / 4;
  const float4* from = reinterpret_cast<const float4*>(keys.row);
  const auto fetch = [&](index_t first, index_t tile, float4(&scores)[rounds]) {
    if (tile + tile_quads <= whole) {
#pragma unroll
      for (int i = 0; i < rounds; ++i) scores[i] = __ldg(from + first + i * 32);
    } else {
#pragma unroll
      for (int i = 0; i < rounds; ++i) scores[i] = keys.scores((first + i * 32) * 4);
    }
  };
  float4 next[rounds];
  index_t listed = 0, first = warp * (32 * rounds) + lane;
  fetch(first, 0, next);
  unsigned* warp_counts = s.warp_above;
  for (index_t tile = 0; tile < quads; tile += tile_quads, first += tile_quads) {
    float4 mine[rounds];
#pragma unroll
    for (int i = 0; i < rounds; ++i) mine[i] = next[i];
    if (tile + tile_quads < quads) fetch(first + tile_quads, tile + tile_quads, next);
    unsigned mask = 0;
#pragma unroll
    for (int i = 0; i < rounds; ++i) {  // false for NaN
      mask |= (unsigned(mine[i].x >= bound) | unsigned(mine[i].y >= bound) << 1 | unsigned(mine[i].z >= bound) << 2 |
               unsigned(mine[i].w >= bound) << 3)
              << (i * 4);
    }
    const counts ranks(mask, lane);
    if (lane == 0) warp_counts[warp] = ranks.all();
    __syncthreads();
    const unsigned of_lane = lane < warps ? warp_counts[lane] : 0u;
    const index_t before = index_t(warp_sum(lane < warp ? of_lane : 0u));
    const index_t all = index_t(warp_sum(of_lane));
    warp_counts =
        warp_counts == s.warp_above ? s.warp_equal : s.warp_above;  // alternate: one barrier per tile suffices
    if (listed + all > most) return listed + all;
    index_t to_round = listed + before;
    listed += all;
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const float scores[4] = {mine[i].x, mine[i].y, mine[i].z, mine[i].w};
      index_t to = to_round + index_t(ranks.before_in(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (mask >> (i * 4 + j) & 1u) {
          kept[to] = bits_as<unsigned>(scores[j]);
          slots[to] = (first + i * 32) * 4 + j;
          ++to;
        }
      }
      to_round += index_t(ranks.total_in(i));
    }
  }
  __syncthreads();
  for (index_t i = threadIdx.x; i < listed; i += stream_threads) kept[i] = ordered_bits(bits_as<float>(kept[i]));
  return listed;
}

/// One thread block reads a row once. Keys that reach a guessed key stay in shared memory, where the search ends.
/// `room` candidates are chosen, 0 < room < candidates.
/// It suits many long rows: there is no barrier between blocks, and a row need not fit. Where the guess fails (many
/// equal scores at the cut), the row is read up to six more times.
template <class Storage>
__device__ void stream_row(Storage& s, uint4* memory, const float* scores, index_t candidates, index_t room,
                           index_t resident, index_t* out) {
  using select = row_select<Storage, 1>;
  const token_keys keys(scores, candidates);
  auto* kept = reinterpret_cast<unsigned*>(memory);
  auto* slots = reinterpret_cast<index_t*>(kept + resident);
  index_t count = 0;
  if (room <= resident) {
    const unsigned least = ordered_bits(-infinity) + 1;  // the lowest finite score: -infinity and NaN are left out
    const unsigned lowest =
        candidates <= resident ? least : (max)(least, guess_lowest(s, keys, candidates, room, resident));
    count = keep_from(s, keys, score_of(lowest), kept, slots, resident);
  }
  const index_t padded = (count + 3) / 4 * 4;
  if (count <= resident && count + index_t(threadIdx.x) < padded) kept[count + index_t(threadIdx.x)] = 0;
  __syncthreads();
  if (count < room || count > resident) {
    const row_part<token_keys> row{keys, 0, candidates, memory, 0};
    const cut at = select::template threshold<false>(s, row, room, false);
    select::compact(s, row, at, [&](index_t to, index_t slot, index_t, bool) { out[to] = slot; });
    return;
  }
  if (count == room) {
    for (index_t i = threadIdx.x; i < room; i += stream_threads) out[i] = slots[i];
    return;
  }
  const row_part<token_keys> list{token_keys(nullptr, count), 0, count, memory, padded};
  const cut at = select::template threshold<false>(s, list, room, false);
  select::compact(s, list, at, [&](index_t to, index_t place, index_t, bool) { out[to] = slots[place]; });
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
