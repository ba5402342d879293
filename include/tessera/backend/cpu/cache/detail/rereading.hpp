// Rereading on the CPU: the queries of a text that passes through the model once more score the tokens of one part.
#pragma once

#include "../../../../core/host/host_vector.hpp"
#include "../../../../planned.hpp"
#include "../../../../runtime/turn/reread_part.hpp"
#include "../../kernel/scratch.hpp"
#include "../../read/candidates.hpp"
#include "../../score/score.hpp"
#include "../../store/kv_store.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scores nothing, for recipes that do not re-read.
template <class Recipe, bool Rereads = Recipe::retain_type::rereads>
class rereading {
 public:
  template <class E>
  void score(sequence_layer, kv_store<typename Recipe::layout_type>&, const planned<Recipe>&, const logit_rule&,
             const rows_view<const E>&, const reread_part&, executor&) {}
};

/// Scores the tokens of a part by the attention of a rereading's queries.
template <class Recipe>
class rereading<Recipe, true> {
  static constexpr int k_dim = Recipe::layout_type::k_dim;

 public:
  /// Raises the scores of the part's tokens to those that the queries give, where these are larger.
  /// Errors   out of memory: scores are unchanged.
  template <class E>
  void score(sequence_layer owner, kv_store<typename Recipe::layout_type>& store, const planned<Recipe>& policies,
             const logit_rule& rule, const rows_view<const E>& q, const reread_part& part, executor& workers) {
    auto& [chosen, visible, scores, scoring] = *workspace_;
    const auto& scorer = policies.first.scorer;
    const auto all = store.view(owner);
    columns& beside = store.beside(owner);
    const auto in_part = [&](index_t position) { return position >= part.first && position < part.end; };
    chosen.reset(store.lengths(owner));
    for (index_t h = 0; h < chosen.rows(); ++h) {
      index_t& count = chosen.counts[std::size_t(h)];
      for (index_t slot = 0; slot < all.length(0, h); ++slot) {
        const index_t position = all.position(0, h, slot);
        if (position < scorer.sinks || in_part(position) || position >= part.begin) chosen.row(h)[count++] = slot;
      }
    }
    visible.assign(chosen, all);
    scores.assign(chosen.indices.size(), 0.0f);
    score_rows(visible.view(all), query_rows<E>{q, &part.begin}, rule, scorer, scores.data(), chosen.offsets.data(),
               scoring, workers);
    for (index_t h = 0; h < chosen.rows(); ++h) {
      for (index_t i = 0; i < chosen.counts[std::size_t(h)]; ++i) {
        const index_t slot = chosen.row(h)[i];
        if (!in_part(all.position(0, h, slot))) continue;
        const float given = scores[std::size_t(chosen.offsets[std::size_t(h)] + i)];
        float& score = beside.scores()[beside.begins()[std::size_t(h)] + slot];
        if (!(score >= given)) score = given;
      }
    }
  }

 private:
  struct workspace {
    selection chosen;
    candidates visible;
    host_vector<float> scores;
    score_workspace<k_dim> scoring;
  };
  scratch<workspace> workspace_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
