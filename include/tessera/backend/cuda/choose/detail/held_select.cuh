// Selection among keys that lie whole in the shared memory of one thread block, or of a cluster of them.
#pragma once

#include "radix_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Bits for neighbouring keys of one thread, in the order of the row: which are chosen for certain, and which may be.
struct neighbour_bits {
  static constexpr int words = 2, quads = 8;  // groups of four keys that a word has bits for
  const uint4* from;
  index_t half;  // quads of the first word
  unsigned chosen[words] = {}, maybe[words] = {};

  /// Most quads of a thread.
  static constexpr index_t most = words * quads - 1;
  /// Of a thread when `threads` share `all` quads: odd, so that neighbouring threads read from other banks.
  __device__ static index_t each(index_t all, index_t threads) { return (all + threads - 1) / threads | 1; }

  /// Of the thread's `own` quads of `all`, from `first` on. Keys whose leading 11 bits are above `digit` are chosen,
  /// those that share it may be.
  __device__ neighbour_bits(const uint4* keys, index_t all, index_t first, index_t own, unsigned digit)
      : from(keys + first), half(own / 2 + 1) {
    const unsigned low = digit << 21, high = low | 0x1fffffu;
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const index_t begin = w * half, end = (min)(w == 0 ? half : own, all - first);
#pragma unroll
      for (int i = 0; i < quads; ++i) {
        if (begin + i < end) {
          const uint4 k = from[begin + i];
          chosen[w] |= four(k, [&](unsigned key) { return key > high; }) << (i * 4);
          maybe[w] |= four(k, [&](unsigned key) { return key >= low; }) << (i * 4);
        }
      }
      maybe[w] ^= chosen[w];
    }
  }
  /// Calls take(word, bit, key) for every key that may be chosen.
  template <class Take>
  __device__ void each_maybe(const Take& take) {
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const auto* keys = reinterpret_cast<const unsigned*>(from + w * half);
#pragma unroll 1
      for (unsigned left = maybe[w]; left; left &= left - 1) {
        const int bit = __ffs(int(left)) - 1;
        take(w, 1u << bit, keys[bit]);
      }
    }
  }
  /// Of those that may be chosen, the ones whose part is above `cut` are, and only those at it may be.
  template <class Part>
  __device__ void narrow(unsigned cut, const Part& part) {
    each_maybe([&](int w, unsigned bit, unsigned key) {
      const unsigned own = part(key);
      if (own != cut) maybe[w] ^= bit;
      if (own > cut) chosen[w] |= bit;
    });
  }
  /// All of them are chosen.
  __device__ void take_all() {
#pragma unroll
    for (int w = 0; w < words; ++w) chosen[w] |= maybe[w], maybe[w] = 0;
  }
  /// Of the chosen ones in the low half, of the others in the high half.
  __device__ unsigned counts() const {
    return (__popc(chosen[0]) + __popc(chosen[1])) | (__popc(maybe[0]) + __popc(maybe[1])) << 16;
  }
  /// Writes the slots of the chosen keys and of the first `ties` that may be, ascending, `begin` being the thread's
  /// first one.
  __device__ void write(index_t begin, unsigned ties, index_t* to) {
#pragma unroll
    for (int w = 0; w < words; ++w) {
#pragma unroll 1
      for (; maybe[w] && ties > 0; maybe[w] &= maybe[w] - 1, --ties) chosen[w] |= maybe[w] & -maybe[w];
#pragma unroll 1
      for (; chosen[w]; chosen[w] &= chosen[w] - 1) *to++ = begin + w * half * 4 + __ffs(int(chosen[w])) - 1;
    }
  }
};

/// Keys are read once to count their leading digits and once to tell which lie above the digit of the cut, and which
/// share it. From then on only these few are looked at. The list is made where the keys were, so that it is written to
/// memory in one piece.
template <class Storage, int Span>
struct held_select : row_select<Storage, Span> {
  using base = row_select<Storage, Span>;
  using team = block_team<Span>;
  static constexpr int threads = Storage::threads;
  /// Keys of one block, for whose counts 16 bits are enough.
  static constexpr index_t most = threads * neighbour_bits::most * 4;
  static_assert(most < 65536, "tessera: counts of a block's keys have 16 bits");

