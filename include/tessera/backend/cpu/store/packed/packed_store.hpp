// The store of a cache of packed rows on the CPU: segments, followed by the rows that are not packed yet.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../../kernel/scratch.hpp"
#include "../kv_store.hpp"
#include "pack_rows.hpp"
#include "packing.hpp"
#include "segment_searches.hpp"
#include "transfer_segments.hpp"
#include "window_squares.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Has the calls of the plain store. New tokens are whole rows. `plan_packing` makes segments of the rows that are due,
/// `commit_packing` replaces the rows by them. A segment that another sequence, or a copy of the store, shares is never
/// written.
template <packing_layout Layout>
class kv_store<Layout> {
  using rows_type = typename Layout::rows_type;
  using whole_rows = placed_rows<whole_layout<Layout>>;
  using segment_type = packed_segment<typename Layout::placement_type>;
  using segment_pointer = std::shared_ptr<segment_type>;
  using row_lists = typename row_packer<Layout>::row_lists;

 public:
  using view_type = packed_view<Layout>;
  using placement_type = typename Layout::placement_type;

  kv_store(index_t layers, index_t kv_heads, const column_set& with, const placement_type& where = {},
           const Layout& layout = {})
      : order_{layers},
        heads_(kv_heads),
        with_(with),
        layout_(layout),
        whole_(where, layers, kv_heads),
        searches_(layers, kv_heads, with.mean_block, layout.rows),
        stored_(layers) {}

  index_t kv_heads() const { return heads_; }
  const host_vector<index_t>& lengths(sequence_layer owner) const { return stored_[owner].lengths; }
  index_t longest(sequence_layer owner) const {
    return *std::max_element(lengths(owner).begin(), lengths(owner).end());
  }
  index_t position(sequence_layer owner, index_t head, index_t slot) const {
    return stored_[owner].beside.position(head, slot);
  }
  host_vector<index_t> positions(sequence_layer owner, index_t head) const {
    host_vector<index_t> result;
    for (index_t i = 0; i < lengths(owner)[std::size_t(head)]; ++i) result.push_back(position(owner, head, i));
    return result;
  }
  columns& beside(sequence_layer owner) { return stored_[owner].beside; }

  void open(index_t id) {
    stored_.open(id, stored_tokens(heads_, with_));
    for (index_t layer = 0; layer < order_.layers; ++layer) whole_.open(order_.index({layer, id}));
    searches_.open(id);
    clear(id);
  }
  void clear(index_t id) {
    searches_.clear(id);
    for (index_t layer = 0; layer < order_.layers; ++layer) {
      whole_.clear(order_.index({layer, id}));
      stored_tokens& stored = stored_[sequence_layer{layer, id}];
      for (auto* counts : {&stored.lengths, &stored.packed, &stored.whole})
        std::fill(counts->begin(), counts->end(), 0);
      stored.beside.clear();
      host_vector<segment_pointer>().swap(stored.segments);
      stored.pending->reset();
      forget_prompt({layer, id});
      stored.since_packing = 0;
    }
  }

  /// Copies a sequence as the plain store does; segments are shared.
  void copy(index_t source, index_t target) {
    for (index_t layer = 0; layer < order_.layers; ++layer) {
      whole_.copy(order_.index({layer, source}), order_.index({layer, target}));
      stored_[sequence_layer{layer, target}] = stored_[sequence_layer{layer, source}];
    }
    searches_.copy(source, target);
  }

  /// Saves or loads a sequence as the plain store does. A search that has not ended begins anew where it is loaded.
  template <class Next, class Archive>
  void transfer_lengths_of(index_t id, const Next& next, Archive& archive) {
    if constexpr (!Archive::loads) searches_.adopt_result(id, segments_of(id));
    for (index_t layer = 0; layer < order_.layers; ++layer) {
      stored_tokens& stored = stored_[sequence_layer{layer, id}];
      transfer_lengths(stored.lengths, next(layer), archive);
      transfer_lengths(stored.packed, next(layer), archive);
      for (std::size_t h = 0; h < stored.lengths.size(); ++h) {
        stored.whole[h] = stored.lengths[h] - stored.packed[h];
        archive.require(stored.whole[h] >= 0, "with more packed rows than rows");
      }
      stored.beside.transfer_kind(stored.lengths, next(layer), archive);
      transfer_count(stored.since_packing, next(layer), archive);
      transfer_segments<Layout::k_dim, Layout::v_dim>(stored.segments, stored.packed, archive);
    }
  }
  template <class Next, class Archive>
  void transfer_rows_of(index_t id, const Next& next, Archive& archive) {
    for (index_t layer = 0; layer < order_.layers; ++layer) {
      stored_tokens& stored = stored_[sequence_layer{layer, id}];
      if constexpr (Archive::loads) whole_.lay_out(order_.index({layer, id}), stored.whole);
      stored.beside.transfer(stored.lengths, next(layer), archive);
      transfer_view(whole_.view(order_.index({layer, id}), stored.whole), archive);
      for (const segment_pointer& segment : stored.segments) transfer_segment_rows(*segment, archive);
    }
    searches_.transfer(id, segments_of(id), archive);
  }

