// Readers: the index of a second stage, and the choice of what a step reads.
#pragma once

#include <concepts>
#include <cstddef>

#include "../../../core/plan/layer_extent.hpp"
#include "../../../core/types.hpp"
#include "../../../core/views.hpp"
#include "../../../planned.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

template <class Recipe>
class exact_reader;

/// The reader of a recipe that retrieves. An index specialises this for its scorers, in its own header. Without an
/// index, a step reads every key and scores it exactly.
///
/// A reader is made with the model_shape. An entry is the number of a (layer, sequence). Views have what a step may
/// read.
///   open(entry)                              a sequence is opened, without tokens. `open`, `copy`, `refresh`, `append`
///                                            and `choose` may run out of memory; the other calls need none
///   clear(entry)                             the sequence is closed: releases the entry's memory
///   copy(source, target)                     copies an entry to an open, empty one
///   transfer(entry, archive)                 saves what rows do not tell, or loads it; `refresh` follows. Few have it
///   forget(entry)                            a step or the end of a prompt has failed: the index of the last views is
///                                            wrong, and the next `refresh` or `append` builds it anew
///   truncate(entry, lengths)                 heads of the entry's view have become shorter; a reader without it is
///                                            told to `forget`. A reader whose steps leave more behind than rows tell
///                                            declares static constexpr bool steps_are_settled = true: they cannot be
///                                            taken back
///   refresh(entry, view, policies, moved)    a prompt has ended, or slots have moved
///   append(entry, view, tokens)              the newest `tokens` of the view are new
///   choose(entry, view, queries, rule, policies, chosen, workers) -> offset_t
///                                            fills `chosen`, which has memory for every slot, with the slots that the
///                                            step attends; returns the bytes read beside the attended tokens
///   complete(entry, view, tokens, group, out)   corrects the output of the step; few readers do
///   list_bytes(entry, n, count), side_bytes()   bytes that a step reads of candidates, and of sums, of one head
///   bytes(entry)                             allocated bytes
///   upper_bound(policies, readable)          upper bound of `bytes` for heads with so many readable tokens
template <class Recipe>
struct reader_of {
  using type = exact_reader<Recipe>;
};

/// The calls of a reader that stores nothing beside the rows; a step reads whole lists of candidates.
template <class Recipe>
struct reader_without_index {
  void open(std::size_t) {}
  void clear(std::size_t) {}
  void copy(std::size_t, std::size_t) {}
  void forget(std::size_t) {}
  template <class View>
  void refresh(std::size_t, const View&, const planned<Recipe>&, bool) {}
  template <class View>
  void append(std::size_t, const View&, index_t) {}
  template <class View>
  void complete(std::size_t, const View&, index_t, index_t, const rows_view<float>&) {}
  offset_t list_bytes(std::size_t, index_t n, index_t) const { return n * offset_t(sizeof(index_t)); }
  offset_t side_bytes() const { return 0; }
  offset_t bytes(std::size_t) const { return 0; }
  offset_t upper_bound(const planned<Recipe>&, const kept_bound&) const { return 0; }
};

/// True; asserts the calls that need no view, and says which one a reader lacks.
template <class R, class Policies>
consteval bool check_reader() {
  static_assert(
      requires(R& r, std::size_t entry) { r.open(entry), r.clear(entry), r.forget(entry); },
      "tessera: a reader needs open(entry), clear(entry) and forget(entry)");
  static_assert(
      requires(R& r, std::size_t entry) { r.copy(entry, entry); },
      "tessera: a reader needs copy(source, target), by which fork copies the index of a sequence");
  static_assert(
      requires(const R& r, std::size_t entry, index_t n) {
        r.list_bytes(entry, n, n) + r.side_bytes() + r.bytes(entry);
      }, "tessera: a reader needs list_bytes(entry, n, count), side_bytes() and bytes(entry)");
  static_assert(
      requires(const R& r, const Policies& policies, const kept_bound& readable) {
        { r.upper_bound(policies, readable) } -> std::convertible_to<offset_t>;
      }, "tessera: a reader needs offset_t upper_bound(policies, readable), the most that bytes(entry) can be");
  return true;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
