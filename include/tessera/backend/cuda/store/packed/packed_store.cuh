// The store of a cache of packed rows on the device: segments, and behind them the rows that are not packed yet.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../layout/packed_rows.hpp"
#include "../../../../layout/stored.hpp"
#include "../pack.cuh"
#include "detail/planned_packing.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Has the calls of kv_store. New tokens are whole rows, in a kv_store. `plan_packing` finds the rows that are due, and
/// their bases. `commit_packing` packs them into segments. Layers that do not follow the recipe never pack. Rows of
/// segments are dropped by a choice that was noted: when a prompt ends, what is left of its rows is packed. Without
/// choices all heads have equal lengths; the host knows them in any case.
/// Full tails are packed between two steps: sequences of a batch fill theirs at different steps, and a recorded step
/// would launch the packing for all of them in every layer.
/// Memory   whole rows as in a kv_store; segments in pages of the same pool, or, in planes, of every (layer, sequence)
///          for `tokens` tokens; and bases when segments begin: 4 * channels * dim bytes for K and V of a head.
/// Errors   when made, what the device does not pack; later, a second moment with NaN or infinity, and where rows are
///          dropped, segments whose longest heads have more than `tokens` rows together: tessera::error.
template <packing_layout Layout>
class kv_store<Layout> : public planned_packing<Layout> {
  using rows_type = typename Layout::rows_type;
  using parts_type = planned_packing<Layout>;
  using typename parts_type::packing_plan;
  using whole_store = typename parts_type::whole_store;
  using parts_type::due;
  using parts_type::heads_;
  using parts_type::layout_;
  using parts_type::maker_;
  using parts_type::packed_;
  using parts_type::packed_owner;
  using parts_type::packed_rows_of;
  using parts_type::packing_;
  using parts_type::packs;
  using parts_type::searches_;
  using parts_type::stream_beside_;
  using parts_type::tokens_;
  using parts_type::whole_;
  static_assert(check_device_packing<Layout>());

 public:
  using T = typename Layout::element_type;
  using view_type = typename parts_type::view_type;
  using parts_type::bound;
  using parts_type::view;
  using movers = typename whole_store::movers;
  static constexpr bool in_groups = whole_store::in_groups;

  kv_store(index_t layers, index_t sequences, index_t kv_heads, index_t tokens, offset_t rows, const column_set& with,
           const typename Layout::placement_type& where, const Layout& layout, const layer_roles* roles)
      : parts_type(layers, sequences, kv_heads, tokens, rows, with, where,
                   (require_packable(layout, with.mean_block), layout), *roles),
        newest_(kv_heads, layout_.rows.tail.tail) {
    whole_.hold_at_least(layout_.rows.tail.tail + spare_room(layout_.rows.tail.tail));  // a tail fills without moving
  }

  void require_fits(sequence_layer owner, index_t tokens) const {
    require_tokens_of_head(offset_t(bound(owner).longest) + tokens, tokens_);
  }
  void plan_room(const sequence_layers& owners, index_t tokens, bool moves_rows, cudaStream_t stream) {
    for (const sequence_layer owner : owners) require_fits(owner, tokens);
    const bool drops = !pending_.owners.empty();  // rows that have been packed leave in place
    try {
      plan_whole([&] { whole_.plan_room(owners, tokens, moves_rows || drops); }, stream);
    } catch (...) {
      packed_.forget_plan();
      throw;
    }
  }
  bool moves() const { return whole_.moves(); }
  void abandon() {
    whole_.abandon();
    packed_.forget_plan();
    this->forget_choices();
  }
  void commit_room(const sequence_layers& owners, cudaStream_t stream) {
    const bool itself = std::count(owners.begin(), owners.end(), beside_.owner) > 0;
    if (beside_.is_under_way() && (itself || whole_.moves())) stream_beside_.hold(stream);
    whole_.commit_room(owners, stream);
  }
  void expect(index_t id, index_t tokens, bool moves_rows = false) { whole_.expect(id, tokens, moves_rows); }
  bool packs_chunks() const { return layout_.rows.packs_chunks(); }
  void resize(index_t tokens, cudaStream_t stream) {
    finish_layer(stream);
    whole_.resize(tokens, stream);
  }
  void grew(sequence_layer owner, index_t tokens) { whole_.grew(owner, tokens); }
  void drop_newest(sequence_layer owner, index_t tokens) { whole_.drop_newest(owner, tokens); }
  /// Tokens that came before rows were packed are settled: without them the same rows would still be whole.
  index_t settled(sequence_layer owner, index_t next) const {
    const bool packed = packs(owner.layer) && !packed_.segments(packed_owner(owner)).empty();
    return packed ? next - whole_.since_choice(owner) : 0;
  }
  void forget_prompt(sequence_layer owner) {
    if (packs(owner.layer)) maker_.forget(packed_owner(owner));
  }

