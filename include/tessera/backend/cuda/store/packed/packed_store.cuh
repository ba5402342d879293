// The store of a cache of packed rows on the device: segments, and behind them the rows that are not packed yet.
#pragma once

#include <algorithm>
#include <tuple>
#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../layout/packed_rows.hpp"
#include "../../../../layout/stored.hpp"
#include "../kv_store.cuh"
#include "../pack.cuh"
#include "detail/segment_maker.cuh"
#include "detail/segment_searches.cuh"
#include "detail/segment_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Has the calls of kv_store. New tokens are whole rows, in a kv_store. `plan_packing` finds the rows that are due, and
/// their bases. `commit_packing` packs them into segments. Layers that do not follow the recipe never pack. Nothing is
/// dropped from segments: all heads have equal lengths, which the host knows.
/// Full tails are packed between two steps: sequences of a batch fill theirs at different steps, and a recorded step
/// would launch the packing for all of them in every layer.
/// Memory   segments of every (layer, sequence) for `tokens` tokens, whole rows as in a kv_store, and bases when
///          segments begin: 4 * channels * dim bytes for K and V of a head.
/// Errors   when made, what the device does not pack; later, a second moment with NaN or infinity: tessera::error.
template <packing_layout Layout>
class kv_store<Layout> {
  using rows_type = typename Layout::rows_type;
  using whole_store = kv_store<whole_layout<Layout>>;
  static_assert(check_device_packing<Layout>());

 public:
  using T = typename Layout::element_type;
  using view_type = packed_view<typename whole_store::view_type>;
  using movers = typename whole_store::movers;
  static constexpr bool in_groups = whole_store::in_groups;

  kv_store(index_t layers, index_t sequences, index_t kv_heads, index_t tokens, offset_t rows, const column_set& with,
           const typename Layout::placement_type& where, const Layout& layout, const layer_roles* roles)
      : layout_((require_packable(layout, with.mean_block), layout)),
        heads_(kv_heads),
        tokens_(tokens),
        with_(with),
        whole_(layers, sequences, kv_heads, tokens, rows, with, where),
        packing_(layers, *roles),
        packed_(formats_of(layout, with.mean_block), packing_.count, sequences, kv_heads, tokens,
                max_segments(layout, tokens)),
        searches_(layout.rows, packed_.formats(), packing_.count, sequences, kv_heads, packed_.max_segments()),
        maker_(layout, packed_.formats(), with.mean_block, packing_.count, sequences, kv_heads, tokens),
        newest_(kv_heads, layout_.rows.tail.tail) {
    whole_.hold_at_least(layout_.rows.tail.tail + spare_room(layout_.rows.tail.tail));  // a tail fills without moving
  }

  kv_store(const kv_store&) = default;
  kv_store(kv_store&&) noexcept = default;
  kv_store& operator=(const kv_store&) = default;
  kv_store& operator=(kv_store&&) noexcept = default;
  ~kv_store() { stream_beside_.drain(); }
  index_t kv_heads() const { return heads_; }
  token_bound bound(sequence_layer owner) const {
    token_bound whole = whole_.bound(owner);
    const index_t packed = packed_rows_of(owner);
    return {whole.longest + packed, whole.total + offset_t(heads_) * packed};
  }
  index_t always_read(sequence_layer owner) const { return whole_.bound(owner).longest; }
  index_t* lengths(sequence_layer owner) const { return whole_.lengths(owner); }
  const id_column<index_t>& length_column() const { return whole_.length_column(); }
  host_vector<index_t> held_by_head(sequence_layer owner) const { return whole_.held_by_head(owner); }
  const auto& rows() const { return whole_.rows(); }
  auto& rows() { return whole_.rows(); }

  view_type view(sequence_layer owner) const {
    view_type made;
    made.whole = whole_.view(owner);
    if (packs(owner.layer)) packed_.show(made, packed_owner(owner));
    return made;
  }
  view_type batch_view(index_t layer, index_t batch) const {
    view_type made;
    made.whole = whole_.batch_view(layer, batch);
    if (packs(layer)) packed_.show_batch(made, packing_.number[std::size_t(layer)]);
    return made;
  }
  host_vector<detail::gathered_column> gathered() const {
    auto all = whole_.gathered();
    all.push_back(packed_.gathered());
    return all;
  }

