// Columns of numbers beside stored tokens: logical positions, accumulated scores, segments.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/selection.hpp"
#include "../../../core/stored/room.hpp"
#include "../../../core/stored/segment_cursor.hpp"
#include "../../../core/types.hpp"
#include "../../../runtime/saved/rows.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The columns that a recipe needs.
struct column_set {
  bool scores = false;     ///< of scorers that accumulate
  bool segments = false;   ///< which segment of the text a token belongs to
  index_t mean_block = 0;  ///< slots of a block whose mean key a store of packed rows keeps; 0: none
  bool any() const { return scores || segments; }
  /// Bytes of all columns of a token whose position is stored.
  offset_t token_bytes() const { return offset_t(sizeof(index_t)) * (1 + segments) + offset_t(sizeof(float)) * scores; }
};

/// Columns by kv_head and slot, of one layer of one sequence. Heads lie one behind the other; the caller has the
/// lengths. Positions are stored only once a token was dropped: until then slot and position coincide.
class columns {
 public:
  columns(index_t kv_heads, const column_set& with)
      : with_(with), begins_(std::size_t(kv_heads), 0), capacities_(std::size_t(kv_heads), 0) {}

  /// Where each head's row begins, in numbers.
  const host_vector<offset_t>& begins() const { return begins_; }
  const index_t* positions() const { return scattered_ ? positions_.data() : nullptr; }
  float* scores() { return scores_.data(); }
  const index_t* segments() const { return segments_.data(); }
  const host_vector<float>& all_scores() const { return scores_; }
  void set_scores(const host_vector<float>& scores) { std::copy(scores.begin(), scores.end(), scores_.begin()); }
  /// Sets the scores of the stored tokens at positions from `first` on. given [kv_heads, tokens].
  void set_scores(const host_vector<index_t>& lengths, index_t first, index_t tokens, const float* given) {
    for (index_t h = 0; h < index_t(lengths.size()); ++h) {
      for (index_t slot = lengths[std::size_t(h)]; slot > 0 && position(h, slot - 1) >= first; --slot) {
        const index_t at = position(h, slot - 1) - first;
        if (at < tokens) scores_[std::size_t(begins_[std::size_t(h)] + slot - 1)] = given[offset_t(h) * tokens + at];
      }
    }
  }
  index_t position(index_t head, index_t slot) const {
    return !scattered_ ? slot : positions_[std::size_t(begins_[std::size_t(head)] + slot)];
  }

  /// Appends `tokens` entries behind `lengths`, at positions `first_position`, ...; their scores are 0.
  void append(const host_vector<index_t>& lengths, index_t tokens, index_t first_position,
              const segment_marks& marks = {}) {
    if (!with_.any() && !scattered_) return;  // there is no column
    bool room = true;
    for (std::size_t h = 0; h < lengths.size(); ++h) room &= lengths[h] + tokens <= capacities_[h];
    if (!room) {
      host_vector<index_t> wanted;
      for (const index_t length : lengths) wanted.push_back(length + tokens + spare_room(length + tokens));
      reallocate(wanted, lengths, nullptr);
    }
    for (std::size_t h = 0; h < lengths.size(); ++h) {
      const std::size_t at = std::size_t(begins_[h] + lengths[h]);
      segment_cursor text = marks.start;
      for (index_t t = 0; t < tokens; ++t) {
        if (scattered_) positions_[at + std::size_t(t)] = first_position + t;
        if (with_.scores) scores_[at + std::size_t(t)] = 0;
        if (with_.segments) {
          segments_[at + std::size_t(t)] = text.advance(marks.boundaries && marks.boundaries[t] != 0);
        }
      }
    }
  }

  /// Allocates the memory of `keep`, which then cannot fail.
  void plan_keep(const host_vector<index_t>& lengths) {
    if (scattered_) return;
    offset_t held = 0;
    for (const index_t length : lengths) held += length;
    positions_.reserve(std::size_t((std::max)(held, total())));
  }

  /// Drops all but the chosen slots. Nothing changes when memory runs out.
  void keep(const host_vector<index_t>& lengths, const selection& chosen) {
    plan_keep(lengths);
    if (!scattered_) {
      if (!with_.any()) reserve(lengths);
      positions_.assign(std::size_t(total()), 0);
      scattered_ = true;
      for (std::size_t h = 0; h < lengths.size(); ++h) {
        for (index_t i = 0; i < lengths[h]; ++i) positions_[std::size_t(begins_[h] + i)] = i;
      }
    }
    offset_t used = 0;
    for (const index_t count : chosen.counts) used += count;
    if (gives_back(used, total())) {
      try {
        return reallocate(chosen.counts, lengths, &chosen);
      } catch (...) {  // no memory for smaller rows: they stay in the old ones
      }
    }
    for (std::size_t h = 0; h < lengths.size(); ++h) move_row(h, &chosen, chosen.counts[h], begins_[h], *this);
  }