  void append_rows(const view_type& view, const rows_view<const T>& k, const rows_view<const T>& v,
                   const index_t* first_position, const index_t* new_tokens, const new_segments& text,
                   cudaStream_t stream) const {
    whole_.append_rows(view.whole, k, v, first_position, new_tokens, text, stream);
  }

  /// Observes the last queries of a prompt chunk whose tokens have been appended.
  void observe_prompt(sequence_layer owner, const rows_view<const T>& q, cudaStream_t stream) {
    if (packs(owner.layer)) maker_.observe(packed_owner(owner), q, stream);
  }

  /// Makes the operations that move whole rows, which sliding layers keep or which stay when a prompt is packed.
  movers fit(index_t batch, index_t kept, const device_info& device) const {
    return whole_.fit(batch, (std::max)(kept, layout_.rows.tail.tail), device);
  }
  void adopt(movers&& fitted) { whole_.adopt(std::move(fitted)); }
  void plan_keep(const sequence_layers& owners, const host_vector<kept_bound>& kept, cudaStream_t stream) {
    plan_whole([&] { whole_.plan_keep(owners, kept); }, stream);
  }
  void keep(sequence_layer owner, const kept_slots& kept, cudaStream_t stream) {
    if (beside_.is_under_way() && whole_.moves()) stream_beside_.hold(stream);
    whole_.keep(owner, kept, stream);
  }

  /// Plans to pack what is due in a turn with a prompt of `prompt` tokens.
  /// Errors   rows without a basis, or too little memory: tessera::error, and nothing has changed.
  void plan_packing(const sequence_layers& owners, packing_moment when, index_t prompt, cudaStream_t stream) {
    pending_ = {};
    packed_.forget_plan();
    if (std::any_of(owners.begin(), owners.end(),
                    [&](sequence_layer owner) { return due(owner, when, prompt).rows > 0; }))
      finish_layer(stream);
    try {
      packing_plan made;
      made.prompt_ends = when == packing_moment::prompt_end;
      made.cuts = when != packing_moment::step_end;
      for (const sequence_layer owner : owners) {
        if (noted_choice* const choice = this->choice_of(owner))
          this->plan_choice(made, *choice, prompt, stream);
        else
          this->plan_owner(made, owner, when, prompt, stream);
      }
      if (made.prompt_ends) made.ended = owners;
      made.make_room();
      made.memory = maker_.memory_for(made.new_spans.size());
      maker_.find_bases(made.new_spans, made.memory, stream);
      this->plan_memory(made);
      if (!made.owners.empty() && made.prompt_ends) whole_.plan_keep(made.owners, made.left);
      pending_ = std::move(made);
    } catch (...) {
      packed_.forget_plan();
      this->forget_choices();
      throw;
    }
  }
  void commit_packing(cudaStream_t stream) {
    packing_plan made = std::exchange(pending_, {});
    std::size_t begun_count = 0;  // segments that have begun
    for (std::size_t i = 0; i < made.owners.size(); ++i) {
      const sequence_layer owner = made.owners[i], packed = packed_owner(owner);
      if (made.is_apart(i)) {
        this->commit_by_head(made, i, stream);
        continue;
      }
      this->add_positions(owner, nullptr, made.due[i], stream);
      layout_.rows.for_each_segment(made.due[i], made.cuts && made.begins[i], [&](index_t first, index_t count) {
        const auto& all = packed_.segments(packed);
        if (made.begins[i]) {
          packed_.begin_segment(
              packed, maker_.begin(made.memory, begun_count, made.new_spans[begun_count], packed, stream), stream);
          ++begun_count;
        } else if (!made.joins[i]) {
          packed_.begin_segment(packed, searches_.like(packed, all).without_rows(), stream);
        }
        made.joining.push_back({owner, index_t(all.size()) - 1, all.back().slot, all.back().rows, first, count});
        packed_.grew(packed, count, stream);
      });
    }
    this->encode(made, stream);
    for (std::size_t i = 0; i < made.owners.size(); ++i) {
      if (made.is_apart(i)) continue;
      const sequence_layer owner = made.owners[i], packed = packed_owner(owner);
      if (made.begins[i])
        searches_.ended(packed, packed_.segments(packed).size());
      else
        searches_.joined(view(owner), packed, 0, made.due[i], std::move(made.originals[i]), stream);
      searches_.mark(owner.id, stream);
      if (made.prompt_ends) {
        whole_.keep(owner, {newest_.selection(whole_.lengths(owner), made.left[i].longest, stream), made.left[i]},
                    stream);
      } else {
        made.oldest.push_back({whole_.view(owner), made.due[i]});
        whole_.dropped(owner, made.left[i], made.due[i]);  // there is room for the step or chunk that follows
      }
    }
    drop_oldest(made.oldest, stream);
    this->forget_choices();
    for (const sequence_layer owner : made.ended) forget_prompt(owner);
  }

