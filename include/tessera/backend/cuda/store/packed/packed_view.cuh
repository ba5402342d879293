// Packed rows on the device: segments with a basis each, and the rows behind them that are whole.
#pragma once

#include "../../../../core/stored/packed_row.hpp"
#include "../../../../core/views.hpp"
#include "../../device/alignment.cuh"
#include "../../device/memory.cuh"
#include "../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Bytes from one row's values to the next one's: threads load 16 bytes at a time.
TESSERA_HD constexpr index_t value_stride(index_t value_bytes) { return (value_bytes + 15) / 16 * 16; }
/// Words of a row's bits.
TESSERA_HD inline index_t bit_words(const packed_format& format) { return ceil_div(format.groups(), 32); }
/// Channels as matrix instructions take them; those that are added are 0.
TESSERA_HD constexpr index_t whole_channels(index_t channels) { return (channels + 15) / 16 * 16; }

/// Vectors of one kind in a segment: keys, values, or the mean keys of blocks. Planes are [kv_heads, capacity] rows; a
/// row is `value_stride` bytes of values, `bit_words` words of bits, and a scale where the format has scales. Heads may
/// stand further apart than their rows need: see `packed_places`.
struct packed_vectors {
  packed_format format;
  index_t capacity = 0;  ///< rows of a head: from one head's scales to the next one's
  std::byte* values = nullptr;
  std::uint32_t* bits = nullptr;          ///< null where all rows of a head share `set`
  float* scales = nullptr;                ///< null where rows have none
  const std::uint32_t* set = nullptr;     ///< [kv_heads, bit_words]
  const float* basis = nullptr;           ///< [kv_heads, channels, dim]; null: as the engine hands vectors over
  offset_t value_lane = 0, bit_lane = 0;  ///< from one head to the next one, in bytes and in words

  TESSERA_HD offset_t row(index_t head, index_t i) const { return offset_t(head) * capacity + i; }
  TESSERA_HD std::byte* values_of(index_t head, index_t i) const {
    return values + head * value_lane + offset_t(i) * value_stride(format.value_bytes());
  }
  TESSERA_HD std::uint32_t* own_bits_of(index_t head, index_t i) const {
    return bits + head * bit_lane + offset_t(i) * bit_words(format);
  }
  TESSERA_HD const std::uint32_t* bits_of(index_t head, index_t i) const {
    return format.own_bits ? own_bits_of(head, i) : set + offset_t(head) * bit_words(format);
  }
  TESSERA_HD const float* basis_of(index_t head, int dim) const {
    return basis ? basis + offset_t(head) * format.channels * dim : nullptr;
  }
};

/// One segment of a (layer, sequence).
struct device_segment {
  packed_vectors k, v, means;  ///< means: one a block, as keys are
  index_t block = 0;           ///< rows of a block; 0: no means
  index_t* rows = nullptr;     ///< [kv_heads], on the device: they grow there
};

/// What a batch stores of one layer: slots go through a sequence's segments in order, then through its whole rows.
/// `Whole` is the kv_view of the whole rows; its lengths count those alone, and positions that it has are theirs.
template <class Whole>
struct packed_view {
  using element_type = typename Whole::element_type;
  using whole_type = Whole;
  static constexpr int k_dim = Whole::k_dim, v_dim = Whole::v_dim;

  const device_segment* segments = nullptr;  ///< [places, most_segments]
  const index_t* counts = nullptr;           ///< [places], segments that there are
  index_t most_segments = 0;
  const index_t* places = nullptr;  ///< [sequences]; null: a sequence's number is its place
  index_t packed = 0;               ///< of one sequence: rows of a head in segments, as the host knows
  Whole whole{};
  const index_t* positions = nullptr;        ///< by slot of everything; null where slot and position coincide
  const offset_t* position_begin = nullptr;  ///< [sequences, kv_heads]

