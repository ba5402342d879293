// What both backends' operations over pages begin from: a recipe's first stage as it was asked for.
#pragma once

#include <tessera/core/engine/read_problem.hpp>
#include <tessera/planned.hpp>

#include "../recipe_settings.hpp"
#include "any_pages.hpp"

namespace tessera_torch {

namespace detail {

/// The scorer of a first stage; `void` of one that keeps everything.
template <class Retain>
struct scorer_of {
  using type = void;
};
template <class Retain>
requires requires { typename Retain::scorer_type; } struct scorer_of<Retain> {
  using type = typename Retain::scorer_type;
};
/// Whether it adds up what every query gives. Scorers that take some queries only would have to be asked which.
template <class Retain>
constexpr bool adds_up() {
  if constexpr (requires { typename Retain::scorer_type; })
    return Retain::observed == tessera::observes::every_query &&
           !tessera::sampling_scorer<typename Retain::scorer_type>;
  return false;
}
/// Whether it replaces scores by those of the newest query.
template <class Retain>
constexpr bool goes_by_newest() {
  if constexpr (adds_up<Retain>())
    return tessera::joins_rows_by<typename Retain::scorer_type> == tessera::row_join::newest;
  return false;
}

/// Whether each head keeps a share of its own of a prompt, so that no number says what all of them keep.
template <class Retain>
constexpr bool by_shares() {
  if constexpr (requires { typename Retain::budget_type; }) return tessera::share_budget<typename Retain::budget_type>;
  return false;
}

}  // namespace detail

template <class Recipe>
class method_pages : public any_pages {
 protected:
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using view_type = tessera::kv_view<T, layout::k_dim, tessera::block_table>;
  using first_stage = decltype(tessera::planned<Recipe>::first);
  using second_stage = typename Recipe::retrieve_type;
  /// Its steps choose by extrema of pages, among everything that is stored.
  static constexpr bool reads_pages = second_stage::estimates && [] {
    if constexpr (second_stage::estimates)
      return !second_stage::scorer_type::adds_mean_value &&
             (!Recipe::retain_type::chooses || Recipe::retain_type::drops);
    return false;
  }();
  /// A threshold over all layers, and lists by query head, are more than one layer's operation gives.
  static constexpr bool chooses =
      Recipe::retain_type::chooses && !Recipe::retain_type::over_model && !Recipe::retain_type::splits;
  using scorer_type = typename detail::scorer_of<typename Recipe::retain_type>::type;
  static constexpr bool accumulates = chooses && detail::adds_up<typename Recipe::retain_type>();
  static constexpr bool newest = accumulates && detail::goes_by_newest<typename Recipe::retain_type>();
  static constexpr bool by_shares = detail::by_shares<typename Recipe::retain_type>();
  static constexpr bool by_statistics = chooses && Recipe::retain_type::observed == tessera::observes::statistics;

 public:
  explicit method_pages(const cache_request& request)
      : table_(request.table),
        shape_(request.shape),
        rule_(request.rule),
        recipe_(recipe_of(request)),
        first_(tessera::planned<Recipe>(recipe_, request.tokens).first),
        second_(tessera::planned<Recipe>(recipe_, request.tokens).read) {
    shape_.check();
    if constexpr (by_statistics) shape_.check_rope(layout::k_dim);
    first_.check_model(shape_.layers, shape_.kv_heads);
  }

  tessera::element_kind element() const override { return tessera::element_kind_of<T>; }
  index_t head_dim() const override { return layout::k_dim; }
  const char* observes() const override {
    if constexpr (!chooses || Recipe::retain_type::needs_segments || Recipe::retain_type::rereads) {
      return chooses ? "more" : "nothing";
    } else if constexpr (accumulates) {
      return newest ? "newest_query" : "every_query";
    } else {
      constexpr tessera::observes observed = Recipe::retain_type::observed;
      return observed == tessera::observes::nothing      ? "nothing"
             : observed == tessera::observes::window     ? "window"
             : observed == tessera::observes::statistics ? "statistics"
             : observed == tessera::observes::given      ? "given"
                                                         : "more";
    }
  }
  index_t first_observed() const override {
    if constexpr (by_statistics) return first_.scorer.sinks;
    return 0;
  }

  planned_stages plan(index_t prompt, const std::optional<index_t>& budget) const override {
    if constexpr (reads_pages && !by_shares) {
      Recipe recipe = recipe_;
      if (budget) recipe.set_budget(*budget);
      recipe.check();
      tessera::require(prompt >= 0, "prompt", prompt, "at least 0", "pass how many tokens the prompt has");
      const tessera::planned<Recipe> made(recipe, prompt);
      index_t kept = prompt;
      if constexpr (Recipe::retain_type::chooses) kept = std::min(kept, made.first.budget.tokens);
      return {kept, made.read.tokens, made.read.scorer.page, made.read.scorer.channels};
    } else {
      refuse_to_read();
    }
  }
  index_t index_page() const override {
    if constexpr (reads_pages) {
      tessera::require(
          recipe_.retrieve.scorer.page > 0, "page", "0, by the budget", "tokens of a page of the index",
          "pass page=16, or another divisor of the engine's page: budgets of requests differ, pages do not");
      return second_.scorer.page;
    } else {
      refuse_to_read();
    }
  }
  index_t max_read(index_t tokens, index_t capacity) const override {
    if constexpr (reads_pages) {
      const index_t tail = std::max(tokens, second_.scorer.protected_tail(second_.tokens));
      return tessera::max_chosen_slots(second_.tokens, index_page(), tail, capacity);
    } else {
      refuse_to_read();
    }
  }

