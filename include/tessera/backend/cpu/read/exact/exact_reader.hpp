// Retrieval by exact scores on the CPU: every stored key is read, the best tokens are attended.
#pragma once

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../../../planned.hpp"
#include "../../kernel/scratch.hpp"
#include "../../score/finish.hpp"
#include "../../score/score.hpp"
#include "../reader.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scores every key; stores nothing beside the tokens.
template <class Recipe>
class exact_reader : public reader_without_index<Recipe> {
 public:
  static constexpr int k_dim = Recipe::layout_type::k_dim;
  explicit exact_reader(const model_shape&) {}

  template <class View, class Q>
  offset_t choose(std::size_t, const View& all, const query_rows<Q>& queries, const logit_rule& rule,
                  const planned<Recipe>& policies, selection& chosen, executor& workers) {
    const auto& policy = policies.read;
    auto& [offsets, raw, finished_scores, pooled, scoring, top_k] = *workspace_;
    // A step of several tokens reads them all, so that each of them sees a key.
    const index_t tail = queries.q.tokens > 1 ? queries.q.tokens : 0;
    offsets.assign(1, 0);
    for (index_t h = 0; h < all.kv_heads; ++h) offsets.push_back(offsets.back() + all.length(0, h));
    raw.assign(std::size_t(offsets.back()), 0.0f);
    finished_scores.resize(raw.size());
    score_rows(all, queries, rule, policy.scorer, raw.data(), offsets.data(), scoring, workers);
    offset_t bytes = 0;
    for (index_t h = 0; h < all.kv_heads; ++h) {
      const index_t n = all.length(0, h);
      const offset_t row = offsets[std::size_t(h)];
      const float* scores = finished(policy.scorer, raw.data() + row, n, finished_scores.data() + row, pooled);
      const index_t count = choose_slots(policy.selector, scores, n, tail, policy.tokens, chosen.row(h), top_k);
      chosen.counts[std::size_t(h)] = count;
      // The keys of the attended tokens are among these bytes.
      bytes += (n - count) * Recipe::layout_type::key_bytes();
    }
    return bytes;
  }

 private:
  struct workspace {
    host_vector<offset_t> offsets;
    host_vector<float> raw, finished, pooled;
    score_workspace<k_dim> scoring;
    top_k_scratch top_k;
  };
  scratch<workspace> workspace_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
