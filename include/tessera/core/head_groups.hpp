// Which kv_heads share pages: heads that keep about as much stand together.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "error.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Among which heads groups are formed by their shares; `none`: as heads stand in a layer.
enum class clustering { layer, model, none };

/// Groups of `heads` kv_heads each. A head is numbered layer * kv_heads + head.
struct head_groups {
  index_t layers = 0, kv_heads = 0, heads = 1;
  std::vector<index_t> group;    ///< by head
  std::vector<index_t> column;   ///< by head, its place in the group
  std::vector<index_t> members;  ///< [groups, heads]

  index_t count() const { return index_t(members.size()) / heads; }
  const index_t* row(index_t one) const { return members.data() + offset_t(one) * heads; }
};

/// Sorts heads by their shares, the smaller first, equal ones by number, and cuts them into groups.
/// Shapes   shares [layers, kv_heads], or empty: all alike.
/// Errors   heads that do not divide what is grouped: tessera::error.
inline head_groups group_heads(index_t layers, index_t kv_heads, index_t heads, clustering among,
                               const std::vector<double>& shares) {
  const bool whole_model = among == clustering::model;
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
  result.group.resize(std::size_t(all));
  result.column.resize(std::size_t(all));
  for (index_t i = 0; i < all; ++i) {
    result.group[std::size_t(result.members[std::size_t(i)])] = i / heads;
    result.column[std::size_t(result.members[std::size_t(i)])] = i % heads;
  }
  return result;
}

/// The shares of heads that fill their group's pages: each gets the largest of its group.
inline std::vector<double> filled_shares(const head_groups& groups, std::vector<double> shares) {
  for (index_t one = 0; one < groups.count(); ++one) {
    double most = 0;
    for (index_t i = 0; i < groups.heads; ++i) most = std::max(most, shares[std::size_t(groups.row(one)[i])]);
    for (index_t i = 0; i < groups.heads; ++i) shares[std::size_t(groups.row(one)[i])] = most;
  }
  return shares;
}

TESSERA_NAMESPACE_END
