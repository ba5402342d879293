// The first stage on the CPU: what a recipe's scorer has observed of every layer and sequence, and what it chooses by
// it.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/model_shape.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../planned.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../kernel/scratch.hpp"
#include "../store/kv_store.hpp"
#include "score_and_choose.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// What a first stage ranked in one place, by kv_head: the tokens that competed, and their scores as the selector saw
/// them. Tokens that a scorer keeps in any case (its window) have none, nor has a layer that holds no more than the
/// budget.
struct ranked_tokens {
  host_vector<host_vector<index_t>> positions;
  host_vector<host_vector<float>> scores;
  host_vector<host_vector<index_t>>
      blocks;  ///< in what blocks each segment was taken, by a selector that sees them; 0: not
};

/// What every first stage answers; this one chooses nothing.
///   open(id)                                 makes room for an id, of which nothing is observed
///   forget(id), forget(owner)                what was observed of an open id, of one layer of it; needs no memory
///   end_turn(id)                             the same, but for what lasts from turn to turn
///   copy(from, to)                           between turns: what lasts, to an id of which nothing was observed
///   observe_prompt(...), observe_step(...)   take queries in; as before when memory runs out
///   take_back(b, owner, store)               undoes `observe_step` of the b-th sequence of a batch; needs no memory
///   chooser(layer, policies, roles)          the layer whose choice this one takes: its own, or an earlier one
///   choose(...)                              fills a selection of what stays, and what it ranked (null: not wanted);
///                                            returns whether it chooses at all; `reach` says what has been settled
///                                            before, for a recipe that settles. `kept` gets one selection or, where
///                                            query heads of a group choose apart, one for each place in the group
template <class Recipe, observes Observed = Recipe::retain_type::observed, bool Chooses = Recipe::retain_type::chooses>
class first_stage {
 public:
  static constexpr bool with_scores = false;
  explicit first_stage(const model_shape&) {}
  void open(index_t) {}
  void forget(index_t) {}
  void forget(sequence_layer) {}
  void end_turn(index_t) {}
  void copy(index_t, index_t) {}
  template <class... Any>
  void observe_prompt(const Any&...) {}
  template <class... Any>
  offset_t observe_step(const Any&...) {
    return 0;
  }
  template <class... Any>
  void take_back(const Any&...) {}
  index_t chooser(index_t layer, const planned<Recipe>&, const layer_roles&) const { return layer; }
  template <class... Any>
  bool choose(const Any&...) {
    return false;
  }
  offset_t bytes(sequence_layer) const { return 0; }
};

/// What the three kinds below share: what a place stores and what was observed of it in, a selection out.
template <class Recipe>
class choosing {
 public:
  explicit choosing(const model_shape& shape) : shape_(shape) {}

  index_t chooser(index_t layer, [[maybe_unused]] const planned<Recipe>& policies,
                  [[maybe_unused]] const layer_roles& roles) const {
    if constexpr (Recipe::retain_type::reuses) {
      index_t place = 0;
      for (index_t before = 0; before < layer; ++before) place += roles.follows_recipe(before);
      for (index_t back = place - policies.first.scope.chooser(place); back > 0; back -= roles.follows_recipe(layer)) {
        --layer;
      }
    }
    return layer;
  }

  /// [kv_heads]: what the next choice gives to each head, in place of the budget; null: the budget does.
  void give_counts(const index_t* counts) { counts_ = counts; }

 protected:
  using store_type = kv_store<typename Recipe::layout_type>;
  using problem_type = choose_problem<typename store_type::view_type, float>;