  /// Writes which `room` of the row's candidates are chosen; 0 < room < candidates. `part` is held whole, in `held`.
  __device__ static void run(Storage& s, const row_part<token_keys>& part, uint4* held, index_t room, index_t* out) {
    base::load(s, part);
    unsigned need = unsigned(room), prefix = 0, sharing = 0;
    const auto find = [&](int bits) {
      base::find_digit(s, need);
      prefix = prefix << bits | s.digit;
      need -= s.above;
      sharing = s.in_digit;
    };
    find(11);
    const index_t own = neighbour_bits::each(part.quads(), threads), first = index_t(threadIdx.x) * own;
    neighbour_bits bits(held, part.quads(), first, own, prefix);
    for (int shift = 10; sharing != need && shift >= 0; shift -= 10) {
      if constexpr (Span > 1) {
        if (sharing <= unsigned(Span * max_listed) && finish(s, bits, prefix, shift ? 21 : 10, need, sharing)) break;
      }
      const auto digit = [&](unsigned key) { return key >> shift & (shift ? 2047u : 1023u); };
      bits.each_maybe([&](int, unsigned, unsigned key) { atomicAdd(&s.histogram[digit(key)], 1u); });
      find(shift ? 11 : 10);
      bits.narrow(s.digit, digit);
    }
    if (sharing == need) bits.take_all(), need = 0;
    write(s, part, bits, first, need, held, out);
  }

 private:
  /// Ends the search among the few keys of all blocks that share the digits found so far. False, alike in every block,
  /// if some block has too many.
  __device__ static bool finish(Storage& s, neighbour_bits& bits, unsigned prefix, int known_shift, unsigned& need,
                                unsigned& sharing) {
    bits.each_maybe([&](int, unsigned, unsigned key) {
      const unsigned at = atomicAdd(&s.listed, 1u);
      if (at < max_listed) s.list[at] = key;
    });
    if (!base::template finish_listed<true>(s, prefix, known_shift, need)) return false;
    sharing = s.in_digit;
    bits.narrow(prefix, [](unsigned key) { return key; });
    return true;
  }

  /// The chosen, and the first `ties` of those that may be.
  __device__ static void write(Storage& s, const row_part<token_keys>& part, neighbour_bits& bits, index_t first,
                               unsigned ties, uint4* held, index_t* out) {
    const unsigned counts = bits.counts(), before = s.scan.exclusive_sum(counts), all = s.scan.total();
    const unsigned all_above = all & 0xffffu, all_equal = all >> 16;
    unsigned team_above = 0, team_equal = 0;
    if constexpr (Span > 1) {
      const int lane = int(threadIdx.x) % 32;
      // Pushed, not pulled: behind the barrier nobody needs this block's shared memory, so it may leave.
      if (threadIdx.x < Span) {
        team::store(s.team_above[team::rank()], lane, all_above);
        team::store(s.team_equal[team::rank()], lane, all_equal);
      }
      team::sync();
      const bool earlier = lane < team::rank();
      team_above = warp_sum(earlier ? s.team_above[lane] : 0u);
      team_equal = warp_sum(earlier ? s.team_equal[lane] : 0u);
    }
    const unsigned taken = (min)(team_equal, ties),
                   left = ties - taken;  // of the equal ones, by blocks before this one
    const unsigned equal_before = (min)(before >> 16, left);
    auto* list = reinterpret_cast<index_t*>(held);
    bits.write(part.begin + first * 4, left - equal_before, list + (before & 0xffffu) + equal_before);
    __syncthreads();
    index_t* to = out + team_above + taken;
    const index_t count = index_t(all_above + (min)(all_equal, left));
    for (index_t i = threadIdx.x; i < count; i += threads) to[i] = list[i];
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
