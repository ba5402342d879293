// The store of a cache of packed rows on the device: segments, and behind them the rows that are not packed yet.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../../../channels/all_channels.hpp"
#include "../../../../channels/head_channels.hpp"
#include "../../../../channels/top_groups.hpp"
#include "../../../../layout/as_given.hpp"
#include "../../../../layout/packed_rows.hpp"
#include "../../../../layout/rotated.hpp"
#include "../../../../layout/stored.hpp"
#include "../../../../runtime/layer_roles.hpp"
#include "../kv_store.cuh"
#include "../searched/possible_segments.cuh"
#include "../searched/segment_searches.cuh"
#include "drop_oldest.cuh"
#include "encode_rows.cuh"
#include "head_sets.cuh"
#include "segment_bases.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Answers as the plain store does. New tokens are whole rows, in a plain store; `plan_packing` finds what is due and its bases,
/// `commit_packing` puts it into segments. Layers that do not follow the recipe never pack. Nothing is dropped from segments: heads are
/// equally long, and the host knows every length.
///
/// Full tails are packed between two steps, before the next one is planned, not inside the step that fills them: sequences of a batch
/// fill theirs at different steps, and a recorded step would launch for all of them, in every layer, what one in 32 needs.
/// Memory   segments of every place for `tokens` tokens, and whole rows as a plain cache has them: see kv_store. Bases when
///          segments begin, 4 * channels * dim bytes for K and V of a head.
/// Errors   what the device does not pack, when made; a second moment with NaN or infinity: tessera::error.
template <packing_layout Layout>
class kv_store<Layout> {
  using rows_type = typename Layout::rows_type;
  using whole_store = kv_store<whole_layout<Layout>>;
  template <class Channels>
  static constexpr bool is_known = std::is_same_v<Channels, top_groups> || std::is_same_v<Channels, head_channels> ||
                                   std::is_same_v<Channels, all_channels>;
  static_assert(is_known<typename rows_type::key_channels> && is_known<typename rows_type::value_channels>,
                "tessera: the device packs by top_groups, head_channels and all_channels; let another channel selector "
                "say host_only");
  static_assert(std::is_same_v<typename rows_type::basis_type, rotated> ||
                    std::is_same_v<typename rows_type::basis_type, as_given>,
                "tessera: the device knows the bases rotated and as_given; let another one say host_only");
  static_assert(!rows_type::basis_type::rotates || !std::is_same_v<typename rows_type::key_channels, head_channels>,
                "tessera: the device chooses one set of channels for a head in the engine's basis; take as_given");

 public:
  using T = typename Layout::element_type;
  using view_type = packed_view<typename whole_store::view_type>;
  using place_list = typename whole_store::place_list;
  using movers = typename whole_store::movers;
  static constexpr bool in_groups = whole_store::in_groups;

  kv_store(index_t layers, index_t sequences, index_t kv_heads, index_t tokens, offset_t rows, const column_set& with,
           const typename Layout::placement_type& where, const Layout& layout, const layer_roles* roles)
      : rows_((require_packable(layout, with.mean_block), layout.rows)),
        heads_(kv_heads),
        tokens_(tokens),
        with_(with),
        whole_(layers, sequences, kv_heads, tokens, rows, with, where),
        packing_(packing_layers(layers, *roles)),
        packed_(formats_of(layout, with.mean_block), packing_count(), sequences, kv_heads, tokens,
                most_segments(layout, tokens)),
        sets_(packed_.formats(), layers, sequences, kv_heads, Layout::window),
        searches_(layout.rows, packed_.formats(), packing_count(), sequences, kv_heads, packed_.most_segments()),
        encode_(encoded_block(layout, with.mean_block),
                std::max(packed_.formats().k.channels, packed_.formats().v.channels), packed_.formats().least_block),
        left_slots_(std::size_t(kv_heads) * std::size_t(rows_.tail.tail)),
        left_counts_(std::size_t(kv_heads)) {
    if constexpr (rows_type::basis_type::rotates) {
      const index_t longest = std::min(rows_.segment, tokens);
      bases_.emplace(packed_.formats(), kv_heads, layers * ceil_div(tokens, longest), longest, device_info::current());
    }
  }

