// Choosing the lines of an attention matrix that carry a share of its weight, on a few sampled rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../core/host/host_vector.hpp"
#include "../core/prompt/prompt_lines.hpp"
#include "../core/prompt/sampled_attention.hpp"
#include "published_walk.hpp"

TESSERA_NAMESPACE_BEGIN

/// A choice of lines as it grows, and the memory that it is made in, which the caller keeps from head to head.
/// A line has a number: a slash its distance, a vertical `next` plus its slot. Lines without a stored key do not exist.
class line_cover {
 public:
  /// Forgets all lines. Cost  one pass over the weights.
  void begin(const sampled_attention& sample) {
    sample_ = sample;
    chosen_.assign(std::size_t(lines()), 0);
    weights_.assign(std::size_t(lines()), 0.0);
    total_ = covered_ = 0;
    for (index_t r = 0; r < index_t(sample.rows.size()); ++r) {
      const float* row = sample.row(r);
      for (index_t slot = 0; slot < sample.slots(); ++slot) {
        const double weight = row[slot];
        if (weight == 0) continue;
        weights_[std::size_t(vertical(slot))] += weight;
        weights_[std::size_t(sample.rows[std::size_t(r)] - sample.positions[std::size_t(slot)])] += weight;
        total_ += weight;
      }
    }
  }

  index_t lines() const { return sample_.next + sample_.slots(); }
  index_t vertical(index_t slot) const { return sample_.next + slot; }
  bool is_slash(index_t line) const { return line < sample_.next; }
  index_t length(index_t line) const {
    return is_slash(line) ? sample_.slash_length(line) : sample_.vertical_length(line - sample_.next);
  }
  double weight(index_t line) const { return weights_[std::size_t(line)]; }
  double total() const { return total_; }
  bool has(index_t line) const { return chosen_[std::size_t(line)] != 0; }

  /// Adds a line whatever its weight.
  void add(index_t line) { chosen_[std::size_t(line)] = 1; }

  /// The nearest `slashes` and the keys at the first `columns` positions, as far as there are any.
  void add_forced(index_t slashes, index_t columns) {
    for (index_t distance = 0; distance < (std::min)(slashes, sample_.next); ++distance) add_if_any(distance);
    for (index_t slot = 0; slot < sample_.slots() && sample_.positions[std::size_t(slot)] < columns; ++slot) {
      add(vertical(slot));
    }
  }
  void add_if_any(index_t distance) {
    if (length(distance) > 0) add(distance);
  }

  /// Adds lines until the chosen ones carry `share` of the weight. Each time, the line that covers the most uncovered
  /// weight for its length is added; ties to the slash, then to the lower line. Exact on the sampled rows; overwrites
  /// the weights.
  /// Cost  a line's uncovered weight only falls as others are chosen, so it is summed again only when it ranks first.
  void cover(double share) {
    struct candidate {
      double per_entry;
      index_t line;
      bool operator<(const candidate& other) const {
        return per_entry != other.per_entry ? per_entry < other.per_entry : line > other.line;
      }
    };
    for (index_t line = 0; line < lines(); ++line) {
      if (has(line)) covered_ += sum(line, true);
    }
    host_vector<candidate> heap;
    for (index_t line = 0; line < lines(); ++line) {
      if (!has(line) && weight(line) > 0) heap.push_back({weight(line) / length(line), line});
    }
    std::make_heap(heap.begin(), heap.end());
    const double wanted = (std::min)(share, 1.0) * total_;
    while (covered_ < wanted && !heap.empty()) {
      std::pop_heap(heap.begin(), heap.end());
      candidate best = heap.back();
      best.per_entry = sum(best.line, false) / length(best.line);
      heap.pop_back();
      if (best.per_entry <= 0) continue;
      if (!heap.empty() && best < heap.front()) {
        heap.push_back(best);
        std::push_heap(heap.begin(), heap.end());
        continue;
      }
      covered_ += sum(best.line, true);
      add(best.line);
    }
  }

  /// The published greedy (LoopServe's Algorithm 5, see published_walk) until its bound comes to `share` of the weight.
  /// Of lines that weigh the same the lower comes first.
  void cover_as_published(double share) {
    host_vector<index_t> slashes, verticals;
    for (index_t line = 0; line < lines(); ++line) {
      if (weight(line) > 0) (is_slash(line) ? slashes : verticals).push_back(line);
    }
    const std::size_t count =
        (std::max)(slashes.size(), verticals.size()) + 1;  // both lists end with a line without weight
    const auto in_order = [&](host_vector<index_t>& list) {
      std::sort(list.begin(), list.end(),
                [&](index_t a, index_t b) { return weight(a) != weight(b) ? weight(a) > weight(b) : a < b; });
      host_vector<weighed_line> weighed;
      for (const index_t line : list) weighed.push_back({weight(line), largest(line), length(line)});
      weighed.resize(count, weighed_line{});
      return weighed;
    };
    const host_vector<weighed_line> by_slash = in_order(slashes), by_vertical = in_order(verticals);
    published_walk walk{};
    walk.go_on((std::min)(share, 1.0) * total_, by_slash.data(), by_vertical.data(), index_t(count));
    for (index_t i = 0; i < walk.slashes; ++i) add(slashes[std::size_t(i)]);
    for (index_t i = 0; i < walk.verticals; ++i) add(verticals[std::size_t(i)]);
  }

  /// Adds every stored key. It is for a share of 1: rows that were not sampled must then see everything too.
  void add_everything() {
    for (index_t slot = 0; slot < sample_.slots(); ++slot) add(vertical(slot));
  }

  void write(line_set& to) const {
    to.vertical.clear();
    to.slash.clear();
    for (index_t distance = 0; distance < sample_.next; ++distance) {
      if (has(distance)) to.slash.push_back(distance);
    }
    for (index_t slot = 0; slot < sample_.slots(); ++slot) {
      if (has(vertical(slot))) to.vertical.push_back(sample_.positions[std::size_t(slot)]);
    }
  }

 private:
  /// Calls `see(weight)` for a line's entry of each sampled row.
  template <class See>
  void visit(index_t line, const See& see) const {
    for (index_t r = 0; r < index_t(sample_.rows.size()); ++r) {
      const index_t slot = is_slash(line) ? sample_.slot_on_slash(r, line) : line - sample_.next;
      if (slot != no_index) see(sample_.row(r)[slot]);
    }
  }
  /// The uncovered weight on a line. `takes`: marks it as covered.
  double sum(index_t line, bool takes) const {
    double result = 0;
    visit(line, [&](float& weight) {
      result += weight;
      if (takes) weight = 0;
    });
    return result;
  }
  double largest(index_t line) const {
    float result = 0;
    visit(line, [&](float weight) { result = (std::max)(result, weight); });
    return result;
  }

  sampled_attention sample_;  // a view of the caller's memory
  double total_ = 0, covered_ = 0;
  host_vector<std::uint8_t> chosen_;  // by line
  host_vector<double> weights_;       // by line, before anything was covered
};

TESSERA_NAMESPACE_END
