// Upper bounds, known to the host, of what every entry of a store holds. An entry is a (layer, sequence).
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/plan/layer_extent.hpp"
#include "../../../../runtime/kept_lengths.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The bounds of one entry: of all its heads together, and of each head.
struct stored_tokens : token_bound {
  const index_t* first;  ///< [kv_heads], bounds when slots were last chosen
  index_t since;         ///< tokens that every head has gained since
  index_t least;         ///< slots below it are not written: every head has at least as many
  index_t head(index_t h) const { return (std::min)(longest, first[h] + since); }
};

/// The bounds of all entries. A step costs one addition per entry.
class stored_bounds {
 public:
  stored_bounds(index_t entries, index_t kv_heads)
      : heads_(kv_heads),
        bounds_(std::size_t(entries)),
        since_(std::size_t(entries)),
        first_(std::size_t(entries) * std::size_t(kv_heads)) {}

  const host_vector<token_bound>& bounds() const { return bounds_; }
  const token_bound& bound(std::size_t entry) const { return bounds_[entry]; }
  /// `moves`: for a call that moves stored rows.
  stored_tokens tokens(std::size_t entry, bool moves = false) const {
    return {bounds_[entry], first_.data() + entry * std::size_t(heads_), since_[entry],
            moves ? 0 : (std::max)(0, since_[entry])};
  }
  host_vector<index_t> by_head(std::size_t entry) const {
    host_vector<index_t> all;
    for (index_t h = 0; h < heads_; ++h) all.push_back(tokens(entry).head(h));
    return all;
  }

  void grew(std::size_t entry, index_t tokens) {
    bounds_[entry].longest += tokens;
    bounds_[entry].total += offset_t(heads_) * tokens;
    since_[entry] += tokens;
  }
  void keep(std::size_t entry, const kept_bound& kept) {
    const stored_tokens previous = tokens(entry);
    for (index_t h = 0; h < heads_; ++h) {
      first_[entry * std::size_t(heads_) + std::size_t(h)] =
          kept.by_head.empty() ? (std::min)(previous.head(h), kept.longest) : kept.by_head[std::size_t(h)];
    }
    since_[entry] = 0;
    bounds_[entry] = kept;
  }
  /// Slots were dropped in place: no head has more than the longest one now, and any may have fewer.
  void shrank(std::size_t entry, const token_bound& kept) {
    const stored_tokens previous = tokens(entry);
    bounds_[entry] = {(std::min)(bounds_[entry].longest, kept.longest), (std::min)(bounds_[entry].total, kept.total)};
    for (index_t h = 0; h < heads_; ++h) {
      first_[entry * std::size_t(heads_) + std::size_t(h)] = (std::min)(previous.head(h), bounds_[entry].longest);
    }
    since_[entry] = 0;
  }
  /// Heads of an empty entry have `counts` tokens, of which each gained `since` since slots were chosen.
  void lay_out(std::size_t entry, const host_vector<index_t>& counts, index_t since) {
    bounds_[entry] = {};
    since_[entry] = since;
    for (std::size_t h = 0; h < counts.size(); ++h) {
      first_[entry * std::size_t(heads_) + h] = counts[h] - since;
      bounds_[entry].longest = (std::max)(bounds_[entry].longest, counts[h]);
      bounds_[entry].total += counts[h];
    }
  }
  void copy(std::size_t from, std::size_t to) {
    bounds_[to] = bounds_[from];
    since_[to] = since_[from];
    std::copy_n(first_.begin() + offset_t(from) * heads_, heads_, first_.begin() + offset_t(to) * heads_);
  }
  void clear(std::size_t entry) {
    bounds_[entry] = {};
    since_[entry] = 0;
    std::fill_n(first_.begin() + offset_t(entry) * heads_, heads_, 0);
  }

 private:
  index_t heads_;
  host_vector<token_bound> bounds_;  // by entry
  host_vector<index_t> since_;       // by entry
  host_vector<index_t> first_;       // [entries, kv_heads]
};

}  // namespace cuda
TESSERA_NAMESPACE_END
