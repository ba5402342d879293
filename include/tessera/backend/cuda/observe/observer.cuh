// Observers on the device: what a first stage's scorer has to see of a conversation, by layer and sequence.
#pragma once

#include <algorithm>

#include "../../../core/engine/choose_problem.hpp"
#include "../../../core/model_shape.hpp"
#include "../../../core/prompt/prompt_reach.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../planned.hpp"
#include "../cache_options.hpp"
#include "../device/numbers.cuh"
#include "../score/queries/query_ring.cuh"
#include "../store/kv_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What a choice by a recipe's first stage begins with.
template <class Recipe>
using first_stage_problem = choose_problem<typename kv_store<typename Recipe::layout_type>::view_type,
                                           typename Recipe::layout_type::element_type>;

/// Queries of one call of an observer that accumulates: bounds its workspace.
inline constexpr index_t observed_at_once = 512;

/// The observer of a recipe whose first stage chooses by position alone, or not at all. Every observer is made with
/// (recipe, shape, options, device, batch), `batch` being the most sequences of one choice, and has these members:
///   with_scores                          whether the store holds a score beside each token
///   queries_at_once(recipe, options)     rows of queries that one call scores, at most
///   forget(id), forget(owner)            what was observed of a turn goes, but for what lasts from turn to turn
///   copy(from, to, stream)               what lasts, to an id that goes on from another one's
///   observe_prompt(...)                  takes the queries of a chunk whose last one is at `next` - 1; the store holds
///                                        the chunk's tokens already
///   lse_room(tokens)                     where the attention of a prompt's newest tokens writes log-sum-exps for
///                                        `observe_attention`; data null: nowhere
///   observe_attention(...)               a layer's newest queries have been attended over all that it stores; `lse`:
///                                        of those that `lse_room` has room for at least
///   observe_step(...)                    takes the queries of a step that has been attended, of a batch; `ids` and
///                                        `first_position` lie on the device
///   queries(owner, reach, next, stream)  what a prompt's choice sees; `next` lies on the device
///   queries_in_step(...)                 what the choice of a batch sees
///   tail(owner, held, policies)          the newest of `held` tokens that stay whatever their score
///   complete(problem, store)             adds what was observed to the problem of a choice
///   bytes_of_layer()                     what it holds for one layer of one sequence
template <class Recipe>
class no_observer {
 public:
  static constexpr bool with_scores = false;
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using store_type = kv_store<layout>;
  using view_type = typename store_type::view_type;

  no_observer(const Recipe&, const model_shape&, const cache_options&, const device_info&, index_t) {}
  static index_t queries_at_once(const Recipe&, const cache_options& options) {
    return (std::max)(observed_at_once, options.step_tokens);
  }
  void forget(index_t) {}
  void forget(sequence_layer) {}
  void copy(index_t, index_t, cudaStream_t) {}
  void observe_prompt(sequence_layer, const store_type&, const planned<Recipe>&, const logit_rule&,
                      const rows_view<const T>&, index_t, cudaStream_t) {}
  rows_view<float> lse_room(index_t) const { return {}; }
  void observe_attention(sequence_layer, const rows_view<const T>&, const rows_view<float>&, cudaStream_t) {}
  void observe_step(index_t, const index_t*, const store_type&, const view_type&, const planned<Recipe>&,
                    const logit_rule&, const rows_view<const T>&, const index_t*, cudaStream_t) const {}
  newest_rows<T> queries(sequence_layer, const prompt_reach&, const index_t* next, cudaStream_t) {
    return {{}, nullptr, next};
  }
  newest_rows<T> queries_in_step(index_t, const index_t*, index_t, const index_t* next, cudaStream_t) const {
    return {{}, nullptr, next};
  }
  index_t tail(sequence_layer, index_t, const planned<Recipe>& policies) const {
    return policies.first.scorer.protected_tail(policies.first.budget.tokens);
  }
  void complete(first_stage_problem<Recipe>&, const store_type&) const {}
  offset_t bytes_of_layer() const { return 0; }
};

/// The observer of a recipe, by what its scorer observes; each kind specialises this in its own header.
template <class Recipe>
struct observer_of {
  using type = no_observer<Recipe>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
