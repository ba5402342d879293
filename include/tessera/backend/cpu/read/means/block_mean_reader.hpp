// Retrieval by the packed mean keys of blocks on the CPU.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../../../planned.hpp"
#include "../../../../scorer/block_mean.hpp"
#include "../../kernel/scratch.hpp"
#include "../../store/packed/packed_view.hpp"
#include "../reader.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scores every block of every segment of a head, chooses among all of them at once, and adds the tokens that are not
/// packed. The segments have the means; the reader itself stores nothing.
template <class Recipe>
class block_mean_reader : public reader_without_index<Recipe> {
  using layout = typename Recipe::layout_type;
  static constexpr int k_dim = layout::k_dim;

 public:
  explicit block_mean_reader(const model_shape&) {}

  template <class Q>
  offset_t choose(std::size_t, const packed_view<layout>& all, const query_rows<Q>& queries, const logit_rule&,
                  const planned<Recipe>& policies, selection& chosen, executor&) {
    memory& with = *memory_;
    offset_t bytes = 0;
    for (index_t h = 0; h < all.kv_heads; ++h) {
      const index_t n = all.length(0, h), packed = all.packed[h];
      index_t* out = chosen.row(h);
      index_t count = 0;
      if (packed <= policies.read.tokens) {  // all of it is read: nothing to choose
        for (; count < packed; ++count) out[count] = count;
      } else {
        bytes += score(all, queries, policies.read.scorer, h, with);
        with.taken.resize(with.scores.size());
        const index_t taken =
            policies.read.selector.choose_blocks(with.scores.data(), with.sizes.data(), index_t(with.scores.size()),
                                                 policies.read.tokens, with.taken.data(), with.top_k);
        for (index_t i = 0; i < taken; ++i) {
          const auto block = std::size_t(with.taken[std::size_t(i)]);
          for (index_t slot = 0; slot < with.sizes[block]; ++slot) out[count++] = with.begins[block] + slot;
        }
      }
      for (index_t slot = packed; slot < n; ++slot) out[count++] = slot;
      chosen.counts[std::size_t(h)] = count;
    }
    return bytes;
  }

  offset_t list_bytes(std::size_t, index_t, index_t) const { return 0; }

 private:
  struct memory {
    host_vector<float> scores, rows, rotated, turned;  // by block; queries in the engine's basis and in a segment's
    host_vector<index_t> sizes, begins, taken;         // by block: slots, the first one; blocks
    top_k_scratch top_k;
  };

  /// Scores and slots of the blocks of a head. Returns the bytes of means and key bases that this read.
  template <class Q>
  static offset_t score(const packed_view<layout>& all, const query_rows<Q>& queries, const block_mean& scorer,
                        index_t head, memory& with) {
    with.scores.clear();
    with.sizes.clear();
    with.begins.clear();
    const index_t group = queries.q.heads / all.kv_heads;
    const bool sums = scorer.reduce == row_reduction::sum;
    const index_t rows = sums ? 1 : queries.q.tokens * group;
    with.rows.assign(std::size_t(rows) * k_dim, 0.0f);
    with.rotated.resize(with.rows.size());
    with.turned.resize(std::size_t(k_dim) * k_dim);
    for (index_t row = 0; row < queries.q.tokens * group; ++row) {
      const Q* q = queries.q.row(0, row / group, head * group + row % group);
      float* to = with.rows.data() + (sums ? 0 : row * k_dim);
      for (int d = 0; d < k_dim; ++d) {
        const float x = float(q[d]);
        if (!sums || (x < infinity && x > -infinity)) to[d] += x;
      }
    }
    offset_t bytes = 0;
    index_t begin = 0;
    for (const auto& segment : *all.segments) {
      const float* basis = segment->k_basis(head, k_dim);
      rotate_rows<k_dim>(with.rows.data(), int(rows), basis, segment->format.k.channels, with.turned.data(),
                         with.rotated.data());
      const index_t length = segment->lengths[std::size_t(head)], block = segment->format.block;
      for (index_t b = 0; b < segment->blocks(head); ++b) {
        float best = segment->mean_dot(head, b, with.rotated.data());
        for (index_t row = 1; row < rows; ++row) {
          const float other = segment->mean_dot(head, b, with.rotated.data() + row * k_dim);
          best = other > best || best != best ? other : best;
        }
        with.scores.push_back(best);
        with.sizes.push_back((std::min)(block, length - b * block));
        with.begins.push_back(begin + b * block);
      }
      bytes += segment->blocks(head) * row_bytes(segment->format.mean_planes());
      if (basis) bytes += offset_t(segment->format.k.channels) * k_dim * offset_t(sizeof(float));
      begin += length;
    }
    return bytes;
  }

  scratch<memory> memory_;
};

template <class Recipe>
requires std::same_as<typename Recipe::retrieve_type::scorer_type, block_mean> struct reader_of<Recipe> {
  using type = block_mean_reader<Recipe>;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
