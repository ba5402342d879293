// What LoopServe's steps read, in double.
#pragma once

#include <algorithm>
#include <set>
#include <vector>

#include "methods/support/conversation.hpp"

namespace methods_test {

/// The choice of one list in double, over everything up to `next`: by one query head, or by all of a group.
inline std::vector<index_t> best_tokens(const model_data& data, index_t layer, const std::vector<index_t>& q_heads,
                                        index_t next, index_t observed, index_t budget) {
  std::vector<const float*> keys;
  std::vector<index_t> positions;
  for (index_t at = 0; at < next; ++at) {
    keys.push_back(data.key(layer, at, q_heads[0] / data.group()));
    positions.push_back(at);
  }
  std::vector<double> scores(std::size_t(next), 0.0);
  const index_t rows = std::min(observed, next);
  for (index_t row = next - rows; row < next; ++row) {
    for (const index_t head : q_heads) {
      const auto seen = oracle::attend(data.query(layer, row, head), row, keys, {}, positions, dim, dim, {}, head);
      for (std::size_t i = 0; i < scores.size(); ++i) scores[i] += seen.probabilities[i];
    }
  }
  return oracle::top_tokens(scores, rows, budget);
}

/// What a turn's steps read of every list in double: everything until the turn has `first` outputs; then what is chosen with
/// those and with every `every` more, and what is decoded since.
struct reader {
  const model_data& data;
  index_t budget, observed, first, every;
  bool by_query_head;
  index_t outputs = 0, chosen_at = 0;
  std::vector<std::vector<index_t>> lists{};
  std::vector<std::set<index_t>> columns{}, slashes{};  // that join every list, by list

  index_t count() const { return by_query_head ? data.shape.q_heads : data.shape.kv_heads; }
  void choose(index_t layer, index_t next) {
    lists.clear();
    for (index_t list = 0; list < count(); ++list) {
      std::vector<index_t> heads{list};
      if (!by_query_head) {
        heads.clear();
        for (index_t g = 0; g < data.group(); ++g) heads.push_back(list * data.group() + g);
      }
      auto best = best_tokens(data, layer, heads, next, observed, budget);
      if (!columns.empty()) {
        std::set<index_t> all(best.begin(), best.end());
        all.insert(columns[std::size_t(list)].begin(), columns[std::size_t(list)].end());
        best.assign(all.begin(), all.end());
      }
      lists.push_back(best);
    }
    chosen_at = next;
  }
  void begin_turn(index_t layer, index_t next) {
    outputs = chosen_at = 0;
    lists.clear();
    if (first == 0) choose(layer, next);
  }
  /// What a step reads whose tokens lie from `from` on, before `next`.
  std::vector<index_t> read(index_t list, index_t from, index_t next) const {
    std::set<index_t> all;
    if (!lists.empty()) all.insert(lists[std::size_t(list)].begin(), lists[std::size_t(list)].end());
    for (index_t at = chosen_at; at < next; ++at) all.insert(at);
    for (index_t at = from; at < next && !slashes.empty(); ++at) {
      for (const index_t distance : slashes[std::size_t(list)]) {
        if (distance <= at) all.insert(at - distance);
      }
    }
    return {all.begin(), all.end()};
  }
  /// After a step: true where it was time to choose again.
  bool decoded(index_t layer, index_t tokens, index_t next) {
    bool due = false;
    while (tokens-- > 0) due |= ++outputs >= first && (outputs - first) % every == 0;
    if (due) choose(layer, next);
    return due;
  }
};

}  // namespace methods_test
