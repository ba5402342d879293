// Readers: the index that a second stage keeps beside the tokens, and how it uses the index to choose what a step
// reads.
#pragma once

#include <algorithm>
#include <string>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../core/views.hpp"
#include "../../../planned.hpp"
#include "../cache_options.hpp"
#include "../store/step_table.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Every plan of conversations that have taken `first` to `last` tokens.
template <class Recipe, class Visit>
void for_each_plan(const Recipe& recipe, index_t first, index_t last, const Visit& visit) {
  // Sizes change slowly with the tokens: steps of a hundredth meet every page, and the ends meet the extremes.
  for (double tokens = first; tokens < last; tokens = (std::max)(tokens + 1, tokens * 1.01)) {
    visit(recipe.plan_unchecked(index_t(tokens)));
  }
  visit(recipe.plan_unchecked(last));
}
/// Every plan that these options make room for. A conversation may take more tokens than a head stores: its plans then
/// store more, which is refused where it does not fit.
template <class Recipe, class Visit>
void for_each_plan(const Recipe& recipe, const cache_options& options, const Visit& visit) {
  for_each_plan(recipe, options.first_prompt, options.tokens, visit);
}

/// Base of readers that choose slots.
struct slot_reader {
  template <class Store>
  static const host_vector<index_t>& slots(const Store&, sequence_layer, index_t, const host_vector<index_t>& list) {
    return list;
  }
};

/// An upper bound of the tokens of a head that a plan keeps and decodes; all where nothing is dropped.
template <class Recipe>
index_t max_indexed(const Recipe& recipe, const cache_options& options) {
  if (!Recipe::retain_type::drops) return options.tokens;
  index_t most = 0;
  for_each_plan(recipe, options,
                [&](const stage_plan& plan) { most = (std::max)({most, plan.capacity, plan.retained, plan.read}); });
  return most;
}
/// Tokens of a head that an index has room for. If tokens are dropped, this is twice what plans keep; a longer answer
/// needs `index_tokens`.
template <class Recipe>
index_t index_tokens(const Recipe& recipe, const cache_options& options) {
  if (options.index_tokens > 0) return options.index_tokens;
  if (!Recipe::retain_type::drops) return options.tokens;
  return index_t((std::min<offset_t>)(options.tokens, 2 * offset_t(max_indexed(recipe, options)) + 1024));
}
/// Errors   an index for `room` tokens of a head is too small for what the recipe's plans keep; for `tokens`.
template <class Recipe>
void require_indexed(const Recipe& recipe, const cache_options& options, index_t room) {
  const index_t needed = (std::min)(options.tokens, max_indexed(recipe, options));
  require(needed <= room, "tokens whose keys the budget's plans index", needed,
          "at most cache_options::index_tokens, which is " + std::to_string(room),
          "raise index_tokens, or make a new cache for this budget");
}
/// Errors   an index for `room` tokens of a head is too small for `tokens`.
inline void require_index_fits(offset_t tokens, index_t room) {
  require(tokens <= room, "tokens whose keys are indexed", tokens,
          "at most cache_options::index_tokens, which is " + std::to_string(room), "raise index_tokens");
}

/// A kv_head of a layer of one sequence. Its `newest` tokens are read whatever is chosen.
struct head_place {
  sequence_layer owner;
  index_t head;
  offset_t newest;
};

template <class Recipe, class View, class Out>
class exact_reader;

/// The reader of a recipe that retrieves, over views that a step may read, for outputs of `Out`. A recipe with an index
/// of its own specialises this for its scorers, in the header of the index. Other recipes score every key exactly.
///
/// A reader is made with (recipe, shape, options, device). All calls but `fit`, `adopt` and those about bytes only
/// enqueue.
///   fit(recipe, shape, options, device), adopt(fitted)   operations for another budget; uses them from now on
///   require_covered(policies), require_fits(tokens)      tessera::error where the reader's memory is too small
///   gathered()                               the columns by id that `prepare_step` gathers for a batch
///   set_plan(id, policies, stream)           called when a sequence has a new plan
///   set_reads(ids, policies_of, stream)      called before a step: what it reads of these sequences may have grown
///   refresh(owner, view, longest, stream)    called when a prompt has ended, and when tokens were taken back: a
///                                            layer's index is built anew. A reader whose steps leave more behind than
///                                            rows tell declares static constexpr bool steps_are_settled = true: they
///                                            cannot be taken back
///   copy(from, to, stream)                   called after `refresh` for an id that continues another one: copies what
///                                            is not part of the index
///   rebuild(layer, ids, view, stream)        called when slots of a batch have moved in place
///   choose(layer, view, q, first, rule, out, lse, chosen, stream) -> bool
///                                            sets `chosen`; or attends too, and returns true
///   slots(store, owner, head, list)          the slots that a head's list of `chosen` stands for
///   complete(layer, ids, view, out, stream)  corrects the step's output; most readers do nothing
///   bytes(policies, tokens)                  of the heads of a layer
///   attended(policies, n, place), bytes_read(policies, n, place)   of one head; they may synchronise
template <class Recipe, class View, class Out>
struct reader_of {
  using type = exact_reader<Recipe, View, Out>;
};

/// Base of readers without an index.
template <class Recipe, class View, class Out>
struct reader_without_index {
  void require_covered(const planned<Recipe>&) const {}
  void require_fits(offset_t) const {}
  host_vector<detail::gathered_column> gathered() const { return {}; }
  void set_plan(index_t, const planned<Recipe>&, cudaStream_t) {}
  template <class PoliciesOf>
  void set_reads(const host_vector<index_t>&, const PoliciesOf&, cudaStream_t) {}
  void clear(index_t, cudaStream_t) {}
  void refresh(sequence_layer, const View&, index_t, cudaStream_t) const {}
  void copy(index_t, index_t, cudaStream_t) const {}
  void rebuild(index_t, const index_t*, const View&, cudaStream_t) const {}
  template <class ReadView>
  void complete(index_t, const index_t*, const ReadView&, const rows_view<Out>&, cudaStream_t) const {}
  offset_t bytes(const planned<Recipe>&, index_t) const { return 0; }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