  /// Called when a prompt of `prompt` tokens has been through a layer. Makes its new segments on a second stream. No
  /// view counts them before `finish_layer`. Rows that join an old segment, or cannot be packed, wait for the prompt's
  /// end.
  void pack_layer(sequence_layer owner, index_t prompt, cudaStream_t stream) {
    finish_layer(stream);
    const auto due_part = this->due(owner, packing_moment::prompt_end, prompt);
    const index_t due = due_part.rows;
    const std::size_t held = due > 0 ? packed_.segments(packed_owner(owner)).size() : 0;
    if (!due_part.begins() || index_t(held) + layout_.rows.segments_of(due, true) > packed_.max_segments()) return;
    packing_plan plan;
    this->add_spans(plan.new_spans, view(owner), owner.layer, due, true);
    layer_beside made{owner, due, {}};
    made.segments.reserve(plan.new_spans.size());
    packed_.make_room(packed_owner(owner), plan.new_spans.size());
    bases_and_sets memory = maker_.memory_for(plan.new_spans.size());
    try {
      const cudaStream_t beside = stream_beside_.begin(stream);
      maker_.start_bases(plan.new_spans, memory, beside);
      if (!this->plan_new_segments(plan.new_spans, memory, packed_owner(owner))) return stream_beside_.drain();
      for (std::size_t i = 0; i < plan.new_spans.size(); ++i) {
        segment_record begun = maker_.begin(memory, i, plan.new_spans[i], packed_owner(owner), beside);
        made.segments.push_back(packed_.begin_unseen(packed_owner(owner), std::move(begun), plan.new_spans[i].count,
                                                     made.segments, beside));
        plan.joining = {
            {owner, index_t(held + i), made.segments.back().slot, 0, plan.new_spans[i].first, plan.new_spans[i].count}};
        this->encode(plan, beside);
        made.segments.back().rows = plan.new_spans[i].count;
      }
      stream_beside_.end();
    } catch (...) {
      stream_beside_.drain();
      packed_.forget_unseen(made.segments);
      packed_.forget_plan();
      throw;
    }
    beside_ = std::move(made);
  }
  /// Replaces whole rows by the segments of `pack_layer`. Where rows have no basis or memory is short, nothing changes,
  /// and the prompt's end reports it.
  void finish_layer(cudaStream_t stream) {
    if (!beside_.is_under_way()) return;
    layer_beside made = std::exchange(beside_, {});
    const sequence_layer owner = made.owner;
    stream_beside_.hold(stream), stream_beside_.wait();
    if (!maker_.have_bases()) return packed_.forget_unseen(made.segments);
    const index_t left = whole_.bound(owner).longest - made.due;
    const kept_bound kept{{left, offset_t(heads_) * left}, {}};
    try {
      whole_.plan_keep({owner}, {kept});
    } catch (const error&) {
      return packed_.forget_unseen(made.segments);
    } catch (...) {
      packed_.forget_unseen(made.segments);
      throw;
    }
    for (segment_record& record : made.segments) packed_.add_segment(packed_owner(owner), std::move(record), stream);
    searches_.ended(packed_owner(owner), packed_.segments(packed_owner(owner)).size());
    searches_.mark(owner.id, stream);
    whole_.keep(owner, {newest_.selection(whole_.lengths(owner), left, stream), kept}, stream);
  }

