// How many tokens each layer's heads keep where one threshold runs over the model, on the CPU.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../../../math/winners.hpp"
#include "../../../../runtime/layer_roles.hpp"
#include "../../score/finish.hpp"
#include "../../store/kv_store.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Does nothing: for policies whose layers choose separately.
template <class Policy, bool OverModel = Policy::over_model>
class model_counts {
 public:
  explicit model_counts(const model_shape&) {}
  template <class Store>
  void allot(const Policy&, index_t, Store&, const layer_roles&) {}
  const index_t* counts(index_t) const { return nullptr; }
};

/// Counts for a sequence whose scores are stored beside its tokens. Over all heads of the layers that follow the
/// recipe, the best (heads * budget) candidates win.
template <class Policy>
class model_counts<Policy, true> {
 public:
  explicit model_counts(const model_shape& shape) : layers_(shape.layers), heads_(shape.kv_heads) {}

  template <class Store>
  void allot(const Policy& policy, index_t id, Store& store, const layer_roles& roles) {
    const index_t tail = policy.scorer.protected_tail(policy.budget.tokens);
    host_vector<index_t> tokens, won, rows;
    host_vector<offset_t> offsets;
    host_vector<float> scores, scratch;
    host_vector<index_t> counts(std::size_t(layers_) * std::size_t(heads_), 0);
    for (index_t layer = 0; layer < layers_; ++layer) {
      if (!roles.follows_recipe(layer)) continue;
      columns& beside = store.beside({layer, id});
      for (index_t h = 0; h < heads_; ++h) {
        const index_t stored = store.lengths({layer, id})[std::size_t(h)], candidates = (std::max)(0, stored - tail);
        rows.push_back(layer * heads_ + h);
        tokens.push_back(stored);
        offsets.push_back(offset_t(scores.size()));
        scores.resize(scores.size() + std::size_t(stored));
        float* out = scores.data() + offsets.back();
        const float* raw = beside.scores() + beside.begins()[std::size_t(h)];
        const float* last = finished(policy.scorer, raw, candidates, out, scratch);
        if (last != out) std::copy_n(last, candidates, out);
      }
    }
    layer_scores all;
    all.kv_heads = index_t(rows.size());
    all.protected_tail = tail;
    all.tokens = tokens.data();
    all.offsets = offsets.data();
    all.scores = scores.data();
    won.assign(rows.size(), 0);
    count_winners(all, offset_t(rows.size()) * (std::max)(0, policy.budget.tokens - tail), won.data());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      counts[std::size_t(rows[r])] = (std::min)(tokens[r], won[r] + tail);
    }
    counts_.swap(counts);
  }

  /// [kv_heads]: tokens that each head of a layer keeps; 0 where the layer does not follow the recipe.
  const index_t* counts(index_t layer) const { return counts_.data() + offset_t(layer) * heads_; }

 private:
  index_t layers_, heads_;
  host_vector<index_t> counts_;  // [layers, kv_heads]
};

}  // namespace cpu
TESSERA_NAMESPACE_END
