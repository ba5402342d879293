// Readers: what a second stage keeps beside the tokens (an index), and how it chooses by it what a step reads.
#pragma once

#include <cstddef>

#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

template <class Recipe>
class exact_reader;

/// The reader of a recipe that retrieves. One that needs an index of its own specialises this for its scorers, in the
/// header of the index; without that, exact scores of every key are read.
///
/// A reader is made with the model_shape. A place is a (layer, sequence); views are what the step may read of it.
///   open(place)                              a sequence is opened: nothing is stored yet. Like `refresh`, `append` and
///                                            `choose` it may run out of memory; the others need none
///   clear(place)                             the sequence is closed: gives the place's memory back
///   copy(from, to)                           an open, empty place gets what another one knows; may run out of memory,
///                                            too
///   forget(place)                            a step or a prompt's end came to nothing: what was built of the last
///                                            views is wrong, and the next `refresh` or `append` builds anew
///   refresh(place, view, policies, moved)    a prompt has ended, or slots have moved
///   append(place, view, tokens)              the newest tokens of the view are new
///   choose(place, view, queries, rule, policies, chosen, workers) -> offset_t
///                                            fills `chosen`, of as much room as slots, with what the step attends;
///                                            returns the bytes read beyond what is then attended
///   complete(place, view, tokens, group, out)   corrects the output of what was attended; most have nothing to add
///   list_bytes(place, n, count), side_bytes()   bytes that a step reads of candidate lists and of sums, of one head
///   bytes(place)                             what is allocated
template <class Recipe>
struct reader_of {
  using type = exact_reader<Recipe>;
};

/// Says which of the calls that need no view a reader lacks; true.
template <class R>
consteval bool check_reader() {
  static_assert(requires(R& r, std::size_t at) { r.open(at), r.clear(at), r.forget(at); },
                "tessera: a reader needs open(place), clear(place) and forget(place)");
  static_assert(
      requires(R& r, std::size_t at) { r.copy(at, at); },
      "tessera: a reader needs copy(from, to), by which the cache's fork gives a place what another one knows");
  static_assert(
      requires(const R& r, std::size_t at, index_t n) { r.list_bytes(at, n, n) + r.side_bytes() + r.bytes(at); },
      "tessera: a reader needs list_bytes(place, n, count), side_bytes() and bytes(place)");
  return true;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
