// Every method by its name, and what the recipes say of themselves.
#include "catch.hpp"

#include <filesystem>
#include <set>

#include <tessera/methods/ada_snapkv.hpp>
#include <tessera/methods/exact_topk.hpp>
#include <tessera/methods/full.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/hsa.hpp>
#include <tessera/methods/loopserve.hpp>
#include <tessera/methods/minference.hpp>
#include <tessera/methods/pyramidkv.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/rocketkv.hpp>
#include <tessera/methods/rocketkv_mt.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/sparq.hpp>
#include <tessera/methods/streaming_llm.hpp>
#include <tessera/methods/tri_shape.hpp>

#include "methods/support/mixtures.hpp"

using namespace tessera;

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

TEST_CASE("every header of methods/ is a method that the tests run") {
  std::set<std::string> headers;
  for (const auto& file : std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/include/tessera/methods")) {
    headers.insert(file.path().stem().string());
  }
  const auto tested = methods_test::published_methods();
  CHECK(std::set<std::string>(tested.begin(), tested.end()) == headers);
  CHECK(tested.size() == headers.size());
  CHECK(headers.count("full") == 1);
}

TEST_CASE("methods are described to the reference as their papers have it") {
  using methods_test::traits;
  const auto described = [](const char* method, traits::first scorer, traits::share budget, traits::second reads) {
    CAPTURE(method);
    const traits found = methods_test::traits_of(method);
    CHECK(found.has_reference());
    CHECK((found.scorer == scorer && found.budget == budget && found.reads == reads));
    return found;
  };
  using first = traits::first;
  using share = traits::share;
  using second = traits::second;
  described("full", first::none, share::uniform, second::none);
  described("snapkv", first::window, share::uniform, second::none);
  described("pyramidkv", first::window, share::pyramid, second::none);
  described("ada_snapkv", first::window, share::adaptive, second::none);
  CHECK(described("h2o", first::accumulated, share::uniform, second::none).each_step);
  CHECK(described("streaming_llm", first::position, share::uniform, second::none).before_step);
  described("exact_topk", first::none, share::uniform, second::exact);
  described("hsa", first::none, share::uniform, second::hsa);
  CHECK(described("quest", first::none, share::uniform, second::quest).pages);
  described("sparq", first::none, share::uniform, second::sparq);
  CHECK(described("rocketkv", first::window, share::uniform, second::hsa).plans);
  const traits turns = described("rocketkv_mt", first::window, share::uniform, second::hsa);
  CHECK((turns.plans && turns.filters));
}

TEST_CASE("every method lists its parameters by unique names") {
  CHECK(parameter_names<full<fp32, 64>>() == names{"dense_layers"});
  CHECK(parameter_names<snapkv<fp32, 64>>() == names{"window", "pool", "pool_kind", "dense_layers"});
  CHECK(parameter_names<pyramidkv<fp32, 64>>() ==
        names{"window", "pool", "pool_kind", "beta", "layer", "layers", "dense_layers"});
  CHECK(parameter_names<ada_snapkv<fp32, 64>>() == names{"window", "pool", "pool_kind", "floor", "dense_layers"});
  CHECK(parameter_names<h2o<fp32, 64>>() == names{"recent", "dense_layers"});
  CHECK(parameter_names<streaming_llm<fp32, 64>>() == names{"sinks", "dense_layers"});
  CHECK(parameter_names<exact_topk<fp32, 64>>() == names{"dense_layers"});
  CHECK(parameter_names<hsa<fp32, 64>>() == names{"max_new", "page", "channels", "newest", "unit", "dense_layers"});
  CHECK(parameter_names<quest<fp32, 64>>() == names{"max_new", "page", "newest", "dense_layers"});
  CHECK(parameter_names<sparq<fp32, 64>>() == names{"max_new", "channels", "recent", "dense_layers"});
  CHECK(parameter_names<rocketkv<fp32, 64>>() ==
        names{"window", "pool", "pool_kind", "max_new", "split", "page", "channels", "newest", "unit", "dense_layers"});
  CHECK(parameter_names<rocketkv_mt<fp32, 64>>() == parameter_names<rocketkv<fp32, 64>>());
  CHECK(parameter_names<loopserve<fp32, 64>>() == names{"observed", "pool", "per", "first", "every", "alpha",
                                                        "sampled_rows", "sampling", "seed", "dense_rows", "algorithm",
                                                        "lines", "dense_layers"});
  CHECK(parameter_names<tri_shape<fp32, 64>>() == names{"init", "local", "dense_rows", "dense_layers"});
  CHECK(parameter_names<methods_test::mixtures::snapkv_quest>() ==
        names{"window", "pool", "pool_kind", "read_tokens", "max_new", "page", "newest", "dense_layers"});
  CHECK(parameter_names<methods_test::mixtures::two_stages>() ==
        names{"window", "pool", "pool_kind", "floor", "block", "read_tokens", "dense_layers"});
}

TEST_CASE("every method lists its policies in the order of the pipeline") {
  CHECK(policy_names<full<fp32, 64>>() == names{"dense_rows", "runs", "dense_decode", "once"});
  CHECK(policy_names<snapkv<fp32, 64>>() ==
        names{"observation_window", "uniform", "top_tokens", "dense_rows", "runs", "dense_decode", "once"});
  CHECK(policy_names<loopserve<fp32, 64>>() == names{"newest_queries", "uniform", "top_tokens", "per_head_or_query",
                                                     "dense_rows", "runs", "dense_decode", "every_outputs",
                                                     "lasting_lines"});
  CHECK(policy_names<minference<fp32, 64>>() == names{"dense_rows", "runs", "dense_decode", "once", "vertical_slash"});
  CHECK(policy_names<exact_topk<fp32, 64>>() ==
        names{"exact_score", "top_tokens", "dense_rows", "runs", "gathered_decode", "once"});
  CHECK(policy_names<rocketkv<fp32, 64>>() == names{"observation_window", "two_stage", "top_tokens", "hybrid_min_max",
                                                    "tokens_or_pages", "dense_rows", "runs", "gathered_decode",
                                                    "once"});
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
  const loopserve<fp32, 64> loop;
  CHECK((loop.prefill.alpha == 0.955f && loop.prefill.sampled_rows == 48));
  CHECK((loop.schedule.first == 16 && loop.schedule.every == 16));
  CHECK((loop.retain.scorer.window == 16 && loop.budget() == 1024 && !loop.prefill.adds_to_reading()));
  CHECK((minference<fp32, 64>{}.prefill.vertical == 1000 && minference<fp32, 64>{}.prefill.slash == 6096));
  const tri_shape<fp32, 64> tri;
  CHECK((tri.prefill.init == 128 && tri.prefill.local == 4096 && tri.prefill.dense_rows == 128));
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
