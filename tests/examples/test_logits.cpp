// The engine against transformers: logits of the shipped model after a few prompts, in fp32 and with a bf16 cache.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "catch.hpp"
#include "engine/model.hpp"
#include "support/random.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/tessera.hpp"

namespace {

const std::filesystem::path source = TESSERA_SOURCE_DIR;

/// The library's method `full` behind the engine's interface. Activations are always fp32; K and V are stored as
/// `Element`: in bf16 where transformers' bf16 logits are the reference.
template <class Element>
class full_cache : public engine::kv_cache {
 public:
  full_cache(const engine::llama_config& config, std::shared_ptr<tessera::cpu::executor> workers)
      : heads_(config.num_attention_heads),
        kv_heads_(config.num_key_value_heads),
        cache_({config.num_hidden_layers, heads_, kv_heads_}, {}, std::move(workers)),
        id_(cache_.open()) {}

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    cache_.prefill(layer, id_, rows(q, tokens, heads_), rows(k, tokens, kv_heads_), rows(v, tokens, kv_heads_));
    cache_.prefill_attention(layer, id_, rows(q, tokens, heads_), rows(out, tokens, heads_));
  }
  void end_prefill() override { cache_.end_prefill(id_); }
  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    if (layer == 0) step_ = cache_.prepare_step({id_}, tokens);
    cache_.decode(layer, step_, rows(q, tokens, heads_), rows(k, tokens, kv_heads_), rows(v, tokens, kv_heads_),
                  rows(out, tokens, heads_));
  }
  std::int64_t next_position() const override { return cache_.next_position(id_); }

 private:
  static constexpr int head_dim = 64;
  template <class T>
  static tessera::rows_view<T> rows(T* data, int tokens, int heads) {
    return tessera::nhd_rows(data, tokens, heads, head_dim);
  }

  int heads_, kv_heads_;
  tessera::cache<tessera::full<Element, head_dim>> cache_;
  tessera::index_t id_;
  tessera::batch step_;
};

double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(double(got[i]) - expected[i], 2);
    size += std::pow(double(expected[i]), 2);
  }
  return std::sqrt(difference / size);
}

template <class Element>
void compare(const std::string& kind, double tolerance) {
  const auto fixture = source / "tests/fixtures/logits/logits.safetensors", folder = source / "examples/model";
  const auto workers = std::make_shared<tessera::cpu::executor>();
  auto model = engine::llama::load(folder, *workers);
  const auto file = engine::safetensors_file::open(fixture);
  const std::vector<std::int64_t> list{engine::any_size}, vocabulary{model.config().vocab_size};
  int prompts = 0, compared = 0;
  for (; file.contains("tokens." + std::to_string(prompts)); ++prompts) {
    const std::string number = std::to_string(prompts);
    const auto wide = file.to_int64("tokens." + number, list);
    const std::vector<engine::token_t> tokens(wide.begin(), wide.end());
    if (tokens.size() > std::size_t(support::scaled(8'192))) continue;  // sanitizers take the short prompts
    const auto expected = file.to_fp32(kind + "." + number, vocabulary);
    full_cache<Element> cache(model.config(), workers);
    const double difference = relative_error(model.prefill(tokens, cache), expected);
    INFO("prompt " << number << " of " << tokens.size() << " tokens");
    CHECK(difference < tolerance);
    ++compared;
    std::printf("%s, %5zu tokens: relative error of the logits %.2e\n", kind.c_str(), tokens.size(), difference);
  }
  CHECK(prompts >= 8);
  CHECK(compared >= 1);
}

}  // namespace

TEST_CASE("fp32 logits of the shipped model equal those of transformers") { compare<tessera::fp32>("fp32", 1e-4); }

TEST_CASE("with a bf16 cache the logits equal those of transformers in bf16") { compare<tessera::bf16>("bf16", 1e-2); }
