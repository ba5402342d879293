// A sequence of a cache on the device to another one, and to and from an archive.
#pragma once

#include "../../../../runtime/turn/sequence_state.hpp"
#include "../../store/packed/saved_segments.cuh"
#include "../../store/saving.cuh"
#include "parts.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Copies a sequence to another id, behind the plans of store and candidates. The caller clears that id where this
/// throws.
template <class Recipe, class Out>
void copy_sequence(cache_parts<Recipe, Out>& parts, index_t id, index_t to, const sequence_state<Recipe>& state,
                   cudaStream_t stream) {
  parts.store.commit_copy(id, to, stream);
  parts.read_stage.candidates().commit_copy(id, to, stream);
  copy_on_device(parts.next.data() + to, parts.next.data() + id, 1, stream);
  parts.begin_sequence(to, stream);
  parts.first.observer().copy(id, to, stream);
  parts.first.settled().copy(id, to);
  parts.prompts.copy(id, to, stream);
  if constexpr (cache_parts<Recipe, Out>::store_type::in_groups) {
    if (state.announced > 0) parts.store.rows().share_reservation(id, to);
  }
  // The device learns of a prompt's plan when the prompt ends, and the end of a prompt makes the index.
  parts.set_plan(to, state.announced > 0 ? state.ended_policies : state.policies, stream);
  for (index_t layer = 0; layer < parts.shape.layers && state.front().turn_tokens == 0; ++layer)
    parts.refresh({layer, to}, stream);
  parts.read_stage.reader().copy(id, to, stream);
}

/// Saves a sequence between two turns or steps, or loads one into an open, empty one, which the caller closes where
/// this throws. An index is built anew from the rows. What is small comes first: it waits for the stream's earlier
/// work. The rows come last, and a save does not wait for them.
template <class Recipe, class Out, class Archive>
void transfer_sequence(cache_parts<Recipe, Out>& parts, index_t id, const sequence_state<Recipe>& state,
                       Archive& archive, cudaStream_t stream) {
  const auto next = [&](index_t layer) { return state.layers[std::size_t(layer)].next_position; };
  if constexpr (Archive::loads) {
    parts.require_covered(state.policies);
    set_number(parts.next.data() + id, next(0), stream);
    parts.set_plan(id, state.policies, stream);
  }
  const auto lengths = transfer_lengths_of(parts.store, id, parts.shape.layers, next, archive, stream);
  parts.first.observer().transfer(id, next, archive, stream);
  auto& reading = parts.read_stage;
  for (index_t layer = 0; layer < parts.shape.layers; ++layer) {
    const sequence_layer owner{layer, id};
    reading.candidates().transfer(owner, lengths[std::size_t(layer)].counts, archive, stream);
    const auto& reader = reading.reader();
    if constexpr (requires { reader.transfer(owner, archive, stream); }) reader.transfer(owner, archive, stream);
  }
  parts.prompts.transfer(id, next, archive, stream);
  transfer_rows_of(parts.store, id, lengths, next, archive, stream);
  for (index_t layer = 0; Archive::loads && layer < parts.shape.layers; ++layer) {
    const sequence_layer owner{layer, id};
    if (!parts.roles.follows_recipe(layer) || parts.store.bound(owner).longest == 0) continue;
    reading.require_fits(owner, parts.store, 0);
    reading.refresh(owner, parts.store, stream);
  }
}

}  // namespace cuda
TESSERA_NAMESPACE_END
