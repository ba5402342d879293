// Selection in a short row by one thread block that holds its keys in registers.
#pragma once

#include "radix_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int register_threads = 512;
inline constexpr int register_keys = 16;  // of a thread: neighbours, so that one scan ranks them all

/// A row of at most register_threads * register_keys candidates, 16 neighbours a thread. `room` of them are chosen,
/// 0 < room < candidates. Counts the three digits, each among the keys that share the ones before.
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
  unsigned lowest = 0, need = unsigned(room);
  bool ties = false;  // not all keys equal to the lowest are chosen
#pragma unroll
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, above_shift = pass == 0 ? 32 : pass == 1 ? 21 : 10;
#pragma unroll
    for (int i = 0; i < register_keys / 4; ++i) {
      select::count_four(s, mine[i], lowest, above_shift, shift, pass == 2 ? 1023u : 2047u);
    }
    select::find_digit(s, need);
    lowest = lowest << (pass == 2 ? 10 : 11) | s.digit;
    need -= s.above;
    ties = s.in_digit != need;
    if (!ties) {  // every key of this digit is chosen: the lower digits do not matter
      lowest <<= shift;
      break;
    }
  }
  unsigned chosen = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < register_keys / 4; ++i) {
    chosen |= four(mine[i], [&](unsigned key) { return key >= lowest; }) << (i * 4);
    equal |= four(mine[i], [&](unsigned key) { return key == lowest; }) << (i * 4);
  }
  if (!ties) equal = 0;
  const unsigned counts = __popc(chosen ^ equal) | __popc(equal) << 16;  // 8,192 at most
  const unsigned before = s.scan.before(counts);
  const unsigned equal_before = before >> 16;
  index_t to = index_t((before & 0xffffu) + (ties ? (min)(equal_before, need) : 0u));
  for (unsigned left = need > equal_before ? need - equal_before : 0u; equal; equal &= equal - 1) {
    if (left > 0)
      --left;
    else
      chosen &= ~(equal & -equal);
  }
  for (; chosen; chosen &= chosen - 1) out[to++] = first + __ffs(int(chosen)) - 1;
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
