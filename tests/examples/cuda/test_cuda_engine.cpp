// The engine and the tool on CUDA against themselves on the CPU. Compiled into the tests of builds that have both, run
// where there is a device.
#include "catch.hpp"

#ifdef TESSERA_TOOL_CUDA
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <random>
#include <tessera/core/error.hpp>

#include "../gates_file.hpp"
#include "../near_llama.hpp"
#include "../tiny_model.hpp"
#include "built_dims.hpp"
#include "engine/cuda/kv_cache.hpp"
#include "engine/cuda/model.hpp"
#include "engine/model.hpp"
#include "tool/backend.hpp"
#include "tool/methods/registry.hpp"

using engine::token_t;
using tessera::index_t;
using tool::backend;

namespace {

bool no_device() {
  try {
    engine::cuda::require_device();
    return false;
  } catch (const tessera::error& problem) {
    CHECK_THAT(problem.what(), contains("CUDA device") && contains("--backend cpu"));
    WARN("skipped: no CUDA device on this machine");
    return true;
  }
}

tool::cache_request tiny_request(std::optional<index_t> budget, index_t tokens) {
  tessera::model_shape shape{2, 4, 2};
  for (int d = 0; d < 32; ++d) shape.rope_frequencies.push_back(std::pow(10'000.0f, -float(d) / 32));
  return {shape, 64, tool::element_type::bf16, budget, {}, std::make_shared<tessera::cpu::executor>(2), tokens};
}

std::unique_ptr<tool::method_cache> tiny_cache(const std::string& method, backend where,
                                               std::optional<index_t> budget = {}, index_t tokens = 400) {
  tool::cache_request request = tiny_request(budget, tokens);
  request.settings = tool_tests::needed_settings(method, 2, 2);
  return tool::make_cache(tool::find_method(method), where, request);
}

std::vector<token_t> random_tokens(std::size_t count) {
  std::mt19937 random(5);
  std::vector<token_t> tokens(count);
  for (token_t& token : tokens) token = token_t(random() % 2048);
  return tokens;
}

/// Where segments of such a text end.
std::vector<std::uint8_t> some_boundaries(std::size_t count) {
  std::vector<std::uint8_t> ends(count);
  for (std::size_t t = 0; t < count; ++t) ends[t] = t % 11 == 7;
  return ends;
}

/// |a - b| / |b|
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    size += double(b[i]) * b[i];
  }
  return std::sqrt(difference / size);
}

}  // namespace

TEST_CASE("the CUDA engine refuses numbers that overflow, by layer, head and token") {
  if (no_device()) return;
  for (const auto& [weight, what, step, head] :
       {std::tuple{"q_proj", "a query of layer 1, head 3, token 0", "a query of layer 1, head 3, token 9", 3},
        std::tuple{"k_proj", "a key of layer 1, head 1, token 0", "a key of layer 1, head 1, token 9", 1},
        std::tuple{"v_proj", "a value of layer 1, head 1, token 0", "a value of layer 1, head 1, token 9", 1}}) {
    const tool_tests::tiny_model folder(std::string("model.layers.1.self_attn.") + weight + ".weight", head);
    auto model = engine::cuda::llama::load(folder.path());
    const auto cache = tiny_cache("full", backend::cuda);
    CHECK_THROWS_WITH(model.prefill(random_tokens(9), *cache->on_device()), contains(what) && contains("at most 1e18"));
    CHECK_THROWS_WITH(model.next(token_t(3), *cache->on_device()), contains(step));
    const tool_tests::tiny_model ordinary;
    const auto other = tiny_cache("full", backend::cuda);
    CHECK_NOTHROW(engine::cuda::llama::load(ordinary.path()).prefill(random_tokens(9), *other->on_device()));
  }
}

