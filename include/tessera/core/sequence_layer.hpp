// One layer of one sequence: the key of everything in a cache. Tables with an entry for each.
#pragma once

#include "config.hpp"
#include "host/host_vector.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// One layer of one sequence.
struct sequence_layer {
  index_t layer = 0, id = 0;
  friend bool operator==(const sequence_layer&, const sequence_layer&) = default;
};

/// Some layers of some sequences.
using sequence_layers = host_vector<sequence_layer>;

/// A table order in which the layers of a sequence stand together, so that a sequence can be appended.
struct sequence_major {
  index_t layers = 0;
  TESSERA_INLINE std::size_t index(sequence_layer owner) const {
    return std::size_t(owner.id) * std::size_t(layers) + std::size_t(owner.layer);
  }
};

/// A table order in which the sequences of a layer stand together, as a step of one layer reads them.
struct layer_major {
  index_t sequences = 0;
  TESSERA_INLINE std::size_t index(sequence_layer owner) const {
    return std::size_t(owner.layer) * std::size_t(sequences) + std::size_t(owner.id);
  }
  TESSERA_INLINE sequence_layer owner(std::size_t index) const {
    return {index_t(index / std::size_t(sequences)), index_t(index % std::size_t(sequences))};
  }
};

/// A T for every layer of every sequence that was opened. Closing a sequence releases no memory.
template <class T>
class sequence_table {
 public:
  explicit sequence_table(index_t layers) : order_{layers} {}

  /// Adds entries up to those of sequence `id`, copies of `initial`. Entries that exist keep their values.
  void open(index_t id, const T& initial = {}) {
    const std::size_t wanted = order_.index({0, id + 1});
    if (entries_.size() < wanted) entries_.resize(wanted, initial);
  }
  /// Adds entries up to those of sequence `id` and empties its own, which releases their memory.
  void open_empty(index_t id) {
    open(id);
    clear(id);
  }
  /// Makes each layer's entry of an open sequence a T{}.
  void clear(index_t id) {
    for (index_t layer = 0; layer < order_.layers; ++layer) (*this)[sequence_layer{layer, id}] = T{};
  }

  T& operator[](sequence_layer owner) { return entries_[order_.index(owner)]; }
  const T& operator[](sequence_layer owner) const { return entries_[order_.index(owner)]; }

 private:
  sequence_major order_;
  host_vector<T> entries_;
};

TESSERA_NAMESPACE_END
