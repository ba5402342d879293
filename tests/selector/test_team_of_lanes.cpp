// A team of lanes chooses in a segment as one lane does, and describes it to rounding: lanes are threads here.
#include "catch.hpp"

#include <barrier>
#include <cmath>
#include <thread>
#include <vector>

#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/by_segment.hpp>
#include <tessera/selector/adaptive_blocks.hpp>

#include "support/random.hpp"

using namespace tessera;

namespace {

constexpr int lanes = 8;

/// What the lanes of a team meet in.
struct meeting {
  std::barrier<> all{lanes};
  double real[lanes];
  index_t whole[lanes];
};

struct threads_team {
  static constexpr int size = lanes;
  meeting* place;
  int own;
  int rank() const { return own; }
  double sum(double x) const { return over(place->real, x, lanes); }
  index_t sum(index_t x) const { return over(place->whole, x, lanes); }
  index_t exclusive_sum(index_t x) const { return over(place->whole, x, own); }
  void sync() const { place->all.arrive_and_wait(); }

 private:
  template <class T>
  T over(T* all, T x, int end) const {
    all[own] = x;
    sync();
    T total = 0;
    for (int i = 0; i < end; ++i) total += all[i];
    sync();
    return total;
  }
};

template <class Body>
void in_team(const Body& body) {
  meeting place;
  std::vector<std::thread> threads;
  for (int i = 0; i < lanes; ++i) threads.emplace_back([&, i] { body(threads_team{&place, i}); });
  for (auto& thread : threads) thread.join();
}

}  // namespace

TEST_CASE("a team of lanes takes the slots that one lane takes") {
  support::rng random(5901);
  for (index_t i = 0; i < support::scaled(100); ++i) {
    const index_t n = random.between(1, i % 5 ? 40 : max_segment_tokens), keep = random.between(1, n);
    std::vector<float> scores;
    for (index_t t = 0; t < n; ++t) {
      scores.push_back(random.chance(0.03) ? std::nanf("")
                       : i % 3 == 0        ? float(random.between(0, 3))
                       : i % 3 == 1        ? std::fabs(random.normal())
                                           : std::exp(6 * random.normal()));
    }
    adaptive_blocks policy;
    policy.coverage = random.pick({0.0f, 0.5f, 0.9f, 1.0f});
    policy.largest = random.pick({1, 2, 5, 9, 64});
    std::vector<index_t> alone(std::size_t(n), -1), together(std::size_t(n), -1), sizes(lanes, -1);
    std::vector<double> sums(max_segment_tokens / 2);
    const index_t size = policy.choose_in_segment(scores.data(), n, keep, alone.data());
    in_team([&](const threads_team& team) {
      sizes[std::size_t(team.rank())] =
          policy.choose_in_segment(team, scores.data(), n, keep, together.data(), sums.data());
    });
    CAPTURE(i, n, keep, policy.coverage, policy.largest);
    REQUIRE(together == alone);
    REQUIRE(sizes == std::vector<index_t>(lanes, size));
  }
}

TEST_CASE("a team of lanes describes a segment as one lane does, to rounding") {
  support::rng random(5902);
  const by_segment<accumulated_attention> scorer;
  for (index_t i = 0; i < support::scaled(100); ++i) {
    const index_t n = random.between(1, max_segment_tokens);
    std::vector<float> scores;
    for (index_t t = 0; t < n; ++t) scores.push_back(random.chance(0.03) ? infinity : std::fabs(random.normal()));
    const segment_statistics alone = scorer.describe_segment(scores.data(), n);
    std::vector<segment_statistics> together(lanes);
    in_team([&](const threads_team& team) {
      together[std::size_t(team.rank())] = scorer.describe_segment(team, scores.data(), n);
    });
    for (const segment_statistics& own : together) {  // sums in double: at most the last bit of a float differs
      CAPTURE(i, n, alone.importance, alone.diversity, own.importance, own.diversity);
      REQUIRE(std::fabs(own.importance - alone.importance) <= 0x1p-23f * alone.importance);
      REQUIRE(std::fabs(own.diversity - alone.diversity) <= 0x1p-23f * alone.diversity);
    }
  }
}
