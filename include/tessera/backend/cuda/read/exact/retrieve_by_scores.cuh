// The second stage by exact scores: a step's queries score all stored tokens, and the best are chosen.
#pragma once

#include <algorithm>

#include "../../../../core/model_shape.hpp"
#include "../../../../core/plan/stage_plan.hpp"
#include "../../../../recipe.hpp"
#include "../../choose/top_k.cuh"
#include "../../device/memory.cuh"
#include "../../score/pool.cuh"
#include "../../score/score.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Scores every stored token by the step's queries and chooses the best. A step of several tokens also reads all of its
/// own tokens. The choice lies in this object's memory until the next call.
template <class Recipe, class View>
class retrieve_by_scores {
  using T = typename View::element_type;
  using policy = typename Recipe::retrieve_type;
  using scorer = typename policy::scorer_type;
  using finish = finish_scores<scorer>;

 public:
  /// `max_read`: an upper bound of the tokens that a step attends under any plan; `capacity`: of those that a row
  /// stores.
  retrieve_by_scores(const Recipe& recipe, index_t max_read, const model_shape& shape, index_t sequences,
                     index_t tokens, index_t capacity, const device_info& device)
      : scorer_(recipe.retrieve.scorer),
        rule_(recipe.attention.rule),
        rows_(sequences * shape.kv_heads),
        heads_(shape.kv_heads),
        capacity_(capacity),
        max_read_((std::min)(max_read, capacity)),
        score_(sequences, shape.kv_heads, shape.q_heads, tokens, capacity, device),
        finish_(sequences, shape.kv_heads, capacity, device),
        select_(recipe.retrieve.selector, rows_, capacity, device, max_read_),
        raw_(std::size_t(rows_) * std::size_t(capacity)),
        finished_(finish_.out_scores()),
        indices_(std::size_t(rows_) * std::size_t(max_read_)),
        counts_(std::size_t(rows_)),
        scratch_(score_.workspace_bytes()) {}

  /// A sequence's plan for the device.
  static read_plan plan_for(const Recipe&, const stage_plan& plan) { return read_plan(plan.read); }
  /// Throws unless launches can take the plan.
  void require_covered(const read_plan& plan) const {
    require(plan.read <= max_read_ || max_read_ == capacity_, "tokens that a step reads", plan.read,
            "at most " + std::to_string(max_read_), "make the operations for the most that any plan reads");
  }

  /// `plans`: of the view's sequences, on the device.
  template <class Index>
  selection_view choose(const View& view, const read_plan* plans, const Index&, const rows_view<const T>& q,
                        const index_t* first_position, cudaStream_t stream) const {
    score_problem<View> problem;
    problem.view = view;
    problem.q = q;
    problem.first_position = first_position;
    problem.rule = rule_;
    problem.scores = raw_.data();
    problem.row_stride = capacity_;
    score_.run(problem, scorer_, scratch_.data(), stream);
    select_problem select;
    score_rows scores;
    scores.scores = raw_.data();
    scores.row_stride = capacity_;
    scores.sequences = view.sequences;
    scores.kv_heads = view.kv_heads;
    scores.lengths = view.lengths;
    scores.length_strides = {view.length_strides.sequence, view.length_strides.head};
    scores = finish_.run(scores, scorer_, finished_.data(), stream);
    select.scores = scores.scores;
    select.score_stride = scores.row_stride;
    select.n = {view.lengths};
    // A plan's first member is the number of tokens it reads. All rows of a sequence use it; plans lie one plan apart.
    select.keep = {&plans->read, 0, heads_, sizeof(read_plan) / sizeof(index_t)};
    select.tail = {nullptr, q.tokens > 1 ? q.tokens : 0};
    select.out = indices_.data();
    select.out_stride = max_read_;
    select.counts = counts_.data();
    select.rows = view.sequences * view.kv_heads;
    select_.run(select, nullptr, stream);
    return select.chosen();
  }

  /// Bytes that a choice over `n` tokens reads beside the K and V of attended tokens.
  static offset_t bytes_read(const read_plan& plan, offset_t n) {
    return (std::max<offset_t>)(0, n - plan.read) * View::k_dim * offset_t(sizeof(T));
  }
  /// An upper bound of the tokens that a plan attends.
  static offset_t max_read(const read_plan& plan) { return plan.read; }

 private:
  scorer scorer_;
  logit_rule rule_;
  index_t rows_, heads_, capacity_, max_read_;
  attentive_score<View, scorer> score_;
  finish finish_;
  select_slots<typename policy::selector_type> select_;
  device_buffer<float> raw_, finished_;
  device_buffer<index_t> indices_, counts_;
  device_buffer<unsigned char> scratch_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