TEST_CASE("the CUDA engine has transformers' logits of models near Llama to bf16 rounding") {
  if (no_device() || !tool_tests::has_dim(64)) return;
  const auto tokens = engine_tests::architectures()["tokens"].get<std::vector<token_t>>();
  const std::span<const token_t> all(tokens), prompt = all.first(all.size() - 4);
  for (const auto& [name, made] : engine_tests::architectures()["models"].items()) {
    const engine_tests::temporary_folder folder;
    folder.write("config.json", made["config"].dump());
    const engine::llama_config config = engine::load_config(folder / "config.json");
    engine_tests::write_weights(engine_tests::weights_of(config), folder / "model.safetensors");
    auto model = engine::cuda::llama::load(folder.path());
    auto request = tiny_request({}, index_t(tokens.size()) + 8);
    request.shape = {config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads};
    const auto cache = tool::make_cache(tool::find_method("full"), backend::cuda, request);
    engine::prefill_options chunks;
    chunks.chunk = 15;
    std::vector<float> logits = model.prefill(prompt, *cache->on_device(), chunks);
    for (std::size_t i = 0; i < 5; ++i) {
      if (i > 0) logits = model.decode(all.subspan(prompt.size() + i - 1, 1), *cache->on_device());
      const double error = distance(logits, made["logits"][i].get<std::vector<float>>());
      CAPTURE(name, i, error);
      CHECK(error < 0.03);
    }
  }
}

TEST_CASE("the CUDA engine's logits are those of the CPU engine to bf16 rounding, whatever the chunks") {
  if (no_device()) return;
  const tool_tests::tiny_model folder;
  tessera::cpu::executor workers(2);
  auto on_cpu = engine::llama::load(folder.path(), workers);
  auto on_cuda = engine::cuda::llama::load(folder.path());
  const auto prompt = random_tokens(300);
  const std::vector<token_t> step = random_tokens(8);
  const auto cpu_cache = tiny_cache("full", backend::cpu);
  const auto expected = on_cpu.prefill(prompt, *cpu_cache);
  const auto expected_step = on_cpu.decode(step, *cpu_cache);
  for (const std::int32_t chunk : {7, 64, 512}) {
    INFO("chunks of " << chunk);
    const auto cache = tiny_cache("full", backend::cuda);
    engine::prefill_options options;
    options.chunk = chunk;
    CHECK(distance(on_cuda.prefill(prompt, *cache->on_device(), options), expected) < 0.02);
    const auto after = on_cuda.decode(step, *cache->on_device());
    REQUIRE(after.size() == expected_step.size());
    CHECK(distance(after, expected_step) < 0.02);
    CHECK(cache->next_position() == 308);
  }
}

TEST_CASE("the shipped model's logits on CUDA equal those of transformers to bf16 rounding") {
  if (no_device()) return;
  const std::filesystem::path source = TESSERA_SOURCE_DIR;
  auto model = engine::cuda::llama::load(source / "examples/model");
  const auto& config = model.config();
  const auto file = engine::safetensors_file::open(source / "tests/fixtures/logits/logits.safetensors");
  for (int prompt = 0; file.contains("tokens." + std::to_string(prompt)); ++prompt) {
    const std::string number = std::to_string(prompt);
    const auto wide = file.to_int64("tokens." + number, std::vector<std::int64_t>{engine::any_size});
    const std::vector<token_t> tokens(wide.begin(), wide.end());
    auto request = tiny_request({}, index_t(tokens.size()) + 8);
    request.shape = {config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads};
    const auto cache = tool::make_cache(tool::find_method("full"), backend::cuda, request);
    const double error = distance(model.prefill(tokens, *cache->on_device()),
                                  file.to_fp32("fp32." + number, std::vector<std::int64_t>{config.vocab_size}));
    INFO("prompt " << number << " of " << tokens.size() << " tokens");
    CHECK(error < 2e-2);
    std::printf("cuda, %5zu tokens: relative error of the logits %.2e\n", tokens.size(), error);
  }
}

