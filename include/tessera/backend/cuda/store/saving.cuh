// A sequence of a store on the device to and from an archive.
#pragma once

#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
#include "saved_layer.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What comes before the rows of a saved sequence, by layer.
struct saved_lengths {
  host_vector<index_t> counts;  ///< tokens by kv_head
  host_vector<index_t> whole;   ///< those whose rows are not packed
  bool scattered = false;       ///< whether positions are saved
};

/// The lengths of a sequence's whole rows, or, of one that comes, zeros. Waits for the stream.
template <bool Comes, class Store>
host_vector<saved_lengths> download_lengths(const Store& store, index_t id, index_t layers, cudaStream_t stream) {
  const host_vector<index_t> none(std::size_t(store.kv_heads()), 0);
  host_vector<saved_lengths> all(std::size_t(layers), {none, none, store.with().positions});
  for (index_t layer = 0; !Comes && layer < layers; ++layer) {
    check(cudaMemcpyAsync(all[std::size_t(layer)].counts.data(), store.lengths({layer, id}),
                          none.size() * sizeof(index_t), cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
  }
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return all;
}

/// Saves the lengths of a sequence, or reads those of one that comes. next(layer): the layer's next position. Waits for
/// the stream, and for no other one.
template <class Store, class Next, class Archive>
host_vector<saved_lengths> transfer_lengths_of(Store& store, index_t id, index_t layers, const Next& next,
                                               Archive& archive, cudaStream_t stream) {
  host_vector<saved_lengths> all = download_lengths<Archive::loads>(store, id, layers, stream);
  for (index_t layer = 0; layer < layers; ++layer) {
    auto& [counts, whole, scattered] = all[std::size_t(layer)];
    transfer_lengths(counts, next(layer), archive);
    archive.flag(scattered);
    archive.require(!scattered || store.with().positions, "with dropped tokens, which this cache never has");
    for (const index_t count : counts)
      archive.require(scattered || count == next(layer), "with lengths that cannot be");
    whole = counts;
    if constexpr (Archive::loads) store.lay_out({layer, id}, counts, 0, stream);
  }
  return all;
}

/// Saves the rows and columns of a sequence, or loads them into one that is laid out. Does not wait.
template <class Store, class Next, class Archive>
void transfer_rows_of(Store& store, index_t id, const host_vector<saved_lengths>& lengths, const Next& next,
                      Archive& archive, cudaStream_t stream) {
  for (index_t layer = 0; layer < index_t(lengths.size()); ++layer) {
    const saved_lengths& of_layer = lengths[std::size_t(layer)];
    const sequence_layer owner{layer, id};
    transfer_layer(store.view(owner), store.columns_of(owner), of_layer.whole, of_layer.scattered, 0, next(layer),
                   archive, stream);
  }
}

}  // namespace cuda
TESSERA_NAMESPACE_END
