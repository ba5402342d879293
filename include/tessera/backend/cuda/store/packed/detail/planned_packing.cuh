// What is packed of whole rows on the device: how it is planned, and carried out by head where heads differ.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "choices/noted_choices.cuh"
#include "segment_maker.cuh"
#include "segment_searches.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// A store of packed rows with what makes its segments, and the plans of what is packed: all heads alike, or each
/// apart.
template <packing_layout Layout>
class planned_packing : public noted_choices<Layout> {
  using base = noted_choices<Layout>;

 public:
  using typename base::view_type;

  planned_packing(index_t layers, index_t sequences, index_t kv_heads, index_t tokens, offset_t rows,
                  const column_set& with, const typename Layout::placement_type& where, const Layout& layout,
                  const layer_roles& roles)
      : base(layers, sequences, kv_heads, tokens, rows, with, where, layout, roles),
        searches_(layout.rows, packed_.formats(), packing_.count, sequences, kv_heads, packed_.max_segments()),
        maker_(layout, packed_.formats(), with.mean_block, packing_.count, sequences, kv_heads, tokens) {}

  segment_searches<Layout, view_type>& searches() { return searches_; }
  const segment_searches<Layout, view_type>& searches() const { return searches_; }

 protected:
  using base::heads_, base::layout_, base::packed_, base::packed_owner, base::packing_, base::packs, base::view,
      base::whole_, base::with_;
  using packing_plan = cuda::packing_plan<view_type>;

  /// Whole rows of an entry that its tail packs in a turn with a prompt of `prompt` tokens, and what becomes of them.
  struct due_part {
    index_t rows = 0;
    due_rows fate = due_rows::stay_whole;
    bool begins() const { return fate == due_rows::begin_segments; }
  };
  due_part due(sequence_layer owner, packing_moment when, index_t prompt) const {
    if (!packs(owner.layer)) return {};
    const index_t whole = whole_.bound(owner).longest;
    const auto& tail = layout_.rows.tail;
    const index_t all =
        when == packing_moment::step_end ? tail.packed_after_step(whole) : tail.packed_after_prompt(whole);
    return due(owner, all, when, prompt);
  }
  /// The same of `all` rows of the longest head.
  due_part due(sequence_layer owner, index_t all, packing_moment when, index_t prompt) const {
    const auto& rows = layout_.rows;
    const sequence_layer packed = packed_owner(owner);
    const auto& segments = packed_.segments(packed);
    packed_so_far before;
    if (!segments.empty()) {
      const segment_record& joined = searches_.like(packed, segments);
      before = {(std::max)(1, packed_.rows(packed)), 0};
      for (const segment_record& one : segments) {
        if (&one == &joined || (joined.k_basis && one.k_basis == joined.k_basis)) before.in_last_basis += one.rows;
      }
      // Where tokens have been dropped, a segment's length says nothing of its basis: rows join.
      if (packed_.is_scattered(packed)) before.in_last_basis = rows.lasting_basis_rows();
    }
    due_rows fate = rows.fate(before, all, when, prompt);
    if (all == 0 || fate == due_rows::stay_whole) return {};
    // A conversation that drops tokens may have had more of them than there is room for: it goes on in its last basis.
    const offset_t wanted = offset_t(segments.size()) + rows.segments_of(all, when != packing_moment::step_end);
    if (with_.drops && !segments.empty() && wanted > packed_.max_segments()) fate = due_rows::join_last_segment;
    return {all, fate};
  }

