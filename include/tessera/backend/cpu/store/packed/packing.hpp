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

/// Whether rows may join the last segment, which ends before slot packed[h] of each head: the blocks of what stays of
/// it, of the `retained` slots (null: all), must be full. Where strategies are searched, nothing joins behind a choice.
template <class Segment>
bool takes_rows(const host_vector<std::shared_ptr<Segment>>& all, const host_vector<index_t>& packed,
                const selection* retained, bool searches) {
  const Segment& segment = *all.back();
  const index_t block = segment.format.block;
  if (block > 1 && retained && searches) return false;
  for (std::size_t h = 0; block > 1 && h < packed.size(); ++h) {
    std::size_t rows = std::size_t(segment.lengths[h]);
    if (retained)
      rows = slots_from(*retained, index_t(h), packed[h] - index_t(rows)).size() -
             slots_from(*retained, index_t(h), packed[h]).size();
    if (rows % std::size_t(block) != 0) return false;
  }
  return true;
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
