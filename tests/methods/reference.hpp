// What every method must do, simulated in double with token lists: no cache, no tiles, no running sums.
#pragma once

#include "any_cache.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"

namespace methods_test {

namespace oracle = support::oracle;
using support::rng;

/// The tokens of one sequence in all layers: q, k, v [layers, tokens, heads, dim].
struct model_data {
  tessera::model_shape shape;
  index_t tokens = 0;
  std::vector<float> q, k, v;

  /// With `distinct` > 0 the keys are copies of few rows: many tokens then tie exactly.
  model_data(rng& random, const tessera::model_shape& shape_, index_t tokens_, index_t distinct = 0)
      : shape(shape_), tokens(tokens_) {
    const index_t rows = shape.layers * tokens * shape.kv_heads;
    q = support::normals(random, std::size_t(shape.layers * tokens * shape.q_heads * dim), 1.5f);
    k = distinct > 0 ? support::repeated_rows(random, rows, dim, distinct) : support::normals(random, std::size_t(rows * dim));
    v = support::normals(random, std::size_t(rows * dim));
  }

  index_t group() const { return shape.q_heads / shape.kv_heads; }
  const float* query(index_t layer, index_t token, index_t head) const {
    return q.data() + ((offset_t(layer) * tokens + token) * shape.q_heads + head) * dim;
  }
  const float* key(index_t layer, index_t token, index_t head) const {
    return k.data() + ((offset_t(layer) * tokens + token) * shape.kv_heads + head) * dim;
  }
  const float* value(index_t layer, index_t token, index_t head) const {
    return v.data() + ((offset_t(layer) * tokens + token) * shape.kv_heads + head) * dim;
  }

  any_cache::rows queries(index_t layer, index_t first, index_t count) const {
    return tessera::nhd_rows(query(layer, first, 0), count, shape.q_heads, dim);
  }
  any_cache::rows keys(index_t layer, index_t first, index_t count) const {
    return tessera::nhd_rows(key(layer, first, 0), count, shape.kv_heads, dim);
  }
  any_cache::rows values(index_t layer, index_t first, index_t count) const {
    return tessera::nhd_rows(value(layer, first, 0), count, shape.kv_heads, dim);
  }

  oracle::attended attend(const tessera::logit_rule& rule, index_t layer, index_t token, index_t q_head,
                          const std::vector<index_t>& positions) const {
    std::vector<const float*> keys, values;
    for (const index_t position : positions) {
      keys.push_back(key(layer, position, q_head / group()));
      values.push_back(value(layer, position, q_head / group()));
    }
    return oracle::attend(query(layer, token, q_head), token, keys, values, positions, dim, dim, rule, q_head);
  }
};

/// What one head should keep or read.
struct choice {
  std::vector<index_t> positions;
  std::vector<double> scores;      // of every stored token, finished
  std::vector<index_t> stored;     // their positions
  bool ambiguous = false;          // two different scores too close for fp32 stand on both sides of the cut
};

class reference_cache {
 public:
  reference_cache(const settings& chosen, const model_data& data)
      : chosen_(chosen), data_(data), heads_(std::size_t(data.shape.layers * data.shape.kv_heads)) {}

  const std::vector<index_t>& stored(index_t layer, index_t head) const { return at(layer, head).positions; }

  void prefill(index_t count) {
    append(count);
    turn_ += count;
    if (accumulates()) accumulate(count);
  }

  /// By layer and head; empty where the method never retains. The caller says what was kept in truth: see `adopt`.
  std::vector<choice> end_prefill() {
    const auto result = retains() ? choose() : std::vector<choice>{};
    turn_ = 0;
    return result;
  }

  void begin_step(index_t count) { append(count); }

  /// What a step of `count` tokens, the newest stored ones, reads of a head.
  choice read(index_t layer, index_t head, index_t count) const {
    const head_state& state = at(layer, head);
    choice result;
    result.stored = result.positions = state.positions;
    if (!retrieves()) return result;
    result.scores = window_scores(layer, head, count);
    const index_t keep = chosen_.count("read_tokens", chosen_.budget);
    pick(result, oracle::top_tokens(result.scores, count > 1 ? count : 0, keep), count > 1 ? count : 0, keep);
    return result;
  }

  std::vector<choice> end_step(index_t count) {
    if (accumulates()) accumulate(count);
    return each_step() ? choose() : std::vector<choice>{};
  }

  void adopt(index_t layer, index_t head, const std::vector<index_t>& kept) {
    head_state& state = at(layer, head);
    head_state next;
    for (std::size_t i = 0; i < state.positions.size(); ++i) {
      if (std::binary_search(kept.begin(), kept.end(), state.positions[i])) {
        next.positions.push_back(state.positions[i]);
        next.scores.push_back(state.scores[i]);
      }
    }
    state = next;
  }

