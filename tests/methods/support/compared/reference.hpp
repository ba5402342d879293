// What every method must do, simulated in double with token lists: no cache, no tiles, no running sums.
#pragma once

#include "methods/support/model_data.hpp"
#include "support/page_oracle.hpp"

namespace methods_test {

/// What one head should keep or read.
struct choice {
  std::vector<index_t> positions;
  std::vector<double> scores;   // of every stored token, finished
  std::vector<index_t> stored;  // their positions
  bool ambiguous = false;       // two different scores too close for fp32 stand on both sides of the cut
  double slack = 0;             // what fp32 scores may be off by, beside a part of them
  std::vector<std::vector<double>>
      probabilities{};  // by row and stored token, where missing mass goes to the mean of V
};

/// How a budget is split over both stages, by the published formulas.
struct reference_plan {
  index_t retained = 0, read = 0, page = 1, channels = 1;
};

class reference_cache {
 public:
  reference_cache(const settings& chosen, const model_data& data)
      : chosen_(chosen),
        made_of_(traits_of(chosen.method)),
        data_(data),
        heads_(std::size_t(data.shape.layers * data.shape.kv_heads)) {}

  const reference_plan& plan() const { return plan_; }
  const traits& made_of() const { return made_of_; }

  const std::vector<index_t>& stored(index_t layer, index_t head) const { return at(layer, head).positions; }

  void prefill(index_t count) {
    append(count);
    turn_ += count;
    if (accumulates()) accumulate(count);
  }

  /// By layer and head; empty where the method never retains. The caller says what was kept in truth: see `adopt`.
  std::vector<choice> end_prefill() {
    plan_ = make_plan(next_);
    const auto result = chooses() ? choose() : std::vector<choice>{};
    turn_ = 0;
    return result;
  }

  void begin_step(index_t count) {
    append(count);
    if (!made_of_.before_step) return;
    for (index_t layer = 0; layer < data_.shape.layers; ++layer) {
      for (index_t head = 0; head < data_.shape.kv_heads; ++head) {
        auto kept = stored(layer, head);
        keep_ends(kept, count);
        adopt(layer, head, kept);
      }
    }
  }

  /// What a step of `count` tokens, the newest stored ones, reads of a head.
  choice read(index_t layer, index_t head, index_t count) const {
    choice result;
    result.stored = result.positions = readable(layer, head);
    if (made_of_.reads == traits::second::none) return result;
    index_t tail = count > 1 ? count : 0;
    const index_t keep = plan_.read;
    if (made_of_.reads == traits::second::exact) {
      result.scores = window_scores(layer, head, count, result.stored);
      pick(result, oracle::top_tokens(result.scores, tail, keep), tail, keep);
      return result;
    }
    if (index_t(result.stored.size()) <= keep) return result;
    const index_t recent = chosen_.count("recent", -1);
    if (made_of_.reads == traits::second::sparq) tail = std::max(tail, recent < 0 ? keep / 4 : recent);
    if (made_of_.reads == traits::second::quest) tail = std::max(tail, std::min(keep, chosen_.count("newest", 1)));
    if (made_of_.reads == traits::second::hsa) tail = std::max(tail, std::min(keep, chosen_.count("newest", 0)));
    const auto estimated = estimate(layer, head, count, result.stored);
    result.scores = estimated.scores;
    result.slack = estimated.slack;
    const bool by_page = made_of_.pages || (made_of_.reads == traits::second::hsa && chosen_.count("unit", 0) == 1);
    const auto slots = by_page ? oracle::top_pages(result.scores, tail, keep, plan_.page)
                               : oracle::top_tokens(result.scores, tail, keep);
    pick_read(result, slots, tail);
    result.ambiguous |= estimated.ambiguous;
    if (made_of_.reads == traits::second::sparq) result.probabilities = estimated.probabilities;
    return result;
  }

  /// What this turn's steps may read of a head.
  std::vector<index_t> readable(index_t layer, index_t head) const {
    const auto& positions = at(layer, head).positions;
    if (!made_of_.filters) return positions;
    std::vector<index_t> passed;
    std::set_intersection(positions.begin(), positions.end(), at(layer, head).passed.begin(),
                          at(layer, head).passed.end(), std::back_inserter(passed));
    return passed;
  }

  std::vector<choice> end_step(index_t count) {
    if (accumulates() && each_step()) accumulate(count);
    return each_step() ? choose() : std::vector<choice>{};
  }

  void adopt(index_t layer, index_t head, const std::vector<index_t>& kept) {
    head_state& state = at(layer, head);
    if (made_of_.filters) {
      state.passed = kept;
      return;
    }
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
    std::vector<index_t> passed;  // a filter's
  };

