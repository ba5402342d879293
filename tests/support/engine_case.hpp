// An engine that owns its memory: a page pool behind guard bands, tables, lengths and positions, and what a plain model of
// it should hold.
#pragma once

#include <cstring>
#include <set>

#include <tessera/core/engine/choose_problem.hpp>
#include <tessera/core/engine/move_problem.hpp>

#include "plain_head.hpp"
#include "random.hpp"

namespace support {

using tessera::offset_t;

/// How the pages of one case lie.
struct page_shape {
  index_t layers = 2, sequences = 2, heads = 2, page = 16, max_blocks = 8, pages = 40;
  bool hnd = false;         // [pages, heads, page, dim] instead of [pages, page, heads, dim]
  bool own_tables = false;  // every head has a table, of pages [pages, page, dim]
  bool split = false;       // V in a pool of its own, behind K's, instead of beside it in each page

  index_t tables() const { return own_tables ? heads : 1; }
  index_t rows() const { return sequences * tables(); }
  index_t page_heads() const { return own_tables ? 1 : heads; }
  index_t slots() const { return max_blocks * page; }

  static page_shape drawn(rng& random) {
    page_shape s;
    s.sequences = random.between(1, 4);
    s.heads = random.between(1, 4);
    s.page = random.pick({1, 2, 3, 5, 8, 16, 32});
    s.max_blocks = random.between(1, 1 + 200 / s.page);
    s.hnd = random.chance(0.5);
    s.own_tables = random.chance(0.3);
    s.split = random.chance(0.5);
    s.pages = s.rows() * s.max_blocks + random.between(0, 5);
    return s;
  }
};

/// Everything that the operations may touch, by base pointers: of host memory, or of its copy on a device.
template <class T>
struct page_pointers {
  T* pool;
  const index_t *table, *indptr;
  index_t *lengths, *positions;
  float* scores;
};

template <class T, int D, class Table, int Dv = D>
struct engine_pages {
  using view_type = tessera::kv_view<T, D, Table, Dv>;
  static constexpr std::size_t band = 256;  // elements before and behind the pool of every layer

  page_shape s;
  std::vector<T> pool;                 // [layers, band + K and V + band]
  std::vector<index_t> table, indptr;  // [rows, max_blocks]
  std::vector<index_t> lengths;        // [layers, sequences, heads]
  std::vector<index_t> positions;      // [layers, sequences, heads, slots]
  std::vector<float> scores;           // likewise
  std::vector<index_t> held;           // [rows]
  std::vector<index_t> free_list;

  engine_pages(const page_shape& shape, rng& random)
      : s(shape),
        pool(std::size_t(s.layers) * layer_elements()),
        table(std::size_t(s.rows() * s.max_blocks), -7),
        lengths(std::size_t(s.layers * s.sequences * s.heads), 0),
        positions(std::size_t(s.layers * s.sequences * s.heads * s.slots()), -3),
        scores(positions.size(), -5.0f),
        held(std::size_t(s.rows()), 0) {
    std::memset(static_cast<void*>(pool.data()), 0xff, pool.size() * sizeof(T));  // NaN in every element type
    for (index_t page = 0; page < s.pages; ++page) free_list.insert(free_list.begin() + random.between(0, page), page);
    for (index_t row = 0; row <= s.rows(); ++row) indptr.push_back(row * s.max_blocks);
  }

  std::size_t page_elements() const { return std::size_t(s.page * s.page_heads()) * (D + Dv); }
  std::size_t layer_elements() const { return 2 * band + std::size_t(s.pages) * page_elements(); }

  page_pointers<T> here() {
    return {pool.data(), table.data(), indptr.data(), lengths.data(), positions.data(), scores.data()};
  }
  view_type view(index_t layer, const page_pointers<T>& p, bool with_positions = true) const {
    view_type view;
    const offset_t heads = s.page_heads(), k_page = s.page * heads * D, v_page = s.page * heads * Dv;
    view.k = p.pool + std::size_t(layer) * layer_elements() + band;
    view.v = view.k + (s.split ? s.pages * k_page : k_page);
    const auto strides = [&](offset_t page_step, offset_t dim) -> tessera::row_strides {
      const offset_t head = s.own_tables ? 0 : s.hnd ? s.page * dim : dim;
      return {page_step, head, s.hnd || s.own_tables ? dim : heads * dim, 1};
    };
    view.k_strides = strides(s.split ? k_page : k_page + v_page, D);
    view.v_strides = strides(s.split ? v_page : k_page + v_page, Dv);
    view.sequences = s.sequences;
    view.kv_heads = s.heads;
    view.lengths = p.lengths + layer * s.sequences * s.heads;
    view.length_strides = {s.heads, 1};
    if (with_positions) {
      view.positions = p.positions + column_begin(layer);
      view.position_strides = {offset_t(s.heads) * s.slots(), s.slots()};
    }
    if constexpr (std::is_same_v<Table, tessera::block_table>) {
      view.table = {p.table, s.page, offset_t(s.tables()) * s.max_blocks, s.own_tables ? s.max_blocks : 0};
    } else {
      view.table = {p.indptr, p.table, s.page, s.tables()};
    }
    return view;
  }
  offset_t column_begin(index_t layer) const { return offset_t(layer) * s.sequences * s.heads * s.slots(); }
  tessera::slot_column<index_t> position_column(index_t layer, const page_pointers<T>& p) const {
    return {p.positions + column_begin(layer), offset_t(s.heads) * s.slots(), s.slots(), nullptr};
  }
  tessera::slot_column<float> score_column(index_t layer, const page_pointers<T>& p) const {
    return {p.scores + column_begin(layer), offset_t(s.heads) * s.slots(), s.slots(), nullptr};
  }
  tessera::page_pool facts() const { return {s.pages, s.max_blocks}; }

