// Original rows of packed segments, kept until a search has read them.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/parameters.hpp"
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

/// Saves or loads parts of rows of so many heads, whose vectors have so many elements.
template <class Archive>
void transfer_originals(host_vector<std::shared_ptr<const rows_before>>& parts, index_t kv_heads, index_t k_dim,
                        index_t v_dim, Archive& archive) {
  index_t count = index_t(parts.size());
  archive.number(count);
  archive.require(count >= 0 && count <= max_tokens, "with too many original rows");
  for (index_t i = 0; i < count; ++i) {
    rows_before part;
    if constexpr (!Archive::loads) part = *parts[std::size_t(i)];
    part.k.resize(std::size_t(kv_heads));
    part.v.resize(std::size_t(kv_heads));
    for (std::size_t h = 0; h < std::size_t(kv_heads); ++h) {
      archive.numbers(part.k[h], offset_t(max_tokens) * k_dim);
      archive.numbers(part.v[h], offset_t(max_tokens) * v_dim);
      archive.require(part.k[h].size() % std::size_t(k_dim) == 0 &&
                          part.v[h].size() == part.k[h].size() / std::size_t(k_dim) * std::size_t(v_dim),
                      "with a part of an original row");
    }
    if constexpr (Archive::loads) parts.push_back(std::make_shared<const rows_before>(std::move(part)));
  }
}

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
  const host_vector<std::shared_ptr<const rows_before>>& parts() const { return parts_; }
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
