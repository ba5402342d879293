// Prompt chunks for the tests of prefill attention: shapes, and what is stored behind every table.
#pragma once

#include <algorithm>
#include <vector>

#include "backend/cuda/device.hpp"
#include "tessera/core/logit_rule.hpp"
#include "tessera/core/views.hpp"

namespace gpu_test {

struct shape {
  index_t sequences = 1, heads = 1, group = 1, tokens = 1, stored = 1;  // `stored` before the chunk, at most
  bool evicted = false;                                                 // positions with gaps, lengths by head
  bool sinks = false;
  logit_rule rule{};
  float spread = 1;  // of the queries: large ones make sharp softmaxes

  index_t q_heads() const { return heads * group; }
  index_t capacity() const { return stored + tokens; }
  std::size_t query_rows() const { return std::size_t(sequences) * std::size_t(tokens) * std::size_t(q_heads()); }
};

/// The pools of a batch on the host: NaN wherever nothing is stored.
template <class T, int D, int Dv, class Table>
struct pools {
  using view_type = kv_view<const T, D, Table, Dv>;
  static constexpr index_t page = 16;
  shape s;
  std::vector<T> k, v;
  std::vector<index_t> lengths, positions, first, blocks, indptr;
  std::vector<offset_t> begin;

  explicit pools(const shape& of) : s(of) {
    const index_t rows = s.sequences * s.heads, pages = ceil_div(s.capacity(), page);
    for (index_t i = 0; i < s.sequences; ++i) first.push_back(s.evicted ? s.stored * 2 + i : s.stored);
    offset_t pool = offset_t(rows) * s.capacity();
    for (index_t r = 0; r < rows; ++r) {
      const index_t kept = s.evicted ? draw(0, s.stored) : s.stored;
      lengths.push_back(r == 1 ? 0 : kept + s.tokens);
    }
    if constexpr (std::is_same_v<Table, ragged>) {
      pool = 3;
      for (const index_t length : lengths) begin.push_back(pool), pool += length + draw(0, 9);
    } else if constexpr (!std::is_same_v<Table, contiguous>) {
      const index_t tables = std::is_same_v<Table, csr_table> ? rows : s.sequences;
      for (index_t i = 0; i < tables * pages; ++i) blocks.push_back(i);
      std::shuffle(blocks.begin(), blocks.end(), rng());
      for (index_t i = 0; i <= tables; ++i) indptr.push_back(i * pages);
      pool = offset_t(blocks.size()) * page * (std::is_same_v<Table, csr_table> ? 1 : s.heads);
    }
    k.assign(std::size_t(pool) * D, T(NAN)), v.assign(std::size_t(pool) * Dv, T(NAN));
    if (s.evicted) {
      positions.assign(begin.empty() ? std::size_t(rows) * std::size_t(s.capacity()) : std::size_t(pool), -1);
    }
    const view_type view = host();
    for (index_t r = 0; r < rows; ++r) {
      const index_t length = lengths[std::size_t(r)], old = length - s.tokens;
      index_t position = 0;
      for (index_t i = 0; i < length; ++i) {
        fill(const_cast<T*>(view.key(r / s.heads, r % s.heads, i)), D);
        fill(const_cast<T*>(view.value(r / s.heads, r % s.heads, i)), Dv);
        if (!s.evicted) continue;
        position = i >= old ? first[std::size_t(r / s.heads)] + i - old : i == 0 ? draw(0, 1) : position + draw(1, 2);
        positions[std::size_t((begin.empty() ? r * s.capacity() : begin[std::size_t(r)]) + i)] = position;
      }
    }
  }
  static void fill(T* row, int dim) {
    std::normal_distribution<float> normal_of;
    for (int d = 0; d < dim; ++d) row[d] = T(normal_of(rng()));
  }

  view_type at(const T* keys, const T* values, const index_t* length, const index_t* position, const index_t* block,
               const index_t* row, const offset_t* offset) const {
    view_type view;
    view.k = keys, view.v = values;
    view.sequences = s.sequences, view.kv_heads = s.heads;
    view.lengths = length, view.length_strides = {s.heads, 1};
    view.positions = s.evicted ? position : nullptr;
    view.position_strides = {offset_t(s.heads) * s.capacity(), s.capacity()};
    const auto strides = [&](int dim) -> row_strides {
      if constexpr (std::is_same_v<Table, contiguous>) {
        return {offset_t(s.heads) * s.capacity() * dim, offset_t(s.capacity()) * dim, dim, 1};
      } else if constexpr (std::is_same_v<Table, ragged>) {
        return {0, 0, dim, 1};
      } else if constexpr (std::is_same_v<Table, block_table>) {
        return {offset_t(page) * s.heads * dim, dim, offset_t(s.heads) * dim, 1};
      } else {
        return {offset_t(page) * dim, 0, dim, 1};
      }
    };
    view.k_strides = strides(D), view.v_strides = strides(Dv);
    if constexpr (std::is_same_v<Table, ragged>) {
      view.table = {offset, s.heads};
      view.position_begin = offset;
    } else if constexpr (std::is_same_v<Table, block_table>) {
      view.table = {block, page, ceil_div(s.capacity(), page), 0};
    } else if constexpr (std::is_same_v<Table, csr_table>) {
      view.table = {row, block, page, s.heads};
    }
    return view;
  }
  view_type host() const {
    return at(k.data(), v.data(), lengths.data(), positions.data(), blocks.data(), indptr.data(), begin.data());
  }
};

}  // namespace gpu_test
