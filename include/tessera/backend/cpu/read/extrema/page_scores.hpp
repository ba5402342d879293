// Paged retrieval on the CPU: chooses the slots that a decode step reads by an estimate of their keys.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../concepts/scorer.hpp"
#include "../../../../concepts/selector.hpp"
#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/stored/block_extrema.hpp"
#include "../../../../core/stored/page_extrema.hpp"
#include "../../../../selector/tokens_or_pages.hpp"
#include "../../attend/attend.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The queries of one kv_head's group, prepared for an estimate: channels, sides and scales.
template <int D>
struct page_query {
  host_vector<float> q;            // [rows, D], as given
  host_vector<char> usable;        // [rows]: whether every element is finite; other rows are ignored
  host_vector<float> scale;        // [rows]
  host_vector<index_t> positions;  // [rows]
  host_vector<index_t> channels;   // ascending
  host_vector<char> lower, upper;  // [channels]: which extrema some row takes
  host_vector<float> weight;       // [D]: sum of |q| over the usable rows
  host_vector<float> total;        // [D]: sum of q over them
  top_k_scratch top_k;

  index_t rows() const { return index_t(usable.size()); }
  const float* row(index_t r) const { return q.data() + offset_t(r) * D; }

  template <class Q, paged_scorer Scorer>
  void read(const query_rows<Q>& queries, const logit_rule& rule, const Scorer& scorer, index_t sequence, index_t head,
            index_t group) {
    const index_t count = queries.q.tokens * group;
    q.clear();
    scale.clear();
    positions.clear();
    usable.assign(std::size_t(count), 1);
    weight.assign(D, 0.0f);
    total.assign(D, 0.0f);
    for (index_t r = 0; r < count; ++r) {
      const Q* from = queries.q.row(sequence, r / group, head * group + r % group);
      positions.push_back(queries.position(sequence, r / group));
      for (int d = 0; d < D; ++d) {
        q.push_back(float(from[d]));
        usable[std::size_t(r)] = usable[std::size_t(r)] && is_finite(q.back());
      }
      for (int d = 0; d < D && usable[std::size_t(r)]; ++d) {
        weight[std::size_t(d)] += std::abs(row(r)[d]);
        total[std::size_t(d)] += row(r)[d];
      }
    }
    channels.resize(std::size_t((std::min)(scorer.channels, index_t(D))));
    tessera::top_k(weight.data(), D, index_t(channels.size()), channels.data(), top_k);
    lower.assign(channels.size(), 0);
    upper.assign(channels.size(), 0);
    for (index_t r = 0; r < count; ++r) {
      float chosen = 0, whole = 0;
      for (const index_t c : channels) chosen += std::abs(row(r)[c]);
      for (int d = 0; d < D; ++d) whole += std::abs(row(r)[d]);
      scale.push_back(scorer.row_scale(rule.scale_for(D), chosen, whole));
      for (std::size_t i = 0; i < channels.size() && usable[std::size_t(r)]; ++i) {
        (takes_upper(scorer, r, i) ? upper : lower)[i] = 1;
      }
    }
  }

  template <class Scorer>
  bool takes_upper(const Scorer& scorer, index_t r, std::size_t i) const {
    return scorer.takes_upper(row(r)[channels[i]], total[std::size_t(channels[i])]);
  }
};

/// The slots that a query sees: one run, because positions ascend.
struct visible_slots {
  index_t begin, end;

  template <class View>
  static visible_slots find(const View& view, index_t sequence, index_t head, const logit_rule& rule, index_t query) {
    const auto first_above = [&](index_t position) {
      index_t low = 0, high = view.length(sequence, head);
      while (low < high) {
        const index_t middle = low + (high - low) / 2;
        if (view.position(sequence, head, middle) > position)
          high = middle;
        else
          low = middle + 1;
      }
      return low;
    };
    return {rule.sliding_window > 0 ? first_above(query - rule.sliding_window) : 0, first_above(query)};
  }
  index_t overlap(index_t first, index_t last) const {
    return (std::max)(0, (std::min)(last, end) - (std::max)(first, begin));
  }
};

