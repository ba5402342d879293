// Random problems of paged retrieval, on the host and on the device.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "backend/cuda/device.hpp"
#include "support/kv_tensor.hpp"
#include "support/page_oracle.hpp"
#include "tessera/backend/cpu/read/extrema/page_index.hpp"
#include "tessera/backend/cpu/read/extrema/page_scores.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/read/extrema/detail/mean_value.cuh"
#include "tessera/backend/cuda/read/extrema/page_retrieval.cuh"
#include "tessera/scorer/chosen_channels.hpp"
#include "tessera/scorer/hybrid_min_max.hpp"
#include "tessera/scorer/page_min_max.hpp"
#include "tessera/selector/tokens_or_pages.hpp"

namespace gpu_test {

using namespace tessera;
using support::oracle::estimate;
namespace oracle = support::oracle;

/// Keys, values and queries of a few sequences; `listed`: only candidates of what is stored may be read.
template <class T, int D, bool listed>
struct problem {
  using table_type = std::conditional_t<listed, filtered<ragged>, contiguous>;
  using view_type = kv_view<const T, D, table_type>;
  support::kv_tensor<T, D> kv;
  index_t group, tokens;
  std::vector<T> q;  // [sequences, tokens, q_heads, D]
  std::vector<index_t> first;
  std::vector<float> sinks;  // [q_heads], or empty
  logit_rule rule{};
  std::vector<index_t> lists, lengths;  // candidates by row, kv.slots apart; and what a step may read of each row
  std::vector<offset_t> begins;

  index_t rows() const { return kv.sequences * kv.kv_heads; }
  index_t q_heads() const { return group * kv.kv_heads; }
  index_t longest() const { return *std::max_element(lengths.begin(), lengths.end()); }

  /// Where the memory of a view is.
  struct pointers {
    const T *k, *v, *q;
    const index_t *positions, *lengths, *lists, *first;
    const offset_t* begins;
    const float* sinks;
  };
  pointers host() const {
    return {kv.k.data(),
            kv.v.data(),
            q.data(),
            kv.positions.empty() ? nullptr : kv.positions.data(),
            lengths.data(),
            lists.data(),
            first.data(),
            begins.data(),
            sinks.empty() ? nullptr : sinks.data()};
  }
  view_type view(const pointers& at, index_t from = 0, index_t count = -1) const {
    view_type view;
    view.sequences = count < 0 ? kv.sequences : count;
    view.kv_heads = kv.kv_heads;
    view.k = at.k;
    view.v = at.v;
    view.lengths = at.lengths + from * kv.kv_heads;
    view.length_strides = {kv.kv_heads, 1};
    if constexpr (listed) {
      view.k_strides = view.v_strides = {0, 0, D, 1};
      view.table = {
          {at.begins + from * kv.kv_heads, kv.kv_heads}, at.lists, at.begins + from * kv.kv_heads, kv.kv_heads};
      view.positions = at.lists;
      view.position_begin = at.begins + from * kv.kv_heads;
    } else {
      const offset_t head = offset_t(kv.slots) * D, sequence = head * kv.kv_heads;
      view.k_strides = view.v_strides = {sequence, head, D, 1};
      view.k += from * sequence;
      view.v += from * sequence;
      if (at.positions) {
        view.position_strides = {offset_t(kv.kv_heads) * kv.slots, kv.slots};
        view.positions = at.positions + from * kv.kv_heads * kv.slots;
      }
    }
    return view;
  }
  rows_view<const T> queries(const pointers& at, index_t from = 0, index_t count = -1) const {
    return nhd_rows<const T>(at.q + offset_t(from) * tokens * q_heads() * D, tokens, q_heads(), D,
                             count < 0 ? kv.sequences : count);
  }
  const T* query(index_t sequence, index_t head, index_t r) const {
    return q.data() + ((offset_t(sequence) * tokens + r / group) * q_heads() + head * group + r % group) * D;
  }

