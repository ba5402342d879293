// What a device's host counts of what heads keep by lengths alone, against the lengths that the CPU's cache has.
#include "catch.hpp"

#include <memory>
#include <vector>

#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/methods/tangram.hpp>
#include <tessera/runtime/kept_lengths.hpp>

#include "support/random.hpp"

using namespace tessera;
using support::rng;

namespace {

constexpr int dim = 64;
using method = tangram<fp32, dim, dim, dense<fp32, dim>>;

/// One layer of one conversation as a device's host follows it: no score is known.
struct followed_layer {
  std::vector<index_t> held;
  settled_heads before;

  void judge(const method& by, const planned<method>& fitted, const prompt_reach& reach, index_t layer, index_t layers,
             index_t waiting) {
    const index_t heads = index_t(held.size()), tail = std::min(by.retain.scorer.window, waiting);
    const index_t longest = *std::max_element(held.begin(), held.end());
    const layer_extent extent{layer, layers, heads, tail, longest};
    const kept_bound kept = kept_by_lengths(fitted.first.budget, extent, held, before, reach.prompt_tokens(), heads);
    index_t most = 0;
    offset_t total = 0;
    for (const index_t own : kept.by_head) most = std::max(most, own), total += own;
    REQUIRE(kept.longest == most);
    REQUIRE(kept.total == total);
    held = kept.by_head;
  }
};

}  // namespace

TEST_CASE("the host counts what every head keeps, chunk by chunk and turn by turn, without a score") {
  rng random(1290);
  for (index_t i = 0; i < support::scaled(400); ++i) {
    const index_t kv_heads = random.between(1, 4), layers = random.between(1, 3);
    const model_shape shape{layers, kv_heads * random.between(1, 2), kv_heads};
    std::vector<double> shares;
    for (index_t j = 0; j < layers * kv_heads; ++j)
      shares.push_back(random.chance(0.1) ? 1 : random.uniform() * 0.9 + 0.01);
    method recipe;
    recipe.set_budget(random.between(1, 60));
    recipe.retain.scorer.window = random.pick({1, 3, 8});
    if (random.chance(0.7)) {
      recipe.retain.budget.shares = {shares.data(), layers, kv_heads};
    } else {
      recipe.set_budget(random.between(recipe.retain.scorer.window, 60));
    }
    recipe.schedule.chunk = random.pick({5, 16, 30, 1000});
    recipe.dense_layers = random.chance(0.2) ? 1 : 0;
    cache<method> kv(shape, recipe, std::make_shared<cpu::executor>(1));
    const layer_roles roles(shape, recipe.dense_layers, {});
    conversations<method> known(shape, recipe);
    REQUIRE(known.open(recipe, {}) == kv.open());
    std::vector<followed_layer> followed(std::size_t(layers), {std::vector<index_t>(std::size_t(kv_heads), 0), {}});
    const auto compare = [&] {
      for (index_t layer = 0; layer < layers; ++layer) {
        for (index_t h = 0; h < kv_heads; ++h) {
          CAPTURE(i, layer, h);
          REQUIRE(kv.length(layer, 0, h) == followed[std::size_t(layer)].held[std::size_t(h)]);
        }
      }
    };
    for (index_t turn = random.between(1, 3); turn > 0; --turn) {
      const index_t prompt = random.between(1, 90);
      if (random.chance(0.5)) {
        kv.announce(0, prompt);
        known.announce(0, prompt, known.plan_announced(recipe, 0, prompt));
      }
      for (index_t done = 0; done < prompt;) {
        const index_t count = std::min(prompt - done, random.between(1, 40));
        done += count;
        const auto rows = support::normals(random, std::size_t(count * shape.q_heads * dim));
        const auto q = nhd_rows(rows.data(), count, shape.q_heads, dim);
        const auto k = nhd_rows(rows.data(), count, kv_heads, dim);
        for (index_t layer = 0; layer < layers; ++layer) {
          followed_layer& here = followed[std::size_t(layer)];
          const auto& state = known.progress({layer, 0});
          if (state.turn_tokens == 0) here.before = {here.held, here.held};
          if (known.chunk_is_due(recipe, {layer, 0}, count)) {
            if (roles.follows_recipe(layer))
              here.judge(recipe, known.sequence(0).policies, known.reach({layer, 0}), layer, layers,
                         state.turn_tokens - state.judged);
            const index_t reconsidered = known.reconsidered_tokens({layer, 0});
            known.ended_chunk({layer, 0}, reconsidered);
            here.before.settled = here.held;
            for (index_t& own : here.before.settled) own -= reconsidered;
          }
          kv.prefill(layer, 0, q, k, k);
          known.took_chunk({layer, 0}, count);
          for (index_t& own : here.held) own += count;
        }
        compare();
      }
      const planned<method> fitted = known.plan_prompt_end(recipe, 0);
      kv.end_prefill(0);
      for (index_t layer = 0; layer < layers; ++layer) {
        const auto& state = known.progress({layer, 0});
        if (roles.follows_recipe(layer))
          followed[std::size_t(layer)].judge(recipe, fitted, known.reach({layer, 0}), layer, layers,
                                             state.turn_tokens - state.judged);
      }
      known.end_prompt(0, fitted);
      compare();
    }
  }
}
