// Which slots of every (sequence, kv_head) are kept or read: ascending index lists of uneven length.
#pragma once

#include "config.hpp"
#include "host/host_vector.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Index lists, one a row, row = sequence * kv_heads + head.
/// Row r holds `counts[r]` strictly ascending slots from `indices + offsets[r]`; without `offsets`, from
/// `indices + r * row_stride` (a fixed stride, padded with -1).
struct selection_view {
  const index_t* indices = nullptr;
  const index_t* counts = nullptr;
  const offset_t* offsets = nullptr;
  offset_t row_stride = 0;

  TESSERA_HD const index_t* row(offset_t r) const { return indices + (offsets ? offsets[r] : r * row_stride); }
  TESSERA_HD index_t count(offset_t r) const { return counts[r]; }
};

/// An owned selection on the host, in CSR form with the counts beside it.
struct selection {
  host_vector<offset_t> offsets{0};
  host_vector<index_t> counts;
  host_vector<index_t> indices;

  index_t rows() const { return index_t(counts.size()); }

  /// Allocates rows of at most `capacity[r]` indices; every count is 0 then.
  void reset(const host_vector<index_t>& capacity) {
    offsets.assign(1, 0);
    for (const index_t c : capacity) offsets.push_back(offsets.back() + c);
    counts.assign(capacity.size(), 0);
    indices.assign(std::size_t(offsets.back()), no_index);
  }

  /// Appends the rows of another selection.
  void append(const selection& more) {
    const offset_t end = offsets.back();
    for (std::size_t r = 1; r < more.offsets.size(); ++r) offsets.push_back(end + more.offsets[r]);
    counts.insert(counts.end(), more.counts.begin(), more.counts.end());
    indices.insert(indices.end(), more.indices.begin(), more.indices.end());
  }

  index_t* row(index_t r) { return indices.data() + offsets[std::size_t(r)]; }
  const index_t* row(index_t r) const { return indices.data() + offsets[std::size_t(r)]; }

  selection_view view() const { return {indices.data(), counts.data(), offsets.data(), 0}; }
};

TESSERA_NAMESPACE_END