 protected:
  const first_stage& first() const { return first_; }
  const second_stage& second() const { return second_; }
  const tessera::model_shape& shape() const { return shape_; }

  tessera::logit_rule rule(index_t layer) const {
    tessera::require(layer >= 0 && layer < shape_.layers, "layer", layer, "0 to " + std::to_string(shape_.layers - 1),
                     "pass one of the layers that were said when this was made");
    tessera::logit_rule result = rule_;
    if (shape_.slides(layer)) result.sliding_window = shape_.window;
    if (shape_.sink_logits) result.sink_logits = shape_.sink_logits + offset_t(layer) * shape_.q_heads;
    return result;
  }

  tessera::choose_problem<view_type> problem(const paged_layer& from, index_t layer, const choice_queries& by) const {
    tessera::choose_problem<view_type> p;
    p.view = from.as<view_type>();
    p.layer = layer;
    p.layers = shape_.layers;
    p.q = by.q.as<const T>();
    p.valid = by.valid;
    p.first_position = by.first_position;
    p.budgets = by.budgets;
    p.tails = by.tails;
    p.granularity = by.granularity;
    p.statistics = by.statistics;
    p.scores = {from.scores.data, from.scores.sequence_stride, from.scores.head_stride};
    p.rule = rule(layer);
    p.pool = from.pool;
    return p;
  }

  template <class T>
  static tessera::block_extrema_view<T, layout::k_dim> extrema(const index_memory& index, index_t page) {
    return {static_cast<T*>(index.data), page, index.strides, index.side};
  }
  tessera::index_blocks_problem<view_type> indexing(const paged_layer& of, const index_memory& index,
                                                    const index_t* first_slots, index_t new_tokens) const {
    tessera::index_blocks_problem<view_type> p;
    p.view = of.as<view_type>();
    p.index = extrema<T>(index, index_page());
    p.first_slots = first_slots;
    p.new_tokens = new_tokens;
    p.pool = of.pool;
    return p;
  }
  tessera::choose_by_blocks_problem<view_type> reading(const paged_layer& from, index_t layer,
                                                       const index_memory& index, const step_queries& by,
                                                       const chosen_slots& to) const {
    tessera::choose_by_blocks_problem<view_type> p;
    p.view = from.as<view_type>();
    p.index = extrema<const T>(index, index_page());
    p.read = second_.tokens;
    p.reads = by.reads;
    p.channels = by.channels;
    p.q = by.q.as<const T>();
    p.first_position = by.first_position;
    p.rule = rule(layer);
    p.out = to.slots;
    p.out_stride = to.row_stride;
    p.counts = to.counts;
    p.pool = from.pool;
    return p;
  }

  void check_observed(const paged_layer& of, const choice_queries& by) const {
    tessera::require(of.scores.data != nullptr, "scores", "null", "one for every stored slot",
                     "keep a score beside each token: PagedLayer(..., scores)");
    tessera::require(!newest || by.q.tokens == 1, "tokens of q", by.q.tokens, "1: the newest query of each sequence",
                     "pass the query that this method goes by");
  }
  [[noreturn]] static void refuse_to_observe() {
    tessera::fail("method", "one whose scorer observes no queries in this way",
                  "one of accumulated scores or statistics", "ask what the method observes: PageOperations.observes");
  }
  [[noreturn]] static void refuse_to_read() {
    tessera::fail("method", "one whose steps do not choose pages by the extrema of all stored keys",
                  "quest, hsa or rocketkv, or a Policy with such a second stage",
                  "attend to everything, or take one of these");
  }
  [[noreturn]] static void refuse_to_choose() {
    constexpr bool keeps_all = !Recipe::retain_type::chooses;
    tessera::fail("method", keeps_all ? "one that keeps everything" : "one that chooses over layers or query heads",
                  "one whose first stage chooses within a layer, for each kv_head",
                  keeps_all ? "attend to everything, or take another method" : "use its cache: TesseraCache");
  }

 private:
  static Recipe recipe_of(const cache_request& request) {
    const Recipe recipe = requested<Recipe>(request);
    tessera::require(recipe.dense_layers == 0, "dense_layers", recipe.dense_layers, "0",
                     "leave it out: the engine chooses in the layers that it likes, and leaves others whole");
    return recipe;
  }

  std::shared_ptr<const std::vector<double>> table_;  // what the first stage's budget may read
  tessera::model_shape shape_;
  tessera::logit_rule rule_;
  Recipe recipe_;
  first_stage first_;
  second_stage second_;
};

}  // namespace tessera_torch
