// Every method by its name, and what the recipes say of themselves.
#include "catch.hpp"

#include <algorithm>

#include <tessera/methods/ada_snapkv.hpp>
#include <tessera/methods/exact_topk.hpp>
#include <tessera/methods/full.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/hsa.hpp>
#include <tessera/methods/pyramidkv.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/rocketkv.hpp>
#include <tessera/methods/rocketkv_mt.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/sparq.hpp>
#include <tessera/methods/streaming_llm.hpp>
#include <tessera/selector/top_blocks.hpp>

#include "methods/any_cache.hpp"

using namespace tessera;

namespace methods_test {

namespace {

using storage = dense<fp32, dim>;

/// Two mixtures that no paper has: blocks under Ada-KV's budget with a second, exact choice at every step; and
/// StreamingLLM's ranking by blocks.
using two_stages = recipe<retain<observation_window, adaptive, top_blocks>, storage, retrieve<exact_score, top_tokens>,
                          gathered_decode, once>;
using block_heavy_hitters =
    recipe<retain<accumulated_attention, pyramid, top_blocks>, storage, retrieve_all, dense_decode, each_step>;

/// Any first stage with any second, by changing a type.
using snapkv_quest = recipe<retain<observation_window, uniform, top_tokens>, storage, retrieve<page_min_max, top_pages>,
                            gathered_decode, once>;
using ada_hsa = recipe<retain<observation_window, two_stage<adaptive>, top_tokens>, storage,
                       retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, once>;
using pyramid_sparq = recipe<retain<observation_window, two_stage<pyramid>, top_blocks>, storage,
                             retrieve<chosen_channels, top_tokens>, gathered_decode, once>;
using h2o_exact = recipe<retain<accumulated_attention, uniform, top_tokens>, storage, retrieve<exact_score, top_tokens>,
                         gathered_decode, each_step>;
using h2o_hsa = recipe<retain<accumulated_attention, uniform, top_tokens>, storage,
                       retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, each_step>;
using sinks_sparq = recipe<retain<position, uniform, top_tokens>, storage, retrieve<chosen_channels, top_tokens>,
                           gathered_decode, once>;
using rocket_exact = recipe<retain<observation_window, two_stage<uniform>, top_tokens>, storage,
                            retrieve<exact_score, top_tokens>, gathered_decode, once>;
/// And filters: without a second stage, with an exact one, over accumulated scores, with Quest and SparQ inside.
using snapkv_turns = recipe<filter<observation_window, uniform, top_tokens>, storage, retrieve_all, dense_decode, once>;
using snapkv_turns_exact = recipe<filter<observation_window, uniform, top_tokens>, storage,
                                  retrieve<exact_score, top_tokens>, gathered_decode, once>;
using h2o_turns_quest = recipe<filter<accumulated_attention, two_stage<uniform>, top_tokens>, storage,
                               retrieve<page_min_max, top_pages>, gathered_decode, once>;
using ada_turns_sparq = recipe<filter<observation_window, two_stage<adaptive>, top_tokens>, storage,
                               retrieve<chosen_channels, top_tokens>, gathered_decode, once>;

template <class Recipe>
Recipe configured(const settings& chosen) {
  Recipe recipe;
  recipe.set_budget(chosen.budget);
  recipe.attention.rule = chosen.rule;
  Recipe::parameters(recipe, [&](const char* name, auto& value, const auto&, const char*) {
    using value_type = std::remove_reference_t<decltype(value)>;
    const auto found = chosen.values.find(name);
    if (found == chosen.values.end()) return;
    if constexpr (std::is_same_v<value_type, split_factor>) {
      value = split_factor(found->second);
    } else {
      value = static_cast<value_type>(index_t(found->second));
    }
    if constexpr (std::is_same_v<value_type, float>) value = float(chosen.value(name, double(value)));
  });
  if constexpr (Recipe::retain_type::chooses && Recipe::retrieve_type::retrieves && !Recipe::retain_type::plans) recipe.retrieve.tokens = chosen.count("read_tokens", chosen.budget);
  return recipe;
}

template <class Recipe>
class cache_of final : public any_cache {
 public:
  explicit cache_of(cache<Recipe> held) : held_(std::move(held)) {}
  std::unique_ptr<any_cache> clone() const override { return std::make_unique<cache_of>(held_); }
  index_t open() override { return held_.open(); }
  void close(index_t id) override { held_.close(id); }
  void prefill(index_t layer, index_t id, const rows& q, const rows& k, const rows& v) override {
    held_.prefill(layer, id, q, k, v);
  }
  void prefill_attention(index_t layer, index_t id, const rows& q, const results& out, const results& lse) override {
    held_.prefill_attention(layer, id, q, out, lse);
  }
  void end_prefill(index_t id) override { held_.end_prefill(id); }
  void decode(index_t layer, const std::vector<index_t>& ids, const rows& q, const rows& k, const rows& v,
              const results& out, const results& lse) override {
    batch& step = steps_[ids];
    if (layer == 0 || step.tokens != q.tokens) step = held_.prepare_step(ids, q.tokens);
    held_.decode(layer, step, q, k, v, out, lse);
  }
  void set_budget(index_t tokens) override { held_.set_budget(tokens); }
  index_t next_position(index_t id) const override { return held_.next_position(id); }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const override {
    return held_.positions(layer, id, head);
  }
  std::vector<index_t> readable(index_t layer, index_t id, index_t head) const override {
    return held_.readable(layer, id, head);
  }
  stage_plan plan(index_t id) const override { return held_.plan(id); }
  void trace_attended(bool on) override { held_.trace_attended(on); }
  std::vector<std::vector<index_t>> attended(index_t layer, index_t id) const override { return held_.attended(layer, id); }
  void overwrite(index_t layer, index_t id, index_t head, const std::vector<index_t>& but) override {
    const auto view = held_.view(layer, id);
    for (index_t slot = 0; slot < view.length(0, head); ++slot) {
      if (std::binary_search(but.begin(), but.end(), view.position(0, head, slot))) continue;
      std::fill_n(view.value(0, head, slot), dim, 1e20f);
      std::fill_n(view.key(0, head, slot), dim, -1e20f);
    }
  }
  offset_t bytes(index_t id) const override { return held_.bytes(id); }
  offset_t bytes_read(index_t id) const override { return held_.bytes_read(id); }
  offset_t full_bytes(index_t tokens) const override { return held_.full_bytes(tokens); }

