// Segments are packed by a strategy that is searched for each of them.
#pragma once

#include "../../core/parameters.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Whether all segments are packed as the recipe says, or each as a search finds best.
enum class strategy_choice { fixed, searched };

/// A segment that begins with its rows, as a prompt's do, is searched before they are packed (runtime/strategy.hpp).
/// The recipe's own channels, group and block count for none then.
///
/// Decoded tokens wait for a basis of their own where the last one is of few rows (layout/packed_rows.hpp), and are
/// searched with it. Else they join the open segment tail by tail, packed by the strategy of the segment before it.
/// What packing leaves out of each token, its loss, is summed. The segment ends in one of two cases:
///   - it has at least `least_segment` tokens, and their loss has reached `segment_loss` or, where that is 0, the loss
///     of `reference` tokens of the segment before it;
///   - it holds as many tokens as a segment may.
/// A thread beside the cache then searches a strategy for the segment and packs its original rows anew. Between two
/// steps the result takes the segment's place.
///
/// Errors   parameters out of range; rows that are not rotated: tessera::error.
/// Bytes    an open segment also holds its original rows, in fp32.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 5.4, 5.5. Differs: it gives no thresholds. The defaults choose what it
///          configures, 25 % of the channels, on most layers of this repository's example model; `tessera strategies`
///          finds them for another. Second moments are summed when a segment ends, on the other thread; the paper adds
///          every token to them.
struct searched_strategy {
  static constexpr const char* name = "searched_strategy";
  static constexpr bool searches = true;

  strategy_choice strategy = strategy_choice::fixed;
  float channel_loss = 0.195f, block_spread = 0.39f, segment_loss = 0;
  index_t reference = 8192, least_segment = 4096;

  bool searched() const { return strategy == strategy_choice::searched; }
  void check() const { check_parameters(*this); }
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("strategy", self.strategy, one_word_of{"fixed or searched"},
          "whether all segments are packed alike or each by a search of its own");
    visit("channel_loss", self.channel_loss, value_range{0.0f, 1.0f},
          "share of a vector's energy that a searched strategy may leave out");
    visit("block_spread", self.block_spread, value_range{0.0f, 1.0f},
          "how far keys of a searched block may differ, of how far all do");
    visit("segment_loss", self.segment_loss, value_range{0.0f, 16777216.0f},
          "loss, summed over tokens, that ends a searched segment; 0: by `reference`");
    visit("reference", self.reference, value_range{1, max_tokens},
          "tokens of the segment before whose loss ends a searched segment");
    visit("least_segment", self.least_segment, value_range{32, max_tokens}, "least tokens of a searched segment");
  }
};

TESSERA_NAMESPACE_END
