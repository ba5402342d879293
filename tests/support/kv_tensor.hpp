// Keys and values of a batch in the plainest layout, and the oracle's answer over them.
#pragma once

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/core/views.hpp>

#include "oracle.hpp"
#include "random.hpp"

namespace support {

/// K, V [sequences, kv_heads, slots, dim] with a length for each (sequence, kv_head) and optional positions.
template <class T, int D, int Dv = D>
struct kv_tensor {
  index_t sequences, kv_heads, slots;
  std::vector<T> k, v;
  std::vector<float> k_float, v_float;  // what is stored, exactly
  std::vector<index_t> lengths;
  std::vector<index_t> positions;  // [sequences, kv_heads, slots] or empty

  kv_tensor(rng& random, index_t sequences_, index_t kv_heads_, std::vector<index_t> lengths_)
      : sequences(sequences_),
        kv_heads(kv_heads_),
        slots(*std::max_element(lengths_.begin(), lengths_.end())),
        lengths(std::move(lengths_)) {
    for (const float x : normals(random, std::size_t(sequences * kv_heads * slots * D))) k.push_back(T(x));
    for (const float x : normals(random, std::size_t(sequences * kv_heads * slots * Dv))) v.push_back(T(x));
    remember();
  }

  /// To be called after k or v were written to.
  void remember() {
    k_float.assign(k.begin(), k.end());
    v_float.assign(v.begin(), v.end());
  }

  std::size_t row(index_t sequence, index_t head, index_t slot) const {
    return (std::size_t(sequence) * std::size_t(kv_heads) + std::size_t(head)) * std::size_t(slots) + std::size_t(slot);
  }
  index_t length(index_t sequence, index_t head) const { return lengths[std::size_t(sequence * kv_heads + head)]; }
  index_t position(index_t sequence, index_t head, index_t slot) const {
    return positions.empty() ? slot : positions[row(sequence, head, slot)];
  }

  /// Ascending positions with random gaps, as evictions leave them.
  void scatter_positions(rng& random) {
    positions.assign(std::size_t(sequences * kv_heads * slots), 0);
    for (std::size_t at = 0; at < positions.size(); ++at) {
      positions[at] = at % std::size_t(slots) == 0 ? random.between(0, 3) : positions[at - 1] + random.between(1, 4);
    }
  }
  index_t newest(index_t sequence) const {
    index_t latest = 0;
    for (index_t h = 0; h < kv_heads; ++h) {
      if (length(sequence, h) > 0) latest = std::max(latest, position(sequence, h, length(sequence, h) - 1));
    }
    return latest;
  }

  tessera::kv_view<const T, D, tessera::contiguous, Dv> view() const {
    tessera::kv_view<const T, D, tessera::contiguous, Dv> view;
    view.k = k.data();
    view.v = v.data();
    view.k_strides = {tessera::offset_t(kv_heads) * slots * D, tessera::offset_t(slots) * D, D, 1};
    view.v_strides = {tessera::offset_t(kv_heads) * slots * Dv, tessera::offset_t(slots) * Dv, Dv, 1};
    view.sequences = sequences;
    view.kv_heads = kv_heads;
    view.lengths = lengths.data();
    view.length_strides = {kv_heads, 1};
    if (!positions.empty()) {
      view.positions = positions.data();
      view.position_strides = {tessera::offset_t(kv_heads) * slots, slots};
    }
    return view;
  }

  /// The oracle over all slots of a head, or over `chosen` ones.
  oracle::attended attend(const float* query, index_t query_position, index_t sequence, index_t q_head, index_t group,
                          const tessera::logit_rule& rule, const std::vector<index_t>* chosen = nullptr) const {
    const index_t head = q_head / group;
    std::vector<const float*> keys, values;
    std::vector<index_t> at;
    for (index_t i = 0; i < (chosen ? index_t(chosen->size()) : length(sequence, head)); ++i) {
      const index_t slot = chosen ? (*chosen)[std::size_t(i)] : i;
      keys.push_back(k_float.data() + row(sequence, head, slot) * D);
      values.push_back(v_float.data() + row(sequence, head, slot) * Dv);
      at.push_back(position(sequence, head, slot));
    }
    return oracle::attend(query, query_position, keys, values, at, D, Dv, rule, q_head);
  }
};

}  // namespace support