  void require_fits(sequence_layer owner, index_t tokens) const {
    require_tokens_of_head(offset_t(bound(owner).longest) + tokens, tokens_);
  }
  void plan_room(const sequence_layers& owners, index_t tokens, bool moves_rows, cudaStream_t stream) {
    for (const sequence_layer owner : owners) require_fits(owner, tokens);
    const bool drops = !pending_.owners.empty();  // rows that have been packed leave in place
    plan_whole([&] { whole_.plan_room(owners, tokens, moves_rows || drops); }, stream);
  }
  bool moves() const { return whole_.moves(); }
  void abandon() { whole_.abandon(); }
  void commit_room(const sequence_layers& owners, cudaStream_t stream) {
    const bool itself = std::count(owners.begin(), owners.end(), beside_.owner) > 0;
    if (beside_.is_under_way() && (itself || whole_.moves())) stream_beside_.hold(stream);
    whole_.commit_room(owners, stream);
  }
  void expect(index_t id, index_t tokens, bool moves_rows = false) { whole_.expect(id, tokens, moves_rows); }
  void resize(index_t tokens, cudaStream_t stream) {
    finish_layer(stream);
    whole_.resize(tokens, stream);
  }
  void grew(sequence_layer owner, index_t tokens) { whole_.grew(owner, tokens); }
  void drop_newest(sequence_layer owner, index_t tokens) { whole_.drop_newest(owner, tokens); }
  /// Tokens that came before rows were packed are settled: without them the same rows would still be whole.
  index_t settled(sequence_layer owner, index_t next) const {
    return packed_rows_of(owner) == 0 ? 0 : next - whole_.since_choice(owner);
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

  /// Plans to pack what is due when a turn's prompt of `prompt` tokens ends, or, with 0, between steps.
  /// Errors   rows without a basis, or too little memory: tessera::error, and nothing has changed.
  void plan_packing(const sequence_layers& owners, index_t prompt, cudaStream_t stream) {
    pending_ = {};
    if (std::any_of(owners.begin(), owners.end(), [&](sequence_layer owner) { return due(owner, prompt) > 0; }))
      finish_layer(stream);
    packing_plan made;
    made.prompt_ends = prompt > 0;
    for (const sequence_layer owner : owners) {
      const index_t due = this->due(owner, prompt);
      if (due == 0) continue;
      const index_t whole = whole_.bound(owner).longest;
      const auto& held = packed_.segments(packed_owner(owner));
      const bool begins = begins_segments(owner, prompt);
      const index_t share = begins && prompt > 0 ? layout_.rows.segment : due;
      if (begins || !searches_.joins(packed_owner(owner), held))
        packed_.require_segments(index_t(held.size()) + ceil_div(due, share));
      made.owners.push_back(owner);
      made.left.push_back({{whole - due, offset_t(heads_) * (whole - due)}, {}});
      made.due.push_back(due), made.shares.push_back(begins ? share : 0);
      made.originals.push_back(begins ? host_vector<rows_before>{} : searches_.blocks_for(packed_owner(owner), due));
      packed_.make_room(packed_owner(owner), std::size_t(ceil_div(due, share)));
      if (begins) add_spans(made.new_spans, owner, due, share);
    }
    if (made.prompt_ends) made.ended = owners;
    made.make_room();
    made.memory = maker_.memory_for(made.new_spans.size());
    maker_.find_bases(made.new_spans, made.memory, stream);
    if (!made.owners.empty() && made.prompt_ends) whole_.plan_keep(made.owners, made.left);
    pending_ = std::move(made);
  }
  void commit_packing(cudaStream_t stream) {
    packing_plan made = std::exchange(pending_, {});
    std::size_t begun_count = 0;  // segments that have begun
    for (std::size_t i = 0; i < made.owners.size(); ++i) {
      const sequence_layer owner = made.owners[i], packed = packed_owner(owner);
      const index_t due = made.due[i], share = made.shares[i] > 0 ? made.shares[i] : due;
      for (index_t first = 0; first < due; first += share) {
        const index_t count = (std::min)(share, due - first);
        const auto& all = packed_.segments(packed);
        if (made.shares[i] > 0) {
          packed_.begin_segment(
              packed, maker_.begin(made.memory, begun_count, made.new_spans[begun_count], packed, stream), stream);
          ++begun_count;
        } else if (!searches_.joins(packed, all)) {
          packed_.begin_segment(packed, searches_.like(packed, all), stream);
        }
        made.joining.push_back({owner, index_t(all.size()) - 1, all.back().slot, all.back().rows, first, count});
        packed_.grew(packed, count);
      }
    }
    encode(made, stream);
    for (std::size_t i = 0; i < made.owners.size(); ++i) {
      const sequence_layer owner = made.owners[i], packed = packed_owner(owner);
      if (made.shares[i] > 0)
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
    for (const sequence_layer owner : made.ended) forget_prompt(owner);
  }

  /// Called when a prompt of `prompt` tokens has been through a layer. Makes its new segments on a second stream. No
  /// view counts them before `finish_layer`. Rows that join an old segment, or cannot be packed, wait for the prompt's
  /// end.
  void pack_layer(sequence_layer owner, index_t prompt, cudaStream_t stream) {
    finish_layer(stream);
    const index_t due = this->due(owner, prompt);
    const std::size_t held = due > 0 ? packed_.segments(packed_owner(owner)).size() : 0;
    if (due == 0 || !begins_segments(owner, prompt) ||
        index_t(held) + ceil_div(due, layout_.rows.segment) > packed_.max_segments())
      return;
    packing_plan plan;
    add_spans(plan.new_spans, owner, due, layout_.rows.segment);
    layer_beside made{owner, due, {}};
    made.segments.reserve(plan.new_spans.size());
    packed_.make_room(packed_owner(owner), plan.new_spans.size());
    const bases_and_sets memory = maker_.memory_for(plan.new_spans.size());
    const cudaStream_t beside = stream_beside_.begin(stream);
    try {
      maker_.start_bases(plan.new_spans, memory, beside);
      for (std::size_t i = 0; i < plan.new_spans.size(); ++i) {
        segment_record begun = maker_.begin(memory, i, plan.new_spans[i], packed_owner(owner), beside);
        made.segments.push_back(packed_.begin_unseen(packed_owner(owner), std::move(begun), made.segments, beside));
        plan.joining = {
            {owner, index_t(held + i), made.segments.back().slot, 0, plan.new_spans[i].first, plan.new_spans[i].count}};
        encode(plan, beside);
        made.segments.back().rows = plan.new_spans[i].count;
      }
      stream_beside_.end();
    } catch (...) {
      stream_beside_.drain();
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
    if (!maker_.have_bases()) return;
    const index_t left = whole_.bound(owner).longest - made.due;
    const kept_bound kept{{left, offset_t(heads_) * left}, {}};
    try {
      whole_.plan_keep({owner}, {kept});
    } catch (const error&) {
      return;
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
        due = due || (packs(layer) && layout_.rows.tail.packed_after_step(whole_.bound({layer, id}).longest) > 0);
      searches_.settle(id, packed_, due, stream);
    }
  }
  std::tuple<whole_store&, segment_store&, const packing_layers&> parts() { return {whole_, packed_, packing_}; }
  segment_searches<Layout, view_type>& searches() { return searches_; }
  const segment_searches<Layout, view_type>& searches() const { return searches_; }

  void plan_copy(index_t from, index_t to, cudaStream_t stream) {
    for (index_t layer = 0; layer < packing_.count; ++layer) packed_.plan_copy(layer, from, to);
    searches_.copy(from, to);
    plan_whole([&] { whole_.plan_copy(from, to); }, stream);
  }
  void commit_copy(index_t from, index_t to, cudaStream_t stream) {
    if (beside_.is_under_way()) stream_beside_.hold(stream);
    whole_.commit_copy(from, to, stream);
    for (index_t layer = 0; layer < packing_.count; ++layer) {
      const std::size_t segments = packed_.segments({layer, from}).size();
      packed_.commit_copy(layer, from, to, searches_.finished({layer, from}, segments), stream);
      maker_.copy({layer, from}, {layer, to}, stream);
    }
    searches_.mark(to, stream);
  }
  void clear(index_t id, cudaStream_t stream) {
    if (beside_.owner.id == id) stream_beside_.wait(), beside_ = {};
    whole_.clear(id, stream);
    searches_.clear(id);
    for (index_t layer = 0; layer < packing_.count; ++layer) {
      packed_.clear({layer, id}, stream);
      maker_.forget({layer, id});
    }
  }
  /// Logical positions by kv_head, ascending. The position of a packed row is its slot. Synchronises.
  host_vector<host_vector<index_t>> downloaded_positions(sequence_layer owner) const {
    return with_packed_positions(whole_.downloaded_positions(owner), packed_rows_of(owner), with_.positions);
  }
  /// The slots of chosen blocks, and those behind them.
  host_vector<index_t> slots_of_blocks(sequence_layer owner, const host_vector<index_t>& blocks) const {
    return packed_.slots_of_blocks(packed_owner(owner), blocks, bound(owner).longest);
  }
  offset_t bytes(sequence_layer owner) const {
    if (!packs(owner.layer)) return whole_.bytes(owner);
    return whole_.bytes(owner) + packed_.bytes(packed_owner(owner)) + searches_.bytes(packed_owner(owner));
  }
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    capacity bound = whole_.upper_bound(whole_peaks(layout_, peaks));
    for (const layer_peak& peak : peaks) {
      const packed_peak of_layer = packed_peak_of(layout_, peak.turn);
      const offset_t segments = packed_.upper_bound(peak.stored.longest, of_layer.segments);
      bound.bytes += peak.follows_recipe ? segments + searches_.upper_bound(of_layer.originals) : 0;
    }
    return bound;
  }
  capacity available() const { return whole_.available(); }
  offset_t peak_bytes() const { return whole_.peak_bytes() + packed_.bytes(); }
  /// Bytes that a step reads of a head when it attends `attended` tokens. Blocks are scored whatever the budget.
  offset_t step_bytes(sequence_layer owner, offset_t attended) const {
    const offset_t whole = (std::min<offset_t>)(attended, always_read(owner));
    const offset_t total = whole * whole_layout<Layout>::token_bytes();
    if (!packs(owner.layer) || attended == whole) return total;
    return total + packed_.read_bytes(packed_owner(owner), attended - whole, with_.mean_block > 0);
  }

 private:
  using packing_plan = cuda::packing_plan<view_type>;

  bool packs(index_t layer) const { return packing_.number[std::size_t(layer)] >= 0; }
  /// The same owner, with its layer's number among the layers that pack.
  sequence_layer packed_owner(sequence_layer owner) const { return packing_.owner(owner); }
  index_t packed_rows_of(sequence_layer owner) const {
    return packs(owner.layer) ? packed_.rows(packed_owner(owner)) : 0;
  }

  /// Whole rows of an entry that are packed when its prompt of `prompt` tokens ends, or, with 0, between steps.
  index_t due(sequence_layer owner, index_t prompt) const {
    if (!packs(owner.layer)) return 0;
    const index_t whole = whole_.bound(owner).longest;
    return prompt > 0 ? layout_.rows.tail.packed_after_prompt(whole) : layout_.rows.tail.packed_after_step(whole);
  }
  /// Whether these rows begin segments of their own.
  bool begins_segments(sequence_layer owner, index_t prompt) const {
    return packed_.segments(packed_owner(owner)).empty() || prompt >= rows_type::own_segment_tokens;
  }
  void add_spans(host_vector<segment_span<view_type>>& to, sequence_layer owner, index_t due, index_t share) const {
    for (index_t first = 0; first < due; first += share)
      to.push_back({view(owner), owner.layer, first, (std::min)(share, due - first)});
  }
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
  /// Packs whole rows into segments, all rows of the plan in one go.
  void encode(packing_plan& made, cudaStream_t stream) {
    made.problems.clear();
    for (const joining_rows& rows : made.joining)
      made.problems.push_back({view(rows.owner), rows.first, rows.count, nullptr, rows.segment});
    maker_.encode(made.problems, stream);
    searches_.noted(made.problems, made.joining, packing_, stream);
  }

  stream_beside stream_beside_;  // first, so that an assignment waits for it before memory is released
  Layout layout_;
  index_t heads_, tokens_;
  column_set with_;
  whole_store whole_;
  packing_layers packing_;
  segment_store packed_;
  segment_searches<Layout, view_type> searches_;
  segment_maker<Layout, view_type> maker_;
  newest_slots newest_;
  packing_plan pending_;
  layer_beside beside_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
