// A sequence of a cache on the device to and from an archive.
#pragma once

#include "../../../../runtime/turn/sequence_state.hpp"
#include "../../store/saving.cuh"
#include "parts.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Saves a sequence between two turns or steps, or loads one into an open, empty one, which the caller closes where
/// this throws. An index is built anew from the rows. Allocates; waits for the device.
template <class Recipe, class Out, class Archive>
void transfer_sequence(cache_parts<Recipe, Out>& parts, index_t id, const sequence_state<Recipe>& state,
                       Archive& archive, cudaStream_t stream) {
  const auto next = [&](index_t layer) { return state.layers[std::size_t(layer)].next_position; };
  if constexpr (Archive::loads) {
    parts.require_covered(state.policies);
    set_number(parts.next.data() + id, next(0), stream);
    parts.set_plan(id, state.policies, stream);
  }
  transfer_rows_of(parts.store, id, parts.shape.layers, next, archive, stream);
  parts.first.observer().transfer(id, next, archive, stream);
  auto& reading = parts.read_stage;
  for (index_t layer = 0; layer < parts.shape.layers; ++layer) {
    const sequence_layer owner{layer, id};
    const host_vector<index_t> lengths = downloaded(parts.store.lengths(owner), std::size_t(parts.shape.kv_heads));
    reading.candidates().transfer(owner, lengths, archive, stream);
    if constexpr (Archive::loads) {
      if (parts.roles.follows_recipe(layer) && parts.store.bound(owner).longest > 0) {
        reading.require_fits(owner, parts.store, 0);
        reading.refresh(owner, parts.store, stream);
      }
    }
    const auto& reader = reading.reader();
    if constexpr (requires { reader.transfer(owner, archive, stream); }) reader.transfer(owner, archive, stream);
  }
  parts.prompts.transfer(id, next, archive, stream);
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
