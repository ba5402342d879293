// Packed rows on the device as kernels see them: the view of a batch, and how warps walk its rows.
#pragma once

#include <cuda_fp16.h>

#include "../../../../core/stored/packed_row.hpp"
#include "../../../../core/views.hpp"
#include "../../device/alignment.cuh"
#include "../../device/copy.cuh"
#include "../../device/warp.cuh"
#include "../../device/whole_numbers.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Bytes from one row's values to the next one's: threads load 16 bytes at a time.
TESSERA_HD constexpr index_t value_stride(index_t value_bytes) { return (value_bytes + 15) / 16 * 16; }
/// Words of a row's channel bits.
TESSERA_HD inline index_t bit_words(const packed_format& format) { return ceil_div(format.groups(), 32); }
/// `channels`, rounded up to what matrix instructions take; the added channels are 0.
TESSERA_HD constexpr index_t whole_channels(index_t channels) { return (channels + 15) / 16 * 16; }

/// Where packed rows of a cache lie: each head's one behind the other, or in the pages of the pool that has the whole
/// rows.
enum class packed_rows_in { planes, pages };

/// Where a row lies: bytes before its page, and the row's number in it. In planes everything is one page.
struct packed_row_address {
  offset_t page = 0;
  index_t row = 0;
};

/// Vectors of one kind in a segment: keys, values, or the mean keys of blocks. A row is `value_stride` bytes of values,
/// `bit_words` words of bits, and a scale where the format has scales. In planes, these are [kv_heads, capacity] rows;
/// heads may be further apart in memory than their rows need: see `packed_planes`. In pages, these are
/// [kv_heads, capacity] rows of each page, and pointers are those of page 0.
struct packed_vectors {
  packed_format format;
  index_t capacity = 0;  ///< rows of a head, of a page where there are pages: from one head's scales to the next one's
  std::byte* values = nullptr;
  std::uint32_t* bits = nullptr;          ///< null where all rows of a head share `set`
  float* scales = nullptr;                ///< null where rows have none
  const std::uint32_t* set = nullptr;     ///< [kv_heads, bit_words]
  const float* basis = nullptr;           ///< [kv_heads, channels, dim]; null: the engine's own basis
  offset_t value_lane = 0, bit_lane = 0;  ///< from one head to the next one, in bytes and in words
  const index_t* pages = nullptr;         ///< the pages of the segment's rows, in order; null: planes
  offset_t page_bytes = 0;                ///< from one page to the next one
  quick_divisor page_rows{};              ///< by `capacity`

  TESSERA_HD packed_row_address locate(index_t i) const {
    if (!pages) return {0, i};
    const index_t page = page_rows.quotient(i);
    return {offset_t(pages[page]) * page_bytes, i - page * capacity};
  }
  // The first row of a head, in planes or in page 0.
  TESSERA_HD std::byte* values_of(index_t head) const { return values + head * value_lane; }
  TESSERA_HD std::uint32_t* own_bits_of(index_t head) const { return bits + head * bit_lane; }
  TESSERA_HD float* scales_of(index_t head) const { return scales + offset_t(head) * capacity; }
  TESSERA_HD const std::uint32_t* set_of(index_t head) const { return set + offset_t(head) * bit_words(format); }

  // Rows at an address.
  TESSERA_HD std::byte* values_of(index_t head, const packed_row_address& at) const {
    return values_of(head) + at.page + offset_t(at.row) * value_stride(format.value_bytes());
  }
  TESSERA_HD std::uint32_t* own_bits_of(index_t head, const packed_row_address& at) const {
    return own_bits_of(head) + at.page / offset_t(sizeof(*bits)) + offset_t(at.row) * bit_words(format);
  }
  TESSERA_HD float& scale_of(index_t head, const packed_row_address& at) const {
    return scales_of(head)[at.page / offset_t(sizeof(*scales)) + at.row];
  }
  // Rows by their number.
  TESSERA_HD std::byte* values_of(index_t head, index_t i) const { return values_of(head, locate(i)); }
  TESSERA_HD std::uint32_t* own_bits_of(index_t head, index_t i) const { return own_bits_of(head, locate(i)); }
  TESSERA_HD float& scale_of(index_t head, index_t i) const { return scale_of(head, locate(i)); }
  TESSERA_HD const std::uint32_t* bits_of(index_t head, index_t i) const {
    return format.own_bits ? own_bits_of(head, i) : set_of(head);
  }
  TESSERA_HD const float* basis_of(index_t head, int dim) const {
    return basis ? basis + offset_t(head) * format.channels * dim : nullptr;
  }
};