  oracle::page_scores expected(index_t sequence, index_t head, const oracle::page_rules& rules) const {
    const auto all = view(host());
    std::vector<std::vector<float>> floats;
    std::vector<const float*> queries, keys;
    std::vector<index_t> at, heads, positions;
    const auto add = [&](const T* from) { floats.emplace_back(from, from + D); };
    for (index_t r = 0; r < group * tokens; ++r) {
      add(query(sequence, head, r));
      at.push_back(first[std::size_t(sequence)] + r / group);
      heads.push_back(head * group + r % group);
    }
    for (index_t slot = 0; slot < all.length(sequence, head); ++slot) {
      add(all.key(sequence, head, slot));
      positions.push_back(all.position(sequence, head, slot));
    }
    for (std::size_t i = 0; i < floats.size(); ++i)
      (index_t(i) < group * tokens ? queries : keys).push_back(floats[i].data());
    logit_rule host_rule = rule;
    host_rule.sink_logits = sinks.empty() ? nullptr : sinks.data();
    return oracle::score_pages(rules, queries, at, heads, keys, positions, D, host_rule);
  }
};

/// What keys and queries are made of.
enum class kind { normal, repeated, integers, specials };

template <class T, int D, bool listed>
problem<T, D, listed> random_problem(support::rng& random, kind of, index_t longest) {
  const index_t sequences = random.between(1, 3), kv_heads = random.between(1, 3);
  std::vector<index_t> lengths;
  for (index_t r = 0; r < sequences * kv_heads; ++r) {
    lengths.push_back(
        random.pick({0, 1, 31, 32, 33, 64, 65, random.between(1, 40), random.between(1, longest), longest}));
  }
  lengths[0] = std::max(lengths[0], 1);
  problem<T, D, listed> made{support::kv_tensor<T, D>(random, sequences, kv_heads, lengths),
                             random.pick({1, 2, 3, 4, 4, 8}),
                             random.pick({1, 1, 1, 2, 5, 8}),
                             {},
                             {},
                             {},
                             {},
                             {},
                             {},
                             {}};
  const index_t count = index_t(made.kv.k.size()) / D;
  if (of == kind::repeated) {
    const auto rows = support::repeated_rows(random, count, D, random.between(1, 4));
    for (std::size_t i = 0; i < rows.size(); ++i) made.kv.k[i] = T(rows[i]);
  }
  if (of == kind::integers) {
    for (auto& x : made.kv.k) x = T(float(random.between(-2, 2)));
  }
  constexpr float odd[] = {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity};
  for (index_t bad = of == kind::specials ? random.between(1, 12) : 0; bad > 0; --bad) {
    const offset_t at = offset_t(random.between(0, count - 1)) * D;
    const index_t from = random.between(0, D - 1), to = random.chance(0.5) ? D : from + 1;
    std::fill(made.kv.k.begin() + at + from, made.kv.k.begin() + at + to, T(odd[random.between(0, 2)]));
  }
  made.kv.remember();
  if (!listed && random.chance(0.4)) made.kv.scatter_positions(random);
  for (const float x : support::normals(random, std::size_t(sequences * made.tokens * made.q_heads() * D),
                                        random.pick({0.3f, 1.0f, 2.0f}))) {
    made.q.push_back(T(of == kind::integers ? float(random.between(-2, 2)) : x));
  }
  if (of == kind::specials && random.chance(0.3)) {
    made.q[std::size_t(random.between(0, index_t(made.q.size()) - 1))] = T(odd[random.between(0, 2)]);
  }
  if (random.chance(0.1)) std::fill(made.q.begin(), made.q.begin() + D, T(0.0f));
  if (random.chance(0.2)) made.sinks = support::normals(random, std::size_t(made.q_heads()), 3);
  if (random.chance(0.2)) made.rule.soft_cap = 5;
  if (random.chance(0.25)) made.rule.sliding_window = random.between(1, 80);
  if (random.chance(0.1)) made.rule.scale = 0.2f;
  made.lists.assign(std::size_t(made.rows() * made.kv.slots), no_index);
  for (index_t row = 0; row < made.rows(); ++row) {
    made.begins.push_back(offset_t(row) * made.kv.slots);
    index_t passed = 0;
    for (index_t slot = 0; slot < lengths[std::size_t(row)]; ++slot) {
      if (random.chance(0.6)) made.lists[std::size_t(row * made.kv.slots + passed++)] = slot;
    }
    made.lengths.push_back(listed ? passed : lengths[std::size_t(row)]);
  }
  for (index_t s = 0; s < sequences; ++s) made.first.push_back(std::max(0, made.kv.newest(s) - made.tokens + 1));
  return made;
}

/// A problem's memory on the device, each sequence's plan, and an index with room to spare.
template <class Problem>
struct on_device;
template <class T, int D, bool listed>
struct on_device<problem<T, D, listed>> {
  using problem_type = problem<T, D, listed>;
  const problem_type& made;
  buffer<T> k, v, q;
  buffer<index_t> positions, lengths, lists, first, rooms;
  buffer<offset_t> begins, index_begins;
  buffer<float> sinks;
  std::vector<index_t> host_rooms;
  std::vector<offset_t> host_begins;
  std::vector<read_plan> host_plans;  // by sequence
  buffer<read_plan> plans;
  buffer<T> extrema{0};
  bool uneven;

