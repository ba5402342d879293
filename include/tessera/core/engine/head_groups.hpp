// Which kv_heads share pages: those that keep about the same number of tokens.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <string>

#include "../error.hpp"
#include "../host/host_vector.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Among which heads groups are formed by shares: of a layer, or of the model. `none`: in a layer's order. `fitted`: of
/// the model, with smaller groups where shares differ much.
enum class clustering { layer, model, none, fitted };

/// Groups of kv_heads that share pages of `heads` columns, each of `page` tokens. The size of a group divides `heads`.
/// A head of a smaller group has several columns of each page: `heads / size` blocks of `page` tokens, one behind the
/// other. The number of a head is layer * kv_heads + head.
struct head_groups {
  index_t layers = 0, kv_heads = 0, heads = 1;
  host_vector<index_t> group;      ///< by head
  host_vector<index_t> column;     ///< by head, its index in the group
  host_vector<index_t> members;    ///< of all groups, one after the other
  host_vector<index_t> begins{0};  ///< [groups + 1], in `members`

  index_t count() const { return index_t(begins.size()) - 1; }
  std::span<const index_t> row(index_t i) const {
    return std::span(members).subspan(std::size_t(begins[std::size_t(i)]), std::size_t(size(i)));
  }
  index_t size(index_t i) const { return begins[std::size_t(i) + 1] - begins[std::size_t(i)]; }
  /// Blocks of a head in one page.
  index_t blocks_of_page(index_t i) const { return heads / size(i); }
  /// Pages that a group needs for `tokens` tokens of each of its heads.
  index_t pages_for(index_t i, index_t tokens, index_t page) const {
    const offset_t tokens_of_page = offset_t(page) * blocks_of_page(i);
    return index_t((tokens + tokens_of_page - 1) / tokens_of_page);
  }
  /// The number of a head's i-th block, in blocks of one column, when `pages` are its group's.
  index_t block(index_t head, index_t i, std::span<const index_t> pages) const {
    const index_t g = group[std::size_t(head)], blocks = blocks_of_page(g);
    return pages[std::size_t(i / blocks)] * heads + i % blocks * size(g) + column[std::size_t(head)];
  }
};

namespace detail {

/// Cuts heads of ascending shares into groups whose sizes divide `heads`, with the least empty memory for prompts of
/// 8,192 tokens and columns of 16. A group's empty memory is half a page, and that of its shorter heads.
inline host_vector<index_t> fitted_begins(const host_vector<double>& ascending, index_t heads) {
  constexpr double tokens = 8192, page = 16;
  const std::size_t count = ascending.size();
  host_vector<double> least(count + 1, 0.0);
  host_vector<index_t> last(count + 1, 0);  // size of the last group of the first heads
  for (std::size_t end = 1; end <= count; ++end) {
    for (index_t size = heads; size >= 1; --size) {
      if (heads % size != 0 || std::size_t(size) > end) continue;
      const double total = least[end - std::size_t(size)] + ascending[end - 1] * size * tokens + heads * page / 2;
      if (last[end] == 0 || total < least[end]) least[end] = total, last[end] = size;
    }
  }
  host_vector<index_t> begins;
  for (std::size_t end = count; end > 0; end -= std::size_t(last[end])) begins.push_back(index_t(end));
  begins.push_back(0);
  std::reverse(begins.begin(), begins.end());
  return begins;
}

}  // namespace detail

/// Sorts heads by share, ascending, equal ones by number, and cuts them into groups.
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
  for (index_t g = 0; g < result.count(); ++g) {
    index_t column = 0;
    for (const index_t head : result.row(g)) {
      result.group[std::size_t(head)] = g;
      result.column[std::size_t(head)] = column++;
    }
  }
  return result;
}

/// The shares of heads that fill their group's pages: each gets the largest of its group.
inline host_vector<double> filled_shares(const head_groups& groups, host_vector<double> shares) {
  for (index_t g = 0; g < groups.count(); ++g) {
    double largest = 0;
    for (const index_t head : groups.row(g)) largest = (std::max)(largest, shares[std::size_t(head)]);
    for (const index_t head : groups.row(g)) shares[std::size_t(head)] = largest;
  }
  return shares;
}

TESSERA_NAMESPACE_END
