// The most that a layer of a new sequence holds during a prompt and its answer.
#pragma once

#include <algorithm>

#include "../engine/head_groups.hpp"
#include "../error.hpp"
#include "../host/host_vector.hpp"
#include "../parameters.hpp"
#include "layer_extent.hpp"

TESSERA_NAMESPACE_BEGIN

/// A turn before it begins.
struct turn_extent {
  index_t prompt = 0, answer = 0;  ///< tokens
  index_t chunk = 0;               ///< tokens of the prompt's longest chunk; 0: one chunk
  index_t step = 1;                ///< tokens of the longest step; a cache takes its own
  bool layers_end = false;         ///< whether `end_layer` follows each layer of the prompt's last chunk

  index_t tokens() const { return prompt + answer; }
  /// Errors   an empty prompt, a negative number, or more tokens than positions: tessera::error.
  void check() const {
    require(prompt >= 1 && prompt <= max_tokens, "tokens of the prompt", prompt, value_range{1, max_tokens}.text(),
            "say how long the prompt will be");
    require(answer >= 0 && answer <= max_tokens - prompt, "tokens of the answer", answer,
            value_range{0, max_tokens - prompt}.text(), "say how many tokens are decoded at most");
    require(chunk >= 1, "tokens of a prompt chunk", chunk, "at least 1",
            "pass the longest chunk in which the prompt comes; 0: all of it at once");
  }
};

/// Upper bounds of what one layer of a sequence stores at any moment. `by_head` is always known.
struct layer_peak {
  turn_extent turn;
  bool follows_recipe = true;
  kept_bound stored;    ///< tokens
  kept_bound readable;  ///< what steps may read: tokens stored once the prompt has ended, or a filter's candidates
};

/// Ragged pages that a sequence with these peaks needs at most.
inline offset_t upper_bound_pages(const head_groups& groups, index_t page, const host_vector<layer_peak>& peaks) {
  offset_t pages = 0;
  for (index_t group = 0; group < groups.count(); ++group) {
    index_t longest = 0;
    for (const index_t head : groups.row(group)) {
      const auto& by_head = peaks[std::size_t(head / groups.kv_heads)].stored.by_head;
      longest = (std::max)(longest, by_head[std::size_t(head % groups.kv_heads)]);
    }
    pages += groups.pages_for(group, longest, page);
  }
  return pages;
}

TESSERA_NAMESPACE_END