 private:
  struct head_state {
    std::vector<index_t> positions;
    std::vector<double> scores;
  };

  bool is(const char* name) const { return chosen_.method == name; }
  bool accumulates() const { return is("h2o") || is("block_heavy_hitters"); }
  bool each_step() const { return accumulates() || is("streaming_llm"); }
  bool retains() const { return !is("full") && !is("exact_topk"); }
  bool retrieves() const { return is("exact_topk") || is("two_stages"); }
  bool by_blocks() const { return is("two_stages") || is("block_heavy_hitters"); }
  bool adapts() const { return is("ada_snapkv") || is("two_stages"); }
  bool falls() const { return is("pyramidkv") || is("block_heavy_hitters"); }

  head_state& at(index_t layer, index_t head) { return heads_[std::size_t(layer * data_.shape.kv_heads + head)]; }
  const head_state& at(index_t layer, index_t head) const {
    return heads_[std::size_t(layer * data_.shape.kv_heads + head)];
  }

  void append(index_t count) {
    for (head_state& state : heads_) {
      for (index_t t = 0; t < count; ++t) {
        state.positions.push_back(next_ + t);
        state.scores.push_back(0);
      }
    }
    next_ += count;
  }

  /// Mass that the newest `rows` queries give to each stored token of a head.
  std::vector<double> window_scores(index_t layer, index_t head, index_t rows) const {
    const auto& positions = at(layer, head).positions;
    std::vector<double> scores(positions.size(), 0.0);
    for (index_t row = next_ - rows; row < next_; ++row) {
      for (index_t g = 0; g < data_.group(); ++g) {
        const auto result = data_.attend(chosen_.rule, layer, row, head * data_.group() + g, positions);
        for (std::size_t i = 0; i < scores.size(); ++i) scores[i] += result.probabilities[i];
      }
    }
    return scores;
  }

  void accumulate(index_t rows) {
    for (index_t layer = 0; layer < data_.shape.layers; ++layer) {
      for (index_t head = 0; head < data_.shape.kv_heads; ++head) {
        const auto fresh = window_scores(layer, head, rows);
        auto& scores = at(layer, head).scores;
        for (std::size_t i = 0; i < scores.size(); ++i) scores[i] += fresh[i];
      }
    }
  }

  std::vector<double> finished(const std::vector<double>& scores) const {
    const index_t pool = chosen_.count("pool", 7);
    if (accumulates()) return scores;
    return chosen_.count("pool_kind", 0) == 0 ? oracle::max_pool(scores, pool) : oracle::average_pool(scores, pool);
  }

  /// fp32 and double rank two scores alike only if they differ by more than this.
  static bool too_close(double a, double b) { return a != b && std::abs(a - b) <= 3e-5 * std::max(std::abs(a), std::abs(b)); }

  /// Notes what was picked, and whether rounding could have picked otherwise.
  void pick(choice& result, const std::vector<index_t>& slots, index_t tail, index_t keep) const {
    result.positions.clear();
    for (const index_t slot : slots) result.positions.push_back(result.stored[std::size_t(slot)]);
    const std::vector<double> candidates(result.scores.begin(), result.scores.end() - std::min(tail, index_t(result.scores.size())));
    if (by_blocks() && !candidates.empty() && result.scores.size() > slots.size()) {
      ambiguous_block(result, candidates, keep - tail);
    } else if (keep > tail && keep - tail < index_t(candidates.size())) {
      const double last = candidates[std::size_t(oracle::preference(candidates)[std::size_t(keep - tail - 1)])];
      for (const double score : candidates) result.ambiguous |= too_close(score, last);
    }
  }

  /// Blocks compete with the last one taken, the tokens inside it with each other. Sums of the same scores in another
  /// order may differ in the last bit, so equal sums are safe only where the scores are equal one by one.
  void ambiguous_block(choice& result, const std::vector<double>& candidates, index_t room) const {
    const index_t block = chosen_.count("block", 16);
    std::vector<double> sums;
    std::vector<std::vector<double>> members;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (i % std::size_t(block) == 0) {
        sums.push_back(0);
        members.emplace_back();
      }
      sums.back() += candidates[i];
      members.back().push_back(candidates[i]);
    }
    std::size_t last = 0;
    for (const index_t b : oracle::preference(sums)) {
      if (room <= 0) break;
      last = std::size_t(b);
      room -= index_t(members[last].size());
    }
    for (std::size_t b = 0; b < sums.size(); ++b) {
      result.ambiguous |= too_close(sums[b], sums[last]) || (sums[b] == sums[last] && members[b] != members[last]);
    }
    for (const double a : members[last]) {
      for (const double b : members[last]) result.ambiguous |= room < 0 && too_close(a, b);
    }
  }