 private:
  cache<Recipe> held_;
  std::map<std::vector<index_t>, batch> steps_;  // of each batch of ids, the last one
};

template <class Recipe>
std::vector<number> numbers() {
  std::vector<number> all;
  if (Recipe::retain_type::chooses || Recipe::retrieve_type::retrieves) all.push_back({"budget", double(Recipe::budgets.least), double(Recipe::budgets.most), 1});
  Recipe recipe;
  Recipe::parameters(recipe, [&](const char* name, auto& value, const auto& allowed, const char*) {
    using value_type = std::remove_reference_t<decltype(value)>;
    if constexpr (std::is_same_v<value_type, split_factor>) all.push_back({name, allowed.fixed.least, allowed.fixed.most, 1e-6});
    if constexpr (std::is_arithmetic_v<value_type>) {
      all.push_back({name, double(allowed.least), double(allowed.most), std::is_same_v<value_type, float> ? 1e-6 : 1});
    }
  });
  return all;
}

struct entry {
  const char* name;
  traits made_of;
  std::vector<number> (*numbers)();
  std::unique_ptr<any_cache> (*make)(const settings&, const model_shape&, std::shared_ptr<cpu::executor>);
};

template <class Recipe>
entry entry_of(const char* name, const traits& made_of) {
  return {name, made_of, &numbers<Recipe>,
          [](const settings& chosen, const model_shape& shape, std::shared_ptr<cpu::executor> workers) {
            return std::unique_ptr<any_cache>(
                new cache_of<Recipe>(cache<Recipe>(shape, configured<Recipe>(chosen), std::move(workers))));
          }};
}

using first = traits::first;
using share = traits::share;
using second = traits::second;

const std::vector<entry>& entries() {
  static const std::vector<entry> all{
      entry_of<full<fp32, dim>>("full", {}),
      entry_of<snapkv<fp32, dim>>("snapkv", {.scorer = first::window}),
      entry_of<pyramidkv<fp32, dim>>("pyramidkv", {.scorer = first::window, .budget = share::pyramid}),
      entry_of<ada_snapkv<fp32, dim>>("ada_snapkv", {.scorer = first::window, .budget = share::adaptive}),
      entry_of<h2o<fp32, dim>>("h2o", {.scorer = first::accumulated, .each_step = true}),
      entry_of<streaming_llm<fp32, dim>>("streaming_llm", {.scorer = first::position, .before_step = true}),
      entry_of<exact_topk<fp32, dim>>("exact_topk", {.reads = second::exact}),
      entry_of<hsa<fp32, dim>>("hsa", {.reads = second::hsa}),
      entry_of<quest<fp32, dim>>("quest", {.reads = second::quest, .pages = true}),
      entry_of<sparq<fp32, dim>>("sparq", {.reads = second::sparq}),
      entry_of<rocketkv<fp32, dim>>("rocketkv", {.scorer = first::window, .reads = second::hsa, .plans = true}),
      entry_of<rocketkv_mt<fp32, dim>>(
          "rocketkv_mt", {.scorer = first::window, .reads = second::hsa, .filters = true, .plans = true}),
      entry_of<two_stages>("two_stages", {.scorer = first::window, .budget = share::adaptive, .reads = second::exact, .blocks = true}),
      entry_of<block_heavy_hitters>(
          "block_heavy_hitters", {.scorer = first::accumulated, .budget = share::pyramid, .blocks = true, .each_step = true}),
      entry_of<snapkv_quest>("snapkv_quest", {.scorer = first::window, .reads = second::quest, .pages = true}),
      entry_of<ada_hsa>("ada_hsa", {.scorer = first::window, .budget = share::adaptive, .reads = second::hsa, .plans = true}),
      entry_of<pyramid_sparq>(
          "pyramid_sparq", {.scorer = first::window, .budget = share::pyramid, .reads = second::sparq, .blocks = true, .plans = true}),
      entry_of<h2o_exact>("h2o_exact", {.scorer = first::accumulated, .reads = second::exact, .each_step = true}),
      entry_of<h2o_hsa>("h2o_hsa", {.scorer = first::accumulated, .reads = second::hsa, .each_step = true}),
      entry_of<sinks_sparq>("sinks_sparq", {.scorer = first::position, .reads = second::sparq}),
      entry_of<rocket_exact>("rocket_exact", {.scorer = first::window, .reads = second::exact, .plans = true}),
      entry_of<snapkv_turns>("snapkv_turns", {.scorer = first::window, .filters = true}),
      entry_of<snapkv_turns_exact>("snapkv_turns_exact", {.scorer = first::window, .reads = second::exact, .filters = true}),
      entry_of<h2o_turns_quest>(
          "h2o_turns_quest", {.scorer = first::accumulated, .reads = second::quest, .filters = true, .plans = true, .pages = true}),
      entry_of<ada_turns_sparq>("ada_turns_sparq", {.scorer = first::window,
                                                    .budget = share::adaptive,
                                                    .reads = second::sparq,
                                                    .filters = true,
                                                    .plans = true}),
  };
  return all;
}

/// Of the entries, this many are published methods; the rest are mixtures.
constexpr int published = 12;

}  // namespace

std::unique_ptr<any_cache> make_cache(const settings& chosen, const model_shape& shape,
                                      std::shared_ptr<cpu::executor> workers) {
  for (const entry& known : entries()) {
    if (known.name == chosen.method) return known.make(chosen, shape, std::move(workers));
  }
  throw std::out_of_range(chosen.method);
}

const traits& traits_of(const std::string& method) {
  for (const entry& known : entries()) {
    if (known.name == method) return known.made_of;
  }
  throw std::out_of_range(method);
}

std::vector<number> numbers_of(const std::string& method) {
  for (const entry& known : entries()) {
    if (known.name == method) return known.numbers();
  }
  throw std::out_of_range(method);
}

const std::vector<std::string>& all_methods() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const entry& known : entries()) result.emplace_back(known.name);
    return result;
  }();
  return names;
}