/// Scratch of `choose_by_pages`, one per worker.
template <int D>
struct page_workspace {
  page_query<D> query;
  host_vector<float> logits;   // [rows, pages rounded up to tiles]
  host_vector<float> scores;   // [tokens], or [pages] where whole pages are chosen
  host_vector<float> columns;  // [2, channels, tile_tokens]
  host_vector<visible_slots> visible;
  host_vector<char> speaks;
  top_k_scratch top_k;
};

namespace detail {

/// sums [tile_tokens] += the sum over the chosen channels of q[channel] * column(channel)[0 .. tile_tokens).
template <class Column>
void add_channels(const float* q, const host_vector<index_t>& channels, const Column& column, float* sums) {
  for (int t = 0; t < tile_tokens; t += lane_count) {
    lanes acc = load(sums + t);
    for (std::size_t i = 0; i < channels.size(); ++i) {
      acc += splat(q[channels[i]]) * load(column(i) + t);
    }
    store(sums + t, acc);
  }
}

/// The extrema of a tile of one head's pages, from an index by row. `load` writes tile_tokens values of every wanted
/// channel to columns [channels, tile_tokens], zeros behind the last page.
template <class T, int D>
struct row_extrema {
  const page_extrema_view<const T, D>& index;
  offset_t row;
  index_t begin = 0, count = 0;

  template <class View>
  row_extrema(const View& view, const page_extrema_view<const T, D>& index_, index_t sequence, index_t head)
      : index(index_), row(offset_t(sequence) * view.kv_heads + head) {}
  void move_to(index_t begin_, index_t count_) { begin = begin_, count = count_; }
  template <class Wanted>
  void load(bool upper, const host_vector<index_t>& channels, const Wanted& wanted, float* columns) const {
    for (std::size_t i = 0; i < channels.size(); ++i) {
      if (!wanted(i)) continue;
      const T* const from = (upper ? index.upper(row, channels[i]) : index.lower(row, channels[i])) + begin;
      for (index_t p = 0; p < tile_tokens; ++p) columns[i * tile_tokens + p] = p < count ? float(from[p]) : 0.0f;
    }
  }
};

/// The same from an index by block, through the view's table. Pages are read whole, one after the other: in a pool they
/// lie a power of two apart, and elements of many pages at a time would displace one another from the cache.
template <class View>
struct block_extrema_of {
  using T = typename View::element_type;
  using index_type = block_extrema_view<const T, View::k_dim>;
  static constexpr int D = View::k_dim, pages_at_once = 8;
  const View& view;
  const index_type& index;
  index_t sequence, head;
  index_t count = 0;
  const T* pages[tile_tokens];  // their smaller values

