// Observers on the CPU: what a first stage's scorer has to see of a conversation, by layer and sequence.
#pragma once

#include "../../../core/engine/choose_problem.hpp"
#include "../../../core/model_shape.hpp"
#include "../../../core/prompt/query_statistics.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../planned.hpp"
#include "../kernel/executor.hpp"
#include "../store/kv_store.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// What a choice by a recipe's first stage begins with.
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
///   open(id)                       makes room for an id, of which nothing is observed
///   forget(id), forget(owner)      what was observed of an open id, of one layer of it, goes; needs no memory
///   end_turn(id)                   the same, but for what lasts from turn to turn
///   copy(from, to)                 between turns: what lasts, to an id of which nothing was observed
///   observe_prompt(...)            takes the queries of a chunk's last tokens; as before when memory runs out
///   observe_step(b, ...)           takes the queries of a step, of the b-th sequence of a batch; returns the bytes of
///                                  scores that it read; as before when memory runs out
///   abandon(b, owner, store)       undoes `observe_step`; needs no memory
///   complete(problem, ...)         adds what was observed to the problem of a choice
///   bytes(owner)                   what is allocated for a layer of a sequence
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
  template <class E>
  void observe_prompt(sequence_layer, store_type&, const planned<Recipe>&, const logit_rule&,
                      const rows_view<const E>&, index_t, executor&) {}
  template <class E>
  offset_t observe_step(index_t, sequence_layer, store_type&, const planned<Recipe>&, const logit_rule&,
                        const rows_view<const E>&, index_t, executor&) {
    return 0;
  }
  void abandon(index_t, sequence_layer, store_type&) {}
  /// `next`: the position of the next token.
  void complete(first_stage_problem<Recipe>& problem, sequence_layer, store_type&, const planned<Recipe>&,
                index_t next, choice_inputs& inputs) const {
    inputs.first_position = next;
    problem.first_position = &inputs.first_position;
  }
  offset_t bytes(sequence_layer) const { return 0; }
};

/// The observer of a recipe, by what its scorer observes; each kind specialises this in its own header.
template <class Recipe>
struct observer_of {
  using type = no_observer<Recipe>;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