const std::vector<std::string>& published_methods() {
  static const std::vector<std::string> names(all_methods().begin(), all_methods().begin() + published);
  return names;
}

}  // namespace methods_test

namespace {

template <class Recipe>
std::vector<std::string> parameter_names() {
  Recipe recipe;
  std::vector<std::string> names;
  Recipe::parameters(recipe, [&](const char* name, auto&, const auto& allowed, const char* about) {
    CHECK_FALSE(allowed.text().empty());
    CHECK(std::string(about).size() > 5);
    names.emplace_back(name);
  });
  return names;
}

template <class Recipe>
std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  Recipe::policies([&](const char*, const char* policy) { names.emplace_back(policy); });
  return names;
}

using names = std::vector<std::string>;

}  // namespace

TEST_CASE("every method lists its parameters by unique names") {
  CHECK(parameter_names<full<fp32, 64>>() == names{"dense_layers"});
  CHECK(parameter_names<snapkv<fp32, 64>>() == names{"window", "pool", "pool_kind", "dense_layers"});
  CHECK(parameter_names<pyramidkv<fp32, 64>>() == names{"window", "pool", "pool_kind", "beta", "layer", "layers", "dense_layers"});
  CHECK(parameter_names<ada_snapkv<fp32, 64>>() == names{"window", "pool", "pool_kind", "floor", "dense_layers"});
  CHECK(parameter_names<h2o<fp32, 64>>() == names{"recent", "dense_layers"});
  CHECK(parameter_names<streaming_llm<fp32, 64>>() == names{"sinks", "dense_layers"});
  CHECK(parameter_names<exact_topk<fp32, 64>>() == names{"dense_layers"});
  CHECK(parameter_names<hsa<fp32, 64>>() == names{"max_new", "page", "channels", "unit", "dense_layers"});
  CHECK(parameter_names<quest<fp32, 64>>() == names{"max_new", "page", "dense_layers"});
  CHECK(parameter_names<sparq<fp32, 64>>() == names{"max_new", "channels", "recent", "dense_layers"});
  CHECK(parameter_names<rocketkv<fp32, 64>>() ==
        names{"window", "pool", "pool_kind", "max_new", "split", "page", "channels", "unit", "dense_layers"});
  CHECK(parameter_names<rocketkv_mt<fp32, 64>>() == parameter_names<rocketkv<fp32, 64>>());
  CHECK(parameter_names<methods_test::snapkv_quest>() ==
        names{"window", "pool", "pool_kind", "read_tokens", "max_new", "page", "dense_layers"});
  CHECK(parameter_names<methods_test::two_stages>() == names{"window", "pool", "pool_kind", "floor", "block", "read_tokens", "dense_layers"});
}