  /// Pages for `tokens` more in every head of a sequence; layers of one engine share its tables.
  void make_room(index_t sequence, index_t tokens) {
    for (index_t t = 0; t < s.tables(); ++t) {
      index_t longest = 0;
      for (index_t layer = 0; layer < s.layers; ++layer) {
        for (index_t h = 0; h < s.heads; ++h) {
          if (s.own_tables && h != t) continue;
          longest = std::max(longest, lengths[std::size_t((layer * s.sequences + sequence) * s.heads + h)]);
        }
      }
      const index_t row = sequence * s.tables() + t;
      for (index_t& count = held[std::size_t(row)]; count * s.page < longest + tokens; ++count) {
        table[std::size_t(row * s.max_blocks + count)] = free_list.back();
        free_list.pop_back();
      }
    }
  }
  /// The most tokens that a sequence may still take.
  index_t room(index_t sequence) const {
    index_t longest = 0;
    for (index_t layer = 0; layer < s.layers; ++layer) {
      for (index_t h = 0; h < s.heads; ++h) {
        longest = std::max(longest, lengths[std::size_t((layer * s.sequences + sequence) * s.heads + h)]);
      }
    }
    return s.slots() - longest;
  }

  tessera::free_pages_problem<view_type> freeing(const page_pointers<T>& p, index_t* held_, index_t* freed,
                                                 index_t* freed_count, index_t room) const {
    tessera::free_pages_problem<view_type> problem;
    problem.view = view(0, p);
    problem.layers = s.layers;
    problem.layer_stride = offset_t(s.sequences) * s.heads;
    problem.spare_tokens = room;
    problem.page_counts = held_;
    problem.freed = freed;
    problem.freed_stride = s.max_blocks;
    problem.freed_count = freed_count;
    problem.pool = facts();
    return problem;
  }
  /// Takes freed pages back and spoils what they held: nobody may read it any more.
  void take_back(const std::vector<index_t>& freed, const std::vector<index_t>& counts) {
    for (index_t row = 0; row < s.rows(); ++row) {
      for (index_t i = 0; i < counts[std::size_t(row)]; ++i) {
        const index_t page = freed[std::size_t(row * s.max_blocks + i)];
        table[std::size_t(row * s.max_blocks + held[std::size_t(row)] + i)] = -7;
        free_list.push_back(page);
        for (index_t layer = 0; layer < s.layers; ++layer) {
          const auto view = this->view(layer, here());
          for (index_t r = 0; r < s.page; ++r) {
            for (index_t h = 0; h < s.page_heads(); ++h) {
              T* k = view.k + page * view.k_strides.outer + h * view.k_strides.head + r * view.k_strides.token;
              T* v = view.v + page * view.v_strides.outer + h * view.v_strides.head + r * view.v_strides.token;
              std::memset(static_cast<void*>(k), 0xff, D * sizeof(T));
              std::memset(static_cast<void*>(v), 0xff, Dv * sizeof(T));
            }
          }
        }
      }
    }
  }
  /// Elements of the pool that belong to no slot of a table: bands, and pages that nobody holds.
  bool outside_is_untouched() const {
    std::set<index_t> used;
    for (index_t row = 0; row < s.rows(); ++row) {
      for (index_t i = 0; i < held[std::size_t(row)]; ++i) used.insert(table[std::size_t(row * s.max_blocks + i)]);
    }
    const auto spoiled = [](const T& x) {
      unsigned char bytes[sizeof(T)];
      std::memcpy(bytes, &x, sizeof(T));
      return std::all_of(bytes, bytes + sizeof(T), [](unsigned char b) { return b == 0xff; });
    };
    bool clean = true;
    for (index_t layer = 0; layer < s.layers; ++layer) {
      const T* first = pool.data() + std::size_t(layer) * layer_elements();
      for (std::size_t i = 0; i < layer_elements(); ++i) {
        bool ours = false;
        if (i >= band && i < layer_elements() - band) {
          const std::size_t at = i - band, k_part = std::size_t(s.pages * s.page * s.page_heads()) * D;
          const std::size_t k_page = std::size_t(s.page * s.page_heads()) * D, v_page = k_page / D * Dv;
          const std::size_t page = !s.split      ? at / (k_page + v_page)
                                   : at < k_part ? at / k_page
                                                 : (at - k_part) / v_page;
          ours = used.count(index_t(page)) > 0;
        }
        clean &= ours || spoiled(first[i]);
      }
    }
    return clean;
  }
};

/// Whether `chosen` are slots that a ranking by `scores` may give: the newest `tail` and the best others, equals by index,
/// up to rounding.
inline bool may_be_chosen(const std::vector<double>& scores, index_t tail, const std::vector<index_t>& chosen,
                          double rounding) {
  const index_t n = index_t(scores.size()), keep = index_t(chosen.size());
  tail = std::min({tail, n, keep});
  std::vector<bool> in(std::size_t(n), false);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (chosen[i] < 0 || chosen[i] >= n || (i > 0 && chosen[i] <= chosen[i - 1])) return false;
    in[std::size_t(chosen[i])] = true;
  }
  for (index_t slot = n - tail; slot < n; ++slot) {
    if (!in[std::size_t(slot)]) return false;
  }
  for (index_t i = 0; i < n - tail; ++i) {
    for (index_t j = 0; j < n - tail && !in[std::size_t(i)]; ++j) {
      if (!in[std::size_t(j)]) continue;
      const double out = scores[std::size_t(i)], kept = scores[std::size_t(j)];
      if (out > kept + rounding * std::max(1e-6, std::abs(out)) || (out == kept && i < j)) return false;
    }
  }
  return true;
}

}  // namespace support
