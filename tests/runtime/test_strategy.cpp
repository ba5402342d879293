#include "catch.hpp"

#include <numeric>

#include <tessera/channels/top_groups.hpp>
#include <tessera/runtime/eigen.hpp>
#include <tessera/runtime/strategy.hpp>

#include "support/random.hpp"

using namespace tessera;

namespace {

using numbers = std::vector<double>;
using matrix = std::vector<numbers>;

/// Rows of one head: some directions are much stronger than others, and which ones changes slowly with the row.
std::vector<float> random_rows(support::rng& random, index_t count, index_t dim, double decay) {
  const auto mix = support::normals(random, std::size_t(dim * dim));
  std::vector<float> rows(std::size_t(count * dim), 0.0f);
  for (index_t i = 0; i < count; ++i) {
    for (index_t c = 0; c < dim; ++c) {
      const double on = 1.2 + std::sin(double(i) / 9 + double(c % 5));
      const double strength = double(random.normal()) * on * std::exp(-decay * double(c));
      for (index_t d = 0; d < dim; ++d)
        rows[std::size_t(i * dim + d)] += float(strength * mix[std::size_t(c * dim + d)]);
    }
  }
  return rows;
}

/// Eigenvectors of a symmetric matrix by Jacobi's rotations, the strongest first.
matrix strongest_directions(matrix a, index_t wanted) {
  const std::size_t n = a.size();
  matrix v(n, numbers(n, 0.0));
  for (std::size_t i = 0; i < n; ++i) v[i][i] = 1;
  for (int sweep = 0; sweep < 60; ++sweep) {
    for (std::size_t p = 0; p < n; ++p) {
      for (std::size_t q = p + 1; q < n; ++q) {
        if (std::abs(a[p][q]) < 1e-300) continue;
        const double angle = 0.5 * std::atan2(2 * a[p][q], a[q][q] - a[p][p]), c = std::cos(angle), s = std::sin(angle);
        for (std::size_t k = 0; k < n; ++k) {
          const double x = a[k][p], y = a[k][q];
          a[k][p] = c * x - s * y;
          a[k][q] = s * x + c * y;
        }
        for (std::size_t k = 0; k < n; ++k) {
          const double x = a[p][k], y = a[q][k];
          a[p][k] = c * x - s * y;
          a[q][k] = s * x + c * y;
          const double z = v[k][p], w = v[k][q];
          v[k][p] = c * z - s * w;
          v[k][q] = s * z + c * w;
        }
      }
    }
  }
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) { return a[x][x] > a[y][y]; });
  matrix rows;
  for (index_t c = 0; c < wanted; ++c) {
    numbers one;
    for (std::size_t k = 0; k < n; ++k) one.push_back(v[k][order[std::size_t(c)]]);
    rows.push_back(one);
  }
  return rows;
}

/// The groups of channels that are chosen together: the best pair of all that are left, again and again.
std::vector<std::vector<std::size_t>> matched_groups(const matrix& rotated, index_t kept, index_t group) {
  const std::size_t channels = rotated.front().size(), step = (rotated.size() + 1023) / 1024;
  matrix together(channels, numbers(channels, 0.0));
  for (std::size_t i = 0; i < rotated.size(); i += step) {
    std::vector<std::size_t> order(channels);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return std::abs(rotated[i][a]) > std::abs(rotated[i][b]); });
    for (index_t a = 0; a < kept; ++a) {
      for (index_t b = 0; b < kept; ++b) together[order[std::size_t(a)]][order[std::size_t(b)]] += 1;
    }
  }
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t c = 0; c < channels; ++c) groups.push_back({c});
  for (index_t size = 1; size < group; size *= 2) {
    std::vector<std::vector<std::size_t>> joined;
    while (!groups.empty()) {
      std::size_t best_a = 0, best_b = 1;
      double best = -1;
      for (std::size_t a = 0; a < groups.size(); ++a) {
        for (std::size_t b = a + 1; b < groups.size(); ++b) {
          double sum = 0;
          for (const std::size_t x : groups[a]) {
            for (const std::size_t y : groups[b]) sum += together[x][y];
          }
          if (sum > best) best = sum, best_a = a, best_b = b;
        }
      }
      joined.push_back(groups[best_a]);
      joined.back().insert(joined.back().end(), groups[best_b].begin(), groups[best_b].end());
      groups.erase(groups.begin() + std::ptrdiff_t(best_b));
      groups.erase(groups.begin() + std::ptrdiff_t(best_a));
    }
    std::sort(joined.begin(), joined.end());
    groups = joined;
  }
  return groups;
}

/// The mean loss of one side of one head.
double loss_of(const std::vector<float>& rows, index_t dim, index_t left, index_t kept, index_t group) {
  const std::size_t count = rows.size() / std::size_t(dim);
  matrix moment(std::size_t(dim), numbers(std::size_t(dim), 0.0)), rotated;
  const auto x = [&](std::size_t i, index_t d) { return double(rows[i * std::size_t(dim) + std::size_t(d)]); };
  for (std::size_t i = 0; i < count; ++i) {
    for (index_t a = 0; a < dim; ++a) {
      for (index_t b = 0; b < dim; ++b) moment[std::size_t(a)][std::size_t(b)] += x(i, a) * x(i, b);
    }
  }
  const matrix strongest = strongest_directions(moment, left);
  matrix basis = strongest;  // ties between channels go to the lower row
  for (index_t c = 0; c < left; ++c) basis[std::size_t(c * spread_step(left) % left)] = strongest[std::size_t(c)];
  for (std::size_t i = 0; i < count; ++i) {
    numbers one(std::size_t(left), 0.0);
    for (index_t c = 0; c < left; ++c) {
      for (index_t d = 0; d < dim; ++d) one[std::size_t(c)] += basis[std::size_t(c)][std::size_t(d)] * x(i, d);
    }
    rotated.push_back(one);
  }
  const auto groups = matched_groups(rotated, kept, group);
  double total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    numbers energies;
    for (const auto& one : groups) {
      double energy = 0;
      for (const std::size_t c : one) energy += rotated[i][c] * rotated[i][c];
      energies.push_back(energy);
    }
    std::sort(energies.rbegin(), energies.rend());
    double all = 0, stays = 0;
    for (index_t d = 0; d < dim; ++d) all += x(i, d) * x(i, d);
    for (index_t g = 0; g < kept / group; ++g) stays += energies[std::size_t(g)];
    total += (all - stays) / (all + 1e-12);
  }
  return total / double(count);
}