  bool accumulates() const { return made_of_.scorer == traits::first::accumulated; }
  bool each_step() const { return made_of_.each_step; }
  bool chooses() const { return made_of_.scorer != traits::first::none; }
  bool by_blocks() const { return made_of_.blocks; }
  bool adapts() const { return made_of_.budget == traits::share::adaptive; }
  bool falls() const { return made_of_.budget == traits::share::pyramid; }
  index_t kept_budget() const { return made_of_.plans ? std::max(plan_.retained, plan_.read) : chosen_.budget; }

  reference_plan make_plan(index_t prompt) const {
    reference_plan result;
    const double max_new = chosen_.value("max_new", 128), length = prompt + max_new;
    double capacity = length, budget = chosen_.budget;
    if (made_of_.plans) {
      const double c = std::max(1.0, length / budget);
      const double r =
          chosen_.values.count("split") ? chosen_.value("split", 0) : std::min(0.2 + 0.06 * std::log2(c), 0.8);
      capacity = std::max(std::floor(length / std::pow(c, r)), std::min(2 * max_new, length));
      result.retained = index_t(capacity - max_new);
    } else if (chooses()) {
      result.retained = chosen_.budget;
      capacity = std::min<double>(prompt, chosen_.budget) + max_new;
      budget = chosen_.value("read_tokens", chosen_.budget);
    }
    const bool halved = made_of_.plans || made_of_.estimate;
    result.read = index_t(halved ? std::floor(budget / 2) : budget);
    const double ratio = std::max(1.0, capacity / budget);
    index_t page = 1, channels = dim;
    if (made_of_.reads == traits::second::hsa) {
      page = index_t(std::ceil(std::sqrt(ratio)));
      if (page > ratio) page = 1;
    }
    if (made_of_.reads == traits::second::quest) page = index_t(std::ceil(ratio));
    const index_t asked = chosen_.count("page", made_of_.reads == traits::second::quest ? 16 : 0);
    if (made_of_.reads != traits::second::sparq && asked > 0) page = asked;
    if (made_of_.reads == traits::second::hsa) channels = std::min(dim, int(std::floor(dim * double(page) / ratio)));
    if (made_of_.reads == traits::second::sparq) channels = std::max(1, int(std::floor(dim / ratio)));
    if (made_of_.reads != traits::second::quest && chosen_.count("channels", 0) > 0)
      channels = chosen_.count("channels", 0);
    result.page = page;
    result.channels = channels;
    return result;
  }

  oracle::page_scores estimate(index_t layer, index_t head, index_t count, const std::vector<index_t>& stored) const {
    const auto kind = made_of_.reads == traits::second::hsa     ? oracle::estimate::hsa
                      : made_of_.reads == traits::second::quest ? oracle::estimate::quest
                                                                : oracle::estimate::sparq;
    std::vector<const float*> queries, keys;
    std::vector<index_t> at, q_heads;
    for (index_t row = next_ - count; row < next_; ++row) {
      for (index_t g = 0; g < data_.group(); ++g) {
        queries.push_back(data_.query(layer, row, head * data_.group() + g));
        at.push_back(row);
        q_heads.push_back(head * data_.group() + g);
      }
    }
    for (const index_t position : stored) keys.push_back(data_.key(layer, position, head));
    return oracle::score_pages({kind, plan_.page, plan_.channels}, queries, at, q_heads, keys, stored, dim,
                               chosen_.rule);
  }

  /// As `pick`, for what a step reads: the cut may be open between the worst slot taken and the best left.
  void pick_read(choice& result, const std::vector<index_t>& slots, index_t tail) const {
    const index_t n = index_t(result.stored.size());
    result.positions.clear();
    double worst = oracle::infinite, best = -oracle::infinite;
    std::vector<bool> taken(std::size_t(n), false);
    for (const index_t slot : slots) {
      result.positions.push_back(result.stored[std::size_t(slot)]);
      taken[std::size_t(slot)] = true;
      if (slot < n - tail) worst = std::min(worst, result.scores[std::size_t(slot)]);
    }
    for (index_t slot = 0; slot < n; ++slot) {
      if (!taken[std::size_t(slot)]) best = std::max(best, result.scores[std::size_t(slot)]);
    }
    for (index_t slot = 0; slot < n; ++slot) {
      const double score = result.scores[std::size_t(slot)], edge = taken[std::size_t(slot)] ? best : worst;
      if (slot >= n - tail && taken[std::size_t(slot)]) continue;
      result.ambiguous |= score != edge && std::isfinite(score) && std::isfinite(edge) &&
                          std::abs(score - edge) <= 1e-4 * std::max(std::abs(score), std::abs(edge)) + result.slack;
    }
  }

