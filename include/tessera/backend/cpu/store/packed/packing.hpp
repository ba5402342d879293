// What a store of packed rows has planned to pack.
#pragma once

#include <algorithm>
#include <memory>
#include <span>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/selection.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The slots of a head's row of a selection that are not below `first`.
inline std::span<const index_t> slots_from(const selection& chosen, index_t head, index_t first) {
  const index_t *row = chosen.row(head), *end = row + chosen.counts[std::size_t(head)];
  return {std::lower_bound(row, end, first), end};
}

/// Whether rows may join a segment: its blocks must be full, and it must not lose rows first.
template <class Segment>
bool takes_rows(const Segment& segment, bool loses_rows) {
  if (segment.format.block <= 1) return true;
  return !loses_rows && std::all_of(segment.lengths.begin(), segment.lengths.end(),
                                    [&](index_t length) { return length % segment.format.block == 0; });
}
/// Replaces a shared segment by a copy of the store's own.
template <class Segment>
void make_unique(std::shared_ptr<Segment>& segment) {
  if (segment.use_count() > 1) segment = std::make_shared<Segment>(*segment);
}

/// Segments that have been made of the oldest whole rows and do not replace them yet.
template <class Segment>
struct packing {
  host_vector<std::shared_ptr<Segment>> segments;
  host_vector<index_t> counts;  ///< by kv_head, whole rows that are in the segments
  selection left;               ///< the other whole rows
  bool joins = false;           ///< the new segment joins the last one instead of following it
  bool prompt_ended = false;    ///< its queries and tokens are forgotten
  bool in_own_basis = false;

  /// Fills `left` for heads of these whole rows.
  void leave(const host_vector<index_t>& whole) {
    for (std::size_t h = 0; h < counts.size(); ++h) {
      left.counts[h] = whole[h] - counts[h];
      for (index_t i = 0; i < left.counts[h]; ++i) left.row(index_t(h))[i] = counts[h] + i;
    }
  }
};

}  // namespace cpu
TESSERA_NAMESPACE_END
