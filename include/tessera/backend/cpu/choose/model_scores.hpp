// One set of tokens for all layers and heads of a model, on the CPU: scores of layers, added as they come, and one
// choice.
#pragma once

#include <algorithm>
#include <string>

#include "../../../scope/per_layer.hpp"
#include "score_and_choose.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scores one sequence's slots in one layer without choosing, whatever the budget.
/// Shapes   as choose_problem says, with one sequence.
/// Returns  the scores of every kv_head, valid until the workspace changes: before heads are joined, and before the
///          scorer's last pass (pooling), which a choice makes.
/// Errors   more or fewer sequences than one, a reach or counts; those of score_and_choose: tessera::error.
/// Cost     that of the scorer in score_and_choose.
template <class Policy, class View, class E>
layer_scores score_layer(const Policy& policy, const choose_problem<View, E>& p,
                         choose_workspace<View::k_dim>& workspace, executor& workers) {
  static_assert(check_chooses<Policy>());
  const default_float_mode mode;
  require(p.view.sequences == 1, "sequences of the problem", p.view.sequences, "1",
          "score one sequence at a time: scores of layers are added up for each");
  require(!p.reach && !p.counts && p.granularity <= 1, "reach, counts or granularity of the problem", "given", "none",
          "one set for a model is chosen from all tokens, by the policy's budget");
  detail::check_choose<Policy>(p);
  detail::lay_out(policy, p, workspace);
  detail::score_batch(policy, p, ascending_view(p.view), workspace, [](index_t) { return false; }, workers);
  return detail::scores_of<Policy>(p, 0, workspace);
}

/// The scores of one sequence, added over all heads and layers that were given: for engines whose cells or pages hold
/// all layers, so that a token stays in all of them or in none.
///
///   cpu::model_scores<> all;
///   all.begin(tokens);
///   // in each layer, in any order, in one pass through the model or in several:
///   all.add(cpu::score_layer(policy, problem, workspace, workers));
///   all.choose(policy, kept, retaining);  // kept.row(0): the slots that stay, ascending
///
/// Join    over_heads::sum adds scores, over_heads::maximum takes the largest. NaN in one head makes a token's sum NaN,
///         which ranks last; the maximum goes by the others.
/// Memory  4 bytes a token.
template <over_heads Join = over_heads::sum>
class model_scores {
  static_assert(Join != over_heads::mean,
                "tessera: model_scores joins by sum or maximum; a mean ranks as the sum does");

 public:
  /// Forgets all layers. `tokens`: slots that every head holds.
  void begin(index_t tokens) {
    require(tokens >= 0, "tokens", tokens, "at least 0", "pass how many slots every head holds");
    joined_.assign(std::size_t(tokens), 0.0f);
    layers_ = tail_ = 0;
  }

  /// Adds a layer. The order of layers decides how sums are rounded.
  /// Errors   heads with another number of slots, another protected tail than the layers before: tessera::error, and
  ///          nothing has been added.
  void add(const layer_scores& layer) {
    for (index_t h = 0; h < layer.kv_heads; ++h) {
      require(layer.tokens[h] == tokens(), "slots of kv_head " + std::to_string(h), layer.tokens[h],
              std::to_string(tokens()) + ", with which the sum began", "score the same slots in every layer");
    }
    require(layers_ == 0 || layer.protected_tail == tail_, "newest tokens that stay", layer.protected_tail,
            std::to_string(tail_) + ", as in the layers before", "score every layer by the same policy");
    const per_layer<Join> scope;
    for (index_t h = 0; h < layer.kv_heads; ++h) {
      if (layers_ == 0 && h == 0) {
        std::copy_n(layer.head(0), joined_.size(), joined_.begin());
        continue;
      }
      for (std::size_t i = 0; i < joined_.size(); ++i) joined_[i] = scope.join(joined_[i], layer.head(h)[i]);
    }
    tail_ = layer.protected_tail;
    ++layers_;
  }

  index_t tokens() const { return index_t(joined_.size()); }
  /// Layers that have been added.
  index_t layers() const { return layers_; }
  /// [tokens]: what was added, before the scorer's last pass.
  const float* scores() const { return joined_.data(); }

  /// Chooses the slots that stay in all layers, by the policy's last pass over the scores, its budget and its selector.
  /// Its scope is not asked. The same scores choose again with another budget; the newest tokens that stay are those of
  /// the policy that scored, also where a scorer makes them of its budget (`recent` of accumulated scores).
  /// Returns  the scores as budget and selector got them, of the slots before the newest that stay; valid until
  ///          `workspace` or this object changes.
  /// Errors   no layer: tessera::error.
  template <class Policy>
  const float* choose(const Policy& policy, selection& kept, retain_workspace& workspace) const {
    static_assert(!segment_scorer<typename Policy::scorer_type> && !weighted_scorer<typename Policy::scorer_type> &&
                      !Policy::needs_segments,
                  "tessera: model_scores chooses by scores alone; scorers of values and selectors of segments need "
                  "more: score_and_choose");
    require(layers_ >= 1, "layers of the scores", layers_, "at least 1", "add the scores of every layer");
    const index_t count = tokens();
    const offset_t begin = 0;
    layer_scores row;
    row.kv_heads = 1;
    row.protected_tail = tail_;
    row.tokens = &count;
    row.offsets = &begin;
    row.scores = joined_.data();
    return choose_kept(policy, row, kept, workspace).scores;
  }

 private:
  host_vector<float> joined_;
  index_t layers_ = 0, tail_ = 0;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
