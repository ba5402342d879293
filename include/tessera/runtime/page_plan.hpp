// How many pages a prompt will need, computed from its length.
#pragma once

#include <algorithm>
#include <limits>

#include "../core/engine/head_groups.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/stored/room.hpp"

TESSERA_NAMESPACE_BEGIN

/// The pages that a prompt needs of a pool of ragged pages.
struct page_plan {
  host_vector<index_t> final_pages;  ///< of each group when the prompt has ended; an upper bound if layers slide
  /// The largest number of pages of all groups together during the prompt, earlier pages included; at most 2^31 - 1.
  index_t peak = 0;
};

/// A prompt before its first chunk.
struct coming_prompt {
  index_t tokens = 0;
  index_t chunk = 0;   ///< tokens that are judged together; parts of a chunk end at multiples of it
  index_t window = 0;  ///< newest tokens of a chunk: they always stay, and the next chunk's choice judges them again
};

/// Simulates the length of every head through the prompt. Before a layer appends a chunk, each of its heads drops
/// tokens until it keeps its share of the prompt so far.
/// Shapes   stored [layers, kv_heads], tokens of each head before the prompt.
///          share(layer, head, tokens): how many of the prompt's first `tokens` a head keeps; whole(layer): whether the
///          layer drops nothing by choice; window(layer): how many newest tokens such a layer keeps, 0: all.
/// Cost     chunks * layers * kv_heads * heads of a group.
template <class Share, class Whole, class Window>
page_plan plan_pages(const head_groups& groups, index_t page, const host_vector<index_t>& stored,
                     const coming_prompt& prompt, const Share& share, const Whole& whole, const Window& window) {
  host_vector<index_t> lengths = stored, settled = stored;
  page_plan plan;
  plan.final_pages.resize(std::size_t(groups.count()));
  offset_t pages = 0;
  const auto recount = [&](index_t group) {
    index_t longest = 0;
    for (const index_t head : groups.row(group)) longest = (std::max)(longest, lengths[std::size_t(head)]);
    index_t& count = plan.final_pages[std::size_t(group)];
    pages -= count;
    count = groups.pages_for(group, longest, page);
    pages += count;
  };
  const auto recount_layer = [&](index_t layer) {
    for (index_t h = 0; h < groups.kv_heads; ++h) recount(groups.group[std::size_t(layer * groups.kv_heads + h)]);
    plan.peak = (std::max)(plan.peak, index_t((std::min<offset_t>)(pages, (std::numeric_limits<index_t>::max)())));
  };
  const auto judge = [&](index_t layer, index_t tokens, index_t chunk) {
    for (index_t h = 0; h < groups.kv_heads && !whole(layer); ++h) {
      const std::size_t head = std::size_t(layer * groups.kv_heads + h);
      const index_t tail = (std::min)(prompt.window, chunk), least = (std::min)(settled[head] + tail, lengths[head]);
      lengths[head] = std::clamp(stored[head] + share(layer, h, tokens), least, lengths[head]);
      settled[head] = lengths[head] - tail;
    }
    // A sliding layer drops the rows that are older than its window once there are more than `spare_room` of them. It
    // keeps the rows that the attention of the chunk still reads.
    const offset_t unattended = tokens < prompt.tokens ? chunk : 0, slid = longest_slid(window(layer)) + unattended;
    for (index_t h = 0; h < groups.kv_heads && window(layer) > 0; ++h) {
      index_t& length = lengths[std::size_t(layer * groups.kv_heads + h)];
      length = index_t((std::min<offset_t>)(length, slid));
    }
    for (index_t h = 0; h < groups.kv_heads; ++h) recount(groups.group[std::size_t(layer * groups.kv_heads + h)]);
  };
  for (index_t layer = 0; layer < groups.layers; ++layer) recount_layer(layer);
  index_t chunk = 0;
  for (index_t done = 0; done < prompt.tokens; done += chunk) {
    const index_t previous = chunk;
    chunk = (std::min)(prompt.chunk > 0 ? prompt.chunk : prompt.tokens, prompt.tokens - done);
    for (index_t layer = 0; layer < groups.layers; ++layer) {
      if (previous > 0) judge(layer, done, previous);
      for (index_t h = 0; h < groups.kv_heads; ++h) lengths[std::size_t(layer * groups.kv_heads + h)] += chunk;
      recount_layer(layer);
    }
  }
  for (index_t layer = 0; layer < groups.layers; ++layer) judge(layer, prompt.tokens, chunk);
  return plan;
}

TESSERA_NAMESPACE_END