/// One segment of a (layer, sequence).
struct device_segment {
  packed_vectors k, v, means;  ///< means: one row per block, stored like keys
  index_t block = 0;           ///< rows of a block; 0: no means
  index_t* rows = nullptr;     ///< [kv_heads], on the device: they grow there
};

/// What a batch stores of one layer. An entry is a (layer, sequence). Slots count through a sequence's segments in
/// order, then through its whole rows. `Whole` is the kv_view of the whole rows; its lengths and positions are those of
/// the whole rows only.
template <class Whole, packed_rows_in Memory = packed_rows_in::planes>
struct packed_view {
  static constexpr packed_rows_in rows_in = Memory;
  using element_type = typename Whole::element_type;
  using whole_type = Whole;
  static constexpr int k_dim = Whole::k_dim, v_dim = Whole::v_dim;
  static constexpr bool is_latent = false;

  const device_segment* segments = nullptr;  ///< [entries, max_segments]
  const index_t* counts = nullptr;           ///< [entries], how many segments an entry has
  index_t max_segments = 0;
  const index_t* entries = nullptr;  ///< [sequences]; null: a sequence's number is its entry
  index_t packed = 0;                ///< of one sequence: rows of a head in segments, known to the host
  Whole whole{};
  const index_t* positions = nullptr;        ///< by slot of everything; null where slot and position coincide
  const offset_t* position_begin = nullptr;  ///< [sequences, kv_heads]

  TESSERA_HD index_t entry(index_t sequence) const { return entries ? entries[sequence] : sequence; }
  TESSERA_HD index_t count(index_t sequence) const { return counts[entry(sequence)]; }
  TESSERA_HD const device_segment& segment(index_t sequence, index_t i) const {
    return segments[offset_t(entry(sequence)) * max_segments + i];
  }
  TESSERA_HD index_t position(index_t sequence, index_t head, index_t slot) const {
    return positions ? positions[position_begin[offset_t(sequence) * whole.kv_heads + head] + slot] : slot;
  }
  /// The position of whole row `row`, which `earlier` packed rows precede.
  TESSERA_HD index_t whole_position(index_t sequence, index_t head, index_t earlier, index_t row) const {
    return whole.positions ? whole.position(sequence, head, row) : position(sequence, head, earlier + row);
  }
};

namespace detail {

/// Calls visit.template operator()<element>().
template <class Visit>
__device__ __forceinline__ void with_element(packed_element element, const Visit& visit) {
  switch (element) {
    case packed_element::fp16:
      return visit.template operator()<packed_element::fp16>();
    case packed_element::fp8:
      return visit.template operator()<packed_element::fp8>();
    case packed_element::int4:
      return visit.template operator()<packed_element::int4>();
    default:
      return visit.template operator()<packed_element::bf16>();
  }
}

/// Fills begins [count + 1]. begins[i] is the sum of `units_of` over the segments before segment i; begins[count] is
/// the sum over all. All threads of a block call it. It ends with a barrier.
template <class UnitsOf>
__device__ __forceinline__ void fill_sums(index_t count, index_t* begins, const UnitsOf& units_of) {
  if (threadIdx.x < 32) {
    const int lane = int(threadIdx.x);
    index_t earlier = 0;
#pragma unroll 1
    for (index_t first = 0; first < count; first += 32) {
      const index_t i = first + lane, units = i < count ? units_of(i) : 0;
      const index_t sum = inclusive_sum(units, lane);
      if (i < count) begins[i] = earlier + sum - units;
      earlier += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) begins[count] = earlier;
  }
  __syncthreads();
}

/// The same for the segments of a (sequence, kv_head), in units of `unit` rows; 0: of each segment's block.
template <class View>
__device__ __forceinline__ void fill_begins(const View& view, index_t sequence, index_t head, index_t count,
                                            index_t unit, index_t* begins) {
  fill_sums(count, begins, [&](index_t i) {
    const device_segment& segment = view.segment(sequence, i);
    return ceil_div(segment.rows[head], unit > 0 ? unit : segment.block);
  });
}

}  // namespace detail

// The values of one packed row and the channels that they belong to, one after another, by one thread.

