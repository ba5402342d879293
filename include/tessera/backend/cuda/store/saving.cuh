// A sequence of a store on the device to and from an archive.
#pragma once

#include <numeric>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
#include "transfer_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Saves a sequence, or loads one into an empty one, which the caller clears where this throws. next(layer): the
/// layer's next position. Allocates; waits for the device.
template <class Store, class Next, class Archive>
void transfer_rows_of(Store& store, index_t id, index_t layers, const Next& next, Archive& archive,
                      cudaStream_t stream) {
  layer_transfer<typename Store::view_type> staged;
  const auto& with = store.with();
  host_vector<index_t> counts(std::size_t(store.kv_heads()), 0);
  for (index_t layer = 0; layer < layers; ++layer) {
    const sequence_layer owner{layer, id};
    if constexpr (!Archive::loads) counts = downloaded(store.lengths(owner), counts.size());
    transfer_lengths(counts, next(layer), archive);
    bool scattered = with.positions;
    archive.flag(scattered);
    archive.require(!scattered || with.positions, "with dropped tokens, which this cache never has");
    for (const index_t count : counts)
      archive.require(scattered || count == next(layer), "with lengths that cannot be");
    if constexpr (Archive::loads) store.lay_out(owner, counts, stream);
    const auto rows = store.view(owner);
    const auto columns = store.columns_of(owner);
    staged.lay_out(counts, columns, stream);
    if constexpr (!Archive::loads) staged.fetch(rows, columns, stream);
    for (index_t h = 0; h < store.kv_heads(); ++h) {
      const index_t count = counts[std::size_t(h)];
      index_t* const positions = staged.template column<index_t>(h, 0);
      if (scattered) {
        transfer_ascending(positions, count, next(layer), archive);
      } else if (with.positions) {
        std::iota(positions, positions + count, 0);
      }
      if (with.scores) archive.rows(staged.template column<float>(h, 1), std::size_t(count));
      if (with.segments) archive.rows(staged.template column<index_t>(h, 2), std::size_t(count));
    }
    staged.transfer_rows_of(archive);
    if constexpr (Archive::loads) staged.store(rows, columns, stream);
  }
}

}  // namespace cuda
TESSERA_NAMESPACE_END
