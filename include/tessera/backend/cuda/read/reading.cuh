// What decode steps read on the device: everything or a filter's candidates, and of these either all or a reader's
// choice.
#pragma once

#include <type_traits>

#include "../../../core/host/host_vector.hpp"
#include "../store/kv_store.cuh"
#include "exact/detail/exact_reader.cuh"
#include "extrema/detail/extrema_reader.cuh"
#include "lists/candidates.cuh"
#include "means/detail/block_mean_reader.cuh"
#include "segments/detail/segment_reader.cuh"
#include "segments/segment_means.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The reader of recipes that read everything that they may.
template <class Recipe, class View, class Out>
class whole_reader : public slot_reader, public reader_without_index<Recipe, View, Out> {
 public:
  whole_reader(const Recipe&, const model_shape&, const cache_options&, const device_info&) {}
  struct fitted_operation {};
  fitted_operation fit(const Recipe&, const model_shape&, const cache_options&, const device_info&) const { return {}; }
  void adopt(fitted_operation&&) {}
  /// Whether the step's output is written already.
  bool choose(index_t, const View&, const rows_view<const typename View::element_type>&, const index_t*,
              const logit_rule&, const rows_view<Out>&, const rows_view<float>&, selection_view&, cudaStream_t) const {
    return false;
  }
  static offset_t attended(const planned<Recipe>&, offset_t n, const head_place&) { return n; }
  static offset_t bytes_read(const planned<Recipe>&, offset_t, const head_place&) { return 0; }
};

/// The reader of a recipe whose steps read everything.
template <class Recipe, class View, class Out>
requires(!Recipe::retrieve_type::retrieves) struct reader_of<Recipe, View, Out> {
  using type = whole_reader<Recipe, View, Out>;
};

/// The candidates, where a filter chooses some, and the recipe's reader.
template <class Recipe, class Out>
class reading {
  using retain_type = typename Recipe::retain_type;
  using store_type = kv_store<typename Recipe::layout_type>;
  using all_view = typename store_type::view_type;
  using T = typename all_view::element_type;
  static constexpr bool filters = retain_type::chooses && !retain_type::drops;
  using candidates_type = std::conditional_t<filters, cuda::candidates<all_view>, no_candidates<all_view>>;

 public:
  using view_type = typename candidates_type::view_type;
  /// The view that a reader gets. In recipes whose steps read segments it has the segments of its slots.
  using shown_type = std::conditional_t<Recipe::needs_step_segments, segmented_view<view_type>, view_type>;
  using reader_type = typename reader_of<Recipe, shown_type, Out>::type;
  static constexpr bool has_index = !std::is_base_of_v<reader_without_index<Recipe, shown_type, Out>, reader_type>;

  reading(const Recipe& recipe, const model_shape& shape, const cache_options& options, const device_info& device)
      : candidates_(shape, options.sequences, options.tokens,
                    reading_members(recipe.retain, shape.q_heads / shape.kv_heads),
                    fires_in_steps<typename Recipe::schedule_type>),
        reader_(recipe, shape, options, device) {}

  candidates_type& candidates() { return candidates_; }
  const candidates_type& candidates() const { return candidates_; }
  reader_type& reader() { return reader_; }
  const reader_type& reader() const { return reader_; }

  host_vector<detail::gathered_column> gathered() const {
    auto all = candidates_.gathered();
    for (const auto& column : reader_.gathered()) all.push_back(column);
    return all;
  }
  void require_covered(const planned<Recipe>& policies) const { reader_.require_covered(policies); }
  void set_plan(index_t id, const planned<Recipe>& policies, cudaStream_t stream) {
    reader_.set_plan(id, policies, stream);
  }

  template <class PoliciesOf>
  void set_reads(const host_vector<index_t>& ids, const PoliciesOf& policies_of, cudaStream_t stream) {
    reader_.set_reads(ids, policies_of, stream);
  }

  /// Errors   the reader has no room for `tokens` more.
  void require_fits(sequence_layer owner, const store_type& store, index_t tokens) const {
    reader_.require_fits(offset_t(candidates_.bound(owner, store.bound(owner)).longest) + tokens);
  }

  /// Called when a prompt has ended: the reader's index of a layer of one sequence is built anew.
  void refresh(sequence_layer owner, const store_type& store, cudaStream_t stream) const {
    const token_bound held = candidates_.bound(owner, store.bound(owner));
    const all_view all = store.view(owner);
    reader_.refresh(owner, shown(store, all, candidates_.view(owner, all)), held.longest, stream);
  }
  /// The smallest position that a sequence can go back to, as far as its reader decides it.
  static constexpr index_t settled(index_t next) {
    if constexpr (requires { requires reader_type::steps_are_settled; }) return next;
    return 0;
  }
  /// Called when the newest `tokens` of a layer were taken back from the store. `ends_lists`: candidates are lost.
  void truncate(sequence_layer owner, const store_type& store, index_t tokens, bool ends_lists, cudaStream_t stream) {
    if (ends_lists) return candidates_.end_lists(owner, stream);
    candidates_.drop_newest(owner, tokens, stream);
    refresh(owner, store, stream);
  }
  /// Called when slots of a batch have moved in place.
  void rebuild(index_t layer, const index_t* ids, const store_type& store, const all_view& all,
               cudaStream_t stream) const {
    reader_.rebuild(layer, ids, shown(store, all, candidates_.batch_view(layer, all)), stream);
  }

  /// `view`, which shows slots of the store's view `all`, as the reader sees it.
  shown_type shown([[maybe_unused]] const store_type& store, [[maybe_unused]] const all_view& all,
                   const view_type& view) const {
    if constexpr (Recipe::needs_step_segments) {
      return {view, store.segments(all)};
    } else {
      return view;
    }
  }

  /// The view that a batch may read; of one member of the group, where query heads read apart.
  view_type batch_view(index_t layer, const all_view& all, index_t member = 0) const {
    return candidates_.batch_view(layer, all, member);
  }

 private:
  candidates_type candidates_;
  reader_type reader_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
