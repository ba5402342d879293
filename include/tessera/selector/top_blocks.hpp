// The best runs of consecutive tokens.
#pragma once

#include "../concepts/selector.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Chooses the tail and the best blocks of `block` consecutive slots, `keep` tokens in all.
///
/// Blocks start at slot 0; the last one before the tail may be short. A block's score is the sum of its tokens' scores
/// (NaN and -infinity count as 0, a block of nothing else ranks last; +infinity wins). Blocks are taken best first
/// while they fit; the one that does not fit is trimmed to its best tokens, so that the count is met exactly.
/// Ties     to the lower block, inside the trimmed block to the lower index.   Cost  O(n) on average.
struct top_blocks {
  static constexpr const char* name = "top_blocks";
  using unit = block_unit;

  index_t block = 16;

  index_t select(const float* scores, index_t n, index_t tail, index_t keep, index_t* out,
                 top_k_scratch& scratch) const {
    keep = std::clamp(keep, 0, n);
    tail = std::clamp(tail, 0, keep);
    const index_t candidates = n - tail, blocks = ceil_div(candidates, block);
    index_t room = keep - tail;

    auto& keys = scratch.keys;
    keys.resize(std::size_t(blocks));
    for (index_t b = 0; b < blocks; ++b) {
      float sum = 0;
      bool any = false;
      const index_t first = b * block, length = (std::min)(block, candidates - first);
      for (index_t i = first; i < first + length; ++i) {
        const bool counts = scores[i] > -infinity;  // false for NaN
        sum += counts ? scores[i] : 0;
        any |= counts;
      }
      keys[std::size_t(b)] = rank_key(any ? sum : -infinity, b);
    }
    // Every block holds `block` tokens but the last, so at most this many can be touched.
    const index_t touched = (std::min)(blocks, room / block + 2);
    std::partial_sort(keys.begin(), keys.begin() + touched, keys.end(), std::greater<>{});

    index_t count = 0;
    for (index_t i = 0; i < touched && room > 0; ++i) {
      const index_t first = rank_index(keys[std::size_t(i)]) * block;
      const index_t length = (std::min)(block, candidates - first);
      if (length <= room) {
        for (index_t j = 0; j < length; ++j) out[count++] = first + j;
        room -= length;
      } else {
        top_k_scratch inner;
        const index_t trimmed = top_k(scores + first, length, room, out + count, inner);
        for (index_t j = 0; j < trimmed; ++j) out[count + j] += first;
        count += trimmed;
        room = 0;
      }
    }
    std::sort(out, out + count);
    for (index_t slot = n - tail; slot < n; ++slot) out[count++] = slot;
    return count;
  }

  index_t unit_slots() const { return block; }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("block", self.block, value_range{1, max_tokens}, "consecutive tokens that are chosen together");
  }
};

static_assert(check_selector<top_blocks>());

TESSERA_NAMESPACE_END