namespace detail {

/// The index of the highest bit of a word; of 0 it is -1.
__device__ __forceinline__ std::uint32_t highest_bit(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  std::uint32_t index;
  asm("bfind.u32 %0, %1;" : "=r"(index) : "r"(word));
  return index;
#else
  return std::uint32_t(31 - __builtin_clz(word));
#endif
}

/// The set bits of words, one after another, from the highest of the first word on. A bit's position counts `Step` for
/// every bit before it, set or not.
///
/// Bits that were read are shifted out across all words. So the next bit is always in the first word, and no step has
/// to check where a word ends.
template <int Words, int Step>
struct bit_stream {
  std::uint32_t words[Words];
  /// The position where the first word begins. Until `count` corrects it, it lags by 32 bits for each bit that was
  /// read.
  std::uint32_t position;

  /// The position of the next set bit, the `Taken`th since `count`. The first word must have one.
  template <int Taken>
  __device__ __forceinline__ std::uint32_t next() {
    const std::uint32_t bit = highest_bit(words[0]);
#pragma unroll
    for (int i = 0; i < Words; ++i) words[i] = __funnelshift_r(i + 1 < Words ? words[i + 1] : 0u, words[i], bit);
    position -= bit * std::uint32_t(Step);
    return position + std::uint32_t((Taken * 32 + 31) * Step);
  }
  /// Corrects `position` for `taken` bits that were read.
  __device__ __forceinline__ void count(int taken) { position += std::uint32_t(taken * 32 * Step); }

  /// Drops words without a set bit before the next word that has one.
  __device__ __forceinline__ void drop_empty() {
#pragma unroll
    for (int i = 1; i < Words; ++i) {
      if (words[0] == 0) drop_word();
    }
  }
  /// Whether 32 unset bits or more touch the border between two words.
  __device__ static __forceinline__ bool far_apart(std::uint32_t earlier, std::uint32_t later) {
    return (earlier & (0u - earlier)) - 1 >= later;  // all bits below the last one of `earlier`
  }

 private:
  __device__ __forceinline__ void drop_word() {
#pragma unroll
    for (int i = 0; i < Words; ++i) words[i] = i + 1 < Words ? words[i + 1] : 0u;
    position += std::uint32_t(32 * Step);
  }
};

/// How many values a word has; a row's values are read 4 at a time.
template <packed_element Element>
inline constexpr int values_in_word = Element == packed_element::fp8    ? 4
                                      : Element == packed_element::int4 ? 8
                                                                        : 2;

/// Four values of a row: 8 bytes in bf16 and fp16, 4 in fp8, 2 in int4.
template <packed_element Element>
struct four_values {
  static constexpr int words = values_in_word<Element> == 2 ? 2 : 1;
  std::uint32_t word[words];
  __device__ __forceinline__ explicit four_values(const void* from) {
    if constexpr (words == 2) {
      const uint2 loaded = *static_cast<const uint2*>(from);
      word[0] = loaded.x, word[1] = loaded.y;
    } else if constexpr (values_in_word<Element> == 4) {
      word[0] = *static_cast<const std::uint32_t*>(from);
    } else {
      word[0] = *static_cast<const std::uint16_t*>(from);
    }
  }
};

/// Value i of a word as fp32, without its row's scale.
template <packed_element Element>
__device__ __forceinline__ float value_of(std::uint32_t word, int i) {
  if constexpr (Element == packed_element::bf16) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  } else if constexpr (Element == packed_element::fp16) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (i * 16))));
  } else if constexpr (Element == packed_element::fp8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    std::uint32_t two;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n"
        : "=r"(two)
        : "r"(word >> (i / 2 * 16)));
    return __half2float(__ushort_as_half(static_cast<unsigned short>(two >> (i % 2 * 16))));
#else
    fp8 value;
    value.bits = std::uint8_t(word >> (i * 8));
    return float(value);
#endif
  } else {
    const unsigned nibble = (word >> (i * 4)) & 15u;
    const int whole = nibble < 8 ? int(nibble) : int(nibble) - 16;
    return whole == -8 ? __uint_as_float(0x7fc00000u) : float(whole);
  }
}

/// How packed rows of up to `Channels` 16-bit values lie in shared memory. Eight lanes that read the same 16 bytes of
/// eight rows read from all banks, so there are no bank conflicts. Rows of at most 256 bytes are a power of two apart,
/// and each row has its 16-byte pieces in another order. Longer rows would take too much memory that way. They are an
/// odd multiple of 16 bytes apart.
template <int Channels>
struct row_layout {
  static constexpr bool turned = Channels <= 128;