  problem_type problem(sequence_layer owner, store_type& stored, const logit_rule& rule, const index_t* first_position,
                       const prompt_reach* reach) {
    problem_type result;
    result.view = stored.view(owner);
    result.layer = owner.layer;
    result.layers = shape_.layers;
    result.first_position = first_position;
    if constexpr (Recipe::retain_type::settles) result.reach = reach;
    result.rule = rule;
    result.q.heads = shape_.q_heads;
    result.counts = counts_;
    if (shape_.output_projection) {
      constexpr int v_dim = Recipe::layout_type::v_dim;
      result.projection = shape_.output_projection + offset_t(owner.layer) * shape_.q_heads * v_dim * shape_.hidden;
      result.hidden = shape_.hidden;
    }
    if constexpr (Recipe::needs_segments) {
      const columns& beside = stored.beside(owner);
      result.segments = {beside.segments(), 0, 0, beside.begins().data()};
    }
    return result;
  }
  template <class Policy>
  bool choose_by(const Policy& policy, const problem_type& problem, host_vector<selection>& kept, ranked_tokens* ranked,
                 executor& workers) {
    const index_t members = reading_members(policy, shape_.q_heads / shape_.kv_heads);
    kept.resize(std::size_t(members));
    if (ranked) {
      ranked->positions.assign(std::size_t(shape_.kv_heads * members), {});
      ranked->scores.assign(std::size_t(shape_.kv_heads * members), {});
    }
    for (index_t m = 0; m < members; ++m) {
      const group_member<float> asked(problem.q, problem.rule, m, members);
      problem_type own = problem;
      own.q = asked.q;
      own.rule = asked.rule;
      const layer_scores seen = score_and_choose(policy, own, kept[std::size_t(m)], *choosing_, workers);
      if (!ranked) continue;
      ranked->blocks = choosing_.memory.retaining.blocks;
      for (index_t h = 0; seen.scores && h < shape_.kv_heads; ++h) {
        const std::size_t row = std::size_t(h * members + m);
        const index_t first = (std::min)(seen.settled_of(h), seen.candidates(h));  // what is settled did not compete
        ranked->scores[row].assign(seen.head(h) + first, seen.head(h) + seen.candidates(h));
        for (index_t i = first; i < seen.candidates(h); ++i) {
          ranked->positions[row].push_back(problem.view.position(0, h, i));
        }
      }
    }
    return true;
  }

  model_shape shape_;
  const index_t* counts_ = nullptr;
  scratch<choose_workspace<Recipe::layout_type::k_dim>> choosing_;
};

/// By position alone.
template <class Recipe>
class first_stage<Recipe, observes::nothing, true> : public choosing<Recipe> {
  using base = choosing<Recipe>;

 public:
  static constexpr bool with_scores = false;
  using base::base;
  void open(index_t) {}
  void forget(index_t) {}
  void forget(sequence_layer) {}
  void end_turn(index_t) {}
  void copy(index_t, index_t) {}
  template <class... Any>
  void observe_prompt(const Any&...) {}
  template <class... Any>
  offset_t observe_step(const Any&...) {
    return 0;
  }
  template <class... Any>
  void take_back(const Any&...) {}

  template <class Store>
  bool choose(sequence_layer owner, Store& stored, const planned<Recipe>& policies, const logit_rule& rule,
              index_t next, index_t tail, const prompt_reach* reach, host_vector<selection>& kept,
              ranked_tokens* ranked, executor& workers) {
    auto problem = this->problem(owner, stored, rule, &next, reach);
    problem.tail = tail;
    return this->choose_by(policies.first, problem, kept, ranked, workers);
  }
  offset_t bytes(sequence_layer) const { return 0; }
};

/// By the last queries of a turn's prompt, which are remembered until it ends; or by the newest queries of all, which
/// are remembered as long as the conversation.
template <class Recipe>
class first_stage<Recipe, observes::window, true> : public choosing<Recipe> {
  using base = choosing<Recipe>;
  static constexpr int k_dim = Recipe::layout_type::k_dim;
  static constexpr bool follows = Recipe::retain_type::follows;

 public:
  static constexpr bool with_scores = false;
  explicit first_stage(const model_shape& shape) : base(shape), windows_(shape.layers) {}