  index_t kv_heads() const { return heads_; }
  token_bound bound(index_t layer, index_t id) const {
    token_bound held = whole_.bound(layer, id);
    const index_t packed = packed_rows_of(layer, id);
    return {held.longest + packed, held.total + offset_t(heads_) * packed};
  }
  /// Newest tokens of a head that steps read whatever they choose.
  index_t always_read(index_t layer, index_t id) const { return whole_.bound(layer, id).longest; }
  /// Of the whole rows.
  index_t* lengths(index_t layer, index_t id) const { return whole_.lengths(layer, id); }
  const id_column<index_t>& length_column() const { return whole_.length_column(); }

  view_type view(index_t layer, index_t id) const {
    view_type made;
    made.whole = whole_.view(layer, id);
    if (packs(layer)) packed_.show(made, packing(layer), id);
    return made;
  }
  view_type batch_view(index_t layer, index_t batch) const {
    view_type made;
    made.whole = whole_.batch_view(layer, batch);
    if (packs(layer)) packed_.show_batch(made, packing(layer));
    return made;
  }
  std::vector<detail::gathered_column> gathered() const {
    auto all = whole_.gathered();
    all.push_back(packed_.gathered());
    return all;
  }

  void require_fits(index_t layer, index_t id, index_t tokens) const {
    const offset_t wanted = offset_t(bound(layer, id).longest) + tokens;
    require(wanted <= tokens_, "tokens of a kv_head", wanted,
            "at most cache_options::tokens, which is " + std::to_string(tokens_), "raise tokens, or lower the budget");
  }
  void plan_room(const place_list& places, index_t tokens) {
    for (const auto& [layer, id] : places) require_fits(layer, id, tokens);
    whole_.plan_room(places, tokens);
  }
  void abandon() { whole_.abandon(); }
  void commit_room(const place_list& places, cudaStream_t stream) { whole_.commit_room(places, stream); }
  void expect(index_t id, index_t tokens) { whole_.expect(id, tokens); }
  void resize(index_t tokens, cudaStream_t stream) { whole_.resize(tokens, stream); }
  void took(index_t layer, index_t id, index_t tokens) { whole_.took(layer, id, tokens); }

  void append_rows(const view_type& view, const rows_view<const T>& k, const rows_view<const T>& v,
                   const index_t* first_position, const new_segments& text, cudaStream_t stream) const {
    whole_.append_rows(view.whole, k, v, first_position, text, stream);
  }

  /// The last queries of a prompt chunk whose tokens have been appended.
  void observe_prompt(index_t layer, index_t id, const rows_view<const T>& q, cudaStream_t stream) {
    if (packs(layer)) sets_.observe(packing(layer), id, q, stream);
  }

  /// What moves whole rows: those that sliding layers keep, and those that are left when a prompt has been packed.
  movers fit(index_t batch, index_t kept, const device_info& device) const {
    return whole_.fit(batch, std::max(kept, rows_.tail.tail), device);
  }
  void adopt(movers&& fitted) { whole_.adopt(std::move(fitted)); }
  /// Of layers that never pack.
  void plan_keep(const place_list& places, const std::vector<kept_bound>& kept) { whole_.plan_keep(places, kept); }
  void keep(index_t layer, index_t id, const kept_slots& kept, cudaStream_t stream) {
    whole_.keep(layer, id, kept, stream);
  }

