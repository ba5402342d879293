// Random calls of caches whose rows lie in pages, which forks share, beside the same recipes over runs, where forks have rows of their
// own.
#include "catch.hpp"

#include <memory>
#include <vector>

#include <tessera/layout/dense.hpp>
#include <tessera/layout/dense_rows.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/ragged_pages.hpp>
#include <tessera/layout/stored.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/streaming_llm.hpp>
#include <tessera/methods/tangram.hpp>

#include "support/calls/random_cache_calls.hpp"

using namespace tessera;

namespace {

constexpr int dim = support::cache_call::dim;
using plain = dense_rows<fp32, dim>;
using in_runs = dense<fp32, dim>;
template <int Page>
using in_pages = stored<plain, fixed_pages<Page>>;
using in_ragged_pages = stored<plain, ragged_pages>;

/// Bytes of one placement cannot be loaded by another: every fork is one.
template <class Recipe>
struct called final : support::cpu_calls<Recipe> {
  using support::cpu_calls<Recipe>::cpu_calls;
  std::vector<unsigned char> saved_bytes(index_t) override { return {}; }
  std::unique_ptr<support::called_cache> copy() const override { return std::make_unique<called>(*this); }
};

/// The same numbers for both: small budgets, windows and pages, so that rows move often.
template <class Recipe>
Recipe recipe_of(support::rng random, const std::vector<double>& shares, const model_shape& shape) {
  Recipe recipe;
  if constexpr (requires { recipe.retain.budget.shares; }) {
    recipe.retain.budget.shares = {shares.data(), shape.layers, shape.kv_heads};
  } else {
    recipe.set_budget(random.pick({16, 24, 40}));
  }
  if constexpr (requires { recipe.retain.scorer.window; }) recipe.retain.scorer.window = random.between(1, 4);
  if constexpr (requires { recipe.schedule.chunk; }) recipe.schedule.chunk = random.between(4, 20);
  if constexpr (requires { recipe.placement.heads; }) {
    recipe.placement.heads = shape.kv_heads;
    recipe.placement.page = random.between(1, 5);
    recipe.placement.cluster = random.pick({clustering::layer, clustering::none, clustering::model});
  }
  return recipe;
}

template <class Paged, class Plain>
void call_both(std::uint64_t seed) {
  for (index_t block = 0; block < support::scaled(100); ++block) {
    CAPTURE(seed, block);
    support::rng random(seed + std::uint64_t(block));
    model_shape shape{random.between(1, 3), random.pick({2, 4}), random.pick({1, 2})};
    std::vector<double> shares;
    for (index_t head = 0; head < shape.layers * shape.kv_heads; ++head)
      shares.push_back(random.chance(0.2) ? 1.0 : 0.1 + 0.5 * random.uniform());
    const auto workers = std::make_shared<cpu::executor>(1);
    const support::rng same = random;
    support::called_method known;
    known.has_budget = !requires(Paged& recipe) { recipe.retain.budget.shares; };
    known.by_layer = chooses_by_layer<Paged>;
    known.has_two = true;
    const auto paged = [=, &shares] {
      return std::make_unique<called<Paged>>(cache<Paged>(shape, recipe_of<Paged>(same, shares, shape), workers));
    };
    const auto plain_rows = [=, &shares] {
      return std::make_unique<called<Plain>>(cache<Plain>(shape, recipe_of<Plain>(same, shares, shape), workers));
    };
    const support::called_caches caches{shape, known, {}, paged, plain_rows};
    support::agreement seen;
    REQUIRE(support::wrong_of_random_calls(random, caches, 250, &seen) == "");
    CHECK(seen.swapped == 0);
  }
}

}  // namespace

TEST_CASE("random calls over fixed pages that forks share have the outputs of rows of one's own") {
  call_both<snapkv<fp32, dim, dim, in_pages<4>>, snapkv<fp32, dim, dim, in_runs>>(4810);
  call_both<h2o<fp32, dim, dim, in_pages<16>>, h2o<fp32, dim, dim, in_runs>>(4820);
}

TEST_CASE("random calls over ragged pages that forks share have the outputs of rows of one's own") {
  call_both<tangram<fp32, dim, dim, in_ragged_pages>, tangram<fp32, dim, dim, in_runs>>(4840);
  call_both<streaming_llm<fp32, dim, dim, in_ragged_pages>, streaming_llm<fp32, dim, dim, in_runs>>(4830);
}