  view_type view(sequence_layer owner) {
    stored_tokens& stored = stored_[owner];
    view_type view;
    view.segments = &stored.segments;
    view.whole = whole_.view(order_.index(owner), stored.whole);
    view.packed = stored.packed.data();
    view.kv_heads = heads_;
    view.lengths = stored.lengths.data();
    view.positions = stored.beside.positions();
    view.position_begin = stored.beside.begins().data();
    return view;
  }

  void expect(index_t id, index_t tokens, bool moves_rows = false) { whole_.expect(id, tokens, moves_rows); }
  bool packs_chunks() const { return layout_.rows.packs_chunks(); }
  whole_rows& rows() { return whole_; }
  const whole_rows& rows() const { return whole_; }
  template <class E>
  void append(sequence_layer owner, const rows_view<const E>& k, const rows_view<const E>& v, index_t first_position,
              const segment_marks& marks = {}) {
    stored_tokens& stored = stored_[owner];
    whole_.make_room(order_.index(owner), stored.whole, k.tokens);
    stored.beside.append(stored.lengths, k.tokens, first_position, marks);
    cpu::append(whole_.view(order_.index(owner), stored.whole), k, v);
    for (index_t& length : stored.lengths) length += k.tokens;
    for (index_t& length : stored.whole) length += k.tokens;
    stored.since_packing += k.tokens;
  }
  /// `observe_prompt` counts `tokens` appended tokens of a turn's prompt, and keeps the squares of its last queries, by
  /// which channels are chosen. `plan_observation` allocates their memory first.
  template <class E>
  void plan_observation(sequence_layer owner, const rows_view<const E>& q) {
    if constexpr (Layout::window > 0) stored_[owner].window_queries.reserve(q, heads_, Layout::k_dim, Layout::window);
  }
  template <class E>
  void observe_prompt(sequence_layer owner, const rows_view<const E>& q, index_t tokens) {
    stored_tokens& stored = stored_[owner];
    if constexpr (Layout::window > 0) stored.window_queries.add(q, heads_, Layout::k_dim, Layout::window);
    stored.prompt_tokens += tokens;
  }

  /// Removes tokens from `first_position` on, none of which is packed, and forgets plans. Needs no memory.
  void abandon(sequence_layer owner, index_t first_position) {
    stored_tokens& stored = stored_[owner];
    stored.pending->reset();
    searches_.forget_prepared(owner);
    index_t removed = 0;
    for (index_t h = 0; h < heads_; ++h) {
      index_t& length = stored.lengths[std::size_t(h)];
      for (removed = 0; length > 0 && stored.beside.position(h, length - 1) >= first_position; ++removed) --length;
      stored.whole[std::size_t(h)] = length - stored.packed[std::size_t(h)];
    }
    stored.since_packing -= removed;
  }
  void truncate(sequence_layer owner, index_t first_position) {
    abandon(owner, first_position);
    whole_.truncate(order_.index(owner), stored_[owner].whole);
  }
  /// Tokens that came before rows were packed are settled: without them the same rows would still be whole.
  index_t settled(sequence_layer owner, index_t next) const {
    return stored_[owner].segments.empty() ? 0 : next - stored_[owner].since_packing;
  }
  /// Forgets what was observed of a prompt that is taken back, of which `left` tokens stay.
  void forget_prompt(sequence_layer owner, index_t left = 0) {
    stored_[owner].window_queries = {};
    stored_[owner].prompt_tokens = left;
  }

  void plan_keep(sequence_layer owner, const selection& chosen) {
    stored_tokens& stored = stored_[owner];
    stored.beside.plan_keep(stored.lengths);
    for (segment_pointer& segment : stored.segments) make_unique(segment);
    selection& whole = *stored.retained_rows;
    whole.reset(stored.whole);
    for (index_t h = 0; h < heads_; ++h) {
      for (const index_t slot : slots_from(chosen, h, stored.packed[std::size_t(h)]))
        whole.row(h)[whole.counts[std::size_t(h)]++] = slot - stored.packed[std::size_t(h)];
    }
    if (whole.counts != stored.whole) whole_.plan_keep(order_.index(owner), stored.whole, whole);
  }