  /// Plans to pack what is due of these places: when a turn's prompt of `prompt` tokens ends, or, with 0, what steps have filled. `pack`
  /// carries it out.
  /// Errors   rows that have no basis, no memory: nothing has changed.
  void plan_packing(const place_list& places, index_t prompt, cudaStream_t stream) {
    pending_ = {};
    packing_plan made;
    made.prompt_ends = prompt > 0;
    std::vector<segment_span<view_type>> own;
    for (const auto& [layer, id] : places) {
      if (!packs(layer)) continue;
      const index_t whole = whole_.bound(layer, id).longest;
      const index_t due = prompt > 0 ? rows_.tail.packed_after_prompt(whole) : rows_.tail.packed_after_step(whole);
      if (due == 0) continue;
      const std::size_t held = packed_.segments(packing(layer), id).size();
      const bool begins = held == 0 || prompt >= rows_type::own_segment_tokens;
      const index_t share = begins && prompt > 0 ? rows_.segment : due;
      const bool joins = !begins && searches_.joins(packing(layer), id, packed_.segments(packing(layer), id));
      require(joins || index_t(held) + ceil_div(due, share) <= packed_.most_segments(), "segments of a sequence",
              index_t(held) + ceil_div(due, share), "at most " + std::to_string(packed_.most_segments()),
              "raise cache_options::tokens");
      made.places.push_back({layer, id});
      made.left.push_back({{whole - due, offset_t(heads_) * (whole - due)}, {}});
      made.due.push_back(due), made.shares.push_back(begins ? share : 0);
      made.before.push_back(begins ? std::vector<rows_before>{} : searches_.room(due));
      for (index_t first = 0; begins && first < due; first += share) {
        own.push_back({view(layer, id), layer, first, std::min(share, due - first)});
      }
    }
    if (made.prompt_ends) made.ended = places;
    if (sets_.each() > 0 && !own.empty()) {
      made.sets = std::make_shared<device_buffer<std::uint32_t>>(own.size() * sets_.each());
    }
    if constexpr (rows_type::basis_type::rotates) {
      if (!own.empty()) {
        const auto fresh = std::make_shared<device_buffer<float>>(own.size() * std::size_t(bases_->each()));
        (*bases_).run(own, fresh->data(), stream);
        made.bases = fresh;
      }
    }
    if (!made.places.empty() && made.prompt_ends) whole_.plan_keep(made.places, made.left);
    pending_ = std::move(made);
  }
  void commit_packing(cudaStream_t stream) {
    const packing_plan made = std::exchange(pending_, {});
    index_t own = 0;  // segments that have begun
    for (std::size_t i = 0; i < made.places.size(); ++i) {
      const auto [layer, id] = made.places[i];
      const index_t due = made.due[i], share = made.shares[i] > 0 ? made.shares[i] : due;
      for (index_t first = 0; first < due; first += share) {
        const index_t count = std::min(share, due - first);
        const auto& all = packed_.segments(packing(layer), id);
        if (made.shares[i] > 0) {
          begin_segment(made, own++, layer, id, first, count, stream);
        } else if (!searches_.joins(packing(layer), id, all)) {
          packed_.begin_segment(packing(layer), id, searches_.like(packing(layer), id, all), stream);
        }
        encode_problem<view_type> problem{view(layer, id), first, count};
        problem.segment = index_t(all.size()) - 1;
        encode_.run(problem, stream);
        searches_.noted(problem.view, packing(layer), id, problem.segment, all.back().slot, all.back().rows, first,
                        count, stream);
        packed_.took(packing(layer), id, count);
      }
      if (made.shares[i] > 0)
        searches_.ended(packing(layer), id, packed_.segments(packing(layer), id).size());
      else
        searches_.joined(view(layer, id), packing(layer), id, 0, due, made.before[i], stream);
      searches_.mark(id, stream);
      if (made.prompt_ends) {
        whole_.keep(layer, id, {newest(layer, id, made.left[i].longest, stream), made.left[i]}, stream);
      } else {
        drop_oldest(whole_.view(layer, id), due, whole_.lengths(layer, id), stream);
        whole_.dropped(layer, id, made.left[i], due);  // room for the step or chunk that follows is there
      }
    }
    for (const auto& [layer, id] : made.ended) {
      if (packs(layer)) sets_.forget(packing(layer), id);
    }
  }

