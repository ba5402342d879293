// The search for a segment's packing strategy, on the host: the share of channels that are kept, the size of a group of
// channels, and the tokens of a block.
#pragma once

#include <algorithm>
#include <array>
#include <string>

#include "../core/host/host_vector.hpp"
#include "../core/stored/segment_strategy.hpp"
#include "rotation.hpp"

TESSERA_NAMESPACE_BEGIN

/// What the candidate strategies of a segment's rows lose, and how much its keys differ within blocks.
struct strategy_measures {
  /// Mean losses by share of channels, then group; infinite where a candidate does not fit the head dims.
  std::array<std::array<double, strategy_groups.size()>, strategy_shares.size()> losses{};
  std::array<double, strategy_blocks.size()> inside{};  ///< sums of squared distances from the means of blocks
  double outside = 0;                                   ///< sum of squared distances from the means of heads

  /// The best strategy; a block divides `unit`, unless it is the smallest.
  ///
  /// Candidates qualify if their mean loss is below `loss`. The best of these keeps the fewest channels and, among
  /// equals, has the largest group. If none qualifies, the choice is the most channels in groups of one. The block is
  /// the largest within which the keys' variance is below `spread` times their variance over the whole segment. If none
  /// qualifies, it is the smallest block.
  segment_strategy best(float loss, float spread, index_t unit) const {
    segment_strategy result{strategy_shares.back(), 1, strategy_blocks.back()};
    bool found = false;
    for (std::size_t s = 0; s < strategy_shares.size() && !found; ++s) {
      for (std::size_t g = 0; g < strategy_groups.size() && !found; ++g) {
        found = losses[s][g] < double(loss);
        if (found) result.channels = strategy_shares[s], result.group = strategy_groups[g];
      }
    }
    for (std::size_t b = strategy_blocks.size(); b-- > 0;) {  // later iterations overwrite: the largest qualifying wins
      if (unit % strategy_blocks[b] == 0 && inside[b] < double(spread) * outside) result.block = strategy_blocks[b];
    }
    return result;
  }
};

/// Whether a candidate of `kept` channels in groups of `group` fits rows of which `left` channels are left.
TESSERA_HD constexpr bool fits_candidate(index_t kept, index_t group, index_t left) {
  return kept > 0 && kept % group == 0 && left % group == 0 && kept <= left;
}

/// Measures the loss of every candidate strategy on the rows of a segment, head by head, for K and V; then chooses one.
///
/// The loss of a vector is the share of its energy that is left out, |x - x^|^2 / (|x|^2 + 1e-12). The loss of a token
/// is the mean of K's and V's. Losses are those of up to 1,024 evenly spaced rows of a head; bases and blocks are of
/// all rows.
///
/// Cost     per head, for each of K and V: one second moment, one set of eigenvectors, and nine selections of each of
///          the 1,024 rows.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 5.4, 5.5. The loss, the sample, the order of the search and both
///          thresholds are ours: it gives none.
template <class Channels>
class strategy_search {
 public:
  /// `like`: a selector of one vector's channels. The search sets its members `channels` and `group`.
  explicit strategy_search(const Channels& like) : like_(like) {}

  /// Measures rows of K or of V of one head. `load(i, to)` writes row i of `count`, [dim], as fp32. `left`: channels
  /// that truncation leaves.
  /// Errors   rows with NaN or infinity: tessera::error.
  template <class Load>
  void add(index_t count, index_t dim, index_t left, const std::string& of, const Load& load) {
    host_vector<float> basis(std::size_t(offset_t(left) * dim));
    find_rotation(second_moment(count, dim, load), dim, left, of, basis.data());
    spread_channels(basis.data(), left, dim);
    add(count, dim, left, basis.data(), load);
  }
  /// The same for rows whose rotation, basis [left, dim], is known.
  template <class Load>
  void add(index_t count, index_t dim, index_t left, const float* basis, const Load& load) {
    host_vector<float> turned(std::size_t(offset_t(left) * dim));
    for (index_t c = 0; c < left; ++c) {
      for (index_t d = 0; d < dim; ++d) turned[std::size_t(offset_t(d) * left + c)] = basis[offset_t(c) * dim + d];
    }
    const index_t step = sample_step(count), samples = ceil_div(count, step);
    host_vector<float> rows(std::size_t(offset_t(samples) * left), 0.0f), given(static_cast<std::size_t>(dim));
    host_vector<double> energy(std::size_t(samples), 0.0);
    for (index_t i = 0; i < samples; ++i) {
      load(i * step, given.data());
      float* to = rows.data() + offset_t(i) * left;
      for (index_t d = 0; d < dim; ++d) {
        const float x = given[std::size_t(d)], *from = turned.data() + offset_t(d) * left;
        for (index_t c = 0; c < left; ++c) to[c] += x * from[c];
        energy[std::size_t(i)] += double(x) * double(x);
      }
    }
    for (std::size_t s = 0; s < strategy_shares.size(); ++s) {
      for (std::size_t g = 0; g < strategy_groups.size(); ++g) {
        measure(of_candidate(strategy_shares[s], strategy_groups[g]), dim, rows, energy, tried_[s][g]);
      }
    }
  }

