// LoopServe's published greedy by other means: taken literally, and with room for rounding.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "prefill/line_case.hpp"

namespace support {

/// A line by its number, and what the greedy looks at.
struct published_line {
  index_t line;
  double weight, largest;
  index_t length;
};

/// The lines of both kinds that have weight, as they are numbered: slashes by distance, columns by position.
struct published_lines {
  std::vector<published_line> slashes, verticals;

  explicit published_lines(const sampled_rows& seen) {
    std::vector<published_line> slash(std::size_t(seen.next)), vertical(seen.positions.size());
    for (std::size_t slot = 0; slot < seen.positions.size(); ++slot) {
      vertical[slot] = {seen.positions[slot], 0, 0, seen.vertical_length(seen.positions[slot])};
      for (std::size_t r = 0; r < seen.rows.size(); ++r) {
        const double weight = seen.weights[seen.at(r, slot)];
        if (weight == 0) continue;
        published_line& crossing = slash[std::size_t(seen.rows[r] - seen.positions[slot])];
        for (published_line* line : {&vertical[slot], &crossing}) {
          line->weight += weight;
          line->largest = std::max(line->largest, weight);
        }
      }
    }
    for (std::size_t d = 0; d < slash.size(); ++d) {
      if (slash[d].weight == 0) continue;
      slashes.push_back({index_t(d), slash[d].weight, slash[d].largest, seen.slash_length(index_t(d))});
    }
    for (const published_line& line : vertical) {
      if (line.weight > 0) verticals.push_back(line);
    }
  }
};

/// Step by step as Algorithm 5 says it: each list's heaviest line is looked for among all, quotients are quotients.
inline tessera::line_set published_greedy(const sampled_rows& seen, double share) {
  published_lines left(seen);
  tessera::line_set result;
  double largest_of_slashes = 0, largest_of_verticals = 0, sum = 0;
  const double wanted = share * seen.total();
  const auto first_of = [](std::vector<published_line>& list) {
    return std::max_element(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.weight < b.weight; });
  };
  while (sum < wanted && !(left.slashes.empty() && left.verticals.empty())) {
    const auto s = first_of(left.slashes), v = first_of(left.verticals);
    double by_slash = -1, by_vertical = -1;
    if (!left.slashes.empty()) by_slash = s->weight - largest_of_verticals;
    if (!left.verticals.empty()) by_vertical = v->weight - largest_of_slashes;
    bool takes_slash = left.verticals.empty();
    if (!left.slashes.empty() && !left.verticals.empty()) {
      takes_slash = by_slash / std::max(1, s->length - index_t(result.vertical.size())) >=
                    by_vertical / std::max(1, v->length - index_t(result.slash.size()));
    }
    sum += std::max(0.0, takes_slash ? by_slash : by_vertical);
    (takes_slash ? largest_of_slashes : largest_of_verticals) += (takes_slash ? s : v)->largest;
    (takes_slash ? result.slash : result.vertical).push_back((takes_slash ? s : v)->line);
    if (takes_slash)
      left.slashes.erase(s);
    else
      left.verticals.erase(v);
  }
  std::sort(result.slash.begin(), result.slash.end());
  std::sort(result.vertical.begin(), result.vertical.end());
  return result;
}

/// Did somebody whose weights are right but for `rounding` of each do as Algorithm 5 says? Every order of lines and every choice
/// between two that such weights allow is followed. A state is how many lines of each list are chosen: of two states that say the
/// same, the bounds are joined.
class published_within_rounding {
 public:
  published_within_rounding(const sampled_rows& seen, double share, double rounding = 1e-4)
      : r_(rounding), slashes_(published_lines(seen).slashes, r_), verticals_(published_lines(seen).verticals, r_) {
    const double wanted = std::min(share, 1.0) * seen.total(), least = wanted * (1 - r_), most = wanted * (1 + r_);
    std::vector<state> now{{0, 0, 0, 0}};
    while (!now.empty()) {
      std::vector<state> next;
      certain_ = certain_ && now.size() == 1;
      for (const state& at : now) {
        const bool ended = slashes_.may_end(at.s) && verticals_.may_end(at.v);
        if (at.sum.high >= least || ended) ends_.push_back(at);
        if (at.sum.low < most) follow(at, next);
      }
      now = std::move(next);
    }
    certain_ = certain_ && ends_.size() == 1 && slashes_.parted(ends_[0].s) && verticals_.parted(ends_[0].v);
  }

  /// Is the choice the same for all such weights?
  bool certain() const { return certain_; }
  /// Lines below `forced_slashes` and `forced_columns` are there whether they were chosen or not.
  bool allows(const tessera::line_set& lines, index_t forced_slashes, index_t forced_columns) const {
    return std::any_of(ends_.begin(), ends_.end(), [&](const state& end) {
      return slashes_.allows(lines.slash, end.s, forced_slashes) &&
             verticals_.allows(lines.vertical, end.v, forced_columns);
    });
  }

