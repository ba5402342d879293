// An engine's pool of blocks with tables, in the layouts of real engines, filled from rows by sequence: sequences may share
// their first blocks, and blocks of nobody are NaN.
#pragma once

#include <limits>

#include <tessera/core/engine/read_problem.hpp>
#include <tessera/core/logit_rule.hpp>

#include "support/page_oracle.hpp"
#include "support/random.hpp"

namespace support {

/// How a block lies: [block, kv_heads, 2 dim]; [kv_heads, block, 2 dim]; or [kv_heads, (dim, block) then (block, dim)].
enum class block_layout { nhd, hnd, columns };
/// What keys are made of.
enum class block_keys { normal, repeated, integers, specials };

template <class T, int D>
struct block_engine {
  using view_type = tessera::kv_view<const T, D, tessera::block_table>;

  index_t sequences = 1, kv_heads = 1, group = 1, tokens = 1;  // `tokens`: of a step
  index_t block = 16, blocks = 0, max_blocks = 0;
  block_layout layout = block_layout::nhd;
  std::vector<T> pool, q;        // q [sequences, tokens, q_heads, D]
  std::vector<index_t> table;    // [sequences, max_blocks]
  std::vector<index_t> lengths;  // [sequences]
  std::vector<index_t> shared;   // [sequences], the first slots that lie in blocks of the first sequence
  std::vector<index_t> first;    // [sequences], of the step's first token
  tessera::logit_rule rule{};
  std::vector<float> sinks;

  /// Where the memory of a view is.
  struct pointers {
    const T *pool, *q;
    const index_t *table, *lengths, *first;
    const float* sinks;
  };
  pointers host() const {
    return {pool.data(), q.data(), table.data(), lengths.data(), first.data(), sinks.empty() ? nullptr : sinks.data()};
  }
  index_t q_heads() const { return group * kv_heads; }
  index_t rows() const { return sequences * kv_heads; }
  index_t longest() const { return *std::max_element(lengths.begin(), lengths.end()); }

  view_type view(const pointers& at) const {
    view_type view;
    const tessera::offset_t each = tessera::offset_t(block) * kv_heads * 2 * D;
    view.k = view.v = at.pool;
    switch (layout) {
      case block_layout::nhd:
        view.k_strides = {each, 2 * D, tessera::offset_t(kv_heads) * 2 * D, 1};
        break;
      case block_layout::hnd:
        view.k_strides = {each, tessera::offset_t(block) * 2 * D, 2 * D, 1};
        break;
      case block_layout::columns:
        view.k_strides = {each, tessera::offset_t(block) * 2 * D, 1, block};
        view.v_strides = {each, tessera::offset_t(block) * 2 * D, D, 1};
        view.v += tessera::offset_t(block) * D;
        break;
    }
    if (layout != block_layout::columns) {
      view.v_strides = view.k_strides;
      view.v += D;
    }
    view.sequences = sequences;
    view.kv_heads = kv_heads;
    view.lengths = at.lengths;
    view.length_strides = {1, 0};
    view.table = {at.table, block, max_blocks, 0};
    return view;
  }
  tessera::rows_view<const T> queries(const pointers& at) const {
    return tessera::nhd_rows<const T>(at.q, tokens, q_heads(), D, sequences);
  }
  const T* query(index_t sequence, index_t head, index_t r) const {
    return q.data() + ((std::size_t(sequence) * std::size_t(tokens) + std::size_t(r / group)) * std::size_t(q_heads()) +
                       std::size_t(head * group + r % group)) *
                          D;
  }
  T& key(index_t sequence, index_t head, index_t slot, int d) {
    const auto all = view(host());
    return const_cast<T*>(all.key(sequence, head, slot))[d * all.k_strides.dim];
  }
  T& value(index_t sequence, index_t head, index_t slot, int d) {
    const auto all = view(host());
    return const_cast<T*>(all.value(sequence, head, slot))[d];
  }
  /// Elements of an index of pages of `page` slots.
  std::size_t index_elements(index_t page) const {
    return std::size_t(blocks) * std::size_t(block / page) * std::size_t(kv_heads) * 2 * D;
  }