  /// Measures how the keys of one head, given in order, vary within blocks.
  template <class Load>
  void add_blocks(index_t count, index_t dim, const Load& load) {
    host_vector<float> row(static_cast<std::size_t>(dim));
    host_vector<double> all(static_cast<std::size_t>(dim), 0.0);
    std::array<host_vector<double>, strategy_blocks.size()> sums;
    sums.fill(all);
    double energy = 0;
    for (index_t i = 0; i < count; ++i) {
      load(i, row.data());
      for (index_t d = 0; d < dim; ++d) {
        const double x = row[std::size_t(d)];
        energy += x * x;
        all[std::size_t(d)] += x;
        for (auto& sum : sums) sum[std::size_t(d)] += x;
      }
      for (std::size_t b = 0; b < strategy_blocks.size(); ++b) {
        const index_t in_block = i % strategy_blocks[b] + 1;
        if (in_block == strategy_blocks[b] || i + 1 == count) inside_[b] -= drain_squares(sums[b]) / double(in_block);
      }
    }
    for (double& inside : inside_) inside += energy;
    if (count > 0) outside_ += energy - drain_squares(all) / double(count);
  }

  /// Adds what another search has measured of other heads.
  void add(const strategy_search& other) {
    for (std::size_t s = 0; s < strategy_shares.size(); ++s) {
      for (std::size_t g = 0; g < strategy_groups.size(); ++g) tried_[s][g].add(other.tried_[s][g]);
    }
    for (std::size_t b = 0; b < strategy_blocks.size(); ++b) inside_[b] += other.inside_[b];
    outside_ += other.outside_;
  }

  strategy_measures measures() const {
    strategy_measures result{{}, inside_, outside_};
    for (std::size_t s = 0; s < strategy_shares.size(); ++s) {
      for (std::size_t g = 0; g < strategy_groups.size(); ++g) result.losses[s][g] = loss(s, g);
    }
    return result;
  }
  /// See strategy_measures.
  segment_strategy best(float loss, float spread, index_t unit) const { return measures().best(loss, spread, unit); }

  /// The mean loss of a candidate; infinite where it does not fit the head dims.
  double loss(std::size_t share, std::size_t group) const {
    return tried_[share][group].possible ? tried_[share][group].mean() : double(infinity);
  }

 private:
  struct trial {
    double sum = 0, rows = 0;
    bool possible = true;
    double mean() const { return rows > 0 ? sum / rows : 0; }
    void add(const trial& other) {
      sum += other.sum, rows += other.rows;
      possible = possible && other.possible;
    }
  };

  Channels of_candidate(float share, index_t group) const {
    Channels result = like_;
    result.channels = share;
    result.group = group;
    return result;
  }
  /// Returns the sum of squares, and sets the elements to zero.
  static double drain_squares(host_vector<double>& sum) {
    double square = 0;
    for (double& x : sum) {
      square += x * x;
      x = 0;
    }
    return square;
  }

  static void measure(const Channels& channels, index_t dim, const host_vector<float>& rows,
                      const host_vector<double>& energy, trial& to) {
    const index_t count = index_t(energy.size()), left = count > 0 ? index_t(rows.size() / energy.size()) : 0;
    const index_t kept = channels.stored_channels(dim), group = channels.group_size();
    const packed_format format{packed_element::single, left, group, kept, true};
    if (count == 0) return;
    to.possible = to.possible && fits_candidate(kept, group, left);
    if (!to.possible) return;
    const auto row = [&](index_t i) { return rows.data() + offset_t(i) * left; };
    const host_vector<index_t> order = order_of_channels(channels, format, count, row);
    host_vector<double> groups(std::size_t(format.groups()));
    for (index_t i = 0; i < count; ++i) {
      std::fill(groups.begin(), groups.end(), 0.0);
      for (index_t c = 0; c < left; ++c) {
        const double x = row(i)[order[std::size_t(c)]];
        groups[std::size_t(c / group)] += x * x;
      }
      const auto end = groups.begin() + kept / group;
      std::nth_element(groups.begin(), end - 1, groups.end(), std::greater<>{});
      double left_over = energy[std::size_t(i)];
      for (auto one = groups.begin(); one != end; ++one) left_over -= *one;
      to.sum += (std::max)(0.0, left_over) / (energy[std::size_t(i)] + 1e-12);
    }
    to.rows += double(count);
  }

  Channels like_;
  std::array<std::array<trial, strategy_groups.size()>, strategy_shares.size()> tried_;
  std::array<double, strategy_blocks.size()> inside_{};
  double outside_ = 0;
};

TESSERA_NAMESPACE_END
