// Choices among packed and whole rows: what a first stage sees of both, and what it leaves of them.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "../../../../../../core/host/host_vector.hpp"
#include "../../../../../../runtime/kept_lengths.hpp"
#include "../../scratch_rows.cuh"
#include "../../unpack_slots.cuh"
#include "../whole_and_packed.cuh"
#include "kept_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Errors   segments of heads of different lengths need more rows than there are: tessera::error.
inline void require_segment_rows(offset_t rows, index_t tokens) {
  require(rows <= tokens, "rows of the longest heads of all segments", rows,
          "at most " + std::to_string(tokens) + ", the cache's tokens", "raise cache_options::tokens");
}

/// What a layer will keep of its rows.
struct noted_choice {
  sequence_layer owner;
  device_buffer<index_t> slots{};  ///< [kv_heads, stride]; then what stays whole, likewise, and its counts [kv_heads]
  index_t stride = 0;
  host_vector<index_t> counts{};         ///< [segments + 1, kv_heads], rows of each segment, then whole rows
  host_vector<index_t> stored{};         ///< [kv_heads], packed rows before the choice
  host_vector<index_t> packed{}, due{};  ///< [kv_heads], packed rows that stay; whole rows that stay and are packed
  bool drops_packed = false;             ///< packed rows
  host_vector<kept_segment> segments{};  ///< what becomes of them then, once it is planned

  slot_lists chosen() const { return {slots.data(), stride}; }
  const index_t* whole(index_t heads) const { return counts.data() + counts.size() - std::size_t(heads); }
};

/// A store of packed rows of which a first stage drops some, where `with.drops` says so. Other stores have no memory
/// for it. Heads have different numbers of packed rows then, which the host knows: a choice waits for the device.
/// Memory   where tokens are dropped: a position of each packed row, and whole rows of one layer for `tokens` tokens,
///          to which packed rows are turned back when they are scored.
template <packing_layout Layout>
class noted_choices : public whole_and_packed<Layout> {
  using base = whole_and_packed<Layout>;

 public:
  using typename base::view_type, typename base::whole_store;
  using whole_type = typename whole_store::view_type;

  noted_choices(index_t layers, index_t sequences, index_t kv_heads, index_t tokens, offset_t rows,
                const column_set& with, const typename Layout::placement_type& where, const Layout& layout,
                const layer_roles& roles)
      : base(layers, sequences, kv_heads, tokens, rows, with, where, layout, roles), order_{sequences} {
    if (!with.drops) return;
    const std::size_t entries = std::size_t(packing_.count) * std::size_t(sequences);
    positions_ = device_buffer<index_t>(entries * std::size_t(kv_heads) * std::size_t(tokens));
    due_ = device_buffer<index_t>(entries * std::size_t(kv_heads));
    counts_ = device_buffer<index_t>(4 * std::size_t(kv_heads));
    noted_ = device_buffer<index_t>((std::size_t(packed_.max_segments()) + 1) * std::size_t(kv_heads));
    index_t slots = 128;  // they may be a page, whose length is a power of two
    while (slots < tokens) slots *= 2;
    rows_.emplace(kv_heads, slots);
  }

  /// All rows of a layer as whole ones, for scorers. Valid until the next call.
  whole_type scored_view(sequence_layer owner, cudaStream_t stream) const {
    const view_type all = this->view(owner);
    if (all.packed == 0) return all.whole;
    const whole_type to = (*rows_).view();
    unpack_slots(all, 0, all.packed, to, (*rows_).lengths(), stream);
    const dim3 grid{unsigned(std::clamp(whole_.bound(owner).longest / 16, 1, 128)), unsigned(heads_), 2};
    detail::add_whole_entry<view_type, whole_type, 256>
        <<<grid, 256, 0, stream>>>(all, positions(owner), tokens_, to, (*rows_).positions(), (*rows_).lengths());
    check(cudaGetLastError(), "launch of add_whole");
    return to;
  }

