// Computes in advance an upper bound of what each layer of a new sequence stores during a turn.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../../core/host/host_vector.hpp"
#include "../../core/model_shape.hpp"
#include "../../core/plan/layer_peak.hpp"
#include "../../core/stored/room.hpp"
#include "../../planned.hpp"
#include "../layer_roles.hpp"

TESSERA_NAMESPACE_BEGIN

namespace detail {

/// The largest numbers of tokens that are appended between two choices of a first stage.
struct choice_gaps {
  index_t prompt = 0;          ///< of the prompt that no choice has judged
  bool at_prompt_end = false;  ///< whether the end of the prompt chooses
  index_t first = 0;           ///< of the answer until its first choice, or its end
  index_t later = 0;           ///< of the answer between two choices, or after the last one
  bool in_answer = false;      ///< whether the answer chooses
};

/// Asks a schedule about every moment of a turn with one token per step. Longer steps add `step` - 1 tokens to each
/// gap.
/// Cost     the tokens of the answer, and log(chunk) for each prompt token that a chunk's end does not judge.
template <class Recipe>
choice_gaps gaps_of(const Recipe& recipe, const planned<Recipe>& policies, const turn_extent& turn) {
  using schedule = typename Recipe::schedule_type;
  choice_gaps gaps{turn.prompt, false, turn.answer, 0, false};
  if constexpr (Recipe::retain_type::chooses) {
    if constexpr (schedule::fires_at(moment::chunk_end)) {
      const auto due = [&](index_t waiting, index_t coming) {
        turn_clock now{1, 0};
        now.waiting = waiting, now.coming = coming;
        return recipe.schedule.due(moment::chunk_end, now);
      };
      // The longest piece that joins `waiting` tokens without a choice. A schedule that fires for it fires for longer
      // ones too (concepts/schedule.hpp).
      const index_t chunk = (std::min)(turn.chunk, turn.prompt);
      index_t longest = 0;
      for (index_t waiting = 0; waiting < turn.prompt && !due(waiting, 1); ++waiting) {
        index_t joins = 1, refused = chunk + 1;
        while (refused - joins > 1) {
          const index_t middle = joins + (refused - joins) / 2;
          (due(waiting, middle) ? refused : joins) = middle;
        }
        longest = (std::max)(longest, waiting + joins);
      }
      if (policies.first.budget.knows_shares()) gaps.prompt = (std::min)(turn.prompt, (std::max)(longest, chunk));
    }
    gaps.at_prompt_end = recipe.schedule.due(moment::prompt_end, turn_clock{1, 0});
    if constexpr (fires_in_steps<schedule>) {
      index_t gap = 0, longest = 0;
      for (index_t i = 1; i <= turn.answer; ++i) {
        const turn_clock now{1, i, i, 1};
        ++gap;
        const bool due = (schedule::fires_at(moment::step_begin) && recipe.schedule.due(moment::step_begin, now)) ||
                         (schedule::fires_at(moment::step_end) && recipe.schedule.due(moment::step_end, now));
        if (!due && i < turn.answer) continue;
        (gaps.in_answer ? longest : gaps.first) = (std::max)(gaps.in_answer ? longest : 0, gap);
        gaps.in_answer = gaps.in_answer || due;
        gap = 0;
      }
      gaps.first = (std::min)(turn.answer, gaps.first + turn.step - 1);
      gaps.later = gaps.in_answer ? (std::min)(turn.answer, longest + turn.step - 1) : 0;
    }
  }
  return gaps;
}

/// Heads that all have `tokens` tokens.
inline kept_bound even_heads(index_t kv_heads, index_t tokens) {
  kept_bound even;
  even.longest = tokens;
  even.total = offset_t(kv_heads) * tokens;
  even.by_head.assign(std::size_t(kv_heads), tokens);
  return even;
}

/// An upper bound, over all scores, of what a first stage retains of a layer whose heads have at most `all` tokens.
template <class Recipe>
kept_bound kept_of_layer(const Recipe&, const planned<Recipe>& policies, const model_shape& shape, index_t layer,
                         index_t all) {
  using retain_type = typename Recipe::retain_type;
  kept_bound kept = even_heads(shape.kv_heads, all);
  if constexpr (retain_type::chooses && !retain_type::over_model) {
    const auto& first = policies.first;
    constexpr bool joins = joining_scope<typename retain_type::scope_type>;
    const index_t heads = joins ? 1 : shape.kv_heads, tail = first.scorer.protected_tail(first.budget.tokens);
    const token_bound bound = bound_kept(first.budget, layer_extent{layer, shape.layers, heads, tail, all});
    kept.longest = 0;
    offset_t total = 0;
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      index_t& tokens = kept.by_head[std::size_t(h)];
      if constexpr (retain_type::settles) {  // the newest tokens of a chunk come on top of the share
        tokens = (std::min)(all, first.budget.share({layer, shape.layers, h, shape.kv_heads, 0, all}) + tail);
      } else {
        tokens = bound.longest;
        if constexpr (length_budget<std::remove_cvref_t<decltype(first.budget)>>)
          tokens = first.budget.share({layer, shape.layers, joins ? 0 : h, heads, tail, all});
        tokens = std::clamp(tokens, (std::min)(tail, all), all);
      }
      kept.longest = (std::max)(kept.longest, tokens);
      total += tokens;
    }
    kept.total =
        retain_type::settles
            ? total
            : (std::min)(total, (std::max)(bound.total, offset_t(tail) * heads) * (joins ? shape.kv_heads : 1));
  }
  return kept;
}

