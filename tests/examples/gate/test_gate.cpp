// FastKVzip's gate: its scores against a sum in double and against those of training, and what a model does with them.
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "../naive_cache.hpp"
#include "../tiny_model.hpp"
#include "catch.hpp"
#include "engine/files/safetensors.hpp"
#include "engine/gate/gate.hpp"
#include "engine/model.hpp"
#include "support/random.hpp"

namespace {

using engine::gate_sinks, engine::gate_width;

/// Keeps the scores that it gets, by layer, head and position.
class scored_cache : public engine_tests::naive_cache {
 public:
  explicit scored_cache(const engine::llama_config& config)
      : naive_cache(config),
        scores(std::size_t(config.num_hidden_layers),
               std::vector<std::vector<float>>(std::size_t(config.num_key_value_heads))) {}
  bool takes_scores() const override { return true; }
  void set_scores(int layer, std::int64_t first, const float* given, int tokens) override {
    for (auto& head : scores[std::size_t(layer)]) {
      REQUIRE(std::int64_t(head.size()) == first);
      head.insert(head.end(), given, given + tokens);
      given += tokens;
    }
  }
  std::vector<std::vector<std::vector<float>>> scores;
};

engine::llama_config small_config(int heads, int kv_heads, int hidden) {
  engine::llama_config config{};
  config.num_attention_heads = heads, config.num_key_value_heads = kv_heads, config.hidden_size = hidden;
  return config;
}

double rms_of(const std::vector<double>& x) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  return std::sqrt(squares / double(x.size()) + double(engine::gate_eps));
}

}  // namespace

TEST_CASE("scores of a gate are those of its formula in double") {
  support::rng random(811);
  tessera::cpu::executor workers(2);
  for (int round = 0; round < support::scaled(20); ++round) {
    const int kv_heads = random.between(1, 4), group = random.between(1, 8), heads = kv_heads * group,
              hidden = random.between(1, 70), tokens = random.pick({1, 2, 7, 130});
    CAPTURE(kv_heads, group, hidden, tokens);
    const auto config = small_config(heads, kv_heads, hidden);
    engine::gate_layer gate;
    gate.projections = {(heads + kv_heads) * gate_width, hidden,
                        support::normals(random, std::size_t((heads + kv_heads) * gate_width * hidden))};
    gate.q_bias = support::normals(random, std::size_t(heads * gate_width));
    gate.q_norm = support::normals(random, std::size_t(gate_width));
    gate.k_norm = support::normals(random, std::size_t(gate_width));
    gate.k_base = support::normals(random, std::size_t(kv_heads * gate_sinks * gate_width));
    gate.b = support::normals(random, std::size_t(heads));
    const auto rows = support::normals(random, std::size_t(tokens * hidden));
    std::vector<float> projected(std::size_t(tokens * (heads + kv_heads) * gate_width)),
        scores(std::size_t(tokens * kv_heads), -1.0f);
    engine::gate_scores(workers, config, gate, rows.data(), tokens, projected.data(), scores.data());
    const auto project = [&](int token, int output) {
      double sum = 0;
      for (int i = 0; i < hidden; ++i)
        sum += double(rows[std::size_t(token * hidden + i)]) *
               double(gate.projections.values[std::size_t(output * hidden + i)]);
      return sum;
    };
    for (int token = 0; token < tokens; ++token) {
      for (int h = 0; h < kv_heads; ++h) {
        std::vector<double> k;
        for (int d = 0; d < gate_width; ++d) k.push_back(project(token, (heads + h) * gate_width + d));
        const double of_key = rms_of(k);
        double expected = 0;
        for (int g = h * group; g < (h + 1) * group; ++g) {
          std::vector<double> q;
          for (int d = 0; d < gate_width; ++d)
            q.push_back(project(token, g * gate_width + d) + double(gate.q_bias[std::size_t(g * gate_width + d)]));
          const double of_query = rms_of(q);
          // A softmax over the token's own key and the learned ones; the own one's share is the score.
          double own = double(gate.b[std::size_t(g)]), others = 0;
          for (int d = 0; d < gate_width; ++d)
            own += q[std::size_t(d)] / of_query * double(gate.q_norm[std::size_t(d)]) * k[std::size_t(d)] / of_key *
                   double(gate.k_norm[std::size_t(d)]) / 4;
          for (int s = 0; s < gate_sinks; ++s) {
            double logit = 0;
            for (int d = 0; d < gate_width; ++d)
              logit += q[std::size_t(d)] / of_query * double(gate.q_norm[std::size_t(d)]) *
                       double(gate.k_base[std::size_t((h * gate_sinks + s) * gate_width + d)]) / 4;
            others += std::exp(logit);
          }
          expected += std::exp(own) / (std::exp(own) + others) / group;
        }
        REQUIRE(scores[std::size_t(h * tokens + token)] == Approx(expected).epsilon(1e-3).margin(1e-6));
      }
    }
  }
}