auto loader(const std::vector<float>& rows, index_t dim) {
  return [&rows, dim](index_t i, float* to) { std::copy_n(rows.data() + i * dim, dim, to); };
}

}  // namespace

TEST_CASE("losses of all candidates are those of a search in double with other algorithms") {
  support::rng random(11);
  for (const index_t dim : {16, 24, 32}) {
    for (const double decay : {0.05, 0.4}) {
      CAPTURE(dim, decay);
      const index_t count = random.between(150, 260), left = dim * 3 / 4;
      const auto k0 = random_rows(random, count, dim, decay), k1 = random_rows(random, count, dim, decay),
                 v0 = random_rows(random, count, dim, decay);
      strategy_search<top_groups> search{{}};
      for (const auto* rows : {&k0, &k1, &v0}) search.add(count, dim, left, "keys", loader(*rows, dim));
      for (std::size_t s = 0; s < strategy_shares.size(); ++s) {
        for (std::size_t g = 0; g < strategy_groups.size(); ++g) {
          const index_t kept = index_t(std::lround(strategy_shares[s] * float(dim))), group = strategy_groups[g];
          CAPTURE(kept, group);
          if (kept % group != 0 || left % group != 0) {
            REQUIRE(search.loss(s, g) == double(infinity));
            continue;
          }
          double expected = 0;
          for (const auto* rows : {&k0, &k1, &v0}) expected += loss_of(*rows, dim, left, kept, group) / 3;
          REQUIRE(search.loss(s, g) == Approx(expected).epsilon(1e-4).margin(1e-6));
        }
      }
    }
  }
}

TEST_CASE("the fewest channels come first, then the largest group, then what is left") {
  support::rng random(12);
  const index_t dim = 32, count = 300;
  const auto rows = random_rows(random, count, dim, 0.2);
  strategy_search<top_groups> search{{}};
  search.add(count, dim, 24, "keys", loader(rows, dim));
  // More channels lose less; larger groups lose more.
  for (std::size_t s = 0; s < 3; ++s) {
    for (std::size_t g = 0; g < 3; ++g) {
      if (s > 0) CHECK(search.loss(s, g) < search.loss(s - 1, g));
      if (g > 0) CHECK(search.loss(s, g) < search.loss(s, g - 1));
    }
  }
  const double slack = 1e-6;
  for (std::size_t s = 0; s < 3; ++s) {
    for (std::size_t g = 0; g < 3; ++g) {
      // What qualifies just above this candidate's loss, by trying them in order.
      const double limit = search.loss(s, g) + slack;
      segment_strategy expected{0.375f, 1, 4};
      for (std::size_t i = 9; i-- > 0;) {
        if (search.loss(i / 3, i % 3) < limit) expected = {strategy_shares[i / 3], strategy_groups[i % 3], 4};
      }
      CHECK(search.best(float(limit), 0, 32) == expected);
    }
  }
  CHECK(search.best(0, 0, 32) == segment_strategy{0.375f, 1, 4});
}

TEST_CASE("a block is the largest within which keys are alike") {
  const auto best_block = [](index_t alike, float spread, index_t tail) {
    support::rng random(13);
    const index_t dim = 16, count = 192;
    std::vector<float> keys;
    for (index_t i = 0; i < count; ++i) {
      for (index_t d = 0; d < dim; ++d) {
        const bool fresh = i % alike == 0;
        keys.push_back(fresh ? random.normal() : keys[keys.size() - std::size_t(dim)]);
      }
    }
    strategy_search<top_groups> search{{}};
    search.add_blocks(count, dim, loader(keys, dim));
    search.add_blocks(count, dim, loader(keys, dim));
    return search.best(1, spread, tail).block;
  };
  CHECK(best_block(16, 0.01f, 32) == 16);
  CHECK(best_block(8, 0.01f, 32) == 8);
  CHECK(best_block(4, 0.01f, 32) == 4);
  CHECK(best_block(1, 0.01f, 32) == 4);   // none qualifies: the smallest
  CHECK(best_block(8, 0.6f, 32) == 16);   // two unlike halves spread about half as much as everything
  CHECK(best_block(1, 0.8f, 32) == 4);    // of four unlike keys about three quarters
  CHECK(best_block(16, 0.01f, 24) == 8);  // 16 does not divide the tail
}

TEST_CASE("rows that are no numbers are refused") {
  std::vector<float> rows(64 * 16, 1.0f);
  rows[100] = std::nanf("");
  strategy_search<top_groups> search{{}};
  CHECK_THROWS_WITH(search.add(64, 16, 12, "keys of layer 3", loader(rows, 16)), contains("keys of layer 3"));
}