/// `held` with `tokens` more in every head, each head limited to `all`.
inline kept_bound grown(kept_bound held, offset_t tokens, index_t all) {
  offset_t total = 0;
  held.longest = 0;
  for (index_t& of_head : held.by_head) {
    of_head = index_t((std::min<offset_t>)(all, of_head + tokens));
    held.longest = (std::max)(held.longest, of_head);
    total += of_head;
  }
  held.total = (std::min)(total, held.total + offset_t(held.by_head.size()) * tokens);
  return held;
}
/// The larger one of each count.
inline kept_bound larger(kept_bound a, const kept_bound& b) {
  for (std::size_t h = 0; h < a.by_head.size(); ++h) a.by_head[h] = (std::max)(a.by_head[h], b.by_head[h]);
  a.longest = (std::max)(a.longest, b.longest);
  a.total = (std::max)(a.total, b.total);
  return a;
}

/// Upper bounds of what the heads of a layer store while the prompt is written, and after it has ended. Every choice
/// leaves `kept`, and each gap adds tokens to it.
inline std::pair<kept_bound, kept_bound> peaks_between(const kept_bound& kept, const choice_gaps& gaps,
                                                       index_t kv_heads, const turn_extent& turn) {
  const index_t all = turn.tokens();
  const kept_bound in_prompt =
      gaps.prompt < turn.prompt ? grown(kept, gaps.prompt, turn.prompt) : even_heads(kv_heads, turn.prompt);
  kept_bound ended = grown(gaps.at_prompt_end ? grown(kept, 0, turn.prompt) : in_prompt, gaps.first, all);
  if (gaps.in_answer) ended = larger(ended, grown(kept, gaps.later, all));
  return {in_prompt, ended};
}

}  // namespace detail

/// The most that each layer of a new sequence holds during a turn. Counts are upper bounds for chunks and steps of any
/// lengths up to the given ones, and for all scores.
template <class Recipe>
host_vector<layer_peak> layer_peaks(const Recipe& recipe, const planned<Recipe>& policies, const layer_roles& roles,
                                    const model_shape& shape, const turn_extent& turn) {
  using retain_type = typename Recipe::retain_type;
  const detail::choice_gaps gaps = detail::gaps_of(recipe, policies, turn);
  const kept_bound all = detail::even_heads(shape.kv_heads, turn.tokens());
  // Of layers that end one by one, one is whole at a time. Pages that layers share are as many as their longest head's.
  constexpr bool shares_pages =
      requires(const typename Recipe::layout_type::placement_type& where) { where.groups(1, 1); };
  const bool ends_alone =
      turn.layers_end && turn.chunk >= turn.prompt && gaps.at_prompt_end && chooses_by_layer<Recipe> && !shares_pages;
  bool has_whole = false;
  host_vector<layer_peak> peaks;
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    layer_peak peak{turn, roles.follows_recipe(layer), all, all};
    if (roles.slides(layer)) {
      // Two chunks: the attention of one still reads its window when the next one is appended.
      const offset_t slid = longest_slid(roles.window(layer)) + 2 * offset_t((std::max)(turn.chunk, turn.step));
      peak.stored = peak.readable =
          detail::even_heads(shape.kv_heads, index_t((std::min<offset_t>)(turn.tokens(), slid)));
    } else if (retain_type::chooses && peak.follows_recipe) {
      const index_t judged = retain_type::settles ? turn.prompt : turn.tokens();
      const kept_bound kept = detail::kept_of_layer(recipe, policies, shape, layer, judged);
      auto [in_prompt, ended] = detail::peaks_between(kept, gaps, shape.kv_heads, turn);
      if (retain_type::drops) peak.stored = ends_alone && has_whole ? ended : detail::larger(in_prompt, ended);
      has_whole = true;
      bool joins_columns = false;
      if constexpr (lasting_pattern<typename Recipe::prefill_type>) joins_columns = recipe.prefill.adds_to_reading();
      if (!joins_columns) peak.readable = std::move(ended);
    }
    peaks.push_back(std::move(peak));
  }
  return peaks;
}

TESSERA_NAMESPACE_END
