// Retrieval by an estimate of the keys on the CPU: pages of extrema are read, the best slots are attended.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../../../planned.hpp"
#include "../../kernel/scratch.hpp"
#include "../reader.hpp"
#include "page_index.hpp"
#include "page_scores.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Holds an index of every place's keys and, for a scorer that adds the mean value, the sum of its values.
template <class Recipe>
class extrema_reader {
 public:
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  static constexpr int k_dim = layout::k_dim, v_dim = layout::v_dim;
  static constexpr bool averages = Recipe::retrieve_type::scorer_type::adds_mean_value;

  explicit extrema_reader(const model_shape& shape) : heads_(shape.kv_heads) {}

  void open(std::size_t at) {
    while (places_.size() <= at) places_.emplace_back(heads_);
    clear(at);
  }
  void clear(std::size_t at) {
    forget(at);
    place(at).index.reset(heads_, 1);
  }
  void copy(std::size_t from, std::size_t to) { places_[to] = places_[from]; }
  void forget(std::size_t at) {
    held& here = place(at);
    std::fill(here.sums.begin(), here.sums.end(), 0.0);
    std::fill(here.summed.begin(), here.summed.end(), 0);
    here.index.reset(heads_, here.index.page());
  }

  /// `moved`: slots are no longer what they were, everything is built anew.
  template <class View>
  void refresh(std::size_t at, const View& view, const planned<Recipe>& policies, bool moved) {
    held& here = place(at);
    const index_t page = policies.read.scorer.page;
    if (moved) forget(at);
    if (page != here.index.page()) here.index.reset(heads_, page);
    here.index.extend(view);
  }
  template <class View>
  void append(std::size_t at, const View& view, index_t) {
    place(at).index.extend(view);
  }

  template <class View, class Q>
  offset_t choose(std::size_t at, const View& all, const query_rows<Q>& queries, const logit_rule& rule,
                  const planned<Recipe>& policies, selection& chosen, executor& workers) {
    const auto& policy = policies.read;
    const held& here = place(at);
    const index_t tail = queries.q.tokens > 1 ? queries.q.tokens : 0, rows = queries.q.tokens * queries.q.heads;
    offset_t total = 0;
    for (index_t h = 0; h < all.kv_heads; ++h) total += all.length(0, h);
    mass_.memory.assign(std::size_t(rows), 1.0f);
    bytes_.memory.assign(std::size_t(all.kv_heads), 0);
    (*pages_).resize((std::max)((*pages_).size(), std::size_t(workers.threads())));
    workers.for_each(
        all.kv_heads,
        [&](index_t h, int worker) {
          const page_choice choice = choose_by_pages(
              all, 0, h, here.index.view(), queries, rule, policy.scorer, policy.selector,
              (std::max)(tail, policy.scorer.protected_tail(policy.tokens)), policy.tokens, chosen.row(h),
              averages ? mass_.memory.data() + h * (rows / all.kv_heads) : nullptr, (*pages_)[std::size_t(worker)]);
          chosen.counts[std::size_t(h)] = choice.count;
          bytes_.memory[std::size_t(h)] = choice.bytes_read;
        },
        double(total) / here.index.page() * policy.scorer.channels * rows / all.kv_heads);
    offset_t bytes = 0;
    for (const offset_t b : bytes_.memory) bytes += b;
    return bytes;
  }

  /// Gives what the attended tokens lack of each row's mass to the mean of V up to the row's token.
  template <class View>
  void complete(std::size_t at, const View& all, index_t tokens, index_t group, const rows_view<float>& out) {
    if constexpr (!averages) return;
    held& here = place(at);
    for (index_t h = 0; h < all.kv_heads; ++h) {
      const index_t before = all.length(0, h) - tokens;
      double* sum = here.sums.data() + offset_t(h) * v_dim;
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t& slot = here.summed[std::size_t(h)]; slot <= before + t; ++slot) {
          float value[v_dim];
          load_value(all, 0, h, slot, value);
          for (int d = 0; d < v_dim; ++d) sum[d] += is_finite(value[d]) ? double(value[d]) : 0.0;
        }
        for (index_t g = 0; g < group; ++g) {
          const float part = mass_.memory[std::size_t((offset_t(h) * tokens + t) * group + g)];
          if (part == 1) continue;
          float* row = out.row(0, t, h * group + g);
          for (int d = 0; d < v_dim; ++d) {
            const float mean = float(sum[d] / double(before + t + 1));
            row[d] = std::fma(part, row[d], (1 - part) * mean);  // alike whatever a compiler would contract
          }
        }
      }
    }
  }

  /// An estimate needs no list: only what is attended is looked up in it.
  offset_t list_bytes(std::size_t, index_t, index_t count) const { return count * offset_t(sizeof(index_t)); }
  /// Bytes of sums that a step reads, of one head.
  offset_t side_bytes() const { return averages ? offset_t(v_dim) * offset_t(sizeof(double)) : 0; }
  offset_t bytes(std::size_t at) const {
    return places_[at].index.bytes() + offset_t(places_[at].sums.capacity() * sizeof(double));
  }

 private:
  struct held {
    explicit held(index_t heads) : sums(averages ? std::size_t(heads) * v_dim : 0, 0.0), summed(std::size_t(heads), 0) {
      index.reset(heads, 1);
    }
    page_index<T, k_dim> index;
    host_vector<double> sums;     // [kv_heads, v_dim]: of the first `summed` slots of each head's view
    host_vector<index_t> summed;  // by head
  };
  held& place(std::size_t at) { return places_[at]; }

  index_t heads_;
  host_vector<held> places_;
  scratch<host_vector<float>> mass_;  // [kv_heads, rows] of the last choice
  scratch<host_vector<offset_t>> bytes_;
  scratch<host_vector<page_workspace<k_dim>>> pages_;
};

template <class Recipe>
requires(Recipe::retrieve_type::estimates) struct reader_of<Recipe> {
  using type = extrema_reader<Recipe>;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