TEST_CASE("every method lists its policies in the order of the pipeline") {
  CHECK(policy_names<full<fp32, 64>>() == names{"dense_rows", "runs", "dense_decode", "once"});
  CHECK(policy_names<snapkv<fp32, 64>>() ==
        names{"observation_window", "uniform", "top_tokens", "dense_rows", "runs", "dense_decode", "once"});
  CHECK(policy_names<exact_topk<fp32, 64>>() == names{"exact_score", "top_tokens", "dense_rows", "runs", "gathered_decode", "once"});
  CHECK(policy_names<rocketkv<fp32, 64>>() == names{"observation_window", "two_stage", "top_tokens", "hybrid_min_max",
                                                    "tokens_or_pages", "dense_rows", "runs", "gathered_decode", "once"});
  CHECK(policy_names<rocketkv_mt<fp32, 64>>() == policy_names<rocketkv<fp32, 64>>());
  CHECK(policy_names<h2o<fp32, 64>>() ==
        names{"accumulated_attention", "uniform", "top_tokens", "dense_rows", "runs", "dense_decode", "each_step"});
}

TEST_CASE("published defaults are the papers'") {
  CHECK(snapkv<fp32, 64>{}.retain.scorer.window == 32);
  CHECK(snapkv<fp32, 64>{}.retain.scorer.pool == 7);
  CHECK(snapkv<fp32, 64>{}.retain.scorer.pool_kind == pooling::max);
  CHECK(pyramidkv<fp32, 64>{}.retain.budget.beta == 20);
  CHECK(ada_snapkv<fp32, 64>{}.retain.budget.floor == 0.2f);
  CHECK(streaming_llm<fp32, 64>{}.retain.scorer.sinks == 4);
  CHECK(h2o<fp32, 64>{}.retain.scorer.protected_tail(1025) == 512);
  CHECK(rocketkv<fp32, 64>{}.retain.scorer.window == 32);
  CHECK(rocketkv<fp32, 64>{}.retain.scorer.pool == 63);
  CHECK(rocketkv<fp32, 64>{}.retain.budget.split == split_factor{});
  CHECK(rocketkv<fp32, 64>{}.retrieve.selector.choice == selection_unit::token);
  CHECK(rocketkv_mt<fp32, 64>{}.retain.scorer.window == 128);
  CHECK(rocketkv_mt<fp32, 64>{}.retain.scorer.pool == 63);
  CHECK(quest<fp32, 64>{}.retrieve.scorer.page == 16);
}

TEST_CASE("a recipe's budget is what it retains, else what a step reads, else none") {
  snapkv<fp32, 64> retaining;
  retaining.set_budget(77);
  CHECK(retaining.budget() == 77);
  exact_topk<fp32, 64> retrieving;
  retrieving.set_budget(78);
  CHECK(retrieving.budget() == 78);
  full<fp32, 64> neither;
  neither.set_budget(79);
  CHECK(neither.budget() == 0);
}