TEST_CASE("the shipped gate gives the scores of training, whatever the chunks, and of steps too") {
  const std::filesystem::path source = TESSERA_SOURCE_DIR;
  const auto file = engine::safetensors_file::open(source / "tests/fixtures/gate/gate.safetensors");
  tessera::cpu::executor workers;
  auto model = engine::llama::load(source / "examples/model", workers);
  const std::vector<std::int64_t> list{engine::any_size};
  int texts = 0;
  for (; file.contains("tokens." + std::to_string(texts)); ++texts) {
    const auto wide = file.to_int64("tokens." + std::to_string(texts), list);
    const std::vector<engine::token_t> tokens(wide.begin(), wide.end());
    const std::int64_t layers = model.config().num_hidden_layers, heads = model.config().num_key_value_heads,
                       count = std::int64_t(tokens.size());
    const std::vector<std::int64_t> shape{layers, heads, count};
    const auto expected = file.to_fp32("gate." + std::to_string(texts), shape);
    scored_cache cache(model.config());
    engine::prefill_options options;
    options.chunk = 64;
    model.prefill(std::span(tokens).first(tokens.size() - 3), cache, options);
    model.decode(std::span(tokens).subspan(tokens.size() - 3, 2), cache);
    model.decode(std::span(tokens).last(1), cache);
    double worst = 0;
    for (std::int64_t i = 0; i < layers * heads * count; ++i) {
      const auto& head = cache.scores[std::size_t(i / count / heads)][std::size_t(i / count % heads)];
      REQUIRE(std::int64_t(head.size()) == count);
      worst = std::max(worst, std::abs(double(head[std::size_t(i % count)]) - double(expected[std::size_t(i)])));
    }
    std::printf("gate, %zu tokens: scores differ by at most %.1e\n", tokens.size(), worst);
    CHECK(worst < 1e-3);
  }
  CHECK(texts >= 2);
}

TEST_CASE("a model without a gate refuses a cache that takes scores, before anything comes") {
  const tool_tests::tiny_model folder;
  tessera::cpu::executor workers(1);
  const std::vector<engine::token_t> tokens{1, 5, 9, 17};
  auto with = engine::llama::load(folder.path(), workers);
  scored_cache scored(with.config());
  with.prefill(tokens, scored);
  CHECK(scored.scores[1][1].size() == 4);

  std::filesystem::remove(folder.path() / "gate/gate.safetensors");
  auto without = engine::llama::load(folder.path(), workers);
  scored_cache cache(without.config());
  CHECK_THROWS_WITH(without.prefill(tokens, cache),
                    contains("the model is without a gate") && contains("train_gate.py"));
  CHECK_THROWS_WITH(without.decode(std::span(tokens).first(1), cache),
                    contains("without a gate; expected a folder of safetensors"));
  CHECK(cache.calls == 0);
  engine_tests::naive_cache plain(without.config());
  without.prefill(tokens, plain);
  CHECK(plain.calls == 2);
}

TEST_CASE("a gate of another model is refused") {
  const tool_tests::tiny_model folder;
  tessera::cpu::executor workers(1);
  const auto path = folder.path() / "gate/gate.safetensors";
  const auto rewritten = [&](const std::string& changed, std::vector<std::int64_t> shape, float value) {
    const tool_tests::tiny_model other;
    const auto file = engine::safetensors_file::open(other.path() / "gate/gate.safetensors");
    engine::safetensors_writer gate;
    for (const auto& [name, tensor] : file.tensors()) {
      std::vector<float> values = file.to_fp32(name, tensor.shape);
      if (name == changed) values.assign(std::size_t(shape.front()), value);
      gate.add(name, name == changed ? shape : tensor.shape, std::span<const float>(values));
    }
    if (!file.contains(changed)) gate.add(changed, shape, std::vector<float>(std::size_t(shape.front()), value));
    gate.write(path);
    try {
      engine::llama::load(folder.path(), workers);
    } catch (const tessera::error& refused) {
      return std::string(refused.what());
    }
    return std::string("nothing was thrown");
  };
  CHECK_THAT(rewritten("layers.1.q_norm.weight", {8}, 1.0f), contains("layers.1.q_norm.weight") && contains("16"));
  CHECK_THAT(rewritten("layers.0.q_proj.bias", {64}, NAN), contains("layers.0.q_proj.bias"));
  CHECK_THAT(rewritten("layers.2.b", {4}, 1.0f), contains("layers of") && contains("more than the model's"));
}