 private:
  struct range {
    double low, high;
  };
  struct state {
    std::size_t s, v;
    range sum;
    state(std::size_t of_s, std::size_t of_v, double low, double high) : s(of_s), v(of_v), sum{low, high} {}
  };
  /// Lines by falling weight. Those whose weights rounding does not tell apart are a run, in which any may come first.
  class list {
   public:
    list(std::vector<published_line> of, double r) : lines_(std::move(of)), r_(r) {
      std::stable_sort(lines_.begin(), lines_.end(), [](auto& a, auto& b) { return a.weight > b.weight; });
      double before = 0;
      for (std::size_t i = 0; i < lines_.size(); i = end_[i]) {
        std::size_t end = i + 1;
        while (end < lines_.size() && lines_[end].weight * (1 + r) >= lines_[end - 1].weight * (1 - r)) ++end;
        std::vector<double> largest;
        for (std::size_t j = i; j < end; ++j) {
          largest.push_back(lines_[j].largest);
          begin_.push_back(i), end_.push_back(end);
        }
        std::sort(largest.begin(), largest.end());
        double low = before, high = before;
        for (std::size_t j = 0; j < largest.size(); ++j) {
          crossed_.push_back({low * (1 - r), high * (1 + r)});
          low += largest[j], high += largest[largest.size() - 1 - j];
        }
        before = low;
      }
      crossed_.push_back({before * (1 - r), before * (1 + r)});
    }
    std::size_t size() const { return lines_.size(); }
    /// Floats may not hold what is left.
    bool may_end(std::size_t i) const { return i == size() || lines_[i].weight < 1e-30; }
    /// The largest entries of the first i.
    range crossed(std::size_t i) const { return crossed_[i]; }
    /// What the next line adds, and that for its length.
    range gain(std::size_t i, range crossing) const {
      return {lines_[end_[i] - 1].weight * (1 - r_) - crossing.high,
              lines_[begin_[i]].weight * (1 + r_) - crossing.low};
    }
    range worth(std::size_t i, range gain, std::size_t crossing) const {
      double shortest = 1e300, longest = 1;
      for (std::size_t j = begin_[i]; j < end_[i]; ++j) {
        const double length = std::max(1.0, double(lines_[j].length) - double(crossing));
        shortest = std::min(shortest, length), longest = std::max(longest, length);
      }
      return {gain.low / (gain.low < 0 ? shortest : longest), gain.high / (gain.high < 0 ? longest : shortest)};
    }
    /// No run goes from the first i into the others.
    bool parted(std::size_t i) const { return i == size() || begin_[i] == i; }
    bool allows(const std::vector<index_t>& chosen, std::size_t count, index_t forced) const {
      const auto has = [&](index_t line) { return std::binary_search(chosen.begin(), chosen.end(), line); };
      std::size_t own = 0;
      for (const index_t line : chosen) own += line >= forced;
      std::size_t met = 0;
      for (std::size_t i = 0; i < size(); i = end_[i]) {
        std::size_t surely = 0, maybe = 0;
        for (std::size_t j = i; j < end_[i]; ++j) {
          const bool here = has(lines_[j].line), is_forced = lines_[j].line < forced;
          surely += here && !is_forced, maybe += is_forced;
        }
        const std::size_t taken = std::clamp(count, i, end_[i]) - i;
        if (surely > taken || surely + maybe < taken) return false;
        met += surely;
      }
      return met == own;  // nothing without weight
    }

   private:
    std::vector<published_line> lines_;
    std::vector<std::size_t> begin_, end_;  // of a line's run
    std::vector<range> crossed_;
    double r_;
  };

  void follow(const state& at, std::vector<state>& next) const {
    const bool has_slash = at.s < slashes_.size(), has_vertical = at.v < verticals_.size();
    range by_slash{}, by_vertical{}, slash_worth{}, vertical_worth{};
    if (has_slash) {
      by_slash = slashes_.gain(at.s, verticals_.crossed(at.v));
      slash_worth = slashes_.worth(at.s, by_slash, at.v);
    }
    if (has_vertical) {
      by_vertical = verticals_.gain(at.v, slashes_.crossed(at.s));
      vertical_worth = verticals_.worth(at.v, by_vertical, at.s);
    }
    const auto go = [&](std::size_t s, std::size_t v, range gain) {
      const double low = at.sum.low + std::max(0.0, gain.low), high = at.sum.high + std::max(0.0, gain.high);
      for (state& known : next) {
        if (known.s != s) continue;
        known.sum = {std::min(known.sum.low, low), std::max(known.sum.high, high)};
        return;
      }
      next.emplace_back(s, v, low, high);
    };
    if (has_slash && (verticals_.may_end(at.v) || slash_worth.high >= vertical_worth.low)) go(at.s + 1, at.v, by_slash);
    if (has_vertical && (slashes_.may_end(at.s) || vertical_worth.high > slash_worth.low))
      go(at.s, at.v + 1, by_vertical);
  }

  double r_;
  list slashes_, verticals_;
  std::vector<state> ends_;
  bool certain_ = true;
};

}  // namespace support