  block_extrema_of(const View& view_, const index_type& index_, index_t sequence_, index_t head_)
      : view(view_), index(index_), sequence(sequence_), head(head_) {}
  void move_to(index_t begin, index_t count_) {
    count = count_;
    for (index_t p = 0; p < count; ++p) {
      const slot_address address = view.table.locate(sequence, head, (begin + p) * index.page);
      pages[p] = index.lower(address.outer, index_t(address.row / index.page), head);
    }
  }
  template <class Wanted>
  void load(bool upper, const host_vector<index_t>& channels, const Wanted& wanted, float* columns) const {
    alignas(64) float rows[pages_at_once][D];
    for (index_t first = 0; first < tile_tokens; first += pages_at_once) {
      for (index_t j = first + pages_at_once; !upper && j < (std::min)(count, first + 2 * pages_at_once); ++j) {
        prefetch_row<D>(pages[j]);
        prefetch_row<D>(pages[j] + index.side);
      }
      for (index_t j = 0; j < pages_at_once; ++j) {
        if (first + j < count) {
          load_row<D>(pages[first + j] + (upper ? index.side : 0), 1, rows[j]);
        } else {
          std::fill_n(rows[j], D, 0.0f);
        }
      }
      for (std::size_t i = 0; i < channels.size(); ++i) {
        if (!wanted(i)) continue;
        for (index_t j = 0; j < pages_at_once; ++j)
          columns[i * tile_tokens + std::size_t(first + j)] = rows[j][channels[i]];
      }
    }
  }
};

template <class View, class T, int D>
row_extrema<T, D> extrema_of(const View& view, const page_extrema_view<const T, D>& index, index_t sequence,
                             index_t head) {
  return {view, index, sequence, head};
}
template <class View, class T, int D>
block_extrema_of<View> extrema_of(const View& view, const block_extrema_view<const T, D>& index, index_t sequence,
                                  index_t head) {
  return {view, index, sequence, head};
}

/// logits [rows, stride] of every page of a head, before scale and cap. `extrema` moves from tile to tile.
template <class Extrema, class Scorer, int D>
void page_products(Extrema extrema, bool single, const Scorer& scorer, index_t pages, offset_t stride,
                   page_workspace<D>& memory) {
  const page_query<D>& query = memory.query;
  const std::size_t channels = query.channels.size();
  memory.logits.assign(std::size_t(query.rows() * stride), 0.0f);
  memory.columns.assign(2 * channels * tile_tokens, 0.0f);
  float* lower = memory.columns.data();
  float* upper = single ? lower : lower + channels * tile_tokens;
  for (index_t begin = 0; begin < pages; begin += tile_tokens) {
    extrema.move_to(begin, (std::min<index_t>)(tile_tokens, pages - begin));
    extrema.load(false, query.channels, [&](std::size_t i) { return query.lower[i] || single; }, lower);
    if (!single) {
      extrema.load(true, query.channels, [&](std::size_t i) { return query.upper[i] != 0; }, upper);
    }
    for (index_t r = 0; r < query.rows(); ++r) {
      const auto column = [&](std::size_t i) {
        return (query.takes_upper(scorer, r, i) ? upper : lower) + i * tile_tokens;
      };
      if (query.usable[std::size_t(r)]) {
        add_channels(query.row(r), query.channels, column, memory.logits.data() + r * stride + begin);
      }
    }
  }
}

/// Turns the products of one row into the weight that each slot of a page adds to the scores. Returns false for a row
/// that adds nothing: its query is not finite, or it sees no page with a finite logit.
template <class Scorer>
bool weigh_pages(const Scorer&, const logit_rule& rule, float scale, float sink, const visible_slots& seen,
                 index_t page, index_t pages, float* row) {
  if (seen.begin >= seen.end) return false;
  float top = sink;
  bool any = false;
  for (index_t p = seen.begin / page; p < pages && p * page < seen.end; ++p) {
    const float logit = Scorer::normalised ? rule.cap(scale * row[p]) : scale * row[p];
    row[p] = logit < infinity ? logit : std::numeric_limits<float>::quiet_NaN();
    any |= row[p] > -infinity;
    top = row[p] > top ? row[p] : top;
  }
  if (!any) return false;
  if constexpr (Scorer::normalised) {
    float sum = sink > -infinity ? std::exp(sink - top) : 0.0f;
    for (index_t p = seen.begin / page; p < pages && p * page < seen.end; ++p) {
      row[p] = fast_exp(row[p] - top);
      if (row[p] == row[p]) sum += float(seen.overlap(p * page, p * page + page)) * row[p];
    }
    for (index_t p = seen.begin / page; p < pages && p * page < seen.end; ++p) row[p] /= sum;
  }
  return true;
}

/// Whether a selector chooses whole pages of this size, so that scores of pages are enough where every row sees all
/// slots.
template <class Selector>
bool chooses_pages(const Selector& selector, index_t page) {
  if constexpr (requires { &Selector::select_pages; })
    return unit_chosen_by(selector) == selection_unit::page && selector.page == page;
  return false;
}

}  // namespace detail

/// The result of a paged choice of one (sequence, kv_head).
struct page_choice {
  index_t count = 0;        ///< slots chosen
  offset_t bytes_read = 0;  ///< of the index
};