  /// Between two steps, or before a turn's first chunk: segments of these sequences that were searched take their places, and others end before
  /// what steps have filled joins them.
  void settle(const std::vector<index_t>& ids, cudaStream_t stream) {
    for (const index_t id : ids) {
      bool due = false;
      for (index_t layer = 0; layer < index_t(packing_.size()); ++layer)
        due = due || (packs(layer) && rows_.tail.packed_after_step(whole_.bound(layer, id).longest) > 0);
      searches_.settle(id, packed_, due, stream);
    }
  }
  segment_searches<Layout, view_type>& searches() { return searches_; }
  const segment_searches<Layout, view_type>& searches() const { return searches_; }

  void plan_copy(index_t from, index_t to) {
    for (const index_t at : packing_) {
      if (at >= 0) packed_.plan_copy(at, from, to);
    }
    searches_.copy(from, to);
    whole_.plan_copy(from, to);
  }
  void commit_copy(index_t from, index_t to, cudaStream_t stream) {
    whole_.commit_copy(from, to, stream);
    for (const index_t at : packing_) {
      if (at >= 0)
        packed_.commit_copy(at, from, to, searches_.finished(at, from, packed_.segments(at, from).size()), stream);
    }
    searches_.mark(to, stream);
  }

  void clear(index_t id, cudaStream_t stream) {
    whole_.clear(id, stream);
    searches_.clear(id);
    for (const index_t at : packing_) {
      if (at < 0) continue;
      packed_.clear(at, id, stream);
      sets_.forget(at, id);
    }
  }

  /// Logical positions by kv_head, ascending: of packed rows their slots. Synchronises.
  std::vector<std::vector<index_t>> downloaded_positions(index_t layer, index_t id) const {
    auto all = whole_.downloaded_positions(layer, id);
    const index_t packed = packed_rows_of(layer, id);
    for (std::vector<index_t>& head : all) {
      for (index_t& position : head) position += with_.positions ? 0 : packed;
      head.insert(head.begin(), std::size_t(packed), 0);
      std::iota(head.begin(), head.begin() + packed, 0);
    }
    return all;
  }
  /// The slots of chosen blocks, and those behind them.
  std::vector<index_t> slots_of_blocks(index_t layer, index_t id, const std::vector<index_t>& blocks) const {
    std::vector<index_t> slots;
    index_t first_block = 0;
    for (const segment_record& segment : packed_.segments(packing(layer), id)) {
      for (index_t row = 0; row < segment.rows; ++row) {
        if (std::binary_search(blocks.begin(), blocks.end(), first_block + row / segment.block))
          slots.push_back(segment.first_row + row);
      }
      first_block += packed_places::blocks(segment);
    }
    const token_bound held = bound(layer, id);
    for (index_t slot = packed_rows_of(layer, id); slot < held.longest; ++slot) slots.push_back(slot);
    return slots;
  }

  offset_t bytes(index_t layer, index_t id) const {
    if (!packs(layer)) return whole_.bytes(layer, id);
    return whole_.bytes(layer, id) + packed_.bytes(packing(layer), id) + searches_.bytes(packing(layer), id);
  }
  offset_t most_bytes() const { return whole_.most_bytes() + packed_.bytes(); }
  /// Of one head of which a step attends `attended` tokens: rows, as if they were of the segment with the longest, and, as if some of every
  /// segment were attended, bases; means and the bases of keys besides where blocks are scored, which the device does whatever the budget.
  offset_t step_bytes(index_t layer, index_t id, offset_t attended) const {
    const offset_t whole = std::min<offset_t>(attended, always_read(layer, id));
    offset_t total = whole * whole_layout<Layout>::token_bytes();
    if (!packs(layer) || attended == whole) return total;
    offset_t longest = 0;
    for (const segment_record& one : packed_.segments(packing(layer), id)) {
      longest = std::max(longest, packed_places::row_bytes(one));
      total += packed_.basis_bytes();
      if (with_.mean_block > 0) total += packed_places::mean_bytes(one) + packed_.k_basis_bytes();
    }
    return total + (attended - whole) * longest;
  }

