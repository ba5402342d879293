// The role of each layer of a cache: dense, sliding, or following the recipe.
#pragma once

#include "../core/logit_rule.hpp"
#include "../core/model_shape.hpp"

TESSERA_NAMESPACE_BEGIN

/// The first `dense_layers` layers keep and read everything. The model's sliding layers keep and read their window
/// only, whatever the recipe. All others follow the recipe.
class layer_roles {
 public:
  layer_roles(const model_shape& shape, index_t dense_layers, const logit_rule& rule)
      : shape_(shape), dense_layers_(dense_layers), rule_(rule) {
    for (index_t layer = 0; layer < shape.layers; ++layer) some_slide_ = some_slide_ || slides(layer);
  }

  bool slides(index_t layer) const { return shape_.slides(layer); }
  bool some_slide() const { return some_slide_; }
  bool follows_recipe(index_t layer) const { return layer >= dense_layers_ && !slides(layer); }
  /// How many of its newest tokens a layer needs; 0: all of them.
  index_t window(index_t layer) const { return slides(layer) ? shape_.window : 0; }

  logit_rule rule(index_t layer) const {
    logit_rule result = rule_;
    if (slides(layer)) result.sliding_window = shape_.window;
    if (shape_.sink_logits) result.sink_logits = shape_.sink_logits + offset_t(layer) * shape_.q_heads;
    return result;
  }

 private:
  model_shape shape_;
  index_t dense_layers_;
  logit_rule rule_;
  bool some_slide_ = false;
};

TESSERA_NAMESPACE_END
