// What the host knows of how much every place of a store holds.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../runtime/kept_lengths.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Upper bounds of one place: of all its heads, and of each.
struct held_tokens : token_bound {
  const index_t* first;  ///< [kv_heads], when slots were last chosen
  index_t since;         ///< tokens that every head took since
  index_t of(index_t head) const { return (std::min)(longest, first[head] + since); }
};

/// The same of all places. A step costs one addition a place.
class held_tokens_of_places {
 public:
  held_tokens_of_places(index_t places, index_t kv_heads)
      : heads_(kv_heads),
        bounds_(std::size_t(places)),
        since_(std::size_t(places)),
        first_(std::size_t(places) * std::size_t(kv_heads)) {}

  const host_vector<token_bound>& bounds() const { return bounds_; }
  const token_bound& bound(std::size_t place) const { return bounds_[place]; }
  held_tokens of(std::size_t place) const {
    return {bounds_[place], first_.data() + place * std::size_t(heads_), since_[place]};
  }
  host_vector<index_t> by_head(std::size_t place) const {
    host_vector<index_t> all;
    for (index_t h = 0; h < heads_; ++h) all.push_back(of(place).of(h));
    return all;
  }

  void took(std::size_t place, index_t tokens) {
    bounds_[place].longest += tokens;
    bounds_[place].total += offset_t(heads_) * tokens;
    since_[place] += tokens;
  }
  void keep(std::size_t place, const kept_bound& kept) {
    const held_tokens before = of(place);
    for (index_t h = 0; h < heads_; ++h) {
      first_[place * std::size_t(heads_) + std::size_t(h)] =
          kept.by_head.empty() ? (std::min)(before.of(h), kept.longest) : kept.by_head[std::size_t(h)];
    }
    since_[place] = 0;
    bounds_[place] = kept;
  }
  /// Slots were dropped in place: no head has more than the longest now, whatever it took before.
  void shrank(std::size_t place, const token_bound& kept) {
    bounds_[place] = {(std::min)(bounds_[place].longest, kept.longest), (std::min)(bounds_[place].total, kept.total)};
  }
  void copy(std::size_t from, std::size_t to) {
    bounds_[to] = bounds_[from];
    since_[to] = since_[from];
    std::copy_n(first_.begin() + offset_t(from) * heads_, heads_, first_.begin() + offset_t(to) * heads_);
  }
  void clear(std::size_t place) {
    bounds_[place] = {};
    since_[place] = 0;
    std::fill_n(first_.begin() + offset_t(place) * heads_, heads_, 0);
  }

 private:
  index_t heads_;
  host_vector<token_bound> bounds_;  // by place
  host_vector<index_t> since_;       // by place
  host_vector<index_t> first_;       // [places, kv_heads]
};

}  // namespace cuda
TESSERA_NAMESPACE_END
