// Segments of the text among a head's candidates: raising their scores, choosing in each.
#pragma once

#include <algorithm>

#include "../../../concepts/scorer.hpp"
#include "../../../concepts/selector.hpp"
#include "../../../core/host/host_vector.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Calls `visit(first, length)` for every run of equal segments among `n` slots.
template <class Visit>
void for_each_segment(const index_t* segments, index_t n, const Visit& visit) {
  for (index_t first = 0; first < n;) {
    index_t end = first + 1;
    while (end < n && segments[end] == segments[first]) ++end;
    visit(first, end - first);
    first = end;
  }
}

/// The last pass of a scorer of segments, in place.
template <segment_scorer Scorer>
void rescore_segments(const Scorer& scorer, const index_t* segments, index_t n, float* scores) {
  float largest = 0;
  for_each_segment(segments, n, [&](index_t first, index_t length) {
    largest = (std::max)(largest, scorer.describe_segment(scores + first, length).importance);
  });
  for_each_segment(segments, n, [&](index_t first, index_t length) {
    const segment_statistics own = scorer.describe_segment(scores + first, length);
    for (index_t i = first; i < first + length; ++i) scores[i] = scorer.rescored(scores[i], own, largest);
  });
}

/// The choice of a selector of segments: the best tokens fix how many each segment gets, the selector which ones.
/// `blocks` gets the selector's block size of each segment of the candidates, 0: nothing was chosen there.
template <segment_selector Selector>
index_t choose_in_segments(const Selector& selector, const float* scores, const index_t* segments, index_t n,
                           index_t tail, index_t keep, index_t* out, top_k_scratch& scratch, host_vector<index_t>& best,
                           host_vector<index_t>& blocks) {
  keep = std::clamp(keep, 0, n);
  tail = std::clamp(tail, 0, keep);
  const index_t candidates = n - tail;
  best.resize(std::size_t(keep - tail));
  top_k(scores, candidates, keep - tail, best.data(), scratch);
  index_t count = 0;
  std::size_t next = 0;  // of the best
  blocks.clear();
  for_each_segment(segments, candidates, [&](index_t first, index_t length) {
    index_t won = 0;
    while (next < best.size() && best[next] < first + length) ++next, ++won;
    blocks.push_back(won == 0 ? 0 : selector.choose_in_segment(scores + first, length, won, out + count));
    for (index_t i = 0; i < won; ++i) out[count + i] += first;
    count += won;
  });
  for (index_t slot = candidates; slot < n; ++slot) out[count++] = slot;
  return count;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
