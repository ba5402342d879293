// SABlock's selector: in each segment the largest blocks that keep enough of its score.
#pragma once

#include "../concepts/selector.hpp"
#include "../core/one_lane.hpp"
#include "../core/parameters.hpp"
#include "../core/stored/segment_cursor.hpp"
#include "../math/ordered.hpp"

TESSERA_NAMESPACE_BEGIN

/// Gives each segment as many slots as it has among the best tokens of the head, and takes them in blocks.
///
/// Blocks of `size` slots count from the segment's first slot; the last one may be short. A block's score is the sum of
/// its tokens' (what is not finite counts as 0, a block of nothing else ranks last). Blocks are taken best first until
/// they hold the segment's count; the last one taken gives up its worst tokens, so that the count is met exactly. The
/// size is the largest of `largest`, `largest` - 2, ... that is at most the segment and its count, and whose tokens
/// hold `coverage` of the score that as many single tokens could; 1 (the best tokens) always does. An even `largest` is
/// one of the sizes, and odd ones follow.
/// Unit     block. Sums of scores are in double.   Ties   to the lower block, inside a block to the lower slot; NaN
///          last.
/// Errors   coverage or largest out of range: tessera::error.
/// Cost     O(n) for the counts; for a segment of n tokens O(n^2) comparisons, n <= 256.
/// Paper    SABlock, arXiv:2510.22556, Sec. III-D (Alg. 2, Eqs. 10 to 13). The candidate sizes are those of its Table
///          I.
struct adaptive_blocks {
  static constexpr const char* name = "adaptive_blocks";
  using unit = block_unit;

  float coverage = 0.9f;
  index_t largest = 9;

  /// See concepts/selector.hpp: `keep` places of one segment into `out`, ascending; returns the size of the blocks.
  TESSERA_HD index_t choose_in_segment(const float* scores, index_t n, index_t keep, index_t* out) const {
    double sums[max_segment_tokens / 2];
    return choose_in_segment(one_lane{}, scores, n, keep, out, sums);
  }
  /// The same by a team, whose `scores`, `out` and `sums` all lanes see. Sums are added in slot order by every lane, so
  /// that no team chooses otherwise.   Shapes   sums [max_segment_tokens / 2].
  template <class Team>
  TESSERA_HD index_t choose_in_segment(const Team& team, const float* scores, index_t n, index_t keep, index_t* out,
                                       double* sums) const {
    if (keep >= n) {
      for (index_t i = team.rank(); i < n; i += Team::size) out[i] = i;
      team.sync();
      return max_size(n, keep);
    }
    best_tokens(team, scores, n, keep, out);
    const double wanted = double(coverage) * sum_of(scores, out, keep, n);
    for (index_t size = max_size(n, keep); size > 1; size = next_size(size)) {
      best_blocks(team, scores, n, keep, size, out, sums);
      if (sum_of(scores, out, keep, size) >= wanted) return size;
    }
    best_tokens(team, scores, n, keep, out);
    return 1;
  }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("coverage", self.coverage, value_range{0.0f, 1.0f},
          "part of a segment's score that blocks must keep of what single tokens would");
    visit("largest", self.largest, value_range{1, max_segment_tokens}, "largest blocks, in tokens");
  }

 private:
  TESSERA_HD index_t next_size(index_t size) const { return size % 2 == 0 ? size - 1 : size - 2; }
  TESSERA_HD index_t max_size(index_t n, index_t keep) const {
    const index_t limit = keep < n ? keep : n;
    index_t size = largest;
    while (size > limit && size > 1) size = next_size(size);
    return size;
  }
  TESSERA_HD static double finite(float score) { return score - score == 0 ? double(score) : 0.0; }

  /// The `keep` best tokens, ascending.
  template <class Team>
  TESSERA_HD static void best_tokens(const Team& team, const float* scores, index_t n, index_t keep, index_t* out) {
    team.sync();  // whatever stood in `out` has been read
    index_t count = 0;
    for (index_t first = 0; first < n; first += Team::size) {
      const index_t i = first + team.rank();
      index_t taken = 0;
      if (i < n) {
        const std::uint64_t own = rank_key(scores[i], i);
        index_t before = 0;
        for (index_t j = 0; j < n; ++j) before += rank_key(scores[j], j) > own;
        taken = before < keep;
      }
      const index_t at = count + team.exclusive_sum(taken);
      if (taken) out[at] = i;
      count += team.sum(taken);
    }
    team.sync();
  }

  /// The sum over chosen places: of each block in slot order, then of the blocks.
  TESSERA_HD static double sum_of(const float* scores, const index_t* places, index_t count, index_t size) {
    double sum = 0, own = 0;
    index_t end = 0;  // of the block
    for (index_t c = 0; c < count; ++c) {
      if (places[c] >= end) {
        sum += own;
        own = 0;
        end = (places[c] / size + 1) * size;
      }
      own += finite(scores[places[c]]);
    }
    return sum + own;
  }

  TESSERA_HD static double block_sum(const float* scores, index_t n, index_t size, index_t block) {
    const index_t end = (block + 1) * size < n ? (block + 1) * size : n;
    double sum = 0;
    bool any = false;
    for (index_t i = block * size; i < end; ++i) {
      sum += finite(scores[i]);
      any |= scores[i] - scores[i] == 0;
    }
    return any ? sum : -double(infinity);
  }

  /// The best blocks of `size`, two or more, the last one cut to its best tokens.
  template <class Team>
  TESSERA_HD static void best_blocks(const Team& team, const float* scores, index_t n, index_t keep, index_t size,
                                     index_t* out, double* sums) {
    team.sync();
    const index_t blocks = ceil_div(n, size), last = n - (blocks - 1) * size;
    for (index_t b = team.rank(); b < blocks; b += Team::size) sums[b] = block_sum(scores, n, size, b);
    team.sync();
    // How many tokens the blocks before a block hold, in order of rank: it is taken whole, in part or not at all.
    index_t count = 0, cut = 0, cut_at = 0, cut_to = 0;  // one block at most is taken in part; cut: its number and 1
    for (index_t first = 0; first < blocks; first += Team::size) {
      const index_t b = first + team.rank(), length = b + 1 == blocks ? last : size;
      index_t taken = 0;
      if (b < blocks) {
        index_t before = 0;
        for (index_t a = 0; a < blocks; ++a) {
          if (sums[a] > sums[b] || (sums[a] == sums[b] && a < b)) before += a + 1 == blocks ? last : size;
        }
        const index_t room = keep - before;
        taken = room <= 0 ? 0 : room < length ? room : length;
      }
      const index_t at = count + team.exclusive_sum(taken);
      const bool whole = taken == length;
      for (index_t i = 0; whole && i < taken; ++i) out[at + i] = b * size + i;
      const bool in_part = taken > 0 && !whole;
      cut += team.sum(in_part ? b + 1 : index_t(0));
      cut_at += team.sum(in_part ? at : index_t(0));
      cut_to += team.sum(in_part ? taken : index_t(0));
      count += team.sum(taken);
    }
    if (cut > 0) {
      const index_t begin = (cut - 1) * size, length = cut == blocks ? last : size;
      best_tokens(team, scores + begin, length, cut_to, out + cut_at);
      for (index_t i = team.rank(); i < cut_to; i += Team::size) out[cut_at + i] += begin;
    }
    team.sync();
  }
};

static_assert(check_selector<adaptive_blocks>() && segment_selector<adaptive_blocks>);

TESSERA_NAMESPACE_END
