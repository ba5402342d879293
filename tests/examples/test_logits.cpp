// The engine against transformers: logits of the shipped model after a few prompts, in fp32 and in bf16.
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "catch.hpp"
#include "engine/model.hpp"
#include "naive_cache.hpp"

namespace {

const std::filesystem::path source = TESSERA_SOURCE_DIR;

std::unique_ptr<engine::kv_cache> make_reference_cache(const engine::llama_config& config) {
  return std::make_unique<engine_tests::naive_cache>(config);
}

double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(double(got[i]) - expected[i], 2);
    size += std::pow(double(expected[i]), 2);
  }
  return std::sqrt(difference / size);
}

void compare(engine::precision mode, const std::string& kind, double tolerance) {
  const auto fixture = source / "tests/fixtures/logits/logits.safetensors", folder = source / "examples/model";
  if (!std::filesystem::exists(fixture) || !std::filesystem::exists(folder / "config.json")) {
    WARN("skipped: there is no " << fixture.string() << " or no model in " << folder.string());
    return;
  }
  tessera::cpu::executor executor;
  auto model = engine::llama::load(folder, executor, mode);
  const auto file = engine::safetensors_file::open(fixture);
  const std::vector<std::int64_t> list{engine::any_size}, vocabulary{model.config().vocab_size};
  int prompts = 0;
  for (; file.contains("tokens." + std::to_string(prompts)); ++prompts) {
    const std::string number = std::to_string(prompts);
    const auto wide = file.to_int64("tokens." + number, list);
    const std::vector<engine::token_t> tokens(wide.begin(), wide.end());
    const auto expected = file.to_fp32(kind + "." + number, vocabulary);
    const auto cache = make_reference_cache(model.config());
    INFO("prompt " << number << " of " << tokens.size() << " tokens");
    CHECK(relative_error(model.prefill(tokens, *cache), expected) < tolerance);
  }
  CHECK(prompts > 0);
}

}  // namespace

TEST_CASE("fp32 logits of the shipped model equal those of transformers") {
  compare(engine::precision::fp32, "fp32", 1e-4);
}

TEST_CASE("bf16 logits of the shipped model equal those of transformers") {
  compare(engine::precision::bf16, "bf16", 1e-2);
}