 private:
  /// What becomes segments when `commit_packing` is called.
  struct packing_plan {
    place_list places, ended;          // with rows that are due; whose prompts end
    std::vector<kept_bound> left;      // of the whole rows, by place
    std::vector<index_t> due, shares;  // rows; and those of a segment of their own, 0: they join the last one
    std::vector<std::vector<rows_before>> before;  // by place: where rows that join others are kept
    bool prompt_ends = false;
    segment_bases bases;  // of all segments that begin
    std::shared_ptr<device_buffer<std::uint32_t>> sets;
  };

  static void require_packable(const Layout& layout, index_t block) {
    const rows_type& rows = layout.rows;
    for (const packed_format& format : {rows.key_format(), rows.value_format()}) {
      require(format.element != (std::is_same_v<T, bf16> ? packed_element::fp16 : packed_element::bf16), "element",
              "the other type of 16 bits", "same, fp8 or int4 on the device",
              "take a cache of that type, or the CPU's");
    }
    if (block == 0) return;
    require(rows.segment % block == 0, "segment", rows.segment,
            "a multiple of the block on the device, which is " + std::to_string(block),
            "cut prompts into whole blocks");
    for (index_t whole = 0; whole <= 2 * rows.tail.tail; ++whole) {
      require(rows.tail.packed_after_prompt(whole) % block == 0, "tail", rows.tail.tail, "one that packs whole blocks",
              "take full_tails where a step reads blocks");
    }
  }
  static std::vector<index_t> packing_layers(index_t layers, const layer_roles& roles) {
    std::vector<index_t> at;
    index_t next = 0;
    for (index_t layer = 0; layer < layers; ++layer) at.push_back(roles.follows_recipe(layer) ? next++ : no_index);
    return at;
  }
  index_t packing_count() const {
    return index_t(std::count_if(packing_.begin(), packing_.end(), [](index_t at) { return at >= 0; }));
  }
  index_t packing(index_t layer) const { return packing_[std::size_t(layer)]; }
  bool packs(index_t layer) const { return packing(layer) >= 0; }
  index_t packed_rows_of(index_t layer, index_t id) const {
    return packs(layer) ? packed_.rows(packing(layer), id) : 0;
  }

  /// The `own`-th of the segments that begin: of `count` whole rows from `first` on.
  void begin_segment(const packing_plan& made, index_t own, index_t layer, index_t id, index_t first, index_t count,
                     cudaStream_t stream) {
    segment_record begun{.k = packed_.formats().k, .v = packed_.formats().v, .block = packed_.formats().block};
    if (made.sets) {
      std::uint32_t* sets = made.sets->data() + std::size_t(own) * sets_.each();
      sets_.choose(view(layer, id), packing(layer), id, first, count, sets, stream);
      begun.sets = made.sets;
      begun.k_set = sets, begun.v_set = sets + sets_.k_words();
    }
    if constexpr (rows_type::basis_type::rotates) {
      begun.bases = made.bases;
      begun.k_basis = made.bases->data() + own * bases_->each();
      begun.v_basis = begun.k_basis + heads_ * packed_.formats().k_basis();
    }
    packed_.begin_segment(packing(layer), id, std::move(begun), stream);
  }
  /// The newest `count` whole rows of one sequence.
  selection_view newest(index_t layer, index_t id, index_t count, cudaStream_t stream) const {
    detail::newest_rows_entry<128><<<unsigned(heads_), 128, 0, stream>>>(whole_.lengths(layer, id), count,
                                                                         left_slots_.data(), left_counts_.data());
    check(cudaGetLastError(), "launch of newest_rows");
    return {left_slots_.data(), left_counts_.data(), nullptr, count};
  }

  rows_type rows_;
  index_t heads_, tokens_;
  column_set with_;
  whole_store whole_;
  std::vector<index_t> packing_;  // by layer: its number among those that pack, or none
  packed_places packed_;
  head_sets<view_type> sets_;
  segment_searches<Layout, view_type> searches_;
  encode_rows<view_type> encode_;
  std::optional<find_segment_bases<view_type>> bases_;
  device_buffer<index_t> left_slots_, left_counts_;
  packing_plan pending_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