  /// Adds an owner's rows that are due to a plan.
  void plan_owner(packing_plan& made, sequence_layer owner, packing_moment when, index_t prompt, cudaStream_t stream) {
    const due_part part = this->due(owner, when, prompt);
    if (part.rows == 0) return;
    const host_vector<index_t> by_head = this->due_by_head(owner, when);
    if (!by_head.empty())
      return plan_rows(made, owner, part, by_head, this->left_of(whole_.held_by_head(owner), by_head), nullptr, stream);
    const index_t left = whole_.bound(owner).longest - part.rows;
    plan_rows(made, owner, part, {}, {{left, offset_t(heads_) * left}, {}}, nullptr, stream);
  }
  /// The same for what a choice leaves.
  void plan_choice(packing_plan& made, noted_choice& choice, index_t prompt, cudaStream_t stream) {
    const index_t* const whole = choice.whole(heads_);
    for (index_t h = 0; h < heads_; ++h) choice.due[std::size_t(h)] = layout_.rows.tail.packed_after_prompt(whole[h]);
    const due_part part = this->due(choice.owner, *std::max_element(choice.due.begin(), choice.due.end()),
                                    packing_moment::prompt_end, prompt);
    if (part.rows == 0) choice.due.assign(std::size_t(heads_), 0);
    plan_rows(made, choice.owner, part, choice.due, this->left_of({whole, whole + heads_}, choice.due), &choice,
              stream);
  }
  /// Whether rows that go on in the last basis join the last segment, behind a choice where there is one. Its blocks
  /// must be whole. Where there is no room for another segment, rows join it whatever its blocks are.
  bool joins(sequence_layer packed, const noted_choice* choice) const {
    const auto& held = packed_.segments(packed);
    if (!searches_.joins(packed, held)) return false;
    const index_t block = with_.drops ? held.back().block : 0;
    if (block <= 1 || index_t(held.size()) >= packed_.max_segments()) return true;
    const index_t* const rows = choice ? choice->counts.data() + (held.size() - 1) * std::size_t(heads_)
                                       : packed_.rows_by_head(packed, held.back());
    return std::all_of(rows, rows + heads_, [&](index_t length) { return length % block == 0; });
  }
  /// `by_head`: due rows, where heads are packed apart; `left`: bounds of the rows that stay whole.
  void plan_rows(packing_plan& made, sequence_layer owner, const due_part& part, const host_vector<index_t>& by_head,
                 const kept_bound& left, noted_choice* choice, cudaStream_t stream) {
    const sequence_layer packed = packed_owner(owner);
    const auto& held = packed_.segments(packed);
    const index_t due = part.rows;
    const bool begins = part.begins(), cuts = begins && made.cuts;
    const bool joins = due > 0 && !begins && this->joins(packed, choice);
    if (due > 0 && !joins) packed_.require_segments(index_t(held.size()) + layout_.rows.segments_of(due, cuts));
    if (this->drops(owner))
      this->require_rows(owner, choice, by_head.empty() ? host_vector<index_t>(std::size_t(heads_), due) : by_head,
                         !joins);
    if (choice && choice->drops_packed) packed_.plan_keep(packed, choice->counts.data(), choice->segments);
    made.owners.push_back(owner);
    made.left.push_back(left);
    made.due.push_back(due), made.by_head.push_back(by_head), made.begins.push_back(begins);
    made.joins.push_back(joins);
    made.originals.push_back(begins ? host_vector<rows_before>{} : searches_.blocks_for(packed, due));
    packed_.make_room(packed, std::size_t(layout_.rows.segments_of(due, cuts)));
    made.apart.push_back({});
    if (begins && by_head.empty()) {
      add_spans(made.new_spans, view(owner), owner.layer, due, cuts);
    } else if (begins) {
      host_vector<segment_span<view_type>> spans;
      add_spans(spans, this->due_side_by_side(owner, choice, by_head, due, stream), owner.layer, due, cuts);
      made.apart.back() = maker_.memory_for(spans.size());
      maker_.find_bases(spans, made.apart.back(), stream);
    }
  }
  /// Packs what is due of one owner whose heads differ, after a choice has been carried out.
  void commit_by_head(packing_plan& made, std::size_t i, cudaStream_t stream) {
    const sequence_layer owner = made.owners[i], packed = packed_owner(owner);
    const host_vector<index_t>& by_head = made.by_head[i];
    const index_t due = made.due[i];
    noted_choice* const choice = this->choice_of(owner);
    const bool gathers = due > 0 && (choice || made.begins[i]);
    const view_type rows = gathers ? this->due_side_by_side(owner, choice, by_head, due, stream) : view(owner);
    const index_t* const due_rows = this->uploaded(owner, by_head, stream);
    selection_view left;
    if (choice)
      left = this->keep_packed(*choice, stream);
    else
      this->add_positions(owner, due_rows, due, stream);
    std::size_t begun = 0;
    layout_.rows.for_each_segment(due, made.cuts && made.begins[i], [&](index_t first, index_t count) {
      if (made.begins[i]) {
        const segment_span<view_type> span{rows, owner.layer, first, count};
        packed_.begin_segment(packed, maker_.begin(made.apart[i], begun++, span, packed, stream), stream);
      } else if (!made.joins[i]) {
        packed_.begin_segment(packed, searches_.like(packed, packed_.segments(packed)).without_rows(), stream);
      }
      const auto added = [&](index_t h) { return std::clamp(by_head[std::size_t(h)] - first, index_t(0), count); };
      packed_.grew_by_head(packed, added, stream);
      const std::size_t last = packed_.segments(packed).size() - 1;
      made.problems.clear();
      made.problems.push_back({rows, first, count, due_rows, index_t(last)});
      maker_.encode(made.problems, stream);
      const index_t* const all = packed_.rows_by_head(packed, packed_.segments(packed)[last]);
      packed_.renew_means(packed, last, [&](index_t h) { return all[h] - added(h); }, stream);
    });
    if (choice) return whole_.keep(owner, {left, std::move(made.left[i])}, stream);
    made.oldest.push_back({whole_.view(owner), due, due_rows});
    whole_.dropped(owner, made.left[i], *std::min_element(by_head.begin(), by_head.end()));
  }
  /// Plans memory for all rows of a plan, in the formats that have been found.
  void plan_memory(const packing_plan& made) {
    std::size_t begun = 0;
    for (std::size_t i = 0; i < made.owners.size(); ++i) {
      const sequence_layer packed = packed_owner(made.owners[i]);
      if (made.is_apart(i)) {
        plan_memory_by_head(made, i, packed);
        continue;
      }
      const auto& held = packed_.segments(packed);
      layout_.rows.for_each_segment(made.due[i], made.cuts && made.begins[i], [&](index_t, index_t count) {
        if (made.begins[i])
          packed_.plan_rows(packed, maker_.record(made.memory, begun++), true, count);
        else
          packed_.plan_rows(packed, searches_.like(packed, held), !made.joins[i], count);
      });
    }
  }
  void plan_memory_by_head(const packing_plan& made, std::size_t i, sequence_layer packed) {
    const noted_choice* const choice = this->choice_of(made.owners[i]);
    const auto& held = packed_.segments(packed);
    std::size_t begun = 0;
    layout_.rows.for_each_segment(made.due[i], made.cuts && made.begins[i], [&](index_t first, index_t count) {
      const auto added = [&](index_t h) {
        return std::clamp(made.by_head[i][std::size_t(h)] - first, index_t(0), count);
      };
      if (made.begins[i]) return packed_.plan_rows_by_head(maker_.record(made.apart[i], begun++), nullptr, true, added);
      if (!made.joins[i])
        return packed_.plan_rows_by_head(searches_.like(packed, held).without_rows(), nullptr, true, added);
      const bool keeps = choice && choice->drops_packed;
      const index_t* const rows = choice ? choice->counts.data() + (held.size() - 1) * std::size_t(heads_)
                                         : packed_.rows_by_head(packed, held.back());
      packed_.plan_rows_by_head(keeps ? choice->segments.back().record : held.back(), rows, false, added);
    });
  }
  /// Plans memory of new segments. Returns whether there is enough.
  bool plan_new_segments(const host_vector<segment_span<view_type>>& spans, const bases_and_sets& memory,
                         sequence_layer packed) {
    packed_.forget_plan();
    try {
      for (std::size_t i = 0; i < spans.size(); ++i)
        packed_.plan_rows(packed, maker_.record(memory, i), true, spans[i].count);
    } catch (const error&) {
      packed_.forget_plan();
      return false;
    } catch (...) {
      packed_.forget_plan();
      throw;
    }
    return true;
  }

  void add_spans(host_vector<segment_span<view_type>>& to, const view_type& rows, index_t layer, index_t due,
                 bool cuts) const {
    layout_.rows.for_each_segment(due, cuts,
                                  [&](index_t first, index_t count) { to.push_back({rows, layer, first, count}); });
  }
  /// Packs whole rows into segments, all rows of the plan in one go.
  void encode(packing_plan& made, cudaStream_t stream) {
    made.problems.clear();
    for (const joining_rows& rows : made.joining)
      made.problems.push_back({view(rows.owner), rows.first, rows.count, nullptr, rows.segment});
    maker_.encode(made.problems, stream);
    searches_.noted(made.problems, made.joining, packing_, stream);
    for (std::size_t i = 0; with_.drops && i < made.joining.size(); ++i) {
      const joining_rows& rows = made.joining[i];
      packed_.renew_means(
          packed_owner(rows.owner), std::size_t(rows.segment), [&](index_t) { return rows.stored; }, stream);
    }
  }

  segment_searches<Layout, view_type> searches_;
  segment_maker<Layout, view_type> maker_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
