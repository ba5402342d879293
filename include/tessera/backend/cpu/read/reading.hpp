// What decode steps read on the CPU: of everything, or of a filter's candidates; all of it, or what a reader chooses.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../store/kv_store.hpp"
#include "candidates.hpp"
#include "exact/exact_reader.hpp"
#include "extrema/extrema_reader.hpp"
#include "means/block_mean_reader.hpp"
#include "segments/segment_reader.hpp"
#include "segments/segmented_view.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Reads everything, and keeps nothing beside the rows.
template <class Recipe>
struct whole_reader {
  explicit whole_reader(const model_shape&) {}
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
};

template <class Recipe>
requires(!Recipe::retrieve_type::retrieves) struct reader_of<Recipe> {
  using type = whole_reader<Recipe>;
};

/// Every (layer, sequence) of a cache: candidates where a filter chooses, and what the recipe's reader keeps. A
/// filter's lists are those of one turn: none while its prompt comes in, everything until the filter first chooses.
template <class Recipe>
class reading {
  using retrieve_type = typename Recipe::retrieve_type;
  using store_type = kv_store<typename Recipe::layout_type>;
  static constexpr bool filters = Recipe::retain_type::chooses && !Recipe::retain_type::drops;
  using reader_type = typename reader_of<Recipe>::type;
  static_assert(check_reader<reader_type>());

 public:
  /// A filter's lists for a layer of one sequence: one for each kv_head or, where query heads of a group choose apart,
  /// one such set for each place in the group.
  using lists = host_vector<candidates>;

  explicit reading(const model_shape& shape)
      : shape_(shape), order_{shape.layers}, reader_(shape), passed_(shape.layers) {}