  /// Bytes from one row to the next one, of rows of `chunks` of 16 bytes.
  TESSERA_HD static constexpr unsigned stride(unsigned chunks) {
    if constexpr (!turned) return (chunks | 1) * 16;
    unsigned rounded = 1;
    while (rounded < chunks) rounded *= 2;
    return rounded * 16;
  }
  /// Where row `i` begins.
  __device__ static __forceinline__ unsigned row(unsigned i, unsigned stride) {
    const unsigned in_banks = (min)(stride, 128u);
    return i * stride + (turned ? (i * in_banks >> 7) * 16 & (in_banks - 16) : 0);
  }
  /// A byte of the row that begins at `row`.
  __device__ static __forceinline__ unsigned byte(unsigned row, unsigned i) { return turned ? row ^ i : row + i; }
};

/// Walks one row, whose values lie in shared memory. One thread walks a row; the other threads of its warp walk other
/// rows. The kept groups of `Group` channels are walked alternately from the first one up and from the last one down,
/// so that neither direction waits for the other's bits.
///
/// visit(position, words, j): the group at `position` has the values j to j + Group - 1 of `words`. The first of all
/// groups has the position `first`, and every later one `Step` more.
template <class Places, class Way, int Step>
class row_walk {
  static constexpr packed_element Element = Way::element;
  static constexpr int Words = Way::words, Group = Way::group;
  static constexpr int in_word = values_in_word<Element>, value_bits = 32 / in_word;
  using four = four_values<Element>;

 public:
  /// `bits`: one for every group; the lowest bit of the first word is the first group's.
  template <int Most>
  __device__ __forceinline__ row_walk(const std::uint32_t (&bits)[Most], std::uint32_t first) {
    static_assert(Words <= Most, "tessera: there are words for every group");
    up_.position = first, down_.position = first + std::uint32_t((Words * 32 - 1) * Step);
#pragma unroll
    for (int i = 0; i < Words; ++i) up_.words[i] = __brev(bits[i]), down_.words[i] = bits[Words - 1 - i];
    bool apart = false;
#pragma unroll
    for (int i = 1; i < Words; ++i) apart = apart || down_.far_apart(down_.words[i - 1], down_.words[i]);
    gaps_ = Words > 1 && __any_sync(~0u, apart);
  }

  /// Walks all `count` values of the row, which begins at `row` of `shared`.
  template <class Visit>
  __device__ __forceinline__ void walk(int count, const unsigned char* shared, unsigned row, const Visit& visit) {
    if constexpr (!Way::usual)
      walk_up(count, shared, row, visit);
    else if (gaps_)
      walk_all<true>(count, shared, row, visit);
    else
      walk_all<false>(count, shared, row, visit);
  }
  /// Walks the next `count` values upwards, where only these are staged. Earlier calls must have walked upwards too.
  template <class Visit>
  __device__ __forceinline__ void walk_up(int count, const unsigned char* shared, unsigned row, const Visit& visit) {
    int done = 0;
#pragma unroll 1
    for (; done + 4 <= count; done += 4) take_four<true, true>(up_, values_at(shared, row, done), visit);
#pragma unroll 1
    for (; done < count; done += Group) walk_group<true>(up_, done, shared, row, visit);
  }

 private:
  __device__ static __forceinline__ four values_at(const unsigned char* shared, unsigned row, int i) {
    return four(shared + Places::byte(row, unsigned(i * value_bits / 8)));
  }
  /// Walks eight values a round, four from each end. Rounds of sixteen take as many instructions, but warps wait longer
  /// for instruction fetches.
  template <bool Gaps, class Visit>
  __device__ __forceinline__ void walk_all(int count, const unsigned char* shared, unsigned row, const Visit& visit) {
    int done = 0, end = count;
#pragma unroll 1
    while (end % 8 != 0) end -= Group, walk_group<Gaps>(down_, end, shared, row, visit);
#pragma unroll 1
    for (; end > done; done += 4, end -= 4) {
      const four low = values_at(shared, row, done), high = values_at(shared, row, end - 4);
      take_four<Gaps, true>(up_, low, visit), take_four<Gaps, false>(down_, high, visit);
    }
  }
  template <bool Gaps, bool Up, class Stream, class Visit>
  __device__ static __forceinline__ void take_four(Stream& stream, const four& values, const Visit& visit) {
    const auto take = [&]<int Taken>() __attribute__((always_inline)) {
      if constexpr (Taken * Group < 4) {
        if constexpr (Gaps) stream.drop_empty();
        const std::uint32_t position = stream.template next<Taken>();
        visit(position, values.word, Up ? Taken * Group : 4 - Group - Taken * Group);
      }
    };
    take.template operator()<0>(), take.template operator()<1>();
    take.template operator()<2>(), take.template operator()<3>();
    stream.count(4 / Group);
  }
  /// Visits the group whose first value is `i`.
  template <bool Gaps, class Stream, class Visit>
  __device__ static __forceinline__ void walk_group(Stream& stream, int i, const unsigned char* shared, unsigned row,
                                                    const Visit& visit) {
    const auto word = [&](int w) {
      return *reinterpret_cast<const std::uint32_t*>(shared + Places::byte(row, unsigned(w * 4)));
    };
    std::uint32_t words[2] = {word(i / in_word) >> (i % in_word * value_bits), 0};
    if constexpr (Group * value_bits > 32) words[1] = word(i / in_word + 1);
    if constexpr (Gaps) stream.drop_empty();
    const std::uint32_t position = stream.template next<0>();
    visit(position, words, 0);
    stream.count(1);
  }

