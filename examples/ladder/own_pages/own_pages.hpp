// What rungs 9 and 10 share: the shape of a tiny engine that owns its pages, a model in numbers, and what to compare with.
#pragma once

#include "../support/ladder.hpp"

#include <tessera/core/engine/move_problem.hpp>

namespace own_pages {

using namespace tessera;

// [memory]
using counts = std::vector<index_t>;  // one number a sequence
constexpr index_t layers = 2, q_heads = 8, heads = 2, dim = 64, page = 16, pages = 60, max_blocks = 20;
constexpr index_t sequences = 3, slots = max_blocks * page, rows = sequences * heads;  // rows of one layer

/// Pools of K and V [layers, pages, page, heads, dim], lengths [layers, sequences, heads] and positions [.., slots], in
/// somebody's memory, on the host or on a device. As in vLLM all layers share one block table.
template <class T>
struct memory {
  T *k, *v;
  index_t *lengths, *positions;
  const index_t* blocks;

  kv_view<T, dim, block_table> view(index_t layer) const {
    kv_view<T, dim, block_table> view;
    view.k = k + offset_t(layer) * pages * page * heads * dim;
    view.v = v + offset_t(layer) * pages * page * heads * dim;
    view.k_strides = view.v_strides = {page * heads * dim, dim, heads * dim};  // page, head, token
    view.sequences = sequences;
    view.kv_heads = heads;
    view.lengths = layer_lengths(layer);
    view.length_strides = {heads, 1};  // every head has a length of its own
    view.positions = position_column(layer).data;
    view.position_strides = {heads * slots, slots};
    view.table = {blocks, page, max_blocks};
    return view;
  }
  /// Tokens of the longest head of a sequence; on the host.
  index_t longest(index_t sequence) const {
    index_t most = 0;
    for (index_t i = 0; i < layers * heads; ++i) {
      most = std::max(most, lengths[i / heads * rows + sequence * heads + i % heads]);
    }
    return most;
  }
  index_t* layer_lengths(index_t layer) const { return lengths + layer * rows; }
  slot_column<index_t> position_column(index_t layer) const {
    return {positions + offset_t(layer) * rows * slots, heads * slots, slots};
  }
};
// [memory]

/// New tokens of one layer, k and v [sequences, most, heads, dim]: every head takes `added` of each sequence.
template <class T>
append_problem<kv_view<T, dim, block_table>, T> appending(const memory<T>& e, index_t layer, const T* k, const T* v,
                                                          index_t most, const index_t* added,
                                                          const index_t* first_position) {
  append_problem<kv_view<T, dim, block_table>, T> p;
  p.view = e.view(layer);
  p.k = nhd_rows(k, most, heads, dim, sequences);
  p.v = nhd_rows(v, most, heads, dim, sequences);
  p.new_tokens = added;
  p.first_position = first_position;
  p.lengths = e.layer_lengths(layer);  // they advance
  p.positions = e.position_column(layer);
  p.pool = {pages, max_blocks};  // with it the CPU checks the tables first
  return p;
}

/// Which page is whose, on the host.
struct block_tables {
  std::vector<index_t> blocks = std::vector<index_t>(sequences * max_blocks, -1), unused;
  counts held = counts(sequences);  // pages of each

  block_tables() {
    for (index_t i = 0; i < pages; ++i) unused.push_back(i * 7 % pages);  // in no order
  }
  void reserve(index_t sequence, index_t tokens) {
    for (index_t& count = held[std::size_t(sequence)]; count * page < tokens; ++count, unused.pop_back()) {
      blocks[std::size_t(sequence * max_blocks + count)] = unused.back();
    }
  }
  /// Returns how many.
  index_t take_back(const std::vector<index_t>& freed, const counts& freed_count) {
    const std::size_t before = unused.size();
    for (index_t b = 0; b < sequences; ++b) {
      const auto own = freed.begin() + b * max_blocks;
      unused.insert(unused.end(), own, own + freed_count[std::size_t(b)]);
    }
    return index_t(unused.size() - before);
  }
};

/// Queries, keys and values of every layer and position, which stand for a model's. As bf16 holds them.
struct model {
  std::vector<ladder::tensors> layer;

  model() {
    for (index_t l = 0; l < layers; ++l) {
      layer.emplace_back(sequences * slots, q_heads, heads, dim, unsigned(l + 1));
      for (auto* x : {&layer.back().q, &layer.back().k, &layer.back().v}) {
        for (float& value : *x) value = bf16(value);
      }
    }
  }
  static const float* row(const std::vector<float>& x, index_t x_heads, index_t b, index_t position, index_t head) {
    return x.data() + ((offset_t(b) * slots + position) * x_heads + head) * dim;
  }
  /// Of sequence b the tokens [first[b], first[b] + count[b]), as a batch [sequences, the most, heads, dim].
  template <class T>
  static std::vector<T> take(const std::vector<float>& x, index_t x_heads, const counts& first, const counts& count) {
    const index_t most = *std::max_element(count.begin(), count.end());
    std::vector<T> batch(std::size_t(sequences * most * x_heads * dim));
    for (index_t b = 0; b < sequences; ++b) {
      const float* from = row(x, x_heads, b, first[std::size_t(b)], 0);
      for (index_t i = 0; i < count[std::size_t(b)] * x_heads * dim; ++i) {
        batch[std::size_t(b * most * x_heads * dim + i)] = T(from[i]);
      }
    }
    return batch;
  }
  /// The largest difference between `out [sequences, q_heads, dim]` and attention in double of each sequence's newest query
  /// over the model's keys and values at the positions that `kept`, on the host, still has.
  template <class T>
  double worst_error(const std::vector<float>& out, index_t l, const memory<T>& kept, const counts& newest) const {
    const ladder::tensors& x = layer[std::size_t(l)];
    double worst = 0;
    for (index_t r = 0; r < sequences * q_heads; ++r) {
      const index_t b = r / q_heads, q_head = r % q_heads, head = q_head / (q_heads / heads);
      const index_t* positions = kept.position_column(l).row(b, head, heads);
      const float* q = row(x.q, q_heads, b, newest[std::size_t(b)], q_head);
      std::vector<double> expected(dim, 0.0);
      double sum = 0;
      for (index_t i = 0; i < kept.layer_lengths(l)[b * heads + head]; ++i) {
        const float *k = row(x.k, heads, b, positions[i], head), *v = row(x.v, heads, b, positions[i], head);
        double dot = 0;
        for (int d = 0; d < dim; ++d) dot += double(q[d]) * k[d];
        const double weight = std::exp(dot / std::sqrt(double(dim)));
        sum += weight;
        for (int d = 0; d < dim; ++d) expected[std::size_t(d)] += weight * v[d];
      }
      for (int d = 0; d < dim; ++d) {
        const double difference = std::abs(expected[std::size_t(d)] / sum - out[std::size_t(r * dim + d)]);
        worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
      }
    }
    return worst;
  }
};

}  // namespace own_pages
