// Checks of tables, lengths and selections on the host, before anything moves.
#pragma once

#include <algorithm>
#include <string>

#include "../../../core/engine/move_problem.hpp"
#include "../../../core/engine/page_pool.hpp"
#include "../../../core/error.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../core/selection.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
namespace detail {

inline std::string row_name(index_t sequence, index_t head) {
  return "sequence " + std::to_string(sequence) + ", kv_head " + std::to_string(head);
}

/// Calls `visit(sequence, head, tokens)` for every table row: its first head, and the tokens of its longest head.
template <class View, class Tokens, class Visit>
void for_each_table(const View& view, const Tokens& tokens_of, const Visit& visit) {
  const index_t tables = view.table.tables(view.kv_heads), each = view.kv_heads / tables;
  for (index_t b = 0; b < view.sequences; ++b) {
    for (index_t first = 0; first < view.kv_heads; first += each) {
      index_t longest = 0;
      for (index_t h = first; h < first + each; ++h) longest = (std::max)(longest, tokens_of(b, h));
      visit(b, first, longest);
    }
  }
}

}  // namespace detail

/// Checks that a view that stores tokens has its memory. `keys` and `values` say which rows the caller reads.
/// Errors   lengths, rows or a block table that are null: tessera::error.
template <class View>
void require_memory(const View& view, bool keys, bool values) {
  if constexpr (requires { view.k, view.v, view.lengths, view.table; }) {
    if (view.sequences <= 0 || view.kv_heads <= 0) return;
    require(view.lengths != nullptr, "lengths of the view", "null", "how many slots each row stores",
            "set `lengths` and `length_strides`");
    index_t row = 0;
    const index_t rows = view.sequences * view.kv_heads;
    while (row < rows && view.length(row / view.kv_heads, row % view.kv_heads) <= 0) ++row;
    if (row == rows) return;
    require((view.k || !keys) && (view.v || !values || View::is_latent), "k or v of the view", "null",
            "the stored rows", "set where keys and values begin, and their strides");
    if constexpr (requires { view.table.blocks; }) {
      require(view.table.blocks != nullptr, "blocks of the view's table", "null", "the pages of each sequence",
              "set `table`");
    }
  }
}

/// Errors   a selection that does not ascend strictly within the slots of its row: tessera::error.
/// Cost     one look at every chosen slot.
template <class View>
void require_selection(const View& view, const selection_view& chosen) {
  require(chosen.counts || view.sequences * view.kv_heads <= 0, "counts of the selection", "null",
          "how many slots of each row are chosen", "pass the view of a selection");
  for (index_t row = 0; row < view.sequences * view.kv_heads; ++row) {
    const index_t b = row / view.kv_heads, h = row % view.kv_heads, length = view.length(b, h);
    const index_t count = chosen.count(row);
    if (count < 0 || count > length) {
      fail("count of chosen slots (" + detail::row_name(b, h) + ")", count, "0 to " + std::to_string(length),
           "choose among the slots that are stored");
    }
    const index_t* slots = chosen.row(row);
    for (index_t i = 0; i < count; ++i) {
      if (slots[i] >= 0 && slots[i] < length && (i == 0 || slots[i] > slots[i - 1])) continue;
      fail("chosen slot " + std::to_string(i) + " (" + detail::row_name(b, h) + ")", slots[i],
           i == 0 || slots[i - 1] < 0 ? "0 to " + std::to_string(length - 1)
                                      : "more than the one before it, which is " + std::to_string(slots[i - 1]) +
                                            ", and below " + std::to_string(length),
           "pass slots in ascending order, each once");
    }
  }
}

/// Errors   heads of one sequence that keep different numbers of slots: tessera::error.
template <class View>
void require_even_counts(const View& view, const selection_view& chosen) {
  for (index_t row = 0; row < view.sequences * view.kv_heads; ++row) {
    const index_t b = row / view.kv_heads, first = chosen.count(offset_t(b) * view.kv_heads);
    if (chosen.count(row) == first) continue;
    fail("count of chosen slots (" + detail::row_name(b, row % view.kv_heads) + ")", chosen.count(row),
         std::to_string(first) + ", as in the other heads of the sequence", "give every head a length of its own");
  }
}