  on_device(const problem_type& of, std::vector<read_plan> plans_, bool uneven_)
      : made(of),
        k(of.kv.k),
        v(of.kv.v),
        q(of.q),
        positions(of.kv.positions),
        lengths(of.lengths),
        lists(of.lists),
        first(of.first),
        rooms(std::size_t(of.rows())),
        begins(of.begins),
        index_begins(std::size_t(of.rows())),
        sinks(of.sinks),
        host_plans(std::move(plans_)),
        plans(host_plans),
        uneven(uneven_) {
    offset_t total = 0;
    index_t smallest = host_plans[0].page;
    for (const read_plan& plan : host_plans) smallest = std::min(smallest, plan.page);
    const index_t room = (ceil_div(std::max(1, of.longest()), smallest) + 15) / 8 * 8;
    for (std::size_t row = 0; row < of.lengths.size(); ++row) {
      const index_t page = plan_of(index_t(row)).page;
      host_rooms.push_back(uneven ? (ceil_div(of.lengths[row], page) + 7) / 8 * 8 : room);
      host_begins.push_back(total);
      total += page_row_elements(uneven ? page : 2, D, host_rooms.back());
    }
    rooms.set(host_rooms);
    index_begins.set(host_begins);
    cudaFree(extrema.data);
    extrema.count = std::size_t(total);
    cuda::check(cudaMalloc(&extrema.data, std::max<std::size_t>(1, extrema.count) * sizeof(T)), "cudaMalloc");
    extrema.fill(0x33);
  }
  const read_plan& plan_of(index_t row) const { return host_plans[std::size_t(row / made.kv.kv_heads)]; }
  typename problem_type::pointers at() const {
    return {k.data,
            v.data,
            q.data,
            made.kv.positions.empty() ? nullptr : positions.data,
            lengths.data,
            lists.data,
            first.data,
            begins.data,
            made.sinks.empty() ? nullptr : sinks.data};
  }
  auto view() const { return made.view(at()); }
  page_extrema_view<T, D> index() const {
    if (uneven) return {extrema.data, 1, 0, index_begins.data, rooms.data};
    return {extrema.data, 1, host_rooms[0], nullptr, nullptr};
  }
  logit_rule rule() const {
    logit_rule result = made.rule;
    result.sink_logits = at().sinks;
    return result;
  }

  /// The device's index against one that the CPU builds; pages of one slot against their keys.
  void index_is_the_cpus() const {
    const auto got = extrema.get();
    const page_extrema_view<const T, D> device{got.data(), 1, 0, host_begins.data(), host_rooms.data()};
    bool same = true;
    for (index_t s = 0; s < made.kv.sequences; ++s) {
      const index_t page = host_plans[std::size_t(s)].page;
      const auto view = made.view(made.host(), s, 1);
      for (index_t h = 0; page == 1 && h < made.kv.kv_heads; ++h) {
        for (index_t slot = 0; slot < view.length(0, h); ++slot) {
          for (int d = 0; d < D; ++d)
            same &= view.key(0, h, slot)[d].bits == device.lower(s * made.kv.kv_heads + h, d)[slot].bits;
        }
      }
      if (page == 1) continue;
      cpu::page_index<T, D> index;
      index.reset(made.kv.kv_heads, page);
      index.extend(view);
      for (index_t h = 0; h < made.kv.kv_heads; ++h) {
        const index_t row = s * made.kv.kv_heads + h, pages = ceil_div(made.lengths[std::size_t(row)], page);
        for (int d = 0; d < D; ++d) {
          for (index_t p = 0; p < pages; ++p) {
            same &= index.view().lower(h, d)[p].bits == device.lower(row, d)[p].bits;
            same &= index.view().upper(h, d)[p].bits == device.upper(row, d)[p].bits;
          }
        }
      }
    }
    REQUIRE(same);
  }
};

}  // namespace gpu_test
