// Which kv_heads share pages: heads that keep about as much stand together.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <string>

#include "../error.hpp"
#include "../host/host_vector.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Among which heads groups are formed by their shares; `none`: as heads stand in a layer; `fitted`: over the model,
/// heads that stand far apart in groups of fewer.
enum class clustering { layer, model, none, fitted };

/// Groups of kv_heads that share pages of `heads` columns, of `page` tokens each. A group of fewer heads, a divisor of
/// `heads`, has several columns of a page for each of them: `heads / size` blocks of `page` tokens, one after the
/// other. A head is numbered layer * kv_heads + head.
struct head_groups {
  index_t layers = 0, kv_heads = 0, heads = 1;
  host_vector<index_t> group;      ///< by head
  host_vector<index_t> column;     ///< by head, its place in the group
  host_vector<index_t> members;    ///< of all groups, one after the other
  host_vector<index_t> begins{0};  ///< [groups + 1], in `members`

  index_t count() const { return index_t(begins.size()) - 1; }
  std::span<const index_t> row(index_t one) const {
    return std::span(members).subspan(std::size_t(begins[std::size_t(one)]), std::size_t(size(one)));
  }
  index_t size(index_t one) const { return begins[std::size_t(one) + 1] - begins[std::size_t(one)]; }
  /// Blocks of a head in one page.
  index_t blocks_of_page(index_t one) const { return heads / size(one); }
  /// Pages in which a group's heads have room for so many tokens each.
  index_t pages_for(index_t one, index_t tokens, index_t page) const {
    const offset_t each = offset_t(page) * blocks_of_page(one);
    return index_t((tokens + each - 1) / each);
  }
  /// The number of a head's i-th block, in blocks of one column, when its group holds `pages`.
  index_t block(index_t head, index_t i, std::span<const index_t> pages) const {
    const index_t one = group[std::size_t(head)], each = blocks_of_page(one);
    return pages[std::size_t(i / each)] * heads + i % each * size(one) + column[std::size_t(head)];
  }
};

namespace detail {

/// Where to cut heads of ascending shares into groups: sizes that divide `heads`, so that what is empty is least. Each
/// group leaves half a page empty beside what its shorter heads do, of prompts of 8,192 tokens, and of 16 tokens a
/// column.
inline host_vector<index_t> fitted_begins(const host_vector<double>& ascending, index_t heads) {
  constexpr double tokens = 8192, page = 16;
  const std::size_t count = ascending.size();
  host_vector<double> least(count + 1, 0.0);
  host_vector<index_t> last(count + 1, 0);  // size of the last group of the first heads
  for (std::size_t end = 1; end <= count; ++end) {
    for (index_t size = heads; size >= 1; --size) {
      if (heads % size != 0 || std::size_t(size) > end) continue;
      const double own = least[end - std::size_t(size)] + ascending[end - 1] * size * tokens + heads * page / 2;
      if (last[end] == 0 || own < least[end]) least[end] = own, last[end] = size;
    }
  }
  host_vector<index_t> begins;
  for (std::size_t end = count; end > 0; end -= std::size_t(last[end])) begins.push_back(index_t(end));
  begins.push_back(0);
  std::reverse(begins.begin(), begins.end());
  return begins;
}

}  // namespace detail

/// Sorts heads by their shares, the smaller first, equal ones by number, and cuts them into groups.
/// Shapes   shares [layers, kv_heads], or empty: all alike.
/// Errors   heads that do not divide what is grouped: tessera::error.
inline head_groups group_heads(index_t layers, index_t kv_heads, index_t heads, clustering among,
                               const host_vector<double>& shares) {
  const bool whole_model = among == clustering::model || among == clustering::fitted;
  const index_t all = layers * kv_heads, run = whole_model ? all : kv_heads;
  require(heads >= 1 && run % heads == 0, "heads", heads,
          "a divisor of the " + std::to_string(run) + (whole_model ? " KV heads of the model" : " KV heads of a layer"),
          "pass how many KV heads share a table of pages");
  head_groups result;
  result.layers = layers;
  result.kv_heads = kv_heads;
  result.heads = heads;
  result.members.resize(std::size_t(all));
  std::iota(result.members.begin(), result.members.end(), 0);
  for (index_t first = 0; first < all && among != clustering::none && !shares.empty(); first += run) {
    std::stable_sort(result.members.begin() + first, result.members.begin() + first + run,
                     [&](index_t a, index_t b) { return shares[std::size_t(a)] < shares[std::size_t(b)]; });
  }
  if (among == clustering::fitted && !shares.empty()) {
    host_vector<double> ascending;
    for (const index_t head : result.members) ascending.push_back(shares[std::size_t(head)]);
    result.begins = detail::fitted_begins(ascending, heads);
  } else {
    for (index_t end = heads; end <= all; end += heads) result.begins.push_back(end);
  }
  result.group.resize(std::size_t(all));
  result.column.resize(std::size_t(all));
  for (index_t one = 0; one < result.count(); ++one) {
    index_t column = 0;
    for (const index_t head : result.row(one)) {
      result.group[std::size_t(head)] = one;
      result.column[std::size_t(head)] = column++;
    }
  }
  return result;
}

/// The shares of heads that fill their group's pages: each gets the largest of its group.
inline host_vector<double> filled_shares(const head_groups& groups, host_vector<double> shares) {
  for (index_t one = 0; one < groups.count(); ++one) {
    double most = 0;
    for (const index_t head : groups.row(one)) most = (std::max)(most, shares[std::size_t(head)]);
    for (const index_t head : groups.row(one)) shares[std::size_t(head)] = most;
  }
  return shares;
}

TESSERA_NAMESPACE_END