  TESSERA_HD index_t place(index_t sequence) const { return places ? places[sequence] : sequence; }
  TESSERA_HD index_t count(index_t sequence) const { return counts[place(sequence)]; }
  TESSERA_HD const device_segment& segment(index_t sequence, index_t i) const {
    return segments[offset_t(place(sequence)) * most_segments + i];
  }
  TESSERA_HD index_t position(index_t sequence, index_t head, index_t slot) const {
    return positions ? positions[position_begin[offset_t(sequence) * whole.kv_heads + head] + slot] : slot;
  }
  /// Of whole row `row`, behind `before` packed ones.
  TESSERA_HD index_t whole_position(index_t sequence, index_t head, index_t before, index_t row) const {
    return whole.positions ? whole.position(sequence, head, row) : position(sequence, head, before + row);
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

/// begins [count + 1] = the sums of `units_of(i)` over what lies before each of `count` segments, and over all of them.
/// By all threads of a block; ends with a barrier.
template <class UnitsOf>
__device__ __forceinline__ void fill_sums(index_t count, index_t* begins, const UnitsOf& units_of) {
  if (threadIdx.x < 32) {
    const int lane = int(threadIdx.x);
    index_t before = 0;
#pragma unroll 1
    for (index_t first = 0; first < count; first += 32) {
      const index_t i = first + lane, units = i < count ? units_of(i) : 0;
      const index_t sum = inclusive_sum(units, lane);
      if (i < count) begins[i] = before + sum - units;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) begins[count] = before;
  }
  __syncthreads();
}

/// The same of units of `unit` rows (0: of each segment's block) of a (sequence, kv_head).
template <class View>
__device__ __forceinline__ void fill_begins(const View& view, index_t sequence, index_t head, index_t count,
                                            index_t unit, index_t* begins) {
  fill_sums(count, begins, [&](index_t i) {
    const device_segment& segment = view.segment(sequence, i);
    return ceil_div(segment.rows[head], unit > 0 ? unit : segment.block);
  });
}

}  // namespace detail

/// Memory of one segment's rows and means, for as many rows of every kv_head as it is made for. Bases and sets are
/// others'.
class segment_memory {
 public:
  /// `block` 0: no means.
  segment_memory(const packed_format& k, const packed_format& v, index_t block, index_t kv_heads, index_t capacity)
      : block_(block),
        rows_(std::size_t(kv_heads)),
        k_(k, kv_heads, capacity),
        v_(v, kv_heads, capacity),
        means_(k, kv_heads, block > 0 ? ceil_div(capacity, block) : 0) {}

  device_segment segment() const { return {k_.vectors(), v_.vectors(), means_.vectors(), block_, rows_.data()}; }
  /// The same with bases [kv_heads, channels, dim], or null, and, where rows have no bits of their own, sets [kv_heads,
  /// bit_words].
  device_segment segment(const float* k_basis, const float* v_basis, const std::uint32_t* k_set = nullptr,
                         const std::uint32_t* v_set = nullptr) const {
    device_segment made = segment();
    made.k.basis = made.means.basis = k_basis;
    made.v.basis = v_basis;
    made.k.set = made.means.set = k_set;
    made.v.set = v_set;
    return made;
  }
  std::size_t bytes() const { return k_.bytes() + v_.bytes() + means_.bytes() + rows_.bytes(); }

 private:
  class planes {
   public:
    planes(const packed_format& format, index_t kv_heads, index_t capacity)
        : format_(format),
          capacity_(capacity),
          values_(rows(kv_heads) * std::size_t(value_stride(format.value_bytes()))),
          bits_(format.own_bits ? rows(kv_heads) * std::size_t(bit_words(format)) : 0),
          scales_(format.scaled() ? rows(kv_heads) : 0) {}
    packed_vectors vectors() const {
      return {format_,
              capacity_,
              values_.data(),
              bits_.data(),
              scales_.data(),
              nullptr,
              nullptr,
              offset_t(capacity_) * value_stride(format_.value_bytes()),
              offset_t(capacity_) * bit_words(format_)};
    }
    std::size_t bytes() const { return values_.bytes() + bits_.bytes() + scales_.bytes(); }

   private:
    std::size_t rows(index_t kv_heads) const { return std::size_t(kv_heads) * std::size_t(capacity_); }
    packed_format format_;
    index_t capacity_;
    device_buffer<std::byte> values_;
    device_buffer<std::uint32_t> bits_;
    device_buffer<float> scales_;
  };

  index_t block_;
  device_buffer<index_t> rows_;
  planes k_, v_, means_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