  /// Saves or loads whether positions are stored. `lengths`: of the heads; `next`: the layer's next position.
  template <class Archive>
  void transfer_kind(const host_vector<index_t>& lengths, index_t next, Archive& archive) {
    archive.flag(scattered_);
    for (const index_t length : lengths) archive.require(scattered_ || length == next, "with lengths that cannot be");
  }
  /// Saves the columns of heads of these lengths in one array, or loads those of empty heads, behind `transfer_kind`.
  template <class Archive>
  void transfer(const host_vector<index_t>& lengths, index_t next, Archive& archive) {
    if (!with_.any() && !scattered_) return;
    if constexpr (Archive::loads) {
      reserve(lengths);
      if (scattered_) positions_.resize(std::size_t(total()));
      if (with_.scores) scores_.resize(std::size_t(total()));
      if (with_.segments) segments_.resize(std::size_t(total()));
    }
    const int count = scattered_ + with_.scores + with_.segments;
    offset_t bytes = 0;
    for (const index_t length : lengths) bytes += count * padded_bytes(offset_t(length) * 4);
    archive.begin_array(std::size_t(bytes));
    for (std::size_t h = 0; h < lengths.size(); ++h) {
      const auto column = [&](auto& all) {
        archive.part(all.data() + begins_[h], std::size_t(lengths[h]));
        archive.pad();
      };
      if (scattered_) column(positions_);
      if (with_.scores) column(scores_);
      if (with_.segments) column(segments_);
      if (scattered_) require_ascending(positions_.data() + begins_[h], lengths[h], next, archive);
    }
    archive.end_array();
  }

  /// Removes everything and releases the memory.
  void clear() {
    scattered_ = false;
    std::fill(begins_.begin(), begins_.end(), 0);
    std::fill(capacities_.begin(), capacities_.end(), 0);
    host_vector<index_t>().swap(positions_);
    host_vector<float>().swap(scores_);
    host_vector<index_t>().swap(segments_);
  }

  offset_t bytes() const {
    return offset_t((positions_.capacity() + segments_.capacity()) * sizeof(index_t) +
                    scores_.capacity() * sizeof(float));
  }

 private:
  offset_t total() const { return begins_.empty() ? 0 : begins_.back() + capacities_.back(); }

  /// Lays out rows of these capacities, one behind the other.
  void reserve(const host_vector<index_t>& capacities) {
    offset_t at = 0;
    for (std::size_t h = 0; h < capacities.size(); ++h) {
      begins_[h] = at;
      capacities_[h] = capacities[h];
      at += capacities[h];
    }
  }

  void move_row(std::size_t h, const selection* chosen, index_t count, offset_t to, columns& target) const {
    for (index_t i = 0; i < count; ++i) {
      const std::size_t from = std::size_t(begins_[h] + (chosen ? chosen->row(index_t(h))[i] : i));
      if (scattered_) target.positions_[std::size_t(to + i)] = positions_[from];
      if (with_.scores) target.scores_[std::size_t(to + i)] = scores_[from];
      if (with_.segments) target.segments_[std::size_t(to + i)] = segments_[from];
    }
  }

  void reallocate(const host_vector<index_t>& capacities, const host_vector<index_t>& lengths,
                  const selection* chosen) {
    columns fresh(index_t(begins_.size()), with_);
    fresh.scattered_ = scattered_;
    fresh.reserve(capacities);
    if (scattered_) fresh.positions_.resize(std::size_t(fresh.total()));
    if (with_.scores) fresh.scores_.resize(std::size_t(fresh.total()));
    if (with_.segments) fresh.segments_.resize(std::size_t(fresh.total()));
    for (std::size_t h = 0; h < lengths.size(); ++h) {
      move_row(h, chosen, chosen ? chosen->counts[h] : lengths[h], fresh.begins_[h], fresh);
    }
    *this = std::move(fresh);
  }

  column_set with_;
  bool scattered_ = false;  // something was dropped: positions are no longer slots, even if nothing is left
  host_vector<offset_t> begins_;
  host_vector<index_t> capacities_;
  host_vector<index_t> positions_;
  host_vector<float> scores_;
  host_vector<index_t> segments_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
