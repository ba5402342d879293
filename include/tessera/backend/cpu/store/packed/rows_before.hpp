// Original rows of packed segments, kept until a search has read them.
#pragma once

#include <algorithm>
#include <memory>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Rows of every kv_head in fp32 that were packed together. Copies of a cache share them.
struct rows_before {
  host_vector<host_vector<float>> k, v;  // by kv_head, [rows, dim]

  offset_t bytes() const {
    offset_t total = 0;
    for (const auto* side : {&k, &v}) {
      for (const auto& rows : *side) total += offset_t(rows.capacity() * sizeof(float));
    }
    return total;
  }
};

/// The original rows of a segment, one part behind the other, as a packer reads rows.
template <int D, int Dv>
class rows_of_segment {
 public:
  static constexpr int k_dim = D, v_dim = Dv;
  index_t kv_heads = 0;

  rows_of_segment(index_t heads, host_vector<std::shared_ptr<const rows_before>> parts)
      : kv_heads(heads), parts_(std::move(parts)), ends_(std::size_t(heads), host_vector<index_t>{}) {
    for (index_t h = 0; h < heads; ++h) {
      index_t end = 0;
      for (const auto& part : parts_) {
        ends_[std::size_t(h)].push_back(end += index_t(part->k[std::size_t(h)].size()) / D);
      }
    }
  }
  index_t length(index_t head) const { return ends_[std::size_t(head)].empty() ? 0 : ends_[std::size_t(head)].back(); }
  offset_t bytes() const {
    offset_t total = 0;
    for (const auto& part : parts_) total += part->bytes();
    return total;
  }
  const float* key(index_t head, index_t slot) const { return row(&rows_before::k, D, head, slot); }
  const float* value(index_t head, index_t slot) const { return row(&rows_before::v, Dv, head, slot); }

 private:
  const float* row(host_vector<host_vector<float>> rows_before::* side, int dim, index_t head, index_t slot) const {
    const auto& ends = ends_[std::size_t(head)];
    const auto part = std::upper_bound(ends.begin(), ends.end(), slot) - ends.begin();
    const index_t begin = part == 0 ? 0 : ends[std::size_t(part - 1)];
    return ((*parts_[std::size_t(part)]).*side)[std::size_t(head)].data() + offset_t(slot - begin) * dim;
  }

  host_vector<std::shared_ptr<const rows_before>> parts_;
  host_vector<host_vector<index_t>> ends_;  // by kv_head and part
};

template <int D, int Dv>
void load_key(const rows_of_segment<D, Dv>& from, index_t, index_t head, index_t slot, float* to) {
  std::copy_n(from.key(head, slot), D, to);
}
template <int D, int Dv>
void load_value(const rows_of_segment<D, Dv>& from, index_t, index_t head, index_t slot, float* to) {
  std::copy_n(from.value(head, slot), Dv, to);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