TEST_CASE("replayed steps give the bits of steps that were launched one by one") {
  if (no_device()) return;
  const tool_tests::tiny_model folder;
  auto model = engine::cuda::llama::load(folder.path());
  const auto prompt = random_tokens(200);
  const std::vector<std::uint8_t> boundaries = some_boundaries(200);
  engine::prefill_options options;
  options.boundaries = boundaries;
  for (const auto& method : tool::methods()) {
    if (!method.on_cuda) continue;
    INFO(method.name);
    auto launched = tiny_cache(method.name, backend::cuda, 64);
    model.prefill(prompt, *launched->on_device(), options);
    const auto replayed = launched->clone();
    for (token_t token = 1; token < 40; ++token) {
      const std::vector<std::uint8_t> ends{std::uint8_t(token % 5 == 2)};
      replayed->on_device()->begin_chunk(ends);
      const auto bits = model.decode({&token, 1}, *replayed->on_device());
      launched = launched->clone();  // a copy has no graph yet
      launched->on_device()->begin_chunk(ends);
      CHECK(model.decode({&token, 1}, *launched->on_device()) == bits);
    }
    CHECK(replayed->reads().steps == 39);
    CHECK(replayed->positions(1, 1) == launched->positions(1, 1));
  }
}

TEST_CASE("a prompt that is read again on CUDA keeps what it keeps on the CPU") {
  if (no_device() || !tool_tests::has_method("kvzip")) return;
  const tool_tests::tiny_model folder;
  tessera::cpu::executor workers(2);
  auto on_cpu = engine::llama::load(folder.path(), workers);
  auto on_cuda = engine::cuda::llama::load(folder.path());
  const auto prompt = random_tokens(300);
  engine::prefill_options options;
  options.repeat = {{5, 6, 7}, {8, 9}, {10}, 8, 120};  // three parts
  const auto expected = tiny_cache("kvzip", backend::cpu, 64), got = tiny_cache("kvzip", backend::cuda, 64),
             silent = tiny_cache("kvzip", backend::cuda, 64);
  const auto logits = on_cpu.prefill(prompt, *expected, options);
  CHECK(distance(on_cuda.prefill(prompt, *got->on_device(), options), logits) < 0.02);
  options.repeat = {{}, {}, {}, 0, 300};
  on_cuda.prefill(prompt, *silent->on_device(), options);
  index_t kept = 0, same = 0, others = 0;
  for (int layer = 0; layer < 2; ++layer) {
    for (index_t head = 0; head < 2; ++head) {
      const auto here = expected->positions(layer, head), there = got->positions(layer, head);
      std::vector<index_t> both;
      std::set_intersection(here.begin(), here.end(), there.begin(), there.end(), std::back_inserter(both));
      kept += index_t(there.size());
      same += index_t(both.size());
      others += there != silent->positions(layer, head);
    }
  }
  CHECK(kept == 4 * 64);
  CHECK(double(same) >=
        0.8 * double(kept));  // hidden states differ by bf16 rounding; by chance a fifth would be the same
  CHECK(others > 0);          // another re-reading keeps others: it is looked at
}

TEST_CASE("scores of a gate on CUDA keep what they keep on the CPU, of answers too") {
  if (no_device() || !tool_tests::has_method("fastkvzip")) return;
  const tool_tests::tiny_model folder;
  tessera::cpu::executor workers(2);
  auto on_cpu = engine::llama::load(folder.path(), workers);
  auto on_cuda = engine::cuda::llama::load(folder.path());
  const auto prompt = random_tokens(300);
  const auto expected = tiny_cache("fastkvzip", backend::cpu, 64), got = tiny_cache("fastkvzip", backend::cuda, 64);
  engine::prefill_options options;
  options.chunk = 100;
  index_t kept = 0, same = 0;
  for (int turn = 0; turn < 2; ++turn) {
    const auto logits = on_cpu.prefill(std::span(prompt).first(turn == 0 ? 300 : 40), *expected, options);
    CHECK(distance(on_cuda.prefill(std::span(prompt).first(turn == 0 ? 300 : 40), *got->on_device(), options), logits) <
          0.05);
    for (int layer = 0; layer < 2; ++layer) {
      for (index_t head = 0; head < 2; ++head) {
        const auto here = expected->positions(layer, head), there = got->positions(layer, head);
        std::vector<index_t> both;
        std::set_intersection(here.begin(), here.end(), there.begin(), there.end(), std::back_inserter(both));
        REQUIRE(there.size() == here.size());
        kept += index_t(there.size()), same += index_t(both.size());
      }
    }
    for (token_t token = 1; turn == 0 && token < 12; ++token) {  // replayed from the second one on
      on_cpu.decode({&token, 1}, *expected);
      on_cuda.decode({&token, 1}, *got->on_device());
    }
  }
  CHECK(double(same) >= 0.9 * double(kept));  // hidden states differ by bf16 rounding
  CHECK(kept < 4 * (300 + 40));
}