  /// Makes an empty place of every layer.
  void open(index_t id) {
    if constexpr (filters) passed_.open(id);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      reader_.open(order_.index({layer, id}));
      if constexpr (filters) {
        selection none;
        none.reset(host_vector<index_t>(std::size_t(shape_.kv_heads), 0));
        passed_[sequence_layer{layer, id}] = lists(1);
        passed_[sequence_layer{layer, id}][0].assign(none);
      }
    }
  }
  /// Gives the memory of an open id's places back. Needs none.
  void close(index_t id) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      reader_.clear(order_.index({layer, id}));
      if constexpr (filters) {
        for (candidates& list : passed_[sequence_layer{layer, id}]) list.clear();
      }
    }
  }

  /// An open, empty id's places get what those of another one read. The caller closes it where this throws.
  void copy(index_t from, index_t to) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      reader_.copy(order_.index({layer, from}), order_.index({layer, to}));
      if constexpr (filters) passed_[sequence_layer{layer, to}] = passed_[sequence_layer{layer, from}];
    }
  }

  /// The sets of lists of a place: each is read by the query heads that have its place in their group, or by all.
  index_t members(sequence_layer owner) const { return filters ? index_t(passed_[owner].size()) : 1; }
  /// What steps may read: the candidates, or everything. Valid until either changes.
  auto view(sequence_layer owner, store_type& stored, index_t member = 0) const {
    if constexpr (filters) {
      return passed_[owner][std::size_t(member)].view(stored.view(owner));
    } else {
      return stored.view(owner);
    }
  }
  /// Logical positions of what steps may read of one head, by any list.
  host_vector<index_t> positions(sequence_layer owner, index_t head, const store_type& stored) const {
    host_vector<index_t> result;
    if (!filters || passed_[owner].empty()) {
      for (index_t slot = 0; slot < stored.lengths(owner)[std::size_t(head)]; ++slot) result.push_back(slot);
    } else {
      for (const candidates& list : passed_[owner]) {
        result.insert(result.end(), list.row(head), list.row(head) + list.count(head));
      }
      std::sort(result.begin(), result.end());
      result.erase(std::unique(result.begin(), result.end()), result.end());
    }
    for (index_t& slot : result) slot = stored.position(owner, head, slot);
    return result;
  }

  /// What a place will store when all but the chosen slots have been dropped. Valid until the next choice.
  auto view_of(sequence_layer owner, store_type& stored, const selection& chosen) {
    const auto all = stored.view(owner);
    (*kept_).assign(chosen, all);
    return (*kept_).view(all);
  }

  /// Plans what steps read once a first stage's choice is carried out; until then nobody sees a difference, and
  /// `abandon` forgets it. `chosen` null: it has not chosen, and a filter lets everything through. `next`: the lists to
  /// pass.
  void plan(sequence_layer owner, store_type& stored, const planned<Recipe>& policies,
              const host_vector<selection>* chosen, [[maybe_unused]] lists& next) {
    [[maybe_unused]] const std::size_t index = order_.index(owner);
    if constexpr (filters) {
      next.resize(chosen ? chosen->size()
                          : std::size_t(reading_members(policies.first, shape_.q_heads / shape_.kv_heads)));
      for (std::size_t m = 0; m < next.size(); ++m) {
        chosen ? next[m].assign((*chosen)[m]) : next[m].assign_all(stored.lengths(owner));
      }
      const candidates& passed = next[0];
      reader_.refresh(index, shown(owner, stored, passed.view(stored.view(owner)), &passed), policies, true);
    } else if constexpr (retrieve_type::retrieves) {
      const bool moves = chosen && chosen->front().counts != stored.lengths(owner);
      if (moves) {
        const auto left = view_of(owner, stored, chosen->front());
        return reader_.refresh(index, shown(owner, stored, left, &kept_.memory), policies, true);
      }
      reader_.refresh(index, shown(owner, stored, view(owner, stored), nullptr), policies, false);
    }
  }
  /// From now on steps read what a filter lets through since `plan`. Needs no memory.
  void pass(sequence_layer owner, lists& next) { passed_[owner].swap(next); }
  /// A turn's prompt has begun: a filter's lists are those of the turn before, and go. Needs no memory.
  void end_lists([[maybe_unused]] sequence_layer owner) {
    if constexpr (filters) passed_[owner].clear();
  }
  /// After a step, or a prompt's end, that came to nothing: candidates that the store does not hold go. Needs no
  /// memory.
  void abandon(sequence_layer owner, const store_type& stored) {
    reader_.forget(order_.index(owner));
    if constexpr (filters) {
      for (candidates& list : passed_[owner]) list.abandon(stored.lengths(owner));
    }
  }

  /// Takes in the newest `tokens` tokens of the store.
  void append(sequence_layer owner, store_type& stored, index_t tokens) {
    if constexpr (filters) {
      for (candidates& list : passed_[owner]) list.append(stored.lengths(owner), tokens);
    }
    const candidates* list = nullptr;
    if constexpr (filters) list = &passed_[owner].front();
    reader_.append(order_.index(owner), shown(owner, stored, view(owner, stored), list), tokens);
  }

  /// What a step attends, as slots of `view`: null for all of it. `bytes` becomes what is read beside the tokens
  /// attended.
  template <class View, class Q>
  const selection_view* choose(sequence_layer owner, const View& all, const query_rows<Q>& queries,
                               const logit_rule& rule, const planned<Recipe>& policies, offset_t& bytes,
                               executor& workers) {
    bytes = 0;
    const selection_view* read = nullptr;
    if constexpr (retrieve_type::retrieves) {
      host_vector<index_t> lengths;
      for (index_t h = 0; h < all.kv_heads; ++h) lengths.push_back(all.length(0, h));
      chosen_.memory.reset(lengths);
      bytes = reader_.choose(order_.index(owner), all, queries, rule, policies, *chosen_, workers);
      chosen_view_ = chosen_.memory.view();
      read = &chosen_view_;
    }
    for (index_t h = 0; h < all.kv_heads; ++h) {
      const index_t n = all.length(0, h);
      bytes += side_bytes(owner, n, read ? read->count(h) : n);
    }
    return read;
  }

  /// Corrects the output of what `choose` chose last.
  template <class View>
  void complete(sequence_layer owner, const View& all, index_t tokens, const rows_view<float>& out) {
    reader_.complete(order_.index(owner), all, tokens, shape_.q_heads / shape_.kv_heads, out);
  }

  /// Bytes that are allocated for lists, index and sums.
  offset_t bytes(sequence_layer owner) const {
    offset_t bytes = reader_.bytes(order_.index(owner));
    if constexpr (filters) {
      for (const candidates& list : passed_[owner]) bytes += list.bytes();
    }
    return bytes;
  }

 private:
  /// What a reader gets to see: of a recipe whose steps see segments, with those of the view's slots. `list`: which of
  /// the stored slots they are; null: all.
  template <class View>
  auto shown([[maybe_unused]] sequence_layer owner, [[maybe_unused]] store_type& stored, const View& view,
             [[maybe_unused]] const candidates* list) const {
    if constexpr (Recipe::needs_step_segments) {
      const columns& beside = stored.beside(owner);
      return segmented_view<View>{view, {beside.segments(), 0, 0, beside.begins().data()}, list};
    } else {
      return view;
    }
  }

  /// Bytes of lists and sums that a step reads of one head, which has n slots and attends `count`.
  offset_t side_bytes(sequence_layer owner, index_t n, index_t count) const {
    return (filters ? reader_.list_bytes(order_.index(owner), n, count) : 0) + reader_.side_bytes();
  }

  model_shape shape_;
  sequence_major order_;
  reader_type reader_;
  sequence_table<lists> passed_;  // of a filter
  scratch<candidates> kept_;
  scratch<selection> chosen_;
  selection_view chosen_view_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
