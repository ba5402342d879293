// Memory for those who have none: the tokens of one layer and one sequence, heads of uneven length.
#pragma once

#include <algorithm>
#include <vector>

#include "../../../core/error.hpp"
#include "pack.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
inline namespace TESSERA_HOST_ISA {

/// Owns K and V rows of every kv_head, each head's slots in position order, and the columns that go with them:
/// logical positions (once anything has been dropped) and scores (for scorers that accumulate).
///
/// Growth leaves room for a 64th more, at least 16 tokens: a decode step then copies 64 rows on average, far fewer than
/// it reads; `keep` gives memory back as soon as a quarter is unused.
template <class Layout>
class ragged_store {
 public:
  using T = typename Layout::element_type;
  using view_type = kv_view<T, Layout::k_dim, ragged, Layout::v_dim>;

  ragged_store(index_t kv_heads, bool with_scores)
      : with_scores_(with_scores),
        lengths_(std::size_t(kv_heads), 0),
        begins_(std::size_t(kv_heads), 0),
        capacities_(std::size_t(kv_heads), 0) {}

  index_t kv_heads() const { return index_t(lengths_.size()); }
  index_t length(index_t head) const { return lengths_[std::size_t(head)]; }
  const std::vector<index_t>& lengths() const { return lengths_; }
  /// Where each head's row of the score and position columns begins.
  const std::vector<offset_t>& begins() const { return begins_; }
  float* scores() { return scores_.data(); }
  index_t position(index_t head, index_t slot) const {
    return !scattered_ ? slot : positions_[std::size_t(begins_[std::size_t(head)] + slot)];
  }

  /// A view of all heads as one sequence. Valid until the store changes.
  view_type view() {
    view_type view;
    view.k = k_.data();
    view.v = v_.data();
    view.k_strides = {0, 0, Layout::k_dim, 1};
    view.v_strides = {0, 0, Layout::v_dim, 1};
    view.sequences = 1;
    view.kv_heads = kv_heads();
    view.lengths = lengths_.data();
    view.length_strides = {0, 1};
    view.table = {begins_.data(), kv_heads()};
    if (scattered_) {
      view.positions = positions_.data();
      view.position_begin = begins_.data();
    }
    return view;
  }

  /// Appends tokens at positions `first_position`, `first_position` + 1, ...
  template <class E>
  void append(const rows_view<const E>& k, const rows_view<const E>& v, index_t first_position) {
    const index_t tokens = k.tokens;
    const bool room = std::equal(lengths_.begin(), lengths_.end(), capacities_.begin(),
                                 [&](index_t length, index_t capacity) { return length + tokens <= capacity; });
    if (!room) {
      std::vector<index_t> wanted;
      for (const index_t length : lengths_) wanted.push_back(grown(length + tokens));
      reallocate(wanted, nullptr);
    }
    cpu::append(view(), k, v);
    for (std::size_t h = 0; h < lengths_.size(); ++h) {
      const std::size_t at = std::size_t(begins_[h] + lengths_[h]);
      for (index_t t = 0; t < tokens; ++t) {
        if (scattered_) positions_[at + std::size_t(t)] = first_position + t;
        if (with_scores_) scores_[at + std::size_t(t)] = 0;
      }
      lengths_[h] += tokens;
    }
  }

  /// Keeps the chosen slots of every head and drops the rest.
  void keep(const selection& chosen, executor& workers) {
    bool all = true;
    offset_t used = 0, held = 0;
    for (std::size_t h = 0; h < lengths_.size(); ++h) {
      all &= chosen.counts[h] == lengths_[h];
      used += chosen.counts[h];
      held += capacities_[h];
    }
    if (all) return;
    if (!scattered_) {
      scattered_ = true;
      positions_.resize(std::size_t(held));
      for (std::size_t h = 0; h < lengths_.size(); ++h) {
        for (index_t i = 0; i < lengths_[h]; ++i) positions_[std::size_t(begins_[h] + i)] = i;
      }
    }
    if (used * 4 < held * 3) {
      reallocate(chosen.counts, &chosen, &workers);
    } else {
      pack(view(), chosen.view(), view(), workers);
      for (std::size_t h = 0; h < lengths_.size(); ++h) move_columns(h, chosen, begins_[h], positions_, scores_);
      lengths_ = chosen.counts;
    }
  }

  /// Bytes that are allocated for rows, positions and scores.
  offset_t bytes() const {
    return offset_t((k_.capacity() + v_.capacity()) * sizeof(T) + positions_.capacity() * sizeof(index_t) +
                    scores_.capacity() * sizeof(float));
  }

 private:
  static index_t grown(index_t length) { return length + std::max<index_t>(16, length / 64); }

  void move_columns(std::size_t h, const selection& chosen, offset_t to, std::vector<index_t>& positions,
                    std::vector<float>& scores) const {
    const index_t* slots = chosen.row(index_t(h));
    for (index_t i = 0; i < chosen.counts[h]; ++i) {
      const std::size_t from = std::size_t(begins_[h] + slots[i]), target = std::size_t(to + i);
      positions[target] = positions_[from];
      if (with_scores_) scores[target] = scores_[from];
    }
  }

  /// Moves to fresh memory of the given capacities: everything, or the chosen slots only.
  void reallocate(const std::vector<index_t>& capacities, const selection* chosen, executor* workers = nullptr) {
    selection everything;
    if (!chosen) {
      everything.reset(lengths_);
      for (index_t h = 0; h < kv_heads(); ++h) {
        for (index_t i = 0; i < length(h); ++i) everything.row(h)[i] = i;
      }
      everything.counts = lengths_;
      chosen = &everything;
    }
    ragged_store fresh(kv_heads(), with_scores_);
    offset_t total = 0;
    for (std::size_t h = 0; h < lengths_.size(); ++h) {
      fresh.begins_[h] = total;
      fresh.capacities_[h] = capacities[h];
      total += capacities[h];
    }
    fresh.k_.resize(std::size_t(total) * Layout::k_dim);
    fresh.v_.resize(std::size_t(total) * Layout::v_dim);
    if (with_scores_) fresh.scores_.resize(std::size_t(total));
    fresh.scattered_ = scattered_;
    if (scattered_) fresh.positions_.resize(std::size_t(total));
    executor here(1);
    pack(view(), chosen->view(), fresh.view(), workers ? *workers : here);
    if (scattered_) {
      for (std::size_t h = 0; h < lengths_.size(); ++h) {
        move_columns(h, *chosen, fresh.begins_[h], fresh.positions_, fresh.scores_);
      }
    } else if (with_scores_) {
      for (std::size_t h = 0; h < lengths_.size(); ++h) {
        std::copy_n(scores_.begin() + begins_[h], lengths_[h], fresh.scores_.begin() + fresh.begins_[h]);
      }
    }
    fresh.lengths_ = chosen->counts;
    *this = std::move(fresh);
  }

  bool with_scores_;
  bool scattered_ = false;  // something was dropped: positions are no longer slots, even if nothing is left
  std::vector<index_t> lengths_;
  std::vector<offset_t> begins_;  // by head, in tokens
  std::vector<index_t> capacities_;
  std::vector<T> k_, v_;
  std::vector<index_t> positions_;
  std::vector<float> scores_;
};

}  // namespace TESSERA_HOST_ISA
}  // namespace cpu
TESSERA_NAMESPACE_END
