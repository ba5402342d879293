// Observers on the CPU: what a first stage's scorer needs to know of a conversation, by layer and sequence.
#pragma once

#include <algorithm>

#include "../../../core/engine/choose_problem.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../core/model_shape.hpp"
#include "../../../core/plan/layer_peak.hpp"
#include "../../../core/prompt/query_statistics.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../planned.hpp"
#include "../kernel/executor.hpp"
#include "../kernel/scratch.hpp"
#include "../score/query_sums.hpp"
#include "../score/score.hpp"
#include "../store/kv_store.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The problem that a choice by a recipe's first stage fills in.
template <class Recipe>
using first_stage_problem = choose_problem<typename kv_store<typename Recipe::layout_type>::view_type, float>;

/// Numbers that the problem of one choice points to.
struct choice_inputs {
  index_t first_position = 0;
  query_statistics statistics{};
};

/// The observer of a recipe whose first stage chooses by position alone, or not at all. Every observer has these
/// members:
///   with_scores                    whether the store holds a score beside each token
///   open(id)                       opens a sequence, of which nothing is observed
///   forget(id), forget(owner)      forgets an open sequence, or one layer of it; needs no memory
///   end_turn(id)                   forgets what does not last from turn to turn
///   copy(source, target)           copies what it knows to an empty sequence
///   transfer(id, policies, archive)   between turns: saves what lasts, or loads it into an empty sequence
///   observe_prompt(...)            observes the queries of a chunk's last tokens; unchanged when memory runs out
///   observe_step(b, ...)           observes the queries of a step, of the b-th sequence of a batch; returns the bytes
///                                  of scores that it read; unchanged when memory runs out
///   abandon(b, owner, store)       undoes `observe_step`; needs no memory
///   complete(problem, ...)         adds the observations to the problem of a choice
///   bytes(owner)                   allocated bytes of a layer of a sequence
///   upper_bound(policies, turn)    the most that these can be
template <class Recipe>
class no_observer {
 public:
  static constexpr bool with_scores = false;
  using store_type = kv_store<typename Recipe::layout_type>;

  explicit no_observer(const model_shape&) {}
  void open(index_t) {}
  void forget(index_t) {}
  void forget(sequence_layer) {}
  void end_turn(index_t) {}
  void copy(index_t, index_t) {}
  template <class Archive>
  void transfer(index_t, const planned<Recipe>&, Archive&) {}
  template <class E>
  void observe_prompt(sequence_layer, store_type&, const planned<Recipe>&, const logit_rule&, const rows_view<const E>&,
                      index_t, executor&) {}
  template <class E>
  offset_t observe_step(index_t, sequence_layer, store_type&, const planned<Recipe>&, const logit_rule&,
                        const rows_view<const E>&, index_t, executor&) {
    return 0;
  }
  void abandon(index_t, sequence_layer, store_type&) {}
  /// `next`: the position of the next token.
  void complete(first_stage_problem<Recipe>& problem, sequence_layer, store_type&, const planned<Recipe>&, index_t next,
                choice_inputs& inputs) const {
    inputs.first_position = next;
    problem.first_position = &inputs.first_position;
  }
  offset_t bytes(sequence_layer) const { return 0; }
  offset_t upper_bound(const planned<Recipe>&, const turn_extent&) const { return 0; }
};

/// The observer of a recipe, by the kind of its scorer; each kind specialises this.
template <class Recipe>
struct observer_of {
  using type = no_observer<Recipe>;
};

/// The last queries of a turn's prompt, kept until it ends.
/// Memory   fp32 [rows, q_heads, k_dim] for each layer of each sequence.
template <class Recipe>
class window_observer : public no_observer<Recipe> {
 protected:
  static constexpr int k_dim = Recipe::layout_type::k_dim;

 public:
  using typename no_observer<Recipe>::store_type;

  explicit window_observer(const model_shape& shape)
      : no_observer<Recipe>(shape), layers_(shape.layers), q_heads_(shape.q_heads), windows_(shape.layers) {}