  bit_stream<Words, Step> up_;
  bit_stream<Words, -Step> down_;
  bool gaps_ = false;  // whether the warp's rows have long gaps: then every step checks for empty words
};

/// Words with a bit for every group of `Group` channels, at most `Channels`. `usual_words`: where a quarter of the
/// channels is left out.
template <int Channels, int Group>
inline constexpr int group_words = (Channels + Group * 32 - 1) / (Group * 32);
template <int Channels>
inline constexpr int usual_words = group_words<Channels * 3 / 4, 1>;

/// One way to walk rows: values of `Element`, and a word of bits for every 32 groups of `Group` channels. Rows of usual
/// formats are walked from both ends. Where no row of the warp has long gaps, empty words are not checked for. Rows of
/// other formats are walked upwards only, with a check before each value. That is slower, but it takes a quarter of the
/// code. Otherwise rare formats would be the larger part of the code.
template <packed_element Element, int Words, int Group, bool Usual>
struct row_way {
  static constexpr packed_element element = Element;
  static constexpr int words = Words, group = Group;
  static constexpr bool usual = Usual;
};

/// The number of a format's way, as `with_way` takes it. For each element there are four ways: single channels with the
/// usual words, single channels with all words, groups of two channels, groups of four.
template <int Channels>
__device__ __forceinline__ int way_of(const packed_format& format) {
  const int element = format.element == packed_element::fp8 ? 1 : format.element == packed_element::int4 ? 2 : 0;
  const int group = format.group == 4 ? 3 : format.group == 2 ? 2 : bit_words(format) <= usual_words<Channels> ? 0 : 1;
  return element * 4 + group;
}

/// Calls run.template operator()<row_way>(); 16-bit elements are of the type that `Tile` names. There is a single
/// switch, because the code of the ways lies far apart: in a chain of branches, each one would miss the instruction
/// cache.
template <class Tile, int Channels, class Run>
__device__ __forceinline__ void with_way(int way, const Run& run) {
  constexpr packed_element same = std::is_same_v<Tile, bf16> ? packed_element::bf16 : packed_element::fp16;
  constexpr packed_element fp8 = packed_element::fp8, int4 = packed_element::int4;
  constexpr int most = usual_words<Channels>, all = group_words<Channels, 1>, twos = group_words<Channels, 2>,
                fours = group_words<Channels, 4>;
  switch (way) {
    case 0:
      return run.template operator()<row_way<same, most, 1, true>>();
    case 1:
      return run.template operator()<row_way<same, all, 1, false>>();
    case 2:
      return run.template operator()<row_way<same, twos, 2, true>>();
    case 3:
      return run.template operator()<row_way<same, fours, 4, true>>();
    case 4:
      return run.template operator()<row_way<fp8, most, 1, true>>();
    case 5:
      return run.template operator()<row_way<fp8, all, 1, false>>();
    case 6:
      return run.template operator()<row_way<fp8, twos, 2, false>>();
    case 7:
      return run.template operator()<row_way<fp8, fours, 4, false>>();
    case 8:
      return run.template operator()<row_way<int4, most, 1, true>>();
    case 9:
      return run.template operator()<row_way<int4, all, 1, false>>();
    case 10:
      return run.template operator()<row_way<int4, twos, 2, false>>();
    default:
      return run.template operator()<row_way<int4, fours, 4, false>>();
  }
}

