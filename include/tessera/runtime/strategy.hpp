// How a segment is packed best: which share of its channels, in groups of how many, in blocks of how many tokens. On
// the host.
#pragma once

#include <algorithm>
#include <array>
#include <string>

#include "../core/host/host_vector.hpp"
#include "../core/stored/segment_strategy.hpp"
#include "rotation.hpp"

TESSERA_NAMESPACE_BEGIN

/// Measures what every candidate loses on the rows of a segment, head after head, K and V; then chooses.
///
/// A vector's loss is the share of its energy that is left out, |x - x^|^2 / (|x|^2 + 1e-12), of a token the mean of
/// K's and V's. Of the candidates whose mean loss lies below `loss`, the best keeps the fewest channels, then has the
/// largest group; of blocks, the largest within which keys spread less than `spread` of how they spread over all of the
/// segment. Where none qualifies: the most channels, one by one, and the smallest block.
///
/// Cost     of a head: one second moment, one set of eigenvectors, and nine selections a vector, K and V.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 5.4, 5.5. The loss, the order of the search and both thresholds are ours:
///          it gives none.
template <class Channels>
class strategy_search {
 public:
  /// A selector of single vectors' channels whose members `channels` and `group` are a strategy's.
  explicit strategy_search(const Channels& like) : like_(like) {}

  /// Rows of K or of V of one head: `load(i, to)` gives row i of `count` [dim] as fp32; `left`: channels that
  /// truncation leaves.
  /// Errors   rows with NaN or infinity: tessera::error.
  template <class Load>
  void add(index_t count, index_t dim, index_t left, const std::string& of, const Load& load) {
    host_vector<float> basis(std::size_t(offset_t(left) * dim));
    find_rotation(second_moment(count, dim, load), dim, left, of, basis.data());
    add(count, dim, left, basis.data(), load);
  }
  /// The same where their rotation, basis [left, dim], is known.
  template <class Load>
  void add(index_t count, index_t dim, index_t left, const float* basis, const Load& load) {
    host_vector<float> turned(std::size_t(offset_t(left) * dim));
    for (index_t c = 0; c < left; ++c) {
      for (index_t d = 0; d < dim; ++d) turned[std::size_t(offset_t(d) * left + c)] = basis[offset_t(c) * dim + d];
    }
    host_vector<float> rows(std::size_t(offset_t(count) * left), 0.0f), given(static_cast<std::size_t>(dim));
    host_vector<double> energy(std::size_t(count), 0.0);
    for (index_t i = 0; i < count; ++i) {
      load(i, given.data());
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

  /// Keys of one head, in their order: how they spread within blocks.
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

  /// The best strategy; a block divides `tail`.
  segment_strategy best(float loss, float spread, index_t tail) const {
    segment_strategy result{strategy_shares.back(), 1, strategy_blocks.back()};
    bool found = false;
    for (std::size_t s = 0; s < strategy_shares.size() && !found; ++s) {
      for (std::size_t g = 0; g < strategy_groups.size() && !found; ++g) {
        found = tried_[s][g].possible && tried_[s][g].mean() < double(loss);
        if (found) result.channels = strategy_shares[s], result.group = strategy_groups[g];
      }
    }
    for (std::size_t b = strategy_blocks.size(); b-- > 0;) {  // the largest that qualifies comes last
      if (tail % strategy_blocks[b] == 0 && inside_[b] < double(spread) * outside_) result.block = strategy_blocks[b];
    }
    return result;
  }

  /// The mean loss of a candidate; infinite where it does not fit the head dims.
  double loss(std::size_t share, std::size_t group) const {
    return tried_[share][group].possible ? tried_[share][group].mean() : double(infinity);
  }

 private:
  struct trial {
    double sum = 0, rows = 0;
    bool possible = true;
    double mean() const { return rows > 0 ? sum / rows : 0; }
  };

  Channels of_candidate(float share, index_t group) const {
    Channels result = like_;
    result.channels = share;
    result.group = group;
    return result;
  }
  /// The sum of squares; zeroes the elements.
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
    to.possible = to.possible && kept > 0 && kept % group == 0 && left % group == 0 && kept <= left;
    if (!to.possible || count == 0) return;
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
  std::array<double, strategy_blocks.size()> inside_{};  // sums of squares around the means of blocks
  double outside_ = 0;                                   // and around the means of heads
};

TESSERA_NAMESPACE_END