  void open(index_t id) { windows_.open(id); }
  void forget(index_t id) {
    for (index_t layer = 0; layer < this->shape_.layers; ++layer) {
      host_vector<float>().swap(windows_[sequence_layer{layer, id}]);  // `= {}` would keep the memory
    }
  }
  void forget(sequence_layer owner) { windows_[owner].clear(); }
  void end_turn(index_t id) {
    if (!follows) forget(id);
  }
  void copy(index_t from, index_t to) {
    for (index_t layer = 0; follows && layer < this->shape_.layers; ++layer) {
      windows_[sequence_layer{layer, to}] = windows_[sequence_layer{layer, from}];
    }
  }

  /// Queries of a chunk's last tokens.
  template <class E, class Store>
  void observe_prompt(sequence_layer owner, Store&, const planned<Recipe>& policies, const logit_rule&,
                      const rows_view<const E>& q, index_t, executor&) {
    const index_t most = policies.first.scorer.window, fresh = (std::min)(q.tokens, most);
    remember(windows_[owner], q, fresh, most - fresh);
  }
  /// Queries of a step. One that comes to nothing is forgotten again: until the next one its window lies before it.
  template <class E, class Store>
  offset_t observe_step(index_t b, sequence_layer owner, Store&, const planned<Recipe>& policies, const logit_rule&,
                        const rows_view<const E>& q, index_t, executor&) {
    if constexpr (follows) {
      auto& added = *added_;
      if (added.size() <= std::size_t(b)) added.resize(std::size_t(b) + 1);
      remember(windows_[owner], q, q.tokens, policies.first.scorer.window);
      added[std::size_t(b)] = q.tokens;
    }
    return 0;
  }
  template <class Store>
  void take_back(index_t b, sequence_layer owner, Store&) {
    if constexpr (follows) {
      host_vector<float>& rows = windows_[owner];
      rows.resize(rows.size() - std::size_t((*added_)[std::size_t(b)]) * std::size_t(this->shape_.q_heads * k_dim));
    }
  }

  template <class Store>
  bool choose(sequence_layer owner, Store& stored, const planned<Recipe>& policies, const logit_rule& rule,
              index_t next, index_t, const prompt_reach* reach, host_vector<selection>& kept, ranked_tokens* ranked,
              executor& workers) {
    const index_t q_heads = this->shape_.q_heads, row = q_heads * k_dim;
    const host_vector<float>& held = windows_[owner];
    const index_t rows = (std::min)(index_t(held.size()) / row, policies.first.scorer.window), first = next - rows;
    auto problem = this->problem(owner, stored, rule, &first, reach);
    problem.q = nhd_rows<const float>(held.data() + held.size() - std::size_t(rows * row), rows, q_heads, k_dim);
    return this->choose_by(policies.first, problem, kept, ranked, workers);
  }

  offset_t bytes(sequence_layer owner) const { return offset_t(windows_[owner].capacity() * sizeof(float)); }

 private:
  /// Adds the newest `fresh` rows of q behind the newest `kept` of those that are here; the others go.
  template <class E>
  static void remember(host_vector<float>& rows, const rows_view<const E>& q, index_t fresh, index_t kept) {
    const index_t row = q.heads * k_dim, old = (std::min)(kept, index_t(rows.size()) / (std::max)(1, row));
    rows.reserve(std::size_t(old + fresh) * std::size_t(row));  // the last that may fail
    rows.erase(rows.begin(), rows.end() - offset_t(old) * row);
    for (index_t t = q.tokens - fresh; t < q.tokens; ++t) {
      for (index_t h = 0; h < q.heads; ++h) {
        const E* from = q.row(0, t, h);
        for (int d = 0; d < k_dim; ++d) rows.push_back(float(from[d]));
      }
    }
  }

  sequence_table<host_vector<float>> windows_;  // [rows, q_heads, k_dim] by place, the newest that are observed
  scratch<host_vector<index_t>> added_;         // by sequence of a batch: rows of the step
};

/// By every query so far; the scores lie beside the tokens.
template <class Recipe>
class first_stage<Recipe, observes::every_query, true> : public choosing<Recipe> {
  using base = choosing<Recipe>;

