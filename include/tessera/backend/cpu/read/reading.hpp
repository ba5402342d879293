// What decode steps read on the CPU: everything stored or a filter's candidates, all of it or a reader's choice of it.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/plan/layer_peak.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../store/kv_store.hpp"
#include "candidates.hpp"
#include "exact/exact_reader.hpp"
#include "extrema/extrema_reader.hpp"
#include "means/block_mean_reader.hpp"
#include "segments/segment_reader.hpp"
#include "segments/segmented_view.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Reads everything, and stores nothing beside the rows.
template <class Recipe>
struct whole_reader : reader_without_index<Recipe> {
  explicit whole_reader(const model_shape&) {}
};

template <class Recipe>
requires(!Recipe::retrieve_type::retrieves) struct reader_of<Recipe> {
  using type = whole_reader<Recipe>;
};

/// The recipe's reader and, if a filter chooses, the candidates of every (layer, sequence). Candidates last for one
/// turn. There are none during its prompt. Then every slot is a candidate until the filter first chooses.
template <class Recipe>
class reading {
  using retrieve_type = typename Recipe::retrieve_type;
  using store_type = kv_store<typename Recipe::layout_type>;
  static constexpr bool filters = Recipe::retain_type::chooses && !Recipe::retain_type::drops;
  using reader_type = typename reader_of<Recipe>::type;
  static_assert(check_reader<reader_type, planned<Recipe>>());

 public:
  /// A filter's candidates for a layer of one sequence: one set or, where query heads of a group choose apart, one for
  /// each member of the group.
  using candidate_sets = host_vector<candidates>;

  explicit reading(const model_shape& shape)
      : shape_(shape), order_{shape.layers}, reader_(shape), candidates_(shape.layers) {}