  void open(index_t id) { windows_.open(id); }
  void forget(index_t id) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      host_vector<float>().swap(windows_[sequence_layer{layer, id}]);  // `= {}` would keep the memory
    }
  }
  void forget(sequence_layer owner) { windows_[owner].clear(); }
  void end_turn(index_t id) { forget(id); }
  void copy(index_t from, index_t to) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      windows_[sequence_layer{layer, to}] = windows_[sequence_layer{layer, from}];
    }
  }

  template <class E>
  void observe_prompt(sequence_layer owner, store_type&, const planned<Recipe>& policies, const logit_rule&,
                      const rows_view<const E>& q, index_t, executor&) {
    const index_t window = policies.first.scorer.window, added = (std::min)(q.tokens, window);
    remember(windows_[owner], q, added, window - added);
  }

  void complete(first_stage_problem<Recipe>& problem, sequence_layer owner, store_type&,
                const planned<Recipe>& policies, index_t next, choice_inputs& inputs) const {
    const index_t row = q_heads_ * k_dim;
    const host_vector<float>& held = windows_[owner];
    const index_t rows = (std::min)(index_t(held.size()) / row, policies.first.scorer.window);
    inputs.first_position = next - rows;
    problem.first_position = &inputs.first_position;
    problem.q = nhd_rows<const float>(held.data() + held.size() - std::size_t(rows * row), rows, q_heads_, k_dim);
  }

  offset_t bytes(sequence_layer owner) const { return offset_t(windows_[owner].capacity() * sizeof(float)); }
  offset_t upper_bound(const planned<Recipe>& policies, const turn_extent& turn) const {
    const index_t of_step = Recipe::retain_type::follows ? turn.step : 0;
    return (offset_t(policies.first.scorer.window) + of_step) * q_heads_ * k_dim * offset_t(sizeof(float));
  }

 protected:
  /// Adds the newest `added` rows of q behind the newest `kept` stored ones; drops the others.
  template <class E>
  static void remember(host_vector<float>& rows, const rows_view<const E>& q, index_t added, index_t kept) {
    const index_t row = q.heads * k_dim, old = (std::min)(kept, index_t(rows.size()) / (std::max)(1, row));
    rows.reserve(std::size_t(old + added) * std::size_t(row));  // the last that may fail
    rows.erase(rows.begin(), rows.end() - offset_t(old) * row);
    for (index_t t = q.tokens - added; t < q.tokens; ++t) {
      for (index_t h = 0; h < q.heads; ++h) {
        const E* values = q.row(0, t, h);
        for (int d = 0; d < k_dim; ++d) rows.push_back(float(values[d]));
      }
    }
  }

  index_t layers_, q_heads_;
  sequence_table<host_vector<float>> windows_;  // [rows, q_heads, k_dim], the newest that are observed
};

/// The newest queries of a conversation, those of steps included, as long as it lasts.
template <class Recipe>
class following_observer : public window_observer<Recipe> {
  using base = window_observer<Recipe>;

 public:
  using base::base;
  using typename base::store_type;

  void end_turn(index_t) {}
  template <class Archive>
  void transfer(index_t id, const planned<Recipe>& policies, Archive& archive) {
    const offset_t row = offset_t(this->q_heads_) * base::k_dim;
    const offset_t rows = offset_t(policies.first.scorer.window) + step_rows;
    for (index_t layer = 0; layer < this->layers_; ++layer) {
      host_vector<float>& window = this->windows_[sequence_layer{layer, id}];
      archive.numbers(window, rows * row);
      archive.require(offset_t(window.size()) % row == 0, "with a part of a query");
    }
  }

  /// The previous window stays before the new rows until the next step, so that `abandon` can drop these.
  template <class E>
  offset_t observe_step(index_t b, sequence_layer owner, store_type&, const planned<Recipe>& policies,
                        const logit_rule&, const rows_view<const E>& q, index_t, executor&) {
    auto& added = *added_;
    if (added.size() <= std::size_t(b)) added.resize(std::size_t(b) + 1);
    base::remember(this->windows_[owner], q, q.tokens, policies.first.scorer.window);
    added[std::size_t(b)] = q.tokens;
    return 0;
  }
  void abandon(index_t b, sequence_layer owner, store_type&) {
    host_vector<float>& rows = this->windows_[owner];
    rows.resize(rows.size() - std::size_t((*added_)[std::size_t(b)]) * std::size_t(this->q_heads_ * base::k_dim));
  }

 private:
  static constexpr offset_t step_rows = 8;  // that a step adds at most
  scratch<host_vector<index_t>> added_;     // by sequence of a batch: rows of the step
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::window) struct observer_of<Recipe> {
  using type = std::conditional_t<Recipe::retain_type::follows, following_observer<Recipe>, window_observer<Recipe>>;
};

/// A score beside each token that does not come from queries of the cache (KVzip's second reading, an engine's scores).
template <class Recipe>
class stored_scores : public no_observer<Recipe> {
 public:
  static constexpr bool with_scores = true;
  using typename no_observer<Recipe>::store_type;
  using no_observer<Recipe>::no_observer;

  void complete(first_stage_problem<Recipe>& problem, sequence_layer owner, store_type& store, const planned<Recipe>&,
                index_t, choice_inputs&) const {
    columns& beside = store.beside(owner);
    problem.scores = {beside.scores(), 0, 0, beside.begins().data()};
  }
};

/// Adds the weights of every query to the scores that lie beside the tokens.
template <class Recipe>
class accumulating_observer : public stored_scores<Recipe> {
  using scorer_type = typename Recipe::retain_type::scorer_type;
  static constexpr bool in_steps = fires_in_steps<typename Recipe::schedule_type>;

