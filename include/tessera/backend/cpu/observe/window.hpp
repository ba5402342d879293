// Observers of the newest queries on the CPU: those of a turn's prompt, or those of the whole conversation.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../kernel/scratch.hpp"
#include "observer.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The last queries of a turn's prompt, which are remembered until it ends.
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

 protected:
  /// Adds the newest `added` rows of q behind the newest `kept` of those that are here; the others go.
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

/// The newest queries of a conversation, those of steps too; they are remembered as long as it lasts.
template <class Recipe>
class following_observer : public window_observer<Recipe> {
  using base = window_observer<Recipe>;

 public:
  using typename base::store_type;
  using base::base;

  void end_turn(index_t) {}
  void copy(index_t from, index_t to) {
    for (index_t layer = 0; layer < this->layers_; ++layer) {
      this->windows_[sequence_layer{layer, to}] = this->windows_[sequence_layer{layer, from}];
    }
  }

  /// Until the next step the step's window still lies before the new rows, so that `abandon` can drop them.
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
  scratch<host_vector<index_t>> added_;  // by sequence of a batch: rows of the step
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::window) struct observer_of<Recipe> {
  using type = std::conditional_t<Recipe::retain_type::follows, following_observer<Recipe>, window_observer<Recipe>>;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