  /// Forgets what was noted. Kernels may still read it: its memory is released when others have been noted, for which
  /// the host waits.
  void forget_choices() {
    if (choices_.empty()) return;
    for (noted_choice& choice : choices_) packed_.forget(choice.segments);
    read_ = std::move(choices_);
    choices_.clear();
  }
  /// Notes what a layer keeps when its prompt is packed: see `plan_packing`. `kept` has no slots where everything
  /// stays. Waits for the device.
  void note_choice(sequence_layer owner, const kept_slots& kept, cudaStream_t stream) {
    noted_choice noted{.owner = owner};
    const token_bound held = this->bound(owner);
    noted.stride = (std::max)(1, kept.chosen.indices ? (std::min)(kept.bound.longest, held.longest) : held.longest);
    noted.slots = device_buffer<index_t>::not_cleared(std::size_t(heads_) * (2 * std::size_t(noted.stride) + 1));
    const view_type all = this->view(owner);
    detail::note_choice_entry<view_type, 256>
        <<<unsigned(heads_), 256, 0, stream>>>(all, kept.chosen, noted.chosen(), noted_.data());
    check(cudaGetLastError(), "launch of note_choice");
    const auto& segments = packed_.segments(packed_owner(owner));
    noted.counts.resize((segments.size() + 1) * std::size_t(heads_));
    check(cudaMemcpyAsync(noted.counts.data(), noted_.data(), noted.counts.size() * sizeof(index_t),
                          cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    noted.packed.assign(std::size_t(heads_), 0);
    for (std::size_t s = 0; s < segments.size(); ++s) {
      for (index_t h = 0; h < heads_; ++h)
        noted.packed[std::size_t(h)] += noted.counts[s * std::size_t(heads_) + std::size_t(h)];
    }
    for (index_t h = 0; h < heads_; ++h) noted.stored.push_back(packed_.rows(packed_owner(owner), h));
    noted.drops_packed = noted.packed != noted.stored;
    noted.due.assign(std::size_t(heads_), 0);
    choices_.push_back(std::move(noted));
  }

  /// Exact where tokens are dropped.
  token_bound bound(sequence_layer owner) const {
    token_bound all = base::bound(owner);
    if (!drops(owner)) return all;
    const sequence_layer packed = packed_owner(owner);
    const token_bound whole = whole_.bound(owner);
    all = {0, whole.total};
    for (index_t h = 0; h < heads_; ++h) {
      all.longest = (std::max)(all.longest, whole_.stored(owner, h) + packed_.rows(packed, h));
      all.total += packed_.rows(packed, h);
    }
    return all;
  }
  /// Logical positions by kv_head, ascending. Synchronises.
  host_vector<host_vector<index_t>> downloaded_positions(sequence_layer owner) const {
    if (!drops(owner)) return base::downloaded_positions(owner);
    auto all = whole_.downloaded_positions(owner);
    for (index_t h = 0; h < heads_; ++h) {
      const auto packed =
          downloaded(positions(owner) + offset_t(h) * tokens_, std::size_t(packed_.rows(packed_owner(owner), h)));
      all[std::size_t(h)].insert(all[std::size_t(h)].begin(), packed.begin(), packed.end());
    }
    return all;
  }
  /// As the base's; where tokens are dropped, a bound of the head with the most whole rows and of the `attended` packed
  /// ones of the head with the most.
  offset_t step_bytes(sequence_layer owner, offset_t attended) const {
    if (!drops(owner)) return base::step_bytes(owner, attended);
    const sequence_layer packed = packed_owner(owner);
    return whole_.bound(owner).longest * whole_layout<Layout>::token_bytes() +
           packed_.read_bytes(packed, (std::min<offset_t>)(packed_.rows(packed), attended), with_.mean_block > 0);
  }
  offset_t bytes(sequence_layer owner) const {
    offset_t rows = 0;
    for (index_t h = 0; drops(owner) && h < heads_; ++h) rows += packed_.rows(packed_owner(owner), h);
    return rows * offset_t(sizeof(index_t));
  }
  /// What saves and loads need.
  index_t tokens() const { return tokens_; }
  index_t* packed_positions(sequence_layer owner) const { return positions(owner); }  ///< [kv_heads, tokens]
  /// Positions of packed rows of which nothing was dropped.
  void count_positions(sequence_layer owner, cudaStream_t stream) const {
    if (!drops(owner)) return;
    detail::count_packed_positions_entry<view_type, 256>
        <<<unsigned(heads_), 256, 0, stream>>>(this->view(owner), positions(owner), tokens_);
    check(cudaGetLastError(), "launch of count_packed_positions");
  }
  offset_t peak_bytes() const { return base::peak_bytes() + offset_t(positions_.bytes()); }

 protected:
  using base::packed_owner, base::packing_, base::packed_, base::whole_, base::heads_, base::tokens_, base::with_,
      base::layout_, base::packs;

  /// Whether tokens of a layer that packs may be dropped.
  bool drops(sequence_layer owner) const { return with_.drops && packs(owner.layer); }
  noted_choice* choice_of(sequence_layer owner) {
    const auto found = std::find_if(choices_.begin(), choices_.end(), [&](const noted_choice& noted) {
      return noted.owner.layer == owner.layer && noted.owner.id == owner.id;
    });
    return found == choices_.end() ? nullptr : &*found;
  }

  /// Whole rows that are due where nothing was noted, by head; empty where all heads have equally many.
  host_vector<index_t> due_by_head(sequence_layer owner, packing_moment when) const {
    host_vector<index_t> due;
    if (!drops(owner)) return due;
    const auto& tail = layout_.rows.tail;
    for (index_t h = 0; h < heads_; ++h) {
      const index_t whole = whole_.stored(owner, h);
      due.push_back(when == packing_moment::step_end ? tail.packed_after_step(whole) : tail.packed_after_prompt(whole));
    }
    const sequence_layer packed = packed_owner(owner);
    bool even = true;
    for (index_t h = 1; h < heads_; ++h) {
      even = even && packed_.rows(packed, h) == packed_.rows(packed, 0) &&
             whole_.stored(owner, h) == whole_.stored(owner, 0);
    }
    if (even) due.clear();
    return due;
  }
  /// Bounds of the whole rows that stay.
  kept_bound left_of(host_vector<index_t> whole, const host_vector<index_t>& due) const {
    kept_bound left{};
    for (std::size_t h = 0; h < whole.size(); ++h) {
      whole[h] -= due[h];
      left.longest = (std::max)(left.longest, whole[h]);
      left.total += whole[h];
    }
    left.by_head = std::move(whole);
    return left;
  }
  /// Errors   as require_segment_rows.
  void require_rows(sequence_layer owner, const noted_choice* choice, const host_vector<index_t>& due,
                    bool begins) const {
    const auto& segments = packed_.segments(packed_owner(owner));
    const index_t longest_due = *std::max_element(due.begin(), due.end());
    offset_t rows = 0;
    for (std::size_t s = 0; s < segments.size(); ++s) {
      const index_t* held = choice ? choice->counts.data() + s * std::size_t(heads_)
                                   : packed_.rows_by_head(packed_owner(owner), segments[s]);
      const bool joins = !begins && s + 1 == segments.size();
      index_t longest = 0;
      for (index_t h = 0; h < heads_; ++h) longest = (std::max)(longest, held[h] + (joins ? due[std::size_t(h)] : 0));
      rows += longest;
    }
    rows += begins ? longest_due : 0;
    require_segment_rows(rows, tokens_);
  }

  /// Copies the due rows of a layer side by side, as rows of a view of the cache's own: `count` of every head.
  view_type due_side_by_side(sequence_layer owner, const noted_choice* choice, const host_vector<index_t>& due,
                             index_t count, cudaStream_t stream) const {
    view_type all = this->view(owner);
    const whole_type to = (*rows_).view();
    const kept_counts counts =
        choice ? upload(*choice, stream) : kept_counts{nullptr, nullptr, uploaded(owner, due, stream), nullptr};
    const dim3 grid{unsigned(std::clamp(count / 16, 1, 128)), unsigned(heads_), 2};
    detail::gather_due_entry<whole_type, whole_type, 256>
        <<<grid, 256, 0, stream>>>(all.whole, choice ? choice->chosen() : slot_lists{}, counts, count, to);
    check(cudaGetLastError(), "launch of gather_due");
    all.whole = to;
    return all;
  }
  /// Due rows by head on the device.
  const index_t* uploaded(sequence_layer owner, const host_vector<index_t>& due, cudaStream_t stream) const {
    index_t* const own = due_.data() + order_.index(packed_owner(owner)) * std::size_t(heads_);
    set_numbers(own, due.data(), heads_, stream);
    return own;
  }
  /// Notes the positions of the oldest whole rows, which are packed next; `due` null: `count` of every head.
  void add_positions(sequence_layer owner, const index_t* due, index_t count, cudaStream_t stream) const {
    if (!drops(owner)) return;
    detail::add_positions_entry<view_type, 256>
        <<<unsigned(heads_), 256, 0, stream>>>(this->view(owner), due, count, positions(owner), tokens_);
    check(cudaGetLastError(), "launch of add_positions");
  }
  /// Keeps the chosen packed rows, and lists the whole rows that stay whole.
  selection_view keep_packed(noted_choice& choice, cudaStream_t stream) {
    const sequence_layer packed = packed_owner(choice.owner);
    const kept_counts counts = upload(choice, stream);
    detail::keep_positions_entry<whole_type, 256><<<unsigned(heads_), 256, 0, stream>>>(
        whole_.view(choice.owner), choice.chosen(), counts, positions(choice.owner), tokens_);
    check(cudaGetLastError(), "launch of keep_positions");
    index_t* const left = choice.slots.data() + offset_t(heads_) * choice.stride;
    index_t* const left_counts = left + offset_t(heads_) * choice.stride;
    detail::list_left_entry<256><<<unsigned(heads_), 256, 0, stream>>>(choice.chosen(), counts, left, left_counts);
    check(cudaGetLastError(), "launch of list_left");
    bool loses = choice.drops_packed;
    for (index_t h = 0; h < heads_; ++h) loses = loses || choice.whole(heads_)[h] < whole_.stored(choice.owner, h);
    if (choice.drops_packed)
      packed_.keep(packed, {choice.slots.data(), nullptr, nullptr, choice.stride}, choice.counts.data(),
                   choice.segments, stream);
    if (loses) packed_.scatter(packed);
    return {left, left_counts, nullptr, choice.stride};
  }
  void copy_positions(index_t from, index_t to, cudaStream_t stream) const {
    const offset_t own = offset_t(heads_) * tokens_;
    if (with_.drops)
      copy_in_layers(positions_.data(), packing_.count, own * order_.sequences, own * from, own * to, own, stream);
  }

  host_vector<noted_choice> choices_, read_;

 private:
  index_t* positions(sequence_layer owner) const {
    return positions_.data() + offset_t(order_.index(packed_owner(owner))) * heads_ * tokens_;
  }
  kept_counts upload(const noted_choice& choice, cudaStream_t stream) const {
    index_t* const to = counts_.data();
    const std::size_t heads = std::size_t(heads_);
    set_numbers(to, choice.stored.data(), heads_, stream);
    set_numbers(to + heads, choice.packed.data(), heads_, stream);
    set_numbers(to + 2 * heads, choice.due.data(), heads_, stream);
    set_numbers(to + 3 * heads, choice.whole(heads_), heads_, stream);
    return {to, to + heads, to + 2 * heads, to + 3 * heads};
  }

  layer_major order_;
  device_buffer<index_t> positions_;  // [packing layers, sequences, kv_heads, tokens], of packed rows
  device_buffer<index_t> due_;        // [packing layers, sequences, kv_heads]
  device_buffer<index_t> counts_;     // [4, kv_heads]
  device_buffer<index_t> noted_;      // [max_segments + 1, kv_heads]
  std::optional<positioned_rows<whole_type>> rows_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
