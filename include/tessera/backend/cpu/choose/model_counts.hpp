// How many tokens each layer's heads keep where one threshold runs over the model, on the CPU.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../math/winners.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../score/finish.hpp"
#include "../store/kv_store.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Of a sequence whose scores lie beside its tokens: of all heads of the layers that follow the recipe, the best heads
/// * budget candidates win.
/// Shapes   counts [layers, kv_heads]; those of other layers are 0.
template <class Policy, class Store>
void allot_over_model(const Policy& policy, index_t layers, index_t id, Store& stored, const layer_roles& roles,
                      host_vector<index_t>& counts) {
  const index_t heads = stored.kv_heads(), tail = policy.scorer.protected_tail(policy.budget.tokens);
  host_vector<index_t> tokens, won, rows;
  host_vector<offset_t> offsets;
  host_vector<float> scores, scratch;
  counts.assign(std::size_t(layers) * std::size_t(heads), 0);
  for (index_t layer = 0; layer < layers; ++layer) {
    if (!roles.follows_recipe(layer)) continue;
    columns& beside = stored.beside({layer, id});
    for (index_t h = 0; h < heads; ++h) {
      const index_t held = stored.lengths({layer, id})[std::size_t(h)], candidates = (std::max)(0, held - tail);
      rows.push_back(layer * heads + h);
      tokens.push_back(held);
      offsets.push_back(offset_t(scores.size()));
      scores.resize(scores.size() + std::size_t(held));
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
}

}  // namespace cpu
TESSERA_NAMESPACE_END
