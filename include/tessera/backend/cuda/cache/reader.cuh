// Readers: what a second stage keeps beside the tokens (an index), and how it chooses by it what a step reads.
#pragma once

#include <algorithm>
#include <vector>

#include "../../../planned.hpp"
#include "../store/step_table.cuh"
#include "cache_options.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Every plan that conversations of these options may have.
template <class Recipe, class Visit>
void for_each_plan(const Recipe& recipe, const cache_options& options, const Visit& visit) {
  // Sizes change slowly with the prompt: a step of a hundredth meets every page, and the ends meet the extremes.
  for (double prompt = options.first_prompt; prompt < options.tokens; prompt = std::max(prompt + 1, prompt * 1.01)) {
    visit(recipe.plan_unchecked(index_t(prompt)));
  }
  visit(recipe.plan_unchecked(options.tokens));
}

/// Of readers that choose slots.
struct slot_reader {
  template <class Store>
  static const std::vector<index_t>& slots(const Store&, index_t, index_t, const std::vector<index_t>& list) {
    return list;
  }
};

template <class Recipe, class View, class Out>
class exact_reader;

/// The reader of a recipe that retrieves, over views of what a step may read, for outputs of `Out`. A recipe that needs an index
/// of its own specialises this for its scorers, in the header of the index; without that, exact scores of every key are read.
///
/// A reader is made with (recipe, shape, options, device). All but `fit`, `adopt` and what answers bytes only enqueues.
///   fit(recipe, shape, options, device), adopt(fitted)   what another budget needs; puts it in place
///   require_covered(policies), require_fits(tokens)      tessera::error where the reader's memory is too small
///   gathered()                               the columns by id that `prepare_step` gathers for a batch
///   set_plan(id, policies, stream)           a sequence's plan is new
///   refresh(layer, id, view, longest, stream)   a prompt has ended: what is kept of a layer is made anew
///   rebuild(layer, ids, view, stream)        slots of a batch have moved in place
///   choose(layer, view, q, first, rule, out, lse, chosen, stream) -> bool
///                                            sets `chosen`; or attends too, and answers true
///   slots(store, layer, id, list)            the slots that one list of `chosen` stands for
///   complete(layer, ids, view, out, stream)   corrects the step's output; most have nothing to add
///   bytes(policies, tokens), attended(policies, n, newest), bytes_read(policies, n)   of one head, the newest of whose n tokens are
///                                            read whatever is chosen
template <class Recipe, class View, class Out>
struct reader_of {
  using type = exact_reader<Recipe, View, Out>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
