// How many pages a prompt will take, before it comes.
#pragma once

#include <algorithm>
#include <limits>

#include "../core/engine/head_groups.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/stored/room.hpp"

TESSERA_NAMESPACE_BEGIN

/// What a prompt takes of a pool of ragged pages.
struct page_plan {
  host_vector<index_t> after;  ///< pages of each group when the prompt has ended; where layers slide, at most so many
  /// Most pages of all groups together while the prompt comes in, those held before included; at most 2^31 - 1.
  index_t most = 0;
};

/// A prompt that comes in.
struct coming_prompt {
  index_t tokens = 0;
  index_t chunk = 0;   ///< tokens that are judged together; pieces of it end at its multiples
  index_t window = 0;  ///< newest tokens of a chunk that always stay, and are judged again with the next
};

/// Follows every head through the prompt: before a layer takes the next chunk it keeps its share of what it has.
/// Shapes   held [layers, kv_heads], tokens of each head before the prompt.
///          share(layer, head, seen): what a head keeps of the prompt's first `seen` tokens; whole(layer): whether a
///          layer chooses nothing; window(layer): the newest tokens that it then keeps, 0: all.
/// Cost     chunks * layers * kv_heads * heads of a group.
template <class Share, class Whole, class Window>
page_plan plan_pages(const head_groups& groups, index_t page, const host_vector<index_t>& held,
                     const coming_prompt& prompt, const Share& share, const Whole& whole,
                     const Window& window) {
  host_vector<index_t> lengths = held, settled = held;
  page_plan plan;
  plan.after.resize(std::size_t(groups.count()));
  offset_t pages = 0;
  const auto recount = [&](index_t group) {
    index_t longest = 0;
    for (const index_t head : groups.row(group)) longest = (std::max)(longest, lengths[std::size_t(head)]);
    index_t& own = plan.after[std::size_t(group)];
    pages -= own;
    own = groups.pages_for(group, longest, page);
    pages += own;
  };
  const auto recount_layer = [&](index_t layer) {
    for (index_t h = 0; h < groups.kv_heads; ++h) recount(groups.group[std::size_t(layer * groups.kv_heads + h)]);
    plan.most = (std::max)(plan.most, index_t((std::min<offset_t>)(pages, (std::numeric_limits<index_t>::max)())));
  };
  const auto judge = [&](index_t layer, index_t seen, index_t chunk) {
    for (index_t h = 0; h < groups.kv_heads && !whole(layer); ++h) {
      const std::size_t at = std::size_t(layer * groups.kv_heads + h);
      const index_t tail = (std::min)(prompt.window, chunk), least = (std::min)(settled[at] + tail, lengths[at]);
      lengths[at] = std::clamp(held[at] + share(layer, h, seen), least, lengths[at]);
      settled[at] = lengths[at] - tail;
    }
    // A sliding layer drops what it has left behind once that is more than `spare_room`, and never rows that a chunk's
    // attention still asks for: `fresh` of the chunk's tokens.
    const offset_t fresh = seen < prompt.tokens ? chunk : 0, slid = longest_slid(window(layer)) + fresh;
    for (index_t h = 0; h < groups.kv_heads && window(layer) > 0; ++h) {
      index_t& length = lengths[std::size_t(layer * groups.kv_heads + h)];
      length = index_t((std::min<offset_t>)(length, slid));
    }
    for (index_t h = 0; h < groups.kv_heads; ++h) recount(groups.group[std::size_t(layer * groups.kv_heads + h)]);
  };
  for (index_t layer = 0; layer < groups.layers; ++layer) recount_layer(layer);
  index_t chunk = 0;
  for (index_t done = 0; done < prompt.tokens; done += chunk) {
    const index_t before = chunk;
    chunk = (std::min)(prompt.chunk > 0 ? prompt.chunk : prompt.tokens, prompt.tokens - done);
    for (index_t layer = 0; layer < groups.layers; ++layer) {
      if (before > 0) judge(layer, done, before);
      for (index_t h = 0; h < groups.kv_heads; ++h) lengths[std::size_t(layer * groups.kv_heads + h)] += chunk;
      recount_layer(layer);
    }
  }
  for (index_t layer = 0; layer < groups.layers; ++layer) judge(layer, prompt.tokens, chunk);
  return plan;
}

TESSERA_NAMESPACE_END