/// The addresses of a head's rows, for kernels over one kind of memory. In planes a row's address is its number.
template <packed_rows_in Memory>
struct head_rows {
  using address_type = index_t;
  __device__ __forceinline__ explicit head_rows(const packed_vectors&) {}
  __device__ __forceinline__ index_t address(index_t row) const { return row; }
  /// Bytes before the page that has the row, and pieces of 16 bytes.
  __device__ __forceinline__ static constexpr std::uint64_t page_bytes(index_t) { return 0; }
  __device__ __forceinline__ static constexpr unsigned page_chunks(index_t) { return 0; }
  __device__ __forceinline__ static index_t in_page(index_t address) { return address; }
};
/// In pages it is its number in a page, and the page's number, which is read from the segment's table.
template <>
struct head_rows<packed_rows_in::pages> {
  struct address_type {
    index_t row = 0, page = 0;
  };
  const index_t* pages;
  std::uint64_t bytes;
  index_t capacity;
  quick_divisor page_rows;
  __device__ __forceinline__ explicit head_rows(const packed_vectors& from)
      : pages(from.pages), bytes(std::uint64_t(from.page_bytes)), capacity(from.capacity), page_rows(from.page_rows) {}
  /// Of a row below 0, which does not exist: that row of the segment's first page.
  __device__ __forceinline__ address_type address(index_t row) const {
    const index_t page = row >= 0 ? page_rows.quotient(row) : 0;
    return {row - page * capacity, pages[page]};
  }
  __device__ __forceinline__ std::uint64_t page_bytes(const address_type& at) const {
    return unsigned(at.page) * bytes;
  }
  __device__ __forceinline__ unsigned page_chunks(const address_type& at) const {
    return unsigned(at.page) * unsigned(bytes / 16);  // fewer than 2^32 in all: see packed_pages
  }
  __device__ __forceinline__ static index_t in_page(const address_type& at) { return at.row; }
};

/// Where the bits of a head's rows lie.
template <packed_rows_in Memory = packed_rows_in::planes>
struct bit_rows : head_rows<Memory> {
  using address_type = typename head_rows<Memory>::address_type;
  const std::uint32_t* bits;
  unsigned words, stride;  // of a row, and from one row to the next one
  __device__ __forceinline__ bit_rows(const packed_vectors& from, index_t head)
      : head_rows<Memory>(from),
        bits(from.format.own_bits ? from.own_bits_of(head) : from.set_of(head)),
        words(unsigned(bit_words(from.format))),
        stride(from.format.own_bits ? words : 0) {}

  /// Loads the bits of a row, of the first one of the page where there is none. Words that the format does not have are
  /// left unchanged.
  template <int Most>
  __device__ __forceinline__ void load(const address_type& at, std::uint32_t (&to)[Most]) const {
    const std::uint32_t* row = of_row(at);
#pragma unroll
    for (unsigned w = 0; w < Most; ++w) {
      if (w < words) to[w] = load_once(row + w);
    }
  }

  /// Begins to copy the bits of the lane's row to shared memory. All lanes of a warp call it. The first word goes to
  /// `to`, and each further word 128 bytes behind the previous one, so that the words of 32 lanes lie side by side.
  template <int Most>
  __device__ __forceinline__ void copy(const address_type& at, std::uint32_t to) const {
    const std::uint32_t* row = of_row(at);
    const std::uint32_t own = own_address(to);
#pragma unroll
    for (unsigned w = 0; w < Most; ++w) {
      if (w < words) copy_async4(own + w * 128, row + w, evict_first_policy());
    }
  }
  /// Reads what `copy` brought to this lane. Words that the format does not have become 0.
  template <int Most>
  __device__ __forceinline__ void read(const unsigned char* from, std::uint32_t (&to)[Most]) const {
#pragma unroll
    for (unsigned w = 0; w < Most; ++w) {
      to[w] = w < words ? *reinterpret_cast<const std::uint32_t*>(from + w * 128) : 0;
    }
  }

 private:
  __device__ __forceinline__ const std::uint32_t* of_row(const address_type& at) const {
    const std::uint32_t* row = bits + std::uint64_t(unsigned((max)(this->in_page(at), 0))) * stride;
    if constexpr (Memory == packed_rows_in::pages) row += stride > 0 ? this->page_bytes(at) / 4 : 0;
    return row;
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