 public:
  using typename stored_scores<Recipe>::store_type;
  using stored_scores<Recipe>::stored_scores;

  template <class E>
  void observe_prompt(sequence_layer owner, store_type& store, const planned<Recipe>& policies, const logit_rule& rule,
                      const rows_view<const E>& q, index_t next, executor& workers) {
    if (q.tokens == 0) return;
    columns& beside = store.beside(owner);
    const auto score = [&](index_t begin, index_t end) {
      rows_view<const E> queries = q;
      queries.data = q.row(0, begin, 0);
      queries.tokens = end - begin;
      const index_t first = next - q.tokens + begin;
      score_rows(store.view(owner), query_rows<E>{queries, &first}, rule, policies.first.scorer, beside.scores(),
                 beside.begins().data(), *scoring_, workers);
    };
    if constexpr (sampling_scorer<scorer_type>) {
      const auto takes = [&](index_t t) { return policies.first.scorer.takes(next - q.tokens + t); };
      for (index_t begin = 0, end; begin < q.tokens; begin = end) {
        for (end = begin + 1; end < q.tokens && takes(end) == takes(begin);) ++end;
        if (takes(begin)) score(begin, end);
      }
    } else {
      score(joins_rows_by<scorer_type> == row_join::newest ? q.tokens - 1 : 0, q.tokens);
    }
  }

  /// Observes nothing where the recipe chooses nothing in steps.
  template <class E>
  offset_t observe_step(index_t b, sequence_layer owner, store_type& store, const planned<Recipe>& policies,
                        const logit_rule& rule, const rows_view<const E>& q, index_t next, executor& workers) {
    if (!in_steps) return 0;
    auto& previous = *previous_scores_;
    if (previous.size() <= std::size_t(b)) previous.resize(std::size_t(b) + 1);
    previous[std::size_t(b)] = store.beside(owner).all_scores();
    observe_prompt(owner, store, policies, rule, q, next, workers);
    offset_t read = 0;
    for (const index_t length : store.lengths(owner)) read += length * offset_t(sizeof(float));
    return read;
  }
  void abandon(index_t b, sequence_layer owner, store_type& store) {
    if (in_steps) store.beside(owner).set_scores((*previous_scores_)[std::size_t(b)]);
  }

 private:
  scratch<score_workspace<Recipe::layout_type::k_dim>> scoring_;
  scratch<host_vector<host_vector<float>>> previous_scores_;  // by sequence of a batch: scores before the step
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::every_query) struct observer_of<Recipe> {
  using type = accumulating_observer<Recipe>;
};

template <class Recipe>
requires(Recipe::retain_type::rereads || Recipe::retain_type::takes_scores) struct observer_of<Recipe> {
  using type = stored_scores<Recipe>;
};

/// Statistics of the queries of a turn's prompt (Expected Attention); forgotten when it ends.
/// Errors   a model without rope_frequencies: tessera::error.
template <class Recipe>
class statistics_observer : public no_observer<Recipe> {
  static constexpr int k_dim = Recipe::layout_type::k_dim;

 public:
  using typename no_observer<Recipe>::store_type;

  explicit statistics_observer(const model_shape& shape)
      : no_observer<Recipe>(shape), shape_(shape), sums_(shape.layers) {
    shape.check_rope(k_dim);
  }

  void open(index_t id) { sums_.open(id); }
  void forget(index_t id) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) forget({layer, id});
  }
  void forget(sequence_layer owner) { sums_[owner].clear(); }
  void end_turn(index_t id) { forget(id); }
  void copy(index_t from, index_t to) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      sums_[sequence_layer{layer, to}] = sums_[sequence_layer{layer, from}];
    }
  }

  template <class E>
  void observe_prompt(sequence_layer owner, store_type&, const planned<Recipe>& policies, const logit_rule&,
                      const rows_view<const E>& q, index_t next, executor& workers) {
    sums_[owner].prepare(shape_.q_heads);
    sums_[owner].add(q, next - q.tokens, policies.first.scorer.sinks, shape_.rope_frequencies.data(), workers);
  }

  void complete(first_stage_problem<Recipe>& problem, sequence_layer owner, store_type&, const planned<Recipe>&,
                index_t next, choice_inputs& inputs) const {
    inputs.first_position = next;
    inputs.statistics = sums_[owner].view();
    problem.first_position = &inputs.first_position;
    problem.statistics = &inputs.statistics;
    problem.rope_frequencies = shape_.rope_frequencies.data();
  }
  offset_t bytes(sequence_layer owner) const { return sums_[owner].bytes(); }
  offset_t upper_bound(const planned<Recipe>&, const turn_extent&) const {
    return query_sums<k_dim>::bytes_of(shape_.q_heads);
  }

 private:
  model_shape shape_;
  sequence_table<query_sums<k_dim>> sums_;
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::statistics) struct observer_of<Recipe> {
  using type = statistics_observer<Recipe>;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
