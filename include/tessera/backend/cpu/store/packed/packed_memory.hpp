// Memory of packed rows on the CPU, in runs or in pages.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/stored/room.hpp"
#include "../../../../layout/fixed_pages.hpp"
#include "../../../../layout/runs.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Rows of several planes that move together: values, bits and scales of K and of V.
enum packed_plane { k_values, v_values, k_bits, v_bits, k_scales, v_scales, packed_planes };
using plane_bytes = std::array<index_t, packed_planes>;

inline offset_t row_bytes(const plane_bytes& planes) {
  offset_t total = 0;
  for (const index_t bytes : planes) total += bytes;
  return total;
}

/// Rows of every kv_head of one segment; specialised by placement. The caller has the lengths; a copy is independent.
///   packed_memory(planes, kv_heads)
///   reserve(lengths, rows, more)    memory for rows[h] rows of head h, of which the first lengths[h] are stored. Where
///                                   rows must move for it and `more` will come, some spare rows too. Unchanged when
///                                   memory runs out
///   address(plane, head, row)       the first byte of a row in a plane
///   shrink(lengths)                 releases memory that these do not need, if it is worth it and there is memory for
///                                   the smaller copy
///   bytes()                         allocated bytes
///   max_rows(longest, total, segments, kv_heads)   rows that so many segments allocate at most for heads of at most
///                                   `longest` rows, `total` together
template <class Placement>
class packed_memory {
  static_assert(
      sizeof(Placement) == 0,
      "tessera: the CPU's store does not know this placement of packed rows; specialise cpu::packed_memory for it");
};

/// One allocation: plane after plane, in each of them head after head.
template <>
class packed_memory<runs> {
 public:
  packed_memory() = default;
  packed_memory(const plane_bytes& planes, index_t kv_heads)
      : planes_(planes), begins_(std::size_t(kv_heads), 0), capacities_(std::size_t(kv_heads), 0) {}

  void reserve(const host_vector<index_t>& lengths, host_vector<index_t> rows, bool more) {
    bool fits = true;
    for (std::size_t h = 0; h < rows.size(); ++h) fits &= rows[h] <= capacities_[h];
    if (fits) return;
    for (index_t& count : rows) count += more ? spare_room(count) : 0;
    move(lengths, rows);
  }
  std::byte* address(packed_plane plane, index_t head, index_t row) {
    return const_cast<std::byte*>(std::as_const(*this).address(plane, head, row));
  }
  const std::byte* address(packed_plane plane, index_t head, index_t row) const {
    offset_t offset = 0;
    for (int p = 0; p < plane; ++p) offset += planes_[std::size_t(p)];
    return data_.data() + offset * total_ + (begins_[std::size_t(head)] + row) * planes_[std::size_t(plane)];
  }
  void shrink(const host_vector<index_t>& lengths) {
    offset_t used = 0;
    for (const index_t length : lengths) used += length;
    if (!gives_back(used, total_)) return;
    try {
      move(lengths, lengths);
    } catch (...) {  // no memory for a smaller piece: the rows stay in the old one
    }
  }
  offset_t bytes() const { return offset_t(data_.capacity()); }
  static offset_t max_rows(offset_t, offset_t total, offset_t segments, offset_t kv_heads) {
    return total + total / 64 + segments * kv_heads * spare_room(0);
  }

 private:
  void move(const host_vector<index_t>& lengths, const host_vector<index_t>& rows) {
    packed_memory target(planes_, index_t(begins_.size()));
    for (std::size_t h = 0; h < rows.size(); ++h) {
      target.begins_[h] = target.total_;
      target.capacities_[h] = rows[h];
      target.total_ += rows[h];
    }
    target.data_.resize(std::size_t(target.total_ * row_bytes(planes_)));
    for (int p = 0; p < packed_planes; ++p) {
      for (std::size_t h = 0; h < rows.size(); ++h) {
        const auto plane = packed_plane(p);
        const std::size_t bytes = std::size_t(lengths[h]) * std::size_t(planes_[std::size_t(p)]);
        if (bytes > 0) std::copy_n(address(plane, index_t(h), 0), bytes, target.address(plane, index_t(h), 0));
      }
    }
    *this = std::move(target);
  }

  plane_bytes planes_{};
  offset_t total_ = 0;  // capacity in rows of all heads
  host_vector<offset_t> begins_;
  host_vector<index_t> capacities_;
  host_vector<std::byte> data_;
};

/// Pages of `Page` rows of all kv_heads: appended rows move nothing.
template <int Page>
class packed_memory<fixed_pages<Page>> {
 public:
  packed_memory() = default;
  packed_memory(const plane_bytes& planes, index_t kv_heads) : planes_(planes), heads_(kv_heads) {}

  void reserve(const host_vector<index_t>&, const host_vector<index_t>& rows, bool) {
    const std::size_t wanted = pages_of(rows);
    pages_.reserve(wanted);
    while (pages_.size() < wanted) pages_.emplace_back(std::size_t(Page * heads_ * row_bytes(planes_)));
  }
  std::byte* address(packed_plane plane, index_t head, index_t row) {
    return const_cast<std::byte*>(std::as_const(*this).address(plane, head, row));
  }
  const std::byte* address(packed_plane plane, index_t head, index_t row) const {
    offset_t offset = 0;
    for (int p = 0; p < plane; ++p) offset += planes_[std::size_t(p)];
    return pages_[std::size_t(row / Page)].data() + offset * Page * heads_ +
           (offset_t(head) * Page + row % Page) * planes_[std::size_t(plane)];
  }
  void shrink(const host_vector<index_t>& lengths) { pages_.resize((std::min)(pages_.size(), pages_of(lengths))); }
  offset_t bytes() const { return offset_t(pages_.size()) * Page * heads_ * row_bytes(planes_); }
  static offset_t max_rows(offset_t longest, offset_t, offset_t segments, offset_t kv_heads) {
    return (longest + segments * Page) * kv_heads;
  }

 private:
  static std::size_t pages_of(const host_vector<index_t>& rows) {
    index_t longest = 0;
    for (const index_t count : rows) longest = (std::max)(longest, count);
    return std::size_t(fixed_pages<Page>::pages_for(longest));
  }

  plane_bytes planes_{};
  offset_t heads_ = 0;
  host_vector<host_vector<std::byte>> pages_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