  std::vector<choice> choose() const {
    std::vector<choice> result;
    for (index_t layer = 0; layer < data_.shape.layers; ++layer) {
      const auto chosen = choose(layer);
      result.insert(result.end(), chosen.begin(), chosen.end());
    }
    return result;
  }

  std::vector<choice> choose(index_t layer) const {
    const index_t kv_heads = data_.shape.kv_heads;
    std::vector<choice> result(static_cast<std::size_t>(kv_heads));
    std::vector<index_t> lengths;
    for (index_t h = 0; h < kv_heads; ++h) {
      result[std::size_t(h)].stored = result[std::size_t(h)].positions = stored(layer, h);
      lengths.push_back(index_t(stored(layer, h).size()));
    }
    if (*std::max_element(lengths.begin(), lengths.end()) <= chosen_.budget) return result;
    if (is("streaming_llm")) {
      for (choice& head : result) keep_ends(head.positions);
      return result;
    }
    index_t tail = std::min(turn_, chosen_.count("window", 32));
    if (accumulates()) tail = chosen_.count("recent", -1) < 0 ? chosen_.budget / 2 : chosen_.count("recent", -1);
    std::vector<std::vector<double>> candidates;
    for (index_t h = 0; h < kv_heads; ++h) {
      const auto raw = accumulates() ? at(layer, h).scores : window_scores(layer, h, tail);
      candidates.push_back(finished({raw.begin(), raw.end() - std::min(tail, index_t(raw.size()))}));
      auto& scores = result[std::size_t(h)].scores = candidates.back();
      scores.resize(raw.size(), oracle::infinite);
    }
    const auto counts = budget(layer, candidates, lengths, tail);
    for (index_t h = 0; h < kv_heads; ++h) {
      choice& head = result[std::size_t(h)];
      const index_t keep = counts[std::size_t(h)];
      pick(head,
           by_blocks() ? oracle::top_blocks(head.scores, tail, keep, chosen_.count("block", 16))
                       : oracle::top_tokens(head.scores, tail, keep),
           tail, keep);
    }
    if (adapts() && too_close_between_heads(candidates, tail)) {
      for (choice& head : result) head.ambiguous = true;
    }
    return result;
  }

  std::vector<index_t> budget(index_t layer, const std::vector<std::vector<double>>& candidates,
                              const std::vector<index_t>& lengths, index_t tail) const {
    std::vector<index_t> counts = lengths;
    if (adapts()) {
      counts = oracle::adaptive_counts(candidates, lengths, chosen_.budget, tail,
                                       index_t(std::lround(1000 * chosen_.value("floor", 0.2))));
    }
    for (std::size_t h = 0; h < counts.size(); ++h) {
      if (falls()) {
        counts[h] = oracle::pyramid_count(layer, data_.shape.layers, chosen_.budget, chosen_.count("beta", 20), tail, lengths[h]);
      }
      if (!falls() && !adapts()) counts[h] = std::min(lengths[h], chosen_.budget);
      counts[h] = std::clamp(counts[h], std::min(tail, lengths[h]), lengths[h]);
    }
    return counts;
  }

  bool too_close_between_heads(const std::vector<std::vector<double>>& candidates, index_t tail) const {
    std::vector<double> all;
    for (const auto& head : candidates) all.insert(all.end(), head.begin(), head.end());
    const std::size_t places = candidates.size() * std::size_t(std::max(0, chosen_.budget - tail));
    if (places == 0 || places >= all.size()) return false;
    const double last = all[std::size_t(oracle::preference(all)[places - 1])];
    return std::any_of(all.begin(), all.end(), [&](double score) { return too_close(score, last); });
  }

  /// StreamingLLM by its own words: the sinks and the newest, `budget` in all.
  void keep_ends(std::vector<index_t>& positions) const {
    const auto first_recent = std::size_t(std::count_if(positions.begin(), positions.end(), [&](index_t position) {
      return position < chosen_.count("sinks", 4);
    }));
    const std::size_t drop = positions.size() - std::min(positions.size(), std::size_t(chosen_.budget));
    positions.erase(positions.begin() + offset_t(first_recent), positions.begin() + offset_t(first_recent + drop));
  }

  settings chosen_;
  const model_data& data_;
  std::vector<head_state> heads_;
  index_t next_ = 0;
  index_t turn_ = 0;
};

}  // namespace methods_test
