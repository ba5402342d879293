// Selection among keys that all lie in the shared memory of one thread block, or of a cluster of blocks.
#pragma once

#include "radix_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Two bits for each of a thread's neighbouring keys, in the row's order: whether it is chosen, and whether it still
/// may be.
struct neighbour_bits {
  static constexpr int words = 2, quads = 8;  // groups of four keys that a word has bits for
  const uint4* source;
  index_t half;  // quads of the first word
  unsigned chosen[words] = {}, maybe[words] = {};

  /// The largest number of quads of a thread.
  static constexpr index_t max_quads = words * quads - 1;
  /// Quads of a thread when `threads` threads share `all` quads. The number is odd, so that neighbouring threads read
  /// from different banks.
  __device__ static index_t quads_per_thread(index_t all, index_t threads) { return (all + threads - 1) / threads | 1; }

  /// Bits for the thread's `own` quads of `all`, from `first` on. Keys whose leading 11 bits are above `digit` are
  /// chosen; keys that share it may be.
  __device__ neighbour_bits(const uint4* keys, index_t all, index_t first, index_t own, unsigned digit)
      : source(keys + first), half(own / 2 + 1) {
    const unsigned low = digit << 21, high = low | 0x1fffffu;
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const index_t begin = w * half, end = (min)(w == 0 ? half : own, all - first);
#pragma unroll
      for (int i = 0; i < quads; ++i) {
        if (begin + i < end) {
          const uint4 k = source[begin + i];
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
      const auto* keys = reinterpret_cast<const unsigned*>(source + w * half);
#pragma unroll 1
      for (unsigned left = maybe[w]; left; left &= left - 1) {
        const int bit = __ffs(int(left)) - 1;
        take(w, 1u << bit, keys[bit]);
      }
    }
  }
  /// Among the keys that may be chosen, chooses those whose part is above `cut`. After that, only keys whose part
  /// equals it may be chosen.
  template <class Part>
  __device__ void narrow(unsigned cut, const Part& part) {
    each_maybe([&](int w, unsigned bit, unsigned key) {
      const unsigned own = part(key);
      if (own != cut) maybe[w] ^= bit;
      if (own > cut) chosen[w] |= bit;
    });
  }
  /// Chooses all keys that may be.
  __device__ void take_all() {
#pragma unroll
    for (int w = 0; w < words; ++w) chosen[w] |= maybe[w], maybe[w] = 0;
  }
  /// Returns two counts in one word: chosen keys in the low half, keys that may be chosen in the high half.
  __device__ unsigned counts() const {
    return (__popc(chosen[0]) + __popc(chosen[1])) | (__popc(maybe[0]) + __popc(maybe[1])) << 16;
  }
  /// Writes the slots of the chosen keys and of the first `ties` that may be, ascending. `begin` is the thread's first
  /// slot.
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

/// Keys are read once to count their leading digits. They are read once more to find which keys lie above the digit of
/// the cut, and which share it. From then on only these few are read. The list of chosen slots overwrites the keys in
/// shared memory, so that it is written to device memory in one piece.
template <class Storage, int Span>
struct held_select : row_select<Storage, Span> {
  using base = row_select<Storage, Span>;
  using team = block_team<Span>;
  static constexpr int threads = Storage::threads;
  /// Keys of one block. Their counts fit into 16 bits.
  static constexpr index_t max_keys = threads * neighbour_bits::max_quads * 4;
  static_assert(max_keys < 65536, "tessera: counts of a block's keys have 16 bits");

  /// Chooses `room` of the row's candidates, 0 < room < candidates. `held` has all keys of `part`.
  __device__ static void run(Storage& s, const row_part<token_keys>& part, uint4* held, index_t room, index_t* out) {
    base::load(s, part);
    rank_search search{0, unsigned(room), 0};
    base::descend(s, search, 11);
    const index_t own = neighbour_bits::quads_per_thread(part.quads(), threads), first = index_t(threadIdx.x) * own;
    neighbour_bits bits(held, part.quads(), first, own, search.prefix);
    for (int shift = 10; search.sharing != search.need && shift >= 0; shift -= 10) {
      if constexpr (Span > 1) {
        if (search.sharing <= unsigned(Span * max_listed) && finish(s, bits, search, shift ? 21 : 10)) break;
      }
      const key_digit digit{shift, shift ? 21 : 10};
      bits.each_maybe([&](int, unsigned, unsigned key) { atomicAdd(&s.histogram[digit(key)], 1u); });
      base::descend(s, search, digit.bits());
      bits.narrow(s.digit, digit);
    }
    if (search.sharing == search.need) bits.take_all(), search.need = 0;
    write(s, part, bits, first, search.need, held, out);
  }

 private:
  /// Ends the search among the few keys of all blocks that share the digits found so far. Returns false in every block
  /// if some block has too many.
  __device__ static bool finish(Storage& s, neighbour_bits& bits, rank_search& search, int known_shift) {
    bits.each_maybe([&](int, unsigned, unsigned key) {
      const unsigned at = atomicAdd(&s.listed, 1u);
      if (at < max_listed) s.list[at] = key;
    });
    if (!base::template finish_listed<true>(s, search, known_shift)) return false;
    search.sharing = s.in_digit;
    bits.narrow(search.prefix, [](unsigned key) { return key; });
    return true;
  }

  /// Writes the chosen keys, and the first `ties` of those that may be.
  __device__ static void write(Storage& s, const row_part<token_keys>& part, neighbour_bits& bits, index_t first,
                               unsigned ties, uint4* held, index_t* out) {
    const unsigned counts = bits.counts(), before = s.scan.exclusive_sum(counts), all = s.scan.total();
    const unsigned all_above = all & 0xffffu, all_equal = all >> 16;
    unsigned team_above = 0, team_equal = 0;
    if constexpr (Span > 1) {
      const int lane = int(threadIdx.x) % 32;
      // Counts are pushed to the other blocks. After the barrier no block reads this block's shared memory, so it may
      // end.
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
                   left = ties - taken;  // ties that remain after earlier blocks
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
