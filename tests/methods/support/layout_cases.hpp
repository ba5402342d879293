// A method over another layout beside the same method over plain rows, through a conversation of several turns.
#pragma once

#include "conversation.hpp"
#include "entry_of.hpp"

namespace methods_test {

inline const tessera::model_shape layout_shape{2, 6, 3};

/// What all of them run with: small budgets, windows and pages, so that every stage has work to do.
inline settings small_settings(const std::string& method) {
  return {method, 40, {{"window", 8}, {"max_new", 30}, {"recent", 10}}, {}};
}

/// A recipe's cache with the calls of `hold_the_same_conversation` and no others, which would be compiled for every method too.
template <class Recipe>
class cache_in_layout {
 public:
  using rows = any_cache::rows;
  using results = any_cache::results;

  cache_in_layout(const settings& chosen, std::shared_ptr<cpu::executor> workers)
      : held_(support::called_shape<Recipe>(layout_shape), configured<Recipe>(chosen), std::move(workers)) {}

  index_t open(const tessera::sequence_options& options) { return held_.open(options); }
  void prefill(index_t layer, index_t id, const rows& q, const rows& k, const rows& v) {
    support::give_scores<Recipe>(held_, layer, id);
    held_.prefill(layer, id, q, k, v, support::called_boundaries<Recipe>(k));
  }
  void end_prefill(index_t id) {
    support::give_scores<Recipe>(held_, id);
    held_.end_prefill(id);
  }
  /// A layer of one sequence's step, which layer 0 prepares.
  void decode(index_t layer, const std::vector<index_t>& ids, const rows& q, const rows& k, const rows& v,
              const results& out, const results& lse) {
    if (layer == 0)
      step_ = held_.prepare_step(ids, q.tokens, support::called_step_boundaries<Recipe>(held_, ids, q.tokens));
    held_.decode(layer, step_, q, k, v, out, lse);
  }
  index_t fork(index_t id) { return held_.fork(id); }
  void close(index_t id) { held_.close(id); }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const {
    return held_.positions(layer, id, head);
  }
  std::vector<index_t> readable(index_t layer, index_t id, index_t head) const {
    return held_.readable(layer, id, head);
  }
  void trace_attended(bool on) { held_.trace_attended(on); }
  std::vector<std::vector<index_t>> attended(index_t layer, index_t id) const { return held_.attended(layer, id); }
  offset_t bytes_read(index_t id) const { return held_.bytes_read(id); }
  offset_t full_bytes(index_t tokens) const { return held_.full_bytes(tokens); }

 private:
  cache<Recipe> held_;
  tessera::batch step_;
};

}  // namespace methods_test
