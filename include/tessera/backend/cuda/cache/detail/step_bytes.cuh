// What the last decode step of a sequence read on the device.
#pragma once

#include <algorithm>

#include "../../../../runtime/turn/sequence_state.hpp"
#include "parts.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Distinct bytes that the last decode step of a sequence read in all layers: of stored K, V and scores, of candidates,
/// and of the index. Synchronises.
template <class Recipe, class Out>
offset_t step_bytes(const cache_parts<Recipe, Out>& parts, index_t id, const Recipe& recipe,
                    const sequence_state<Recipe>& state) {
  using parts_type = cache_parts<Recipe, Out>;
  constexpr bool filters = parts_type::filters;
  constexpr bool adds_to_scores = first_stage<Recipe>::observer_type::with_scores && parts_type::in_steps;
  if (state.step == 0) return 0;  // no step yet
  offset_t total = 0;
  const bool chose = parts_type::fires_last && recipe.schedule.due(moment::step_end, state.now);
  for (index_t layer = 0; layer < parts.shape.layers; ++layer) {
    const sequence_layer owner{layer, id};
    const bool follows = parts.roles.follows_recipe(layer);
    const auto lists = parts.downloaded_lists(owner);
    host_vector<index_t> lengths, entries(std::size_t(parts.shape.kv_heads));
    for (const auto& list : joined_lists(lists, parts.shape.kv_heads)) lengths.push_back(index_t(list.size()));
    for (std::size_t i = 0; i < lists.size(); ++i)
      entries[i * entries.size() / lists.size()] += index_t(lists[i].size());
    // The step also read slots that the choice at its end has dropped, or no longer reads.
    if (follows && (filters ? chose : parts_type::fires_last)) {
      lengths = downloaded(parts.stepped_of(owner), lengths.size());
      entries = downloaded(parts.stepped_of({parts.shape.layers + layer, id}), lengths.size());
    }
    for (std::size_t h = 0; h < lengths.size(); ++h) {
      const head_place head{owner, index_t(h), parts.store.always_read(owner)};
      const offset_t n = lengths[h],
                     attended = follows ? parts.read_stage.reader().attended(state.policies, n, head) : n;
      total += parts.store.step_bytes(owner, attended);
      if (!follows) continue;
      total += parts.read_stage.reader().bytes_read(state.policies, n, head) + (adds_to_scores ? n * 4 : 0);
      if (filters) total += (lists.size() > lengths.size() ? entries[h] : attended) * offset_t(sizeof(index_t));
      const offset_t stored = filters ? parts.store.bound(owner).longest : n;
      if (Recipe::retain_type::follows && chose) total += (stored - attended) * Recipe::layout_type::key_bytes();
    }
  }
  return total;
}

}  // namespace cuda
TESSERA_NAMESPACE_END