/// Checks that the tables of a batch have the first `tokens_of(sequence, head)` slots of every head.
/// Errors   tables that do not fit the heads, more slots than a row of a dense table can have, entries that are no page
///          of the pool: tessera::error.
/// Cost     one look at every table entry in use.
template <class View, class Tokens>
void require_pages(const View& view, const page_pool& pool, const Tokens& tokens_of) {
  if constexpr (requires { requires page_table<decltype(view.table)>; }) {
    const index_t page = view.table.page;
    require_tables(view);
    if (view.sequences <= 0) return;
    detail::for_each_table(view, tokens_of, [&](index_t b, index_t h, offset_t tokens) {
      if (pool.max_blocks > 0 && tokens > offset_t(pool.max_blocks) * page) {
        fail("tokens of " + detail::row_name(b, h), tokens,
             "at most " + std::to_string(offset_t(pool.max_blocks) * page) + ", which is all that its table reaches",
             "give it a longer table, or evict first");
      }
      const index_t* pages = view.table.pages(b, h);
      for (index_t i = 0; pool.pages > 0 && i < index_t((tokens + page - 1) / page); ++i) {
        if (pages[i] >= 0 && pages[i] < pool.pages) continue;
        fail("entry " + std::to_string(i) + " of the table of " + detail::row_name(b, h), pages[i],
             "a page of the pool, 0 to " + std::to_string(pool.pages - 1),
             "take a page from the pool before slots use it");
      }
    });
  }
}

/// The same for the stored tokens of a view.
template <class View>
void require_pages(const View& view, const page_pool& pool) {
  require_pages(view, pool, [&](index_t b, index_t h) { return view.length(b, h); });
}

/// Errors   an end before the rows that shall lie there; in place, one at or before a chosen slot: tessera::error.
template <class From, class To>
void require_ends(const pack_problem<From, To>& p) {
  const bool in_place = p.source.k == p.target.k;
  for (index_t row = 0; p.ends && row < p.target.sequences * p.target.kv_heads; ++row) {
    const index_t b = row / p.target.kv_heads, count = p.chosen.count(row);
    const index_t least = in_place && count > 0 ? p.chosen.row(row)[count - 1] + 1 : count;
    if (p.ends[b] >= least) continue;
    fail("end of packed rows (" + detail::row_name(b, row % p.target.kv_heads) + ")", p.ends[b],
         "at least " + std::to_string(least) + (in_place ? ", behind every chosen slot" : ", the rows that are kept"),
         "pack towards a slot that no chosen row lies behind");
  }
}

/// Checks that each page in which packing moves a row occurs exactly once in the tables of the batch.
/// Errors   a page that occurs more often: tessera::error.   Cost  one count for every page of the pool.
template <class From, class To>
void require_own_pages(const pack_problem<From, To>& p) {
  if constexpr (page_table<decltype(p.source.table)> && page_table<decltype(p.target.table)>) {
    const From& from = p.source;
    const To& to = p.target;
    if (p.pool.pages == 0 || from.k != to.k || from.sequences == 0) return;
    const bool in_place = from.table.pages(0, 0) == to.table.pages(0, 0);
    const index_t page = to.table.page;
    host_vector<index_t> uses(std::size_t(p.pool.pages), 0);
    const auto count_pages = [&](const auto& view, const auto& tokens_of) {
      detail::for_each_table(view, tokens_of, [&](index_t b, index_t h, index_t tokens) {
        for (index_t i = 0; i < (tokens + view.table.page - 1) / view.table.page; ++i) {
          ++uses[std::size_t(view.table.pages(b, h)[i])];
        }
      });
    };
    const auto behind = [&](index_t b, index_t h) {
      const index_t count = p.chosen.count(offset_t(b) * to.kv_heads + h);
      return p.target_slot(b, count, count);
    };
    count_pages(from, [&](index_t b, index_t h) {
      return in_place ? (std::max)(from.length(b, h), behind(b, h)) : from.length(b, h);
    });
    if (!in_place) count_pages(to, behind);
    for (index_t row = 0; row < to.sequences * to.kv_heads; ++row) {
      const index_t b = row / to.kv_heads, h = row % to.kv_heads, count = p.chosen.count(row);
      const auto stays = [&](index_t i) { return in_place && p.chosen.row(row)[i] == p.target_slot(b, count, i); };
      // Chosen slots ascend, so rows that stay are the first ones, or, towards an end, the last ones.
      index_t first = 0, last = count;
      while (first < last && stays(first)) ++first;
      while (first < last && stays(last - 1)) --last;
      if (first == last) continue;
      for (index_t i = p.target_slot(b, count, first) / page; i <= p.target_slot(b, count, last - 1) / page; ++i) {
        const index_t id = to.table.pages(b, h)[i];
        if (uses[std::size_t(id)] == 1) continue;
        fail("page " + std::to_string(id) + ", into which rows of " + detail::row_name(b, h) + " move, in tables",
             std::to_string(uses[std::size_t(id)]) + " times", "once", "pack what sequences share into fresh pages");
      }
    }
  }
}

}  // namespace cpu
TESSERA_NAMESPACE_END
