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

/// Has an index of the keys of every (layer, sequence) and, for a scorer that adds the mean value, sums of its values.
template <class Recipe>
class extrema_reader {
 public:
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  static constexpr int k_dim = layout::k_dim, v_dim = layout::v_dim;
  static constexpr bool averages = Recipe::retrieve_type::scorer_type::adds_mean_value;

  explicit extrema_reader(const model_shape& shape) : heads_(shape.kv_heads) {}

  void open(std::size_t index) {
    while (entries_.size() <= index) entries_.emplace_back(heads_);
    clear(index);
  }
  void clear(std::size_t index) {
    forget(index);
    entries_[index].pages.reset(heads_, 1);
  }
  void copy(std::size_t source, std::size_t target) { entries_[target] = entries_[source]; }
  void forget(std::size_t index) {
    entry& own = entries_[index];
    std::fill(own.sums.begin(), own.sums.end(), 0.0);
    std::fill(own.summed.begin(), own.summed.end(), 0);
    own.pages.reset(heads_, own.pages.page());
  }

  /// Sums are added anew, slot by slot, which gives the bits that they had.
  void truncate(std::size_t index, const host_vector<index_t>& lengths) {
    entry& own = entries_[index];
    own.pages.truncate(lengths);
    std::fill(own.sums.begin(), own.sums.end(), 0.0);
    std::fill(own.summed.begin(), own.summed.end(), 0);
  }

  /// `moved`: slots hold other rows than before, so that the index is built anew.
  template <class View>
  void refresh(std::size_t index, const View& view, const planned<Recipe>& policies, bool moved) {
    entry& own = entries_[index];
    const index_t page = policies.read.scorer.page;
    if (moved) forget(index);
    if (page != own.pages.page()) own.pages.reset(heads_, page);
    own.pages.extend(view);
  }
  template <class View>
  void append(std::size_t index, const View& view, index_t) {
    entries_[index].pages.extend(view);
  }

  template <class View, class Q>
  offset_t choose(std::size_t index, const View& all, const query_rows<Q>& queries, const logit_rule& rule,
                  const planned<Recipe>& policies, selection& chosen, executor& workers) {
    const auto& policy = policies.read;
    const entry& own = entries_[index];
    const index_t tail = queries.q.tokens > 1 ? queries.q.tokens : 0, rows = queries.q.tokens * queries.q.heads;
    offset_t total = 0;
    for (index_t h = 0; h < all.kv_heads; ++h) total += all.length(0, h);
    mass_.memory.assign(std::size_t(rows), 1.0f);
    bytes_.memory.assign(std::size_t(all.kv_heads), 0);
    (*workspaces_).resize((std::max)((*workspaces_).size(), std::size_t(workers.threads())));
    workers.for_each(
        all.kv_heads,
        [&](index_t h, int worker) {
          const page_choice choice =
              choose_by_pages(all, 0, h, own.pages.view(), queries, rule, policy.scorer, policy.selector,
                              (std::max)(tail, policy.scorer.protected_tail(policy.tokens)), policy.tokens,
                              chosen.row(h), averages ? mass_.memory.data() + h * (rows / all.kv_heads) : nullptr,
                              (*workspaces_)[std::size_t(worker)]);
          chosen.counts[std::size_t(h)] = choice.count;
          bytes_.memory[std::size_t(h)] = choice.bytes_read;
        },
        double(total) / own.pages.page() * policy.scorer.channels * rows / all.kv_heads);
    offset_t bytes = 0;
    for (const offset_t b : bytes_.memory) bytes += b;
    return bytes;
  }

  /// Adds to each row the mean of V up to the row's token, weighted by the probability of the tokens that were not
  /// attended.
  template <class View>
  void complete(std::size_t index, const View& all, index_t tokens, index_t group, const rows_view<float>& out) {
    if constexpr (!averages) return;
    entry& own = entries_[index];
    for (index_t h = 0; h < all.kv_heads; ++h) {
      const index_t previous = all.length(0, h) - tokens;
      double* sum = own.sums.data() + offset_t(h) * v_dim;
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t& slot = own.summed[std::size_t(h)]; slot <= previous + t; ++slot) {
          float value[v_dim];
          load_value(all, 0, h, slot, value);
          for (int d = 0; d < v_dim; ++d) sum[d] += is_finite(value[d]) ? double(value[d]) : 0.0;
        }
        for (index_t g = 0; g < group; ++g) {
          const float part = mass_.memory[std::size_t((offset_t(h) * tokens + t) * group + g)];
          if (part == 1) continue;
          float* row = out.row(0, t, h * group + g);
          for (int d = 0; d < v_dim; ++d) {
            const float mean = float(sum[d] / double(previous + t + 1));
            row[d] = std::fma(part, row[d], (1 - part) * mean);  // explicit: compilers differ in what they contract
          }
        }
      }
    }
  }

  /// An estimate reads no list: of the list only the attended slots are read.
  offset_t list_bytes(std::size_t, index_t, index_t count) const { return count * offset_t(sizeof(index_t)); }
  /// Bytes of sums that a step reads, of one head.
  offset_t side_bytes() const { return averages ? offset_t(v_dim) * offset_t(sizeof(double)) : 0; }
  offset_t bytes(std::size_t index) const {
    return entries_[index].pages.bytes() + offset_t(entries_[index].sums.capacity() * sizeof(double));
  }
  offset_t upper_bound(const planned<Recipe>& policies, const kept_bound& readable) const {
    offset_t bytes = averages ? heads_ * offset_t(v_dim) * offset_t(sizeof(double)) : 0;
    for (const index_t tokens : readable.by_head)
      bytes += page_index<T, k_dim>::upper_bound(policies.read.scorer.page, tokens);
    return bytes;
  }

 private:
  struct entry {
    explicit entry(index_t heads)
        : sums(averages ? std::size_t(heads) * v_dim : 0, 0.0), summed(std::size_t(heads), 0) {
      pages.reset(heads, 1);
    }
    page_index<T, k_dim> pages;
    host_vector<double> sums;     // [kv_heads, v_dim]: of the first `summed` slots of each head's view
    host_vector<index_t> summed;  // by head
  };

  index_t heads_;
  host_vector<entry> entries_;
  scratch<host_vector<float>> mass_;  // [kv_heads, rows] of the last choice
  scratch<host_vector<offset_t>> bytes_;
  scratch<host_vector<page_workspace<k_dim>>> workspaces_;
};

template <class Recipe>
requires(Recipe::retrieve_type::estimates) struct reader_of<Recipe> {
  using type = extrema_reader<Recipe>;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
