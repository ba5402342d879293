#include <filesystem>
#include <set>
#include <string>
#include <tessera/core/error.hpp>
#include <tessera/methods/snapkv.hpp>

#include "catch.hpp"
#include "examples/gates_file.hpp"
#include "tool/backend.hpp"
#include "tool/methods/method_cache.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

using tool::find_method;
using tool::setting;

namespace {

tool::cache_request small_request(std::optional<tessera::index_t> budget, std::vector<setting> settings = {}) {
  return {{1, 4, 2},
          64,
          tool::element_type::bf16,
          budget,
          std::move(settings),
          std::make_shared<tessera::cpu::executor>(1)};
}

std::string value_of(const std::vector<tool::parameter_info>& parameters, const std::string& name) {
  for (const auto& parameter : parameters) {
    if (parameter.name == name) return parameter.value;
  }
  return "absent";
}

}  // namespace

TEST_CASE("every method names itself, its paper and its policies, and has its own name") {
  std::set<std::string> names;
  for (const auto& method : tool::methods()) {
    CHECK(names.insert(method.name).second);
    CHECK_FALSE(method.paper.empty());
    CHECK_FALSE(method.policies.empty());
    for (const auto& parameter : method.parameters) CHECK_FALSE(parameter.about.empty());
  }
  std::set<std::string> headers;
  for (const auto& file : std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/include/tessera/methods")) {
    headers.insert(file.path().stem().string());
  }
  CHECK(names == headers);
}

TEST_CASE("the published defaults are the defaults") {
  CHECK(value_of(find_method("snapkv").parameters, "window") == "32");
  CHECK(value_of(find_method("snapkv").parameters, "pool") == "7");
  CHECK(value_of(find_method("ada_snapkv").parameters, "floor") == "0.2");
  CHECK(value_of(find_method("pyramidkv").parameters, "beta") == "20");
  CHECK(value_of(find_method("streaming_llm").parameters, "sinks") == "4");
  CHECK_FALSE(find_method("full").has_budget);
}

TEST_CASE("every method makes a cache for every element type and head dim") {
  for (const auto& method : tool::methods()) {
    for (const int dim : tool::head_dims) {
      for (const auto element : {tool::element_type::fp32, tool::element_type::fp16, tool::element_type::bf16}) {
        auto request = small_request(64, tool_tests::needed_settings(method.name, 1, 2));
        request.head_dim = dim;
        request.element = element;
        request.shape.rope_frequencies.assign(std::size_t(dim) / 2, 1.0f);
        const auto cache = method.make(request);
        const int bytes = element == tool::element_type::fp32 ? 4 : 2;
        CHECK(cache->full_bytes(10) == 10 * 2 * 2 * dim * bytes);
      }
    }
  }
  auto odd = small_request(64);
  odd.head_dim = 72;
  CHECK_THROWS_WITH(find_method("full").make(odd), contains("head_dim is 72"));
}

TEST_CASE("settings reach the recipe by type") {
  const auto configured =
      find_method("ada_snapkv").configured({{"window", "8"}, {"floor", "0.5"}, {"pool_kind", "average"}});
  CHECK(value_of(configured, "window") == "8");
  CHECK(value_of(configured, "floor") == "0.5");
  CHECK(value_of(configured, "pool_kind") == "average");
  CHECK(find_method("snapkv").make(small_request(64, {{"window", "16"}}))->queries_needed(100) == 16);
  CHECK(find_method("snapkv").make(small_request(64))->queries_needed(10) == 10);
  CHECK(find_method("h2o").make(small_request(64))->queries_needed(100) == 100);
  CHECK(find_method("streaming_llm").make(small_request(64))->queries_needed(100) == 0);
}

TEST_CASE("units and splits are words or numbers") {
  const auto configured = find_method("rocketkv").configured({{"unit", "page"}, {"split", "0.3"}, {"max_new", "64"}});
  CHECK(value_of(configured, "unit") == "page");
  CHECK(value_of(configured, "split") == "0.3");
  CHECK(value_of(configured, "max_new") == "64");
  CHECK(value_of(find_method("rocketkv").parameters, "unit") == "token");
  CHECK(value_of(find_method("rocketkv").parameters, "split") == "adaptive");
  CHECK(value_of(find_method("rocketkv").parameters, "window") == "32");
  CHECK(value_of(find_method("rocketkv").parameters, "pool") == "63");
  CHECK(value_of(find_method("rocketkv_mt").parameters, "window") == "128");
  CHECK(value_of(find_method("quest").parameters, "page") == "16");
  CHECK(value_of(find_method("rocketkv").configured({{"split", "adaptive"}}), "split") == "adaptive");
  CHECK_THROWS_WITH(find_method("rocketkv").configured({{"unit", "pages"}}), contains("one of token, page"));
  for (const char* text : {"adaptve", "", "nan", "0.5x"}) {
    CHECK_THROWS_WITH(find_method("rocketkv").configured({{"split", text}}), contains("adaptive, or 0 to 1"));
  }
  CHECK_THROWS_WITH(find_method("rocketkv").make(small_request(64, {{"split", "1.5"}})), contains("split is 1.5"));
  CHECK_THROWS_WITH(find_method("rocketkv").make(small_request(64, {{"split", "-1"}})), contains("split is -1"));
  CHECK_THROWS_WITH(find_method("rocketkv").make(small_request(15)), contains("budget is 15; expected 16 to"));
}

