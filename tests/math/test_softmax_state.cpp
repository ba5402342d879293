#include "catch.hpp"

#include <tessera/math/softmax_state.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;

namespace {

softmax_state state_of(const std::vector<float>& logits) {
  softmax_state state;
  for (const float logit : logits) state.add(logit);
  return state;
}

double exact_lse(const std::vector<float>& logits) {
  double top = -HUGE_VAL, total = 0;
  for (const float logit : logits) top = std::max(top, double(logit));
  for (const float logit : logits) total += std::exp(double(logit) - top);
  return top + std::log(total);
}

softmax_state merged(softmax_state a, const softmax_state& b) {
  a.merge(b);
  return a;
}

}  // namespace

TEST_CASE("softmax_state gives the log-sum-exp of what it was fed, however it was split") {
  support::rng random(31);
  for (index_t i = 0; i < support::scaled(2'000); ++i) {
    const auto a = support::normals(random, std::size_t(random.between(1, 40)), 20);
    const auto b = support::normals(random, std::size_t(random.between(1, 40)), 20);
    const auto c = support::normals(random, std::size_t(random.between(1, 40)), 20);
    auto all = a;
    all.insert(all.end(), b.begin(), b.end());
    all.insert(all.end(), c.begin(), c.end());
    const auto sa = state_of(a), sb = state_of(b), sc = state_of(c);
    REQUIRE(support::number_error(state_of(all).log_sum_exp(), exact_lse(all)) < 1e-5);
    REQUIRE(support::number_error(merged(merged(sa, sb), sc).log_sum_exp(), exact_lse(all)) < 1e-5);
    REQUIRE(support::number_error(merged(sa, merged(sb, sc)).log_sum_exp(), exact_lse(all)) < 1e-5);
    REQUIRE(support::number_error(merged(sb, sa).log_sum_exp(), merged(sa, sb).log_sum_exp()) < 1e-6);
  }
}

TEST_CASE("an empty softmax_state is neutral, and masked logits leave it empty") {
  const auto some = state_of({1, 2, 3});
  CHECK(merged(some, {}).log_sum_exp() == some.log_sum_exp());
  CHECK(merged({}, some).log_sum_exp() == some.log_sum_exp());
  CHECK(merged({}, {}).empty());
  CHECK(softmax_state{}.log_sum_exp() == -infinity);
  CHECK(state_of({-infinity, -infinity}).empty());
  CHECK(state_of({-infinity, 2.0f}).log_sum_exp() == 2.0f);
}

TEST_CASE("merge_attention of disjoint parts equals attention over all of them") {
  constexpr int dim = 5;
  support::rng random(32);
  for (index_t i = 0; i < support::scaled(1'000); ++i) {
    const index_t n = random.between(2, 30), cut = random.between(0, n);
    const auto keys = support::normals(random, std::size_t(n * dim)),
               values = support::normals(random, std::size_t(n * dim));
    const auto query = support::normals(random, dim, 3);
    const auto part = [&](index_t first, index_t last) {
      std::vector<const float*> k, v;
      std::vector<index_t> positions;
      for (index_t t = first; t < last; ++t) {
        k.push_back(keys.data() + t * dim);
        v.push_back(values.data() + t * dim);
        positions.push_back(t);
      }
      return support::oracle::attend(query.data(), n, k, v, positions, dim, dim);
    };
    const auto left = part(0, cut), right = part(cut, n), whole = part(0, n);
    std::vector<float> out(left.out.begin(), left.out.end());
    const std::vector<float> other(right.out.begin(), right.out.end());
    float lse = float(left.lse);
    merge_attention(out.data(), lse, other.data(), float(right.lse), dim);
    REQUIRE(support::row_error(out.data(), whole.out) < 1e-5);
    REQUIRE(support::number_error(lse, whole.lse) < 1e-6);
  }
}

TEST_CASE("merge_attention of two empty parts stays empty, and an empty part's output is ignored") {
  float out[2] = {7, 8}, lse = -infinity;
  const float garbage[2] = {std::nanf(""), infinity}, part[2] = {1, 2};
  merge_attention(out, lse, garbage, -infinity, 2);
  CHECK(lse == -infinity);
  merge_attention(out, lse, part, 3.0f, 2);
  CHECK((out[0] == 1 && out[1] == 2 && lse == 3));
  merge_attention(out, lse, garbage, -infinity, 2);
  CHECK((out[0] == 1 && out[1] == 2 && lse == 3));
}

TEST_CASE("a base-2 log-sum-exp becomes a natural one") {
  CHECK(support::number_error(natural_lse_from_base2(3.0f), std::log(8.0)) < 1e-6);
  CHECK(natural_lse_from_base2(-infinity) == -infinity);
}
