// A second stage that chooses by an estimate of the keys, in pages.
#pragma once

#include <algorithm>

#include "../../../../core/model_shape.hpp"
#include "../../../../core/plan/stage_plan.hpp"
#include "../../../../recipe.hpp"
#include "../../../../selector/tokens_or_pages.hpp"
#include "../../device/memory.cuh"
#include "page_retrieval.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Chooses by an estimate of the keys, in pages, and attends in the same launch where that is faster. The choice lies
/// in this object's memory until the next call.
template <class Recipe, class View, class Out>
class retrieve_by_pages {
  using T = typename View::element_type;
  using scorer = typename Recipe::retrieve_type::scorer_type;

 public:
  /// `bounds` must cover every later plan: see `plan_for`.
  retrieve_by_pages(const Recipe& recipe, const read_bounds& bounds, const model_shape& shape, index_t sequences,
                    index_t tokens, const device_info& device)
      : rule_(recipe.attention.rule),
        unit_(unit_chosen_by(recipe.retrieve.selector)),
        choose_(recipe.retrieve.scorer, unit_, bounds, sequences, shape.kv_heads, shape.q_heads, tokens, device),
        indices_(std::size_t(sequences) * std::size_t(shape.kv_heads) * std::size_t(choose_.max_chosen())),
        counts_(std::size_t(sequences) * std::size_t(shape.kv_heads)),
        mass_(scorer::adds_mean_value ? std::size_t(sequences) * std::size_t(tokens) * std::size_t(shape.q_heads) : 0),
        scratch_(choose_.workspace_bytes()) {}

  /// A sequence's plan for the device.
  static read_plan plan_for(const Recipe& recipe, const stage_plan& plan) {
    return read_plan::fitted_to(recipe.retrieve.planned(plan, View::k_dim).scorer, plan.read);
  }
  /// Throws unless launches can take the plan.
  void require_covered(const read_plan& plan) const { choose_.require_covered(plan); }

  /// `plans`: of the view's sequences, on the device. `index` does not yet contain the step's newest tokens: the choice
  /// folds them in.
  template <class Index>
  selection_view choose(const View& view, const read_plan* plans, const Index& index, const rows_view<const T>& q,
                        const index_t* first_position, cudaStream_t stream) const {
    choose_.run(problem_of(view, plans, index, q, first_position), scratch_.data(), stream);
    return chosen();
  }

  /// Whether `choose_and_attend` does a step's attention in the launch that chooses.
  bool attends() const { return choose_.attends(); }
  template <class Index>
  selection_view choose_and_attend(const View& view, const read_plan* plans, const Index& index,
                                   const rows_view<const T>& q, const index_t* first_position,
                                   const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) const {
    if constexpr (!scorer::adds_mean_value) {
      choose_.choose_and_attend(problem_of(view, plans, index, q, first_position), out, lse, scratch_.data(), stream);
    }
    return chosen();
  }

  /// Bytes that a choice over `n` tokens reads beside the K and V of attended tokens: one value per page and chosen
  /// channel, or both extrema where query heads may differ in sign.
  static offset_t bytes_read(const read_plan& plan, offset_t n) {
    if (n <= plan.read) return 0;  // everything is attended: nothing is estimated
    const offset_t pages = (n + plan.page - 1) / plan.page;
    return pages * plan.channels * (scorer::normalised || plan.page == 1 ? 1 : 2) * offset_t(sizeof(T));
  }
  /// An upper bound of the tokens that a plan attends.
  offset_t max_read(const read_plan& plan) const {
    return unit_ == selection_unit::token ? plan.read : offset_t(ceil_div(plan.read, plan.page)) * plan.page;
  }
  const float* mass() const { return mass_.data(); }

 private:
  template <class Index>
  page_problem<View> problem_of(const View& view, const read_plan* plans, const Index& index,
                                const rows_view<const T>& q, const index_t* first_position) const {
    page_problem<View> problem;
    problem.view = view;
    problem.plans = plans;
    problem.index = index;
    problem.unfolded = q.tokens;
    problem.q = q;
    problem.first_position = first_position;
    problem.rule = rule_;
    problem.out = indices_.data();
    problem.out_stride = choose_.max_chosen();
    problem.counts = counts_.data();
    problem.mass = mass_.data();
    return problem;
  }
  selection_view chosen() const { return {indices_.data(), counts_.data(), nullptr, choose_.max_chosen()}; }

  logit_rule rule_;
  selection_unit unit_;
  choose_pages<View, scorer, Out> choose_;
  device_buffer<index_t> indices_, counts_;
  device_buffer<float> mass_;
  device_buffer<unsigned char> scratch_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
