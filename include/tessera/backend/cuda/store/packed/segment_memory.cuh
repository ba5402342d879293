// Memory of one segment of packed rows on the device.
#pragma once

#include "../../device/memory.cuh"
#include "packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Memory of one segment's rows and means, for as many rows of every kv_head as it is made for. It does not own bases
/// and sets.
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