  /// The scores of one row's slots in double, slot by slot and from the keys themselves.
  oracle::page_scores expected(index_t sequence, index_t head, const oracle::page_rules& rules) const {
    const auto all = view(host());
    std::vector<std::vector<float>> floats;
    std::vector<const float*> queries, keys;
    std::vector<index_t> at, heads, positions;
    const auto add = [&](const T* from, tessera::offset_t step) {
      floats.emplace_back();
      for (int d = 0; d < D; ++d) floats.back().push_back(float(from[d * step]));
    };
    for (index_t r = 0; r < group * tokens; ++r) {
      add(query(sequence, head, r), 1);
      at.push_back(first[std::size_t(sequence)] + r / group);
      heads.push_back(head * group + r % group);
    }
    for (index_t slot = 0; slot < all.length(sequence, head); ++slot) {
      add(all.key(sequence, head, slot), all.k_strides.dim);
      positions.push_back(slot);
    }
    for (std::size_t i = 0; i < floats.size(); ++i)
      (index_t(i) < group * tokens ? queries : keys).push_back(floats[i].data());
    tessera::logit_rule host_rule = rule;
    host_rule.sink_logits = sinks.empty() ? nullptr : sinks.data();
    return oracle::score_pages(rules, queries, at, heads, keys, positions, D, host_rule);
  }
};

/// A random engine. Some sequences have full blocks of the first sequence at their beginning.
template <class T, int D>
block_engine<T, D> random_engine(rng& random, block_layout layout, index_t block, index_t longest, block_keys of) {
  block_engine<T, D> made;
  made.layout = layout;
  made.block = block;
  made.sequences = random.between(1, 4);
  made.kv_heads = random.between(1, 3);
  made.group = random.between(1, 8);
  made.tokens = random.pick({1, 1, 1, 2, 5, 8});
  for (index_t b = 0; b < made.sequences; ++b) {
    made.lengths.push_back(
        random.pick({0, 1, 15, 16, 17, 33, random.between(1, 40), random.between(1, longest), longest}));
  }
  made.max_blocks = tessera::ceil_div(std::max(1, made.longest()), block) + random.between(0, 2);
  made.table.assign(std::size_t(made.sequences * made.max_blocks), -1);
  std::vector<index_t> ids;
  index_t used = 0;
  for (index_t b = 0; b < made.sequences; ++b) used += tessera::ceil_div(made.lengths[std::size_t(b)], block);
  made.blocks = used + random.between(1, 3);
  for (index_t i = 0; i < made.blocks; ++i) ids.push_back(i);
  for (index_t i = made.blocks - 1; i > 0; --i) std::swap(ids[std::size_t(i)], ids[std::size_t(random.between(0, i))]);
  const index_t whole = made.lengths[0] / block;
  index_t next = 0;
  for (index_t b = 0; b < made.sequences; ++b) {
    const index_t count = tessera::ceil_div(made.lengths[std::size_t(b)], block);
    const index_t shared = b > 0 && random.chance(0.5) ? std::min(whole, made.lengths[std::size_t(b)] / block) : 0;
    made.shared.push_back(shared * block);
    for (index_t i = 0; i < count; ++i) {
      made.table[std::size_t(b * made.max_blocks + i)] =
          i < shared ? made.table[std::size_t(i)] : ids[std::size_t(next++)];
    }
  }
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  made.pool.assign(std::size_t(made.blocks * block * made.kv_heads) * 2 * D, T(nan));
  const auto palette = repeated_rows(random, 64, D, random.between(1, 4));
  constexpr float odd[] = {nan, tessera::infinity, -tessera::infinity};
  for (index_t b = 0; b < made.sequences; ++b) {
    for (index_t h = 0; h < made.kv_heads; ++h) {
      for (index_t slot = 0; slot < made.lengths[std::size_t(b)]; ++slot) {
        const index_t row = random.between(0, 63);
        const bool bad = of == block_keys::specials && random.chance(0.05);
        for (int d = 0; d < D; ++d) {
          made.value(b, h, slot, d) = T(random.normal());
          made.key(b, h, slot, d) = T(of == block_keys::repeated   ? palette[std::size_t(row * D + d)]
                                      : of == block_keys::integers ? float(random.between(-2, 2))
                                      : bad && random.chance(0.3)  ? odd[random.between(0, 2)]
                                                                   : random.normal());
        }
      }
    }
  }
  for (const float x :
       normals(random, std::size_t(made.sequences * made.tokens * made.q_heads() * D), random.pick({0.3f, 1.0f, 2.0f})))
    made.q.push_back(T(of == block_keys::integers ? float(random.between(-2, 2)) : x));
  if (of == block_keys::specials && random.chance(0.3))
    made.q[std::size_t(random.between(0, index_t(made.q.size()) - 1))] = T(odd[random.between(0, 2)]);
  for (const index_t n : made.lengths) made.first.push_back(std::max(0, n - made.tokens));
  if (random.chance(0.2)) made.sinks = normals(random, std::size_t(made.q_heads()), 3);
  if (random.chance(0.2)) made.rule.soft_cap = 5;
  if (random.chance(0.2)) made.rule.sliding_window = random.between(1, 80);
  return made;
}

}  // namespace support