  /// Called between two steps, or before a turn's first chunk. Segments that searches of these sequences have made
  /// replace the old ones. Other searches end before further rows join a segment.
  void settle(const host_vector<index_t>& ids, bool prompt, cudaStream_t stream) {
    for (const index_t id : ids) {
      bool due = prompt;
      for (index_t layer = 0; layer < index_t(packing_.number.size()); ++layer)
        due = due || this->due({layer, id}, packing_moment::step_end, 0).rows > 0;
      searches_.settle(id, packed_, due, stream);
    }
  }
  void plan_copy(index_t from, index_t to, cudaStream_t stream) {
    plan_whole([&] { whole_.plan_copy(from, to); }, stream);  // it may add the segments of the layer beside
    try {
      for (index_t layer = 0; layer < packing_.count; ++layer) packed_.plan_copy(layer, from, to);
      searches_.copy(from, to);
    } catch (...) {
      abandon();
      throw;
    }
  }
  void commit_copy(index_t from, index_t to, cudaStream_t stream) {
    if (beside_.is_under_way()) stream_beside_.hold(stream);
    whole_.commit_copy(from, to, stream);
    for (index_t layer = 0; layer < packing_.count; ++layer) {
      const std::size_t segments = packed_.segments({layer, from}).size();
      packed_.commit_copy(layer, from, to, searches_.finished({layer, from}, segments), stream);
      maker_.copy({layer, from}, {layer, to}, stream);
    }
    packed_.copy_tables(from, to, stream);
    this->copy_positions(from, to, stream);
    searches_.mark(to, stream);
  }
  void clear(index_t id, cudaStream_t stream) {
    if (beside_.owner.id == id) {
      stream_beside_.wait();
      packed_.forget_unseen(beside_.segments);
      beside_ = {};
    }
    whole_.clear(id, stream);
    searches_.clear(id);
    for (index_t layer = 0; layer < packing_.count; ++layer) {
      packed_.clear({layer, id}, stream);
      maker_.forget({layer, id});
    }
  }
  offset_t bytes(sequence_layer owner) const {
    if (!packs(owner.layer)) return whole_.bytes(owner);
    return whole_.bytes(owner) + packed_.bytes(packed_owner(owner)) + searches_.bytes(packed_owner(owner)) +
           parts_type::bytes(owner);
  }
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    capacity bound = whole_.upper_bound(whole_peaks(layout_, peaks));
    for (const layer_peak& peak : peaks) {
      const packed_peak of_layer = packed_peak_of(layout_, peak.turn, peak.stored.longest);
      if (!peak.follows_recipe) continue;
      // Where tokens are dropped, segments may have their rows in different heads.
      offset_t rows = peak.stored.longest;
      if (whole_.with().drops) rows = (std::max)(rows, (std::min)(peak.stored.total, offset_t(peak.turn.tokens())));
      // What follows a choice among packed rows may begin a segment.
      const offset_t followers = whole_.with().drops && whole_.with().mean_block > 1 ? 1 : 0;
      const capacity segments = packed_.upper_bound(rows, of_layer.segments + followers);
      bound.bytes += segments.bytes + searches_.upper_bound(of_layer.originals);
      if (whole_.with().drops) bound.bytes += offset_t(heads_) * rows * offset_t(sizeof(index_t));
      bound.pages += segments.pages;
    }
    return bound;
  }

 private:
  /// Runs a plan of whole rows. If there is no room, releases the rows of the layer beside, and plans again.
  template <class Plan>
  void plan_whole(const Plan& plan, cudaStream_t stream) {
    if (!beside_.is_under_way()) return plan();
    try {
      return plan();
    } catch (const error&) {
      finish_layer(stream);
    }
    plan();
  }

  newest_slots newest_;
  packing_plan pending_;
  layer_beside beside_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