TEST_CASE("an answer limit becomes max_new where a method has it and the user has not set it") {
  const auto settings_of = [](const char* name, std::vector<setting> given) {
    const auto& method = find_method(name);
    return tool::with_answer_limit(method, std::move(given), 19);
  };
  for (const char* name : {"rocketkv", "rocketkv_mt", "hsa", "quest", "sparq"}) {
    CAPTURE(name);
    CHECK(value_of(find_method(name).configured(settings_of(name, {})), "max_new") == "19");
    const auto chosen = settings_of(name, {{"max_new", "7"}});
    CHECK(chosen.size() == 1);
    CHECK(value_of(find_method(name).configured(chosen), "max_new") == "7");
    CHECK(value_of(find_method(name).parameters, "max_new") == "128");
  }
  for (const char* name : {"full", "streaming_llm", "h2o", "snapkv", "pyramidkv", "ada_snapkv", "exact_topk"}) {
    CAPTURE(name);
    CHECK_FALSE(tool::has_parameter(find_method(name), "max_new"));
    CHECK(settings_of(name, {}).empty());
  }
  CHECK(settings_of("snapkv", {{"window", "16"}}).size() == 1);
  const auto both = settings_of("rocketkv", {{"window", "16"}});
  CHECK(value_of(find_method("rocketkv").configured(both), "window") == "16");
  CHECK(value_of(find_method("rocketkv").configured(both), "max_new") == "19");
}

TEST_CASE("wrong settings are refused with what is allowed") {
  const auto& snapkv = find_method("snapkv");
  CHECK_THROWS_WITH(snapkv.configured({{"winow", "8"}}),
                    contains("window, pool, pool_kind") && contains("mean window"));
  CHECK_THROWS_WITH(snapkv.configured({{"window", "8.5"}}), contains("'8.5'"));
  CHECK_THROWS_WITH(snapkv.configured({{"window", "99999999999"}}), contains("'99999999999'"));
  CHECK_THROWS_WITH(snapkv.configured({{"pool_kind", "min"}}), contains("max, average"));
  CHECK_THROWS_WITH(find_method("ada_snapkv").configured({{"floor", "nan"}}), contains("a number"));
  CHECK_THROWS_WITH(find_method("full").configured({{"window", "8"}}), contains("a parameter of full: dense_layers"));
  CHECK_THROWS_WITH(snapkv.make(small_request(16)), contains("window is 32"));
  CHECK_THROWS_WITH(snapkv.make(small_request(64, {{"window", "0"}})), contains("window is 0"));
}

TEST_CASE("misspelt methods are refused with a suggestion, and absent backends by name") {
  CHECK_THROWS_WITH(find_method("snapvk"), contains("did you mean snapkv?") && contains("exact_topk"));
  CHECK_THROWS_WITH(find_method("zzzzzzzzzzzz"), contains("one of a_shape, ada_snapkv"));
  if (tool::backends().size() == 1) {
    CHECK_THROWS_WITH(tool::require_backend("cuda"), contains("this build has no CUDA backend"));
    CHECK_THROWS_WITH(tool::require_backend("tpu"), contains("expected cpu"));
  } else {
    CHECK_THROWS_WITH(tool::require_backend("tpu"), contains("one of cpu, cuda"));
  }
  CHECK(tool::require_backend("cpu") == tool::backend::cpu);
}

TEST_CASE("numbers and lists are read whole or not at all") {
  CHECK(tool::parse_count("n", "12", 1) == 12);
  for (const char* text : {"", "0", "-1", "1.5", "1x", " 1", "9999999999999999999999"}) {
    CHECK_THROWS_AS(tool::parse_count("n", text, 1), tessera::error);
  }
  CHECK(tool::parse_list("l", "a, b,c") == std::vector<std::string>{"a", "b", "c"});
  for (const char* text : {"", "a,", ",a", "a,,b", "a,a"}) {
    CHECK_THROWS_AS(tool::parse_list("l", text), tessera::error);
  }
  CHECK(tool::parse_setting("window=8").value == "8");
  for (const char* text : {"window", "=8", ""}) CHECK_THROWS_AS(tool::parse_setting(text), tessera::error);
}
