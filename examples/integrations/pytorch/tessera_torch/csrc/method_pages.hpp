// What both backends' operations over pages begin from: a recipe's first stage as it was asked for.
#pragma once

#include <tessera/planned.hpp>

#include "any_pages.hpp"
#include "recipe_settings.hpp"

namespace tessera_torch {

template <class Recipe>
class method_pages : public any_pages {
 protected:
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using view_type = tessera::kv_view<T, layout::k_dim, tessera::block_table>;
  using first_stage = decltype(tessera::planned<Recipe>::first);
  /// A threshold over all layers, and lists by query head, are more than one layer's operation gives.
  static constexpr bool chooses =
      Recipe::retain_type::chooses && !Recipe::retain_type::over_model && !Recipe::retain_type::splits;

 public:
  explicit method_pages(const cache_request& request)
      : table_(request.table),
        shape_(request.shape),
        rule_(request.rule),
        first_(tessera::planned<Recipe>(requested<Recipe>(request), request.tokens).first) {
    shape_.check();
    first_.check_model(shape_.layers, shape_.kv_heads);
  }

  tessera::element_kind element() const override { return tessera::element_kind_of<T>; }
  index_t head_dim() const override { return layout::k_dim; }

 protected:
  const first_stage& first() const { return first_; }
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
    p.rule = rule(layer);
    p.pool = from.pool;
    return p;
  }

  [[noreturn]] static void refuse_to_choose() {
    constexpr bool keeps_all = !Recipe::retain_type::chooses;
    tessera::fail("method", keeps_all ? "one that keeps everything" : "one that chooses over layers or query heads",
                  "one whose first stage chooses within a layer, for each kv_head",
                  keeps_all ? "attend to everything, or take another method" : "use its cache: TesseraCache");
  }

 private:
  std::shared_ptr<const std::vector<double>> table_;  // what the first stage's budget may read
  tessera::model_shape shape_;
  tessera::logit_rule rule_;
  first_stage first_;
};

}  // namespace tessera_torch