  /// Opens a sequence: every layer has no candidates, and an empty index.
  void open(index_t id) {
    if constexpr (filters) candidates_.open(id);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      reader_.open(order_.index({layer, id}));
      if constexpr (filters) {
        selection none;
        none.reset(host_vector<index_t>(std::size_t(shape_.kv_heads), 0));
        candidates_[sequence_layer{layer, id}] = candidate_sets(1);
        candidates_[sequence_layer{layer, id}][0].assign(none);
      }
    }
  }
  /// Releases the memory of an open sequence. Needs none.
  void close(index_t id) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      reader_.clear(order_.index({layer, id}));
      if constexpr (filters) {
        for (candidates& list : candidates_[sequence_layer{layer, id}]) list.clear();
      }
    }
  }

  /// Copies the candidates and indexes of a sequence to an open, empty one, which the caller closes where this throws.
  void copy(index_t source, index_t target) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      reader_.copy(order_.index({layer, source}), order_.index({layer, target}));
      if constexpr (filters) candidates_[sequence_layer{layer, target}] = candidates_[sequence_layer{layer, source}];
    }
  }

  /// Saves the candidates of a sequence, whose lengths are there, or loads them into an open, empty one, which the
  /// caller closes where this throws. Call `restore` when its rows are there, too.
  template <class Archive>
  void transfer(index_t id, store_type& stored, Archive& archive) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      const sequence_layer owner{layer, id};
      if constexpr (filters) {
        index_t sets = index_t(candidates_[owner].size());
        archive.number(sets);
        archive.require(sets == 0 || sets == 1 || sets == shape_.q_heads / shape_.kv_heads,
                        "with sets of candidates of no head");  // none: a layer that reads everything
        candidates_[owner].resize(std::size_t(sets));
        for (candidates& list : candidates_[owner]) list.transfer(stored.lengths(owner), archive);
      }
      const std::size_t index = order_.index(owner);
      if constexpr (requires { reader_.transfer(index, archive); }) reader_.transfer(index, archive);
    }
  }
  /// Builds the index of a loaded sequence anew from its rows.
  void restore(index_t id, store_type& stored, const planned<Recipe>& policies, const layer_roles& roles) {
    for (index_t layer = 0; retrieve_type::retrieves && layer < shape_.layers; ++layer) {
      const sequence_layer owner{layer, id};
      if (!roles.follows_recipe(layer)) continue;
      const candidates* list = nullptr;
      if constexpr (filters) {
        if (candidates_[owner].empty()) continue;  // a prompt comes next
        list = &candidates_[owner].front();
      }
      if constexpr (retrieve_type::retrieves)
        reader_.refresh(order_.index(owner), shown(owner, stored, view(owner, stored), list), policies, true);
    }
  }

  /// How many sets of candidates a layer has: 1, or one for each member of a group.
  index_t members(sequence_layer owner) const { return filters ? index_t(candidates_[owner].size()) : 1; }
  /// A view of what steps may read: the candidates, or everything. Valid until either changes.
  auto view(sequence_layer owner, store_type& stored, index_t member = 0) const {
    if constexpr (filters) {
      return candidates_[owner][std::size_t(member)].view(stored.view(owner));
    } else {
      return stored.view(owner);
    }
  }
  /// One set of a filter's candidates.
  const candidates& list(sequence_layer owner, index_t member) const { return candidates_[owner][std::size_t(member)]; }
  /// Logical positions that steps may read of one head, by any set of candidates.
  host_vector<index_t> positions(sequence_layer owner, index_t head, const store_type& stored) const {
    host_vector<index_t> result;
    if (!filters || candidates_[owner].empty()) {
      for (index_t slot = 0; slot < stored.lengths(owner)[std::size_t(head)]; ++slot) result.push_back(slot);
    } else {
      for (const candidates& list : candidates_[owner]) {
        result.insert(result.end(), list.row(head), list.row(head) + list.count(head));
      }
      std::sort(result.begin(), result.end());
      result.erase(std::unique(result.begin(), result.end()), result.end());
    }
    for (index_t& slot : result) slot = stored.position(owner, head, slot);
    return result;
  }

  /// A view of the chosen slots alone, as the layer will store them. Valid until the next choice.
  auto view_of(sequence_layer owner, store_type& stored, const selection& chosen) {
    const auto all = stored.view(owner);
    (*retained_).assign(chosen, all);
    return (*retained_).view(all);
  }

  /// Plans what steps read once a first stage's choice is committed. Nothing visible changes, and `abandon` forgets the
  /// plan. `chosen` null: there is no choice, and every slot is a candidate. `next`: for `set_candidates`.
  void plan(sequence_layer owner, store_type& stored, const planned<Recipe>& policies,
            const host_vector<selection>* chosen, [[maybe_unused]] candidate_sets& next) {
    [[maybe_unused]] const std::size_t index = order_.index(owner);
    if constexpr (filters) {
      next.resize(chosen ? chosen->size()
                         : std::size_t(reading_members(policies.first, shape_.q_heads / shape_.kv_heads)));
      for (std::size_t m = 0; m < next.size(); ++m) {
        chosen ? next[m].assign((*chosen)[m]) : next[m].assign_all(stored.lengths(owner));
      }
      const candidates& first = next[0];
      reader_.refresh(index, shown(owner, stored, first.view(stored.view(owner)), &first), policies, true);
    } else if constexpr (retrieve_type::retrieves) {
      const bool moves = chosen && chosen->front().counts != stored.lengths(owner);
      if (moves) {
        const auto left = view_of(owner, stored, chosen->front());
        return reader_.refresh(index, shown(owner, stored, left, &retained_.memory), policies, true);
      }
      reader_.refresh(index, shown(owner, stored, view(owner, stored), nullptr), policies, false);
    }
  }
  /// Makes the sets of `plan` the candidates of steps. Needs no memory.
  void set_candidates(sequence_layer owner, candidate_sets& next) { candidates_[owner].swap(next); }
  /// A turn's prompt has begun: removes the candidates of the previous turn. Needs no memory.
  void end_candidates([[maybe_unused]] sequence_layer owner) {
    if constexpr (filters) candidates_[owner].clear();
  }
  /// A step, or the end of a prompt, has failed: removes candidates that the store does not have. Needs no memory.
  void abandon(sequence_layer owner, const store_type& stored) {
    reader_.forget(order_.index(owner));
    if constexpr (filters) {
      for (candidates& list : candidates_[owner]) list.abandon(stored.lengths(owner));
    }
  }

  /// The smallest position that a sequence can go back to, as far as its reader decides it.
  static constexpr index_t settled(index_t next) {
    if constexpr (requires { requires reader_type::steps_are_settled; }) return next;
    return 0;
  }
  /// Tokens were taken back from the store. `ends_lists`: candidates are lost. Needs no memory.
  void truncate(sequence_layer owner, const store_type& stored, [[maybe_unused]] bool ends_lists) {
    const host_vector<index_t>* lengths = &stored.lengths(owner);
    if constexpr (filters) {
      for (candidates& list : candidates_[owner]) ends_lists ? list.clear() : list.abandon(*lengths);
      if (!candidates_[owner].empty()) lengths = &candidates_[owner].front().counts();
    }
    if constexpr (requires { reader_.truncate(order_.index(owner), *lengths); }) {
      reader_.truncate(order_.index(owner), *lengths);
    } else {
      reader_.forget(order_.index(owner));
    }
  }

  /// Adds the newest `tokens` tokens of the store.
  void append(sequence_layer owner, store_type& stored, index_t tokens) {
    if constexpr (filters) {
      for (candidates& list : candidates_[owner]) list.append(stored.lengths(owner), tokens);
    }
    const candidates* list = nullptr;
    if constexpr (filters) list = &candidates_[owner].front();
    reader_.append(order_.index(owner), shown(owner, stored, view(owner, stored), list), tokens);
  }

  /// The slots of `all` that a step attends; null: all of them. `bytes` gets the bytes read beside the attended tokens.
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

  /// Corrects the output of a step that attended the last choice.
  template <class View>
  void complete(sequence_layer owner, const View& all, index_t tokens, const rows_view<float>& out) {
    reader_.complete(order_.index(owner), all, tokens, shape_.q_heads / shape_.kv_heads, out);
  }

  /// Bytes allocated for candidates, index and sums.
  offset_t bytes(sequence_layer owner) const {
    offset_t bytes = reader_.bytes(order_.index(owner));
    if constexpr (filters) {
      for (const candidates& list : candidates_[owner]) bytes += list.bytes();
    }
    return bytes;
  }
  /// The most that a layer takes.
  offset_t upper_bound(const planned<Recipe>& policies, const layer_peak& peak) const {
    if (!peak.follows_recipe) return reader_.upper_bound(policies, {});  // an index without tokens
    offset_t bytes = reader_.upper_bound(policies, peak.readable);
    if constexpr (filters) {
      const index_t members = reading_members(policies.first, shape_.q_heads / shape_.kv_heads);
      bytes += members * rows_with_room(peak.readable.by_head) * offset_t(sizeof(index_t));
    }
    return bytes;
  }

 private:
  /// The view that a reader gets: with segments of its slots, if the recipe's steps need them. `list`: which of the
  /// stored slots the view has; null: all.
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

  /// Bytes of candidates and sums that a step reads of a head that has n slots and attends `count`.
  offset_t side_bytes(sequence_layer owner, index_t n, index_t count) const {
    return (filters ? reader_.list_bytes(order_.index(owner), n, count) : 0) + reader_.side_bytes();
  }

  model_shape shape_;
  sequence_major order_;
  reader_type reader_;
  sequence_table<candidate_sets> candidates_;  // of a filter
  scratch<candidates> retained_;
  scratch<selection> chosen_;
  selection_view chosen_view_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