  head_state& at(index_t layer, index_t head) { return heads_[std::size_t(layer * data_.shape.kv_heads + head)]; }
  const head_state& at(index_t layer, index_t head) const {
    return heads_[std::size_t(layer * data_.shape.kv_heads + head)];
  }

  void append(index_t count) {
    for (head_state& state : heads_) {
      for (index_t t = 0; t < count; ++t) {
        state.positions.push_back(next_ + t);
        state.scores.push_back(0);
        state.passed.push_back(next_ + t);
      }
    }
    next_ += count;
  }

  /// Mass that the newest `rows` queries give to each stored token of a head.
  std::vector<double> window_scores(index_t layer, index_t head, index_t rows) const {
    return window_scores(layer, head, rows, at(layer, head).positions);
  }
  std::vector<double> window_scores(index_t layer, index_t head, index_t rows,
                                    const std::vector<index_t>& positions) const {
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
    const index_t pool = chosen_.count("pool", made_of_.pool);
    if (accumulates()) return scores;
    return chosen_.count("pool_kind", 0) == 0 ? oracle::max_pool(scores, pool) : oracle::average_pool(scores, pool);
  }

  /// fp32 and double rank two scores alike only if they differ by more than this.
  static bool too_close(double a, double b) {
    return a != b && std::abs(a - b) <= 3e-5 * std::max(std::abs(a), std::abs(b));
  }

  /// Notes what was picked, and whether rounding could have picked otherwise.
  void pick(choice& result, const std::vector<index_t>& slots, index_t tail, index_t keep) const {
    result.positions.clear();
    for (const index_t slot : slots) result.positions.push_back(result.stored[std::size_t(slot)]);
    const std::vector<double> candidates(result.scores.begin(),
                                         result.scores.end() - std::min(tail, index_t(result.scores.size())));
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
    if (*std::max_element(lengths.begin(), lengths.end()) <= kept_budget()) return result;
    if (made_of_.scorer == traits::first::position) {
      for (choice& head : result) keep_ends(head.positions, 0);
      return result;
    }
    index_t tail = std::min(turn_, chosen_.count("window", made_of_.window));
    if (accumulates()) tail = chosen_.count("recent", -1) < 0 ? kept_budget() / 2 : chosen_.count("recent", -1);
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
      counts = oracle::adaptive_counts(candidates, lengths, kept_budget(), tail,
                                       index_t(std::lround(1000 * chosen_.value("floor", 0.2))));
    }
    for (std::size_t h = 0; h < counts.size(); ++h) {
      if (falls()) {
        counts[h] = oracle::pyramid_count(layer, data_.shape.layers, kept_budget(), chosen_.count("beta", 20), tail,
                                          lengths[h]);
      }
      if (!falls() && !adapts()) counts[h] = std::min(lengths[h], kept_budget());
      counts[h] = std::clamp(counts[h], std::min(tail, lengths[h]), lengths[h]);
    }
    return counts;
  }

  bool too_close_between_heads(const std::vector<std::vector<double>>& candidates, index_t tail) const {
    std::vector<double> all;
    for (const auto& head : candidates) all.insert(all.end(), head.begin(), head.end());
    const std::size_t places = candidates.size() * std::size_t(std::max(0, kept_budget() - tail));
    if (places == 0 || places >= all.size()) return false;
    const double last = all[std::size_t(oracle::preference(all)[places - 1])];
    return std::any_of(all.begin(), all.end(), [&](double score) { return too_close(score, last); });
  }

  /// StreamingLLM by its own words: the sinks and the newest, `budget` in all; a step's own tokens come before the sinks.
  void keep_ends(std::vector<index_t>& positions, index_t own) const {
    const auto first_recent = std::size_t(std::count_if(
        positions.begin(), positions.end(), [&](index_t position) { return position < chosen_.count("sinks", 4); }));
    const std::size_t drop = positions.size() - std::min(positions.size(), std::size_t(std::max(own, kept_budget())));
    const std::size_t from = std::min(first_recent, positions.size() - drop - std::size_t(own));
    positions.erase(positions.begin() + offset_t(from), positions.begin() + offset_t(from + drop));
  }

  settings chosen_;
  traits made_of_;
  reference_plan plan_;  // read 0: not made yet
  const model_data& data_;
  std::vector<head_state> heads_;
  index_t next_ = 0;
  index_t turn_ = 0;
};

}  // namespace methods_test