TEST_CASE("conversations that decode together keep what each keeps alone") {
  if (no_device()) return;
  const tool_tests::tiny_model folder;
  auto model = engine::cuda::llama::load(folder.path());
  for (const std::string method : {"full", "rocketkv", "streaming_llm"}) {
    if (!tool_tests::has_method(method)) continue;
    INFO(method);
    auto request = tiny_request(method == "full" ? std::optional<index_t>() : 64, 400);
    request.conversations = 3;
    const auto together = tool::make_cache(tool::find_method(method), backend::cuda, request);
    engine::cuda::kv_cache& all = *together->on_device();
    std::vector<std::unique_ptr<tool::method_cache>> alone;
    std::vector<token_t> tokens;
    for (int i = 0; i < 3; ++i) {
      const auto prompt = random_tokens(std::size_t(100 + 40 * i));
      all.select(i);
      const auto logits = model.prefill(prompt, all);
      alone.push_back(tiny_cache(method, backend::cuda, request.budget));
      CHECK(model.prefill(prompt, *alone.back()->on_device()) == logits);
      tokens.push_back(token_t(i + 7));
    }
    for (int step = 0; step < 20; ++step) {
      // The same tokens go on in both, whatever was answered: products of three rows round otherwise than those of one.
      const auto answers = model.next(tokens, all);
      REQUIRE(answers.size() == 3);
      for (int i = 0; i < 3; ++i) model.next(tokens[std::size_t(i)], *alone[std::size_t(i)]->on_device());
      for (token_t& token : tokens) token = (token * 31 + 5) % 2048;
    }
    for (int i = 0; i < 3; ++i) {
      all.select(i);
      CHECK(all.next_position() == alone[std::size_t(i)]->next_position());
      CHECK(together->positions(0, 1) == alone[std::size_t(i)]->positions(0, 1));
    }
    CHECK_THROWS_WITH(model.next({tokens.data(), 2}, all), contains("one for each of at most 64 conversations"));
    CHECK_THROWS_WITH(model.decode({tokens.data(), 1}, all), contains("conversations is 3"));
  }
}

TEST_CASE("steps of several tokens and of one may alternate") {
  if (no_device()) return;
  const tool_tests::tiny_model folder;
  auto model = engine::cuda::llama::load(folder.path());
  const auto prompt = random_tokens(100), more = random_tokens(30);
  const auto one = tiny_cache("full", backend::cuda), several = tiny_cache("full", backend::cuda);
  model.prefill(prompt, *one->on_device());
  model.prefill(prompt, *several->on_device());
  std::vector<float> last, last_of_several;
  for (const token_t token : more) last = model.decode({&token, 1}, *one->on_device());
  std::size_t done = 0;
  for (const std::size_t count : {1, 8, 1, 3, 8, 1, 8}) {
    const auto all = model.decode(std::span(more).subspan(done, count), *several->on_device());
    last_of_several.assign(all.end() - 2048, all.end());
    done += count;
  }
  REQUIRE(done == more.size());
  CHECK(distance(last_of_several, last) < 0.02);
}

TEST_CASE("what CUDA caches cannot store is refused with the cure") {
  if (no_device()) return;
  auto request = tiny_request({}, 100);
  request.head_dim = 96;
  CHECK_THROWS_WITH(tool::make_cache(tool::find_method("full"), backend::cuda, request),
                    contains("head_dim is 96") && contains("--backend cpu"));
  request = tiny_request({}, 100);
  request.element = tool::element_type::fp32;
  CHECK_THROWS_WITH(tool::make_cache(tool::find_method("full"), backend::cuda, request), contains("fp32"));
}

#else

TEST_CASE("the CUDA engine is not part of this build") { SUCCEED(); }

#endif
