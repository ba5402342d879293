// The first block, the last one, and the best of those between, each whole.
#pragma once

#include "../concepts/selector.hpp"
#include "../core/error.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Chooses whole blocks of `block` consecutive slots until they have `keep` tokens: ceil(keep / block) full ones. The
/// first and the last block are always chosen and count. The newest `tail` slots stand behind the blocks, are always
/// chosen and do not count.
///
/// A block's score is that of its best slot; NaN counts as -infinity.
/// Ties     to the lower block.   Cost  O(n) on average.
/// Errors   a budget below two blocks: tessera::error.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 4.2. Differs: the first and the last block; the paper keeps the
///          uncompressed tail alone.
struct whole_blocks {
  static constexpr const char* name = "whole_blocks";
  using unit = block_unit;

  index_t block = 8;

  /// Chooses among blocks with these scores and sizes, in order. Writes the chosen ones, ascending; returns how many.
  index_t choose_blocks(const float* scores, const index_t* sizes, index_t blocks, index_t keep, index_t* out,
                        top_k_scratch& scratch) const {
    if (blocks <= 0 || keep <= 0) return 0;
    auto& keys = scratch.keys;
    keys.clear();
    for (index_t b = 1; b + 1 < blocks; ++b) keys.push_back(rank_key(scores[b], b));
    index_t count = 0, tokens = 0;
    const auto add = [&](index_t b) {
      out[count++] = b;
      tokens += sizes[b];
    };
    add(0);
    if (blocks > 1) add(blocks - 1);
    std::sort(keys.begin(), keys.end(), std::greater<>{});
    for (std::size_t i = 0; i < keys.size() && tokens < keep; ++i) add(rank_index(keys[i]));
    std::sort(out, out + count);
    return count;
  }

  index_t select(const float* scores, index_t n, index_t tail, index_t keep, index_t* out,
                 top_k_scratch& scratch) const {
    tail = std::clamp(tail, 0, (std::max)(n, 0));
    const index_t packed = (std::max)(n, 0) - tail, blocks = ceil_div(packed, block);
    host_vector<float> best(std::size_t(blocks), -infinity);
    host_vector<index_t> sizes(std::size_t(blocks), block), chosen(std::size_t(blocks), 0);
    for (index_t slot = 0; slot < packed; ++slot) {
      float& top = best[std::size_t(slot / block)];
      if (scores[slot] > top) top = scores[slot];
    }
    if (packed % block != 0) sizes.back() = packed % block;
    const index_t count = choose_blocks(best.data(), sizes.data(), blocks, keep, chosen.data(), scratch);
    index_t written = 0;
    for (index_t i = 0; i < count; ++i) {
      const index_t first = chosen[std::size_t(i)] * block;
      for (index_t slot = first; slot < first + sizes[std::size_t(chosen[std::size_t(i)])]; ++slot)
        out[written++] = slot;
    }
    for (index_t slot = packed; slot < n; ++slot) out[written++] = slot;
    return written;
  }

  void check() const { check_parameters(*this); }
  /// Of what a step reads.
  void check_budget(const char* budget_name, index_t tokens) const {
    require(tokens >= 2 * offset_t(block), budget_name, tokens,
            "at least two blocks, which are " + std::to_string(2 * offset_t(block)) + " tokens",
            "raise it: the first and the last block are always read");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("block", self.block, value_range{1, max_tokens}, "consecutive packed tokens that are chosen together");
  }
};

static_assert(check_selector<whole_blocks>());

TESSERA_NAMESPACE_END
