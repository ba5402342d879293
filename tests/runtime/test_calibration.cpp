#include "catch.hpp"

#include <cmath>
#include <limits>
#include <numeric>

#include <tessera/runtime/calibration.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/scores.hpp"

using namespace tessera;
using support::rng;
namespace oracle = support::oracle;

TEST_CASE("shares of a choice over a layer are those of a full sort of all heads") {
  rng random(1220);
  for (index_t i = 0; i < support::scaled(2'000); ++i) {
    const index_t heads = random.between(1, 6), tokens = random.between(1, 60), tail = random.between(0, 8);
    const index_t part = random.between(1, 64);  // the share, in 64ths
    std::vector<std::vector<float>> scores;
    std::vector<double> all;
    std::vector<index_t> owner;
    for (index_t h = 0; h < heads; ++h) {
      scores.push_back(support::tied_scores(random, tokens, random.pick({1, 4, 40})));
      for (index_t t = 0; t + tail < tokens; ++t) {
        all.push_back(double(scores.back()[std::size_t(t)]));
        owner.push_back(h);
      }
    }
    const index_t tails = std::min(tail, tokens), places = (part * heads * tokens + 63) / 64 - heads * tails;
    std::vector<index_t> kept(std::size_t(heads), tails);
    const auto order = oracle::preference(all);
    for (index_t p = 0; p < std::min<index_t>(std::max(0, places), index_t(order.size())); ++p)
      ++kept[std::size_t(owner[std::size_t(order[std::size_t(p)])])];
    const support::owned_scores owned(scores);
    const auto shares = layer_wide_shares(owned.view(tail), double(part) / 64);
    for (index_t h = 0; h < heads; ++h)
      REQUIRE(shares[std::size_t(h)] == double(std::max(1, kept[std::size_t(h)])) / double(tokens));
  }
}

TEST_CASE("the share of a layer is taken as a decimal") {
  std::vector<float> scores(100);
  std::iota(scores.begin(), scores.end(), 0.0f);
  const support::owned_scores owned({scores});
  CHECK(layer_wide_shares(owned.view(0), 0.55) == std::vector<double>{0.55});
  CHECK(layer_wide_shares(owned.view(0), 0.07) == std::vector<double>{0.07});
}

TEST_CASE("a profile has mean, deviation and budget of its samples") {
  calibration samples(1, 3);
  samples.add({0.2, 0.5, 0.9});
  samples.add({0.4, 0.5, 0.8});
  samples.add({0.3, 0.5, 1.0});
  const profile made = samples.finish(0.3, 2);
  CHECK(made.samples == 3);
  CHECK(made.mean[0] == Approx(0.3));
  CHECK(made.deviation[0] == Approx(0.1));
  CHECK(made.budget[0] == Approx(0.5));
  CHECK(made.deviation[1] == Approx(0).margin(1e-12));
  CHECK(made.budget[1] == Approx(0.5));
  CHECK(made.budget[2] == 1);  // 0.9 + 2 * 0.1 and no more than all
  profile other = made;
  other.set_alpha(0);
  CHECK(other.budget == other.mean);
  CHECK_THROWS_WITH(other.set_alpha(-0.1), contains("alpha is -0.1; expected 0 to"));
  CHECK_THROWS_WITH(other.set_alpha(std::nan("")), contains("alpha is nan"));
  CHECK_THROWS_WITH(calibration(1, 1).finish(0.3, 2), contains("samples is 0"));
  calibration one(1, 1);
  one.add({0.25});
  CHECK(one.finish(0.3, 2).budget[0] == 0.25);
  CHECK_THROWS_WITH(one.add({0.25, 0.5}), contains("shares of a prompt is 2; expected 1 layers of 1 KV heads"));
}

TEST_CASE("renormalised budgets have the share on average, and none is above 1") {
  rng random(1221);
  for (index_t i = 0; i < support::scaled(1'000); ++i) {
    profile made;
    made.layers = random.between(1, 4);
    made.kv_heads = random.between(1, 8);
    made.share = 0.05 + 0.9 * random.uniform();
    made.samples = 1;
    for (index_t h = 0; h < made.layers * made.kv_heads; ++h) made.mean.push_back(0.01 + 0.99 * random.uniform());
    made.deviation.assign(made.mean.size(), 0.1);
    made.budget.assign(made.mean.size(), 0);
    made.set_alpha(random.pick({0.0, 2.0}));
    const auto before = made.budget;
    made.renormalise();
    made.check();
    const double total = std::accumulate(made.budget.begin(), made.budget.end(), 0.0);
    REQUIRE(total == Approx(made.share * double(made.budget.size())));
    for (std::size_t h = 0; h < before.size(); ++h) {
      for (std::size_t g = 0; g < before.size(); ++g)
        REQUIRE((before[h] > before[g] || made.budget[h] <= made.budget[g] + 1e-12));
    }
  }
}

TEST_CASE("a profile with numbers that are none is refused by name") {
  profile good;
  good.share = 0.3;
  good.samples = 2;
  good.layers = 2;
  good.kv_heads = 2;
  good.mean = good.budget = {0.5, 0.5, 0.5, 0.5};
  good.deviation = {0, 0, 0, 0.1};
  CHECK_NOTHROW(good.check());
  CHECK(good.shares(1).share(0, 1) == 0.5);
  CHECK_THROWS_WITH(good.shares(2), contains("layer is 2; expected 0 to 1"));
  const auto refused = [&](auto change, const std::string& why) {
    profile bad = good;
    change(bad);
    CHECK_THROWS_WITH(bad.check(), contains(why));
  };
  refused([](profile& p) { p.budget[3] = 0; }, "budget of layer 1, kv_head 1 is 0; expected in (0, 1]");
  refused([](profile& p) { p.budget[1] = 1.5; }, "budget of layer 0, kv_head 1 is 1.5; expected in (0, 1]");
  refused([](profile& p) { p.mean[2] = std::nan(""); }, "mean of layer 1, kv_head 0 is nan");
  refused([](profile& p) { p.deviation[0] = -0.1; }, "deviation of layer 0, kv_head 0 is -0.1; expected in [0, 1]");
  refused([](profile& p) { p.mean.pop_back(); }, "mean of the profile is 3; expected 2 layers of 2 KV heads");
  refused([](profile& p) { p.share = 0; }, "share of the profile is 0; expected in (0, 1]");
  refused([](profile& p) { p.samples = 0; }, "samples of the profile is 0");
  refused([](profile& p) { p.alpha = -1; }, "alpha of the profile is -1");
  refused([](profile& p) { p.layers = 0; }, "layers and kv_heads of the profile is 0 and 2");
}

TEST_CASE("ranks that agree correlate fully, opposite ones not at all, and ties share their ranks") {
  CHECK(rank_correlation({1, 2, 3, 4}, {10, 20, 30, 40}) == Approx(1));
  CHECK(rank_correlation({1, 2, 3, 4}, {4, 3, 2, 1}) == Approx(-1));
  CHECK(rank_correlation({1, 1, 2}, {1, 2, 3}) == Approx(std::sqrt(3.0) / 2));
  CHECK(rank_correlation({1, 1, 1}, {1, 2, 3}) == 0);
  CHECK_THROWS_WITH(rank_correlation({1, 2, 3}, {1, 2}),
                    contains("numbers of the second order is 2; expected those of"));
}