 public:
  static constexpr bool with_scores = true;
  using base::base;
  void open(index_t) {}
  void forget(index_t) {}
  void forget(sequence_layer) {}
  void end_turn(index_t) {}
  void copy(index_t, index_t) {}

  template <class E, class Store>
  void observe_prompt(sequence_layer owner, Store& stored, const planned<Recipe>& policies, const logit_rule& rule,
                      const rows_view<const E>& q, index_t next, executor& workers) {
    if (q.tokens == 0) return;
    using scorer_type = typename Recipe::retain_type::scorer_type;
    columns& beside = stored.beside(owner);
    const auto ask = [&](index_t begin, index_t end) {
      rows_view<const E> asked = q;
      asked.data = q.row(0, begin, 0);
      asked.tokens = end - begin;
      const index_t first = next - q.tokens + begin;
      score_rows(stored.view(owner), query_rows<E>{asked, &first}, rule, policies.first.scorer, beside.scores(),
                 beside.begins().data(), this->choosing_.memory.scoring, workers);
    };
    if constexpr (sampling_scorer<scorer_type>) {
      const auto takes = [&](index_t t) { return policies.first.scorer.takes(next - q.tokens + t); };
      for (index_t begin = 0, end; begin < q.tokens; begin = end) {
        for (end = begin + 1; end < q.tokens && takes(end) == takes(begin);) ++end;
        if (takes(begin)) ask(begin, end);
      }
    } else {
      ask(joins_rows_by<scorer_type> == row_join::newest ? q.tokens - 1 : 0, q.tokens);
    }
  }

  /// Queries of a decode step that has been attended, of the b-th sequence of the batch. Returns the bytes of scores
  /// that were read.
  template <class E, class Store>
  offset_t observe_step(index_t b, sequence_layer owner, Store& stored, const planned<Recipe>& policies,
                        const logit_rule& rule, const rows_view<const E>& q, index_t next, executor& workers) {
    if constexpr (!fires_in_steps<typename Recipe::schedule_type>) return 0;
    auto& before = *before_;
    if (before.size() <= std::size_t(b)) before.resize(std::size_t(b) + 1);
    before[std::size_t(b)] = stored.beside(owner).all_scores();
    observe_prompt(owner, stored, policies, rule, q, next, workers);
    offset_t read = 0;
    for (const index_t length : stored.lengths(owner)) read += length * offset_t(sizeof(float));
    return read;
  }
  template <class Store>
  void take_back(index_t b, sequence_layer owner, Store& stored) {
    if constexpr (fires_in_steps<typename Recipe::schedule_type>)
      stored.beside(owner).set_scores((*before_)[std::size_t(b)]);
  }

  template <class Store>
  bool choose(sequence_layer owner, Store& stored, const planned<Recipe>& policies, const logit_rule& rule, index_t,
              index_t, const prompt_reach* reach, host_vector<selection>& kept, ranked_tokens* ranked,
              executor& workers) {
    columns& beside = stored.beside(owner);
    auto problem = this->problem(owner, stored, rule, nullptr, reach);
    problem.scores = {beside.scores(), 0, 0, beside.begins().data()};
    return this->choose_by(policies.first, problem, kept, ranked, workers);
  }
  offset_t bytes(sequence_layer) const { return 0; }

 private:
  scratch<host_vector<host_vector<float>>> before_;  // by sequence of a batch: scores before the step
};

/// By a text that is read again; the scores lie beside the tokens, and `rereading` (cache/rereading.hpp) makes them.
template <class Recipe>
class first_stage<Recipe, observes::rereading, true> : public first_stage<Recipe, observes::every_query, true> {
 public:
  using first_stage<Recipe, observes::every_query, true>::first_stage;
  template <class... Any>
  void observe_prompt(const Any&...) {}
  template <class... Any>
  offset_t observe_step(const Any&...) {
    return 0;
  }
  template <class... Any>
  void take_back(const Any&...) {}
};

}  // namespace cpu
TESSERA_NAMESPACE_END