  /// As the plain store's, after `plan_keep`. The remaining rows of a segment move next to each other. The mean of a
  /// block whose rows change is recomputed from their stored elements.
  bool keep(sequence_layer owner, const selection& chosen, executor& workers) {
    stored_tokens& stored = stored_[owner];
    if (chosen.counts == stored.lengths) return false;
    plan_keep(owner, chosen);
    const selection& whole = *stored.retained_rows;
    bool loses = false;  // rows of segments
    for (index_t h = 0; h < heads_; ++h) {
      const index_t* slots = chosen.row(h);
      const index_t count = chosen.counts[std::size_t(h)];
      index_t i = 0, begin = 0;
      for (const segment_pointer& segment : stored.segments) {
        const index_t length = segment->lengths[std::size_t(h)], first = i;
        while (i < count && slots[i] < begin + length) ++i;
        keep_of_segment<Layout>(layout_.rows, *segment, h, slots + first, i - first, begin);
        begin += length;
      }
      loses = loses || stored.packed[std::size_t(h)] != i;
      stored.packed[std::size_t(h)] = i;
    }
    if (loses) searches_.lost_rows(owner, stored.segments);
    stored.beside.keep(stored.lengths, chosen);
    if (whole.counts != stored.whole) whole_.keep(order_.index(owner), stored.whole, whole, workers);
    std::copy(whole.counts.begin(), whole.counts.end(), stored.whole.begin());
    std::copy(chosen.counts.begin(), chosen.counts.end(), stored.lengths.begin());
    for (const segment_pointer& segment : stored.segments) {
      // rows that join it need its spare memory
      if (*stored.pending && (*stored.pending)->joins && segment == stored.segments.back()) continue;
      segment->shrink();
    }
    return true;
  }

  bool choose_newest(sequence_layer owner, index_t window, index_t added, selection& chosen) const {
    return choose_newest_slots(stored_[owner].lengths, window, added, chosen);
  }

  /// Makes segments of the rows that are due, among `retained` (null: all). They are not visible before
  /// `commit_packing`, which needs no memory.
  /// Errors   rows that have no basis: tessera::error.
  void plan_packing(sequence_layer owner, const selection* retained, packing_moment when, executor& workers) {
    const bool prompt_ends = when == packing_moment::prompt_end;
    stored_tokens& stored = stored_[owner];
    stored.pending->reset();
    searches_.forget_prepared(owner);
    const row_lists due = rows_to_pack(layout_.rows.tail, stored.packed, stored.whole, retained, when);
    index_t longest = 0;
    for (const auto& list : due) longest = (std::max)(longest, index_t(list.size()));
    const due_rows fate = layout_.rows.fate(so_far(owner), longest, when, stored.prompt_tokens);
    if (longest == 0 || fate == due_rows::stay_whole) {
      if (prompt_ends) stored.pending->emplace().prompt_ended = true;
      return;
    }
    const auto whole = whole_.view(order_.index(owner), stored.whole);
    const row_packer<Layout> packer(layout_.rows, with_.mean_block, whole, owner.layer, workers);
    packing<segment_type> made;
    made.prompt_ended = prompt_ends;
    made.in_own_basis = fate == due_rows::begin_segments;
    for (const auto& list : due) made.counts.push_back(index_t(list.size()));
    if (made.in_own_basis) {
      const query_squares queries = stored.window_queries.means(heads_, Layout::k_dim);
      layout_.rows.for_each_segment(longest, when != packing_moment::step_end, [&](index_t first, index_t share) {
        row_lists part;
        for (const auto& list : due) {
          const auto begin = list.begin() + (std::min<offset_t>)(first, offset_t(list.size()));
          part.emplace_back(begin, list.begin() + (std::min<offset_t>)(offset_t(first) + share, offset_t(list.size())));
        }
        made.segments.push_back(packer.in_own_basis(part, queries));
      });
    } else {
      searches_.prepare(owner, whole, due);
      made.segments.push_back(packer.as_in(searches_.like(owner, stored.segments), due));
      made.joins = searches_.joins(owner, stored.segments) &&
                   takes_rows(stored.segments, stored.packed, retained, layout_.rows.searches());
      if (made.joins) {
        segment_pointer& last = stored.segments.back();
        make_unique(last);
        host_vector<index_t> wanted = last->lengths;
        for (std::size_t h = 0; h < wanted.size(); ++h) wanted[h] += made.counts[h];
        last->rows.reserve(last->lengths, wanted, true);
        last->means.reserve(last->blocks_of(last->lengths), last->blocks_of(wanted), true);
      }
    }
    stored.segments.reserve(stored.segments.size() + made.segments.size());
    made.left.reset(stored.whole);
    host_vector<index_t> retained_rows = stored.whole;
    for (index_t h = 0; retained && h < heads_; ++h)
      retained_rows[std::size_t(h)] = index_t(slots_from(*retained, h, stored.packed[std::size_t(h)]).size());
    made.leave(retained_rows);
    whole_.plan_keep(order_.index(owner), stored.whole, made.left);
    *stored.pending = std::move(made);
  }