/// Chooses the slots that a step reads of one (sequence, kv_head), and computes their share of the attention
/// probability.
///
/// Shapes   out [tokens of the head], ascending slots; mass [rows] or null: the sum of each row's estimated
///          probabilities over the chosen slots (1 for a row that adds nothing).
/// `index`: of the view's rows (page_extrema_view), or of its blocks (block_extrema_view).
/// A head of no more than `read` tokens is read whole, without an estimate.
template <class View, class Index, class Q, paged_scorer Scorer, class Selector>
page_choice choose_by_pages(const View& view, index_t sequence, index_t head, const Index& index,
                            const query_rows<Q>& queries, const logit_rule& rule, const Scorer& scorer,
                            const Selector& selector, index_t tail, index_t read, index_t* out, float* mass,
                            page_workspace<View::k_dim>& memory) {
  constexpr int D = View::k_dim;
  const default_float_mode mode;
  check_query_shapes(view, queries);
  if (sequence < 0 || sequence >= view.sequences || head < 0 || head >= view.kv_heads) {
    fail("sequence and kv_head", std::to_string(sequence) + " and " + std::to_string(head), "those of the view",
         "choose for a row of the view");
  }
  require_ascending(view, sequence, head);
  if (index.page < 1 || tail < 0 || read < 0) {
    fail("page, tail and read",
         std::to_string(index.page) + ", " + std::to_string(tail) + " and " + std::to_string(read),
         "at least 1, 0 and 0", "pass what the plan says");
  }
  const index_t n = view.length(sequence, head), page = index.page, pages = ceil_div(n, page);
  const index_t group = queries.q.heads / view.kv_heads, rows = queries.q.tokens * group;
  if (mass) std::fill_n(mass, rows, 1.0f);
  if (n <= read) {
    for (index_t slot = 0; slot < n; ++slot) out[slot] = slot;
    return {n, 0};
  }
  page_query<D>& query = memory.query;
  query.read(queries, rule, scorer, sequence, head, group);
  const offset_t stride = ceil_div(pages, tile_tokens) * offset_t(tile_tokens);
  detail::page_products(detail::extrema_of(view, index, sequence, head), page == 1, scorer, pages, stride, memory);

  auto& scores = memory.scores;
  auto& visible = memory.visible;
  auto& speaks = memory.speaks;
  visible.clear();
  speaks.clear();
  bool by_page = detail::chooses_pages(selector, page);
  for (index_t r = 0; r < rows; ++r) {
    visible.push_back(visible_slots::find(view, sequence, head, rule, query.positions[std::size_t(r)]));
    by_page = by_page && visible.back().overlap(0, n) == n;
  }
  // Slots that no row sees rank last.
  scores.assign(std::size_t(by_page ? pages : n), -infinity);
  for (const visible_slots& run : visible)
    std::fill(scores.begin() + (by_page ? 0 : run.begin), by_page ? scores.end() : scores.begin() + run.end, 0.0f);
  for (index_t r = 0; r < rows; ++r) {
    float* weights = memory.logits.data() + r * stride;
    const visible_slots& run = visible[std::size_t(r)];
    const float sink = rule.sink_logits ? rule.sink_logits[head * group + r % group] : -infinity;
    speaks.push_back(query.usable[std::size_t(r)] &&
                     detail::weigh_pages(scorer, rule, query.scale[std::size_t(r)], sink, run, page, pages, weights));
    if (!speaks.back()) continue;
    for (index_t p = 0; by_page && p < pages; ++p) scores[std::size_t(p)] += weights[p];
    for (index_t p = run.begin / page; !by_page && p < pages && p * page < run.end; ++p) {
      const float weight = weights[p];
      for (index_t slot = (std::max)(run.begin, p * page); slot < (std::min)(run.end, p * page + page); ++slot) {
        scores[std::size_t(slot)] += weight;
      }
    }
  }
  page_choice result;
  if (by_page) {
    if constexpr (requires { &Selector::select_pages; }) {
      for (float& score : scores) score = score == score ? score : -infinity;
      result.count = selector.select_pages(scores.data(), n, tail, read, out, memory.top_k);
    }
  } else {
    result.count = selector.select(scores.data(), n, tail, read, out, memory.top_k);
  }
  for (index_t r = 0; mass && r < rows; ++r) {
    if (!speaks[std::size_t(r)]) continue;
    const visible_slots& run = visible[std::size_t(r)];
    float attended = 0;
    for (index_t i = 0; i < result.count; ++i) {
      const float weight = memory.logits[std::size_t(r * stride + out[i] / page)];
      if (out[i] >= run.begin && out[i] < run.end && weight == weight) attended += weight;
    }
    mass[r] = (std::min)(attended, 1.0f);
  }
  offset_t columns = 0;
  for (std::size_t i = 0; i < query.channels.size(); ++i) columns += page == 1 ? 1 : query.lower[i] + query.upper[i];
  result.bytes_read = columns * pages * offset_t(sizeof(typename View::element_type));
  return result;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
