// The second stage on the CPU: what a layer of one sequence keeps for it, and what one step reads.
#pragma once

#include <algorithm>
#include <vector>

#include "../../../core/stage_plan.hpp"
#include "../../../recipe.hpp"
#include "../score/score.hpp"
#include "../store/ragged_store.hpp"
#include "candidates.hpp"
#include "extrema/page_index.hpp"
#include "extrema/page_scores.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
inline namespace TESSERA_HOST_ISA {

/// Scratch of a step's choice, shared by layers and sequences; and its result.
template <class Recipe>
struct read_workspace {
  selection chosen;         ///< what the step reads, by kv_head, as slots of the stage's view
  std::vector<float> mass;  ///< [kv_heads, rows], for a scorer that adds the mean value
  std::vector<float> raw, finished, pooled;
  std::vector<offset_t> offsets, bytes;
  std::vector<index_t> lengths;
  std::vector<page_workspace<Recipe::layout_type::k_dim>> pages;
  top_k_scratch top_k;
};

/// What steps read from beside the store: the candidates that a filter let through, the index of their (or of all) keys,
/// the sum of their values. Each only where the recipe has a use for it.
template <class Recipe>
class read_stage {
 public:
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using store_type = ragged_store<layout>;
  static constexpr bool averages = [] {
    if constexpr (Recipe::estimates) return Recipe::retrieve_type::scorer_type::adds_mean_value;
    return false;
  }();

  read_stage(index_t kv_heads, index_t page) : sums_(averages ? std::size_t(kv_heads) * layout::v_dim : 0, 0.0) {
    if constexpr (Recipe::filters) {
      selection none;
      none.reset(std::vector<index_t>(std::size_t(kv_heads), 0));
      passed_.assign(none);
    }
    index_.reset(kv_heads, page);
    summed_.assign(std::size_t(kv_heads), 0);
  }

  /// What steps may read: the candidates, or everything. Valid until either changes.
  auto view(store_type& store) const {
    if constexpr (Recipe::filters) {
      return passed_.view(store.view());
    } else {
      return store.view();
    }
  }

  /// The slots of each head that a filter has let through since the last prompt ended.
  void pass(const selection& passed) { passed_.assign(passed); }
  const candidates& passed() const { return passed_; }

  /// Brings index and sums up to date. `moved`: slots are no longer what they were, everything is built anew.
  void refresh(store_type& store, index_t page, bool moved) {
    if (moved) {
      std::fill(sums_.begin(), sums_.end(), 0.0);
      std::fill(summed_.begin(), summed_.end(), 0);
    }
    if constexpr (Recipe::estimates) {
      if (moved || page != index_.page()) index_.reset(store.kv_heads(), page);
      index_.extend(view(store));
    }
  }

  /// Takes in the newest `tokens` tokens of the store.
  void append(store_type& store, index_t tokens) {
    if constexpr (Recipe::filters) passed_.append(store.lengths(), tokens);
    if constexpr (Recipe::estimates) index_.extend(view(store));
  }

  /// Chooses what a step reads: the best slots by the step's queries; the step's own tokens too when it has several, so
  /// that each of them sees something. Returns the bytes that the choice read beyond the K and V of what was chosen.
  template <class View, class Q>
  offset_t choose(const View& all, const query_rows<Q>& queries, const Recipe& recipe, const stage_plan& plan,
                  read_workspace<Recipe>& work, score_workspace<View::k_dim>& scoring, executor& workers) const {
    const auto scorer = recipe.step_scorer(plan);
    const auto selector = recipe.step_selector(plan);
    const index_t tail = queries.q.tokens > 1 ? queries.q.tokens : 0, rows = queries.q.tokens * queries.q.heads;
    work.offsets.assign(1, 0);
    work.lengths.clear();
    for (index_t h = 0; h < all.kv_heads; ++h) {
      work.lengths.push_back(all.length(0, h));
      work.offsets.push_back(work.offsets.back() + all.length(0, h));
    }
    work.chosen.reset(work.lengths);
    offset_t bytes = 0;
    if constexpr (Recipe::estimates) {
      work.mass.assign(std::size_t(rows), 1.0f);
      work.bytes.assign(std::size_t(all.kv_heads), 0);
      work.pages.resize(std::max(work.pages.size(), std::size_t(workers.threads())));
      workers.for_each(
          all.kv_heads,
          [&](index_t h, int worker) {
            const page_choice choice = choose_by_pages(
                all, 0, h, index_.view(), queries, recipe.attention.rule, scorer, selector,
                std::max(tail, scorer.protected_tail(plan.read)), plan.read, work.chosen.row(h),
                averages ? work.mass.data() + h * (rows / all.kv_heads) : nullptr, work.pages[std::size_t(worker)]);
            work.chosen.counts[std::size_t(h)] = choice.count;
            work.bytes[std::size_t(h)] = choice.bytes_read;
          },
          double(work.offsets.back()) / index_.page() * scorer.channels * rows / all.kv_heads);
      for (const offset_t b : work.bytes) bytes += b;
    } else {
      work.raw.assign(std::size_t(work.offsets.back()), 0.0f);
      work.finished.resize(work.raw.size());
      score_rows(all, queries, recipe.attention.rule, scorer, work.raw.data(), work.offsets.data(), scoring, workers);
      for (index_t h = 0; h < all.kv_heads; ++h) {
        const index_t n = all.length(0, h);
        float* finished = work.finished.data() + work.offsets[std::size_t(h)];
        scorer.finish(work.raw.data() + work.offsets[std::size_t(h)], n, finished, work.pooled);
        const index_t count = selector.select(finished, n, tail, plan.read, work.chosen.row(h), work.top_k);
        work.chosen.counts[std::size_t(h)] = count;
        // Exact scores read every key; the keys of what is then attended are the same bytes.
        bytes += (n - count) * offset_t(layout::k_dim) * offset_t(sizeof(T));
      }
    }
    return bytes;
  }

  /// Gives what the attended tokens lack of each row's mass to the mean of V up to the row's token.
  void add_mean_value(store_type& store, index_t tokens, index_t group, const float* mass,
                      const rows_view<float>& out) {
    const auto all = view(store);
    for (index_t h = 0; h < all.kv_heads; ++h) {
      const index_t before = all.length(0, h) - tokens;
      double* sum = sums_.data() + offset_t(h) * layout::v_dim;
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t& slot = summed_[std::size_t(h)]; slot <= before + t; ++slot) {
          const T* value = all.value(0, h, slot);
          for (int d = 0; d < layout::v_dim; ++d) {
            const float x = float(value[d * all.v_strides.dim]);
            sum[d] += is_finite(x) ? double(x) : 0.0;
          }
        }
        for (index_t g = 0; g < group; ++g) {
          const float held = mass[(offset_t(h) * tokens + t) * group + g];
          if (held == 1) continue;
          float* row = out.row(0, t, h * group + g);
          for (int d = 0; d < layout::v_dim; ++d) {
            row[d] = held * row[d] + (1 - held) * float(sum[d] / double(before + t + 1));
          }
        }
      }
    }
  }

  /// Bytes of the lists and sums themselves that a step reads, of one head that has n slots and attends `count`.
  offset_t side_bytes(index_t n, index_t count) const {
    offset_t bytes = averages ? offset_t(layout::v_dim) * offset_t(sizeof(double)) : 0;
    // An estimate needs no list: only what is attended is looked up in it.
    if (Recipe::filters) bytes += offset_t(Recipe::estimates ? count : n) * offset_t(sizeof(index_t));
    return bytes;
  }

  /// Bytes that are allocated for lists, index and sums.
  offset_t bytes() const { return passed_.bytes() + index_.bytes() + offset_t(sums_.capacity() * sizeof(double)); }

 private:
  candidates passed_;
  page_index<T, layout::k_dim> index_;
  std::vector<double> sums_;     // [kv_heads, v_dim]: of the first `summed_` slots of each head's view
  std::vector<index_t> summed_;  // by head
};

}  // namespace TESSERA_HOST_ISA
}  // namespace cpu
TESSERA_NAMESPACE_END