  /// Replaces rows by the planned segments, after `keep`.
  void commit_packing(sequence_layer owner, executor& workers) {
    stored_tokens& stored = stored_[owner];
    if (!*stored.pending) return;
    packing<segment_type>& made = **stored.pending;
    if (made.prompt_ended) stored.window_queries = {}, stored.prompt_tokens = 0;
    if (made.segments.empty()) return stored.pending->reset();
    stored.since_packing = 0;
    if (made.joins) {
      stored.segments.back()->join(*made.segments.front());
    } else {
      for (segment_pointer& segment : made.segments) stored.segments.push_back(std::move(segment));
    }
    searches_.packed(owner, stored.segments, made.in_own_basis);
    made.leave(stored.whole);
    for (std::size_t h = 0; h < made.counts.size(); ++h) stored.packed[h] += made.counts[h];
    whole_.keep(order_.index(owner), stored.whole, made.left, workers);
    std::copy(made.left.counts.begin(), made.left.counts.end(), stored.whole.begin());
    stored.pending->reset();
  }

  /// Between two steps: replaces a segment by the result of its search, and ends a segment that is full.
  void settle(index_t id) {
    searches_.settle(id, [&](index_t layer) -> auto& { return stored_[sequence_layer{layer, id}].segments; });
  }
  segment_searches<Layout>& searches() { return searches_; }
  const segment_searches<Layout>& searches() const { return searches_; }

  /// As the plain store's; bytes of bases are included.
  static constexpr offset_t token_bytes() { return 0; }
  offset_t uneven_bytes(const view_type& view, const selection_view* chosen) const {
    offset_t total = 0;
    for (index_t h = 0; h < heads_; ++h) {
      const slot_source slots = source_of(view, chosen, 0, h);
      const segment_type* last = nullptr;
      for (index_t i = 0; i < slots.count; ++i) {
        const auto [segment, row] = find_row(view, h, slots[i]);
        total += segment ? row_bytes(segment->format.planes()) : whole_layout<Layout>::token_bytes();
        if (segment && segment != last) total += segment->basis->bytes() / heads_;
        last = segment;
      }
    }
    return total;
  }

  offset_t bytes(sequence_layer owner) const {
    const stored_tokens& stored = stored_[owner];
    offset_t total = whole_.bytes(order_.index(owner)) + stored.beside.bytes() + stored.window_queries.bytes() +
                     searches_.bytes(owner);
    const segment_basis* last = nullptr;  // segments that share a basis stand together
    for (const segment_pointer& segment : stored.segments) {
      total += segment->bytes() + (segment->basis.get() != last ? segment->basis->bytes() : 0);
      last = segment->basis.get();
    }
    return total;
  }
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    capacity bound = whole_.upper_bound(whole_peaks(layout_, peaks));
    bound.bytes += column_bytes(with_, peaks) + max_segment_bytes(layout_, with_.mean_block, heads_, peaks);
    return bound;
  }
  capacity available() const { return whole_.available(); }

 private:
  auto segments_of(index_t id) {
    return [this, id](index_t layer) -> auto& { return stored_[sequence_layer{layer, id}].segments; };
  }
  /// A plan: segments, and the rows that they replace.
  struct stored_tokens {
    stored_tokens() = default;
    stored_tokens(index_t kv_heads, const column_set& with)
        : lengths(std::size_t(kv_heads), 0), packed(lengths), whole(lengths), beside(kv_heads, with) {}
    host_vector<index_t> lengths, packed, whole;  // by kv_head; the first is the sum of the others
    columns beside;
    host_vector<segment_pointer> segments;
    window_squares window_queries;
    index_t prompt_tokens = 0;  // of the present turn
    index_t since_packing = 0;  // tokens since rows were packed last
    scratch<std::optional<packing<segment_type>>> pending;
    scratch<selection> retained_rows;  // whole rows that `keep` keeps
  };

  packed_so_far so_far(sequence_layer owner) const {
    const stored_tokens& stored = stored_[owner];
    if (stored.segments.empty()) return {};
    const auto longest = [](const auto& lengths) { return *std::max_element(lengths.begin(), lengths.end()); };
    // Where tokens have been dropped, a segment's length says nothing of its basis: rows join.
    const bool drops = stored.beside.positions() != nullptr;
    index_t last = drops ? layout_.rows.lasting_basis_rows() : 0;
    const auto& basis = searches_.like(owner, stored.segments).basis;
    for (const segment_pointer& segment : stored.segments)
      last += !drops && segment->basis == basis ? longest(segment->lengths) : 0;
    return {(std::max)(1, longest(stored.packed)), last};
  }
  sequence_major order_;
  index_t heads_;
  column_set with_;
  Layout layout_;
  whole_rows whole_;
  segment_searches<Layout> searches_;
  sequence_table<stored_tokens> stored_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
