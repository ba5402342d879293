// What benchmarks of a whole model rest on: weights with lines, many conversations, contexts that come in turns. Run where
// there is a device.
#include "catch.hpp"

#ifdef TESSERA_TOOL_CUDA
#include <memory>
#include <random>
#include <tessera/core/error.hpp>
#include <vector>

#include "built_dims.hpp"
#include "engine/cuda/kv_cache.hpp"
#include "engine/cuda/line_weights.hpp"
#include "engine/cuda/model.hpp"
#include "tool/backend.hpp"
#include "tool/methods/registry.hpp"

namespace {

using engine::token_t;
using tessera::index_t;

constexpr int head_dim = 128;

bool cannot_run() {
  try {
    engine::cuda::require_device();
  } catch (const tessera::error&) {
    WARN("skipped: no CUDA device on this machine");
    return true;
  }
  if (tool_tests::has_dim(head_dim)) return false;
  WARN("skipped: the tool is not built for head dim 128");
  return true;
}

engine::llama_config small_llama() {
  engine::llama_config config{};
  config.hidden_size = config.intermediate_size = 1024;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4, config.num_key_value_heads = 2;
  config.head_dim = head_dim;
  config.vocab_size = 4096;
  config.max_position_embeddings = 1 << 20;
  config.rms_norm_eps = 1e-5f;
  config.rope_theta = 5e5;
  config.rope_scaling = engine::llama3_rope{8, 1, 4, 8192};
  return config;
}

tool::cache_request small_request(index_t tokens, index_t turn, std::optional<index_t> budget) {
  tool::cache_request request;
  request.shape = {2, 4, 2};
  request.head_dim = head_dim;
  request.budget = budget;
  request.tokens = tokens, request.turn_tokens = turn;
  return request;
}
std::unique_ptr<tool::method_cache> small_cache(const std::string& method, index_t tokens, index_t turn,
                                                std::optional<index_t> budget) {
  return tool::make_cache(tool::find_method(method), tool::backend::cuda, small_request(tokens, turn, budget));
}

std::vector<token_t> random_tokens(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<token_t> tokens(count);
  for (token_t& token : tokens) token = token_t(random() % 4096);
  return tokens;
}

}  // namespace

TEST_CASE("weights with lines put attention on marked tokens and near the diagonal") {
  if (cannot_run() || !tool_tests::has_method("loopserve_prefill")) return;
  auto model = engine::cuda::llama::with_lines(small_llama(), 1);
  const auto prompt = random_tokens(16384, 2);
  const auto cache = small_cache("loopserve_prefill", 16400, 0, {});
  REQUIRE(cache->trace_lines());
  engine::prefill_options whole;
  whole.chunk = std::int32_t(prompt.size());
  model.prefill(prompt, *cache->on_device(), whole);
  int columns = 0, marked = 0;
  for (int layer = 0; layer < 2; ++layer) {
    const tessera::prompt_lines lines = cache->lines(layer);
    REQUIRE(lines.heads.size() == 4);
    for (const tessera::line_set& head : lines.heads) {
      CHECK(head.slash.size() < 1500);
      CHECK(head.vertical.size() < prompt.size() / 8);
      for (const index_t column : head.vertical) {
        if (column < 4) continue;  // always taken
        ++columns, marked += prompt[std::size_t(column)] % engine::cuda::line_weights::every_column == 0;
      }
    }
  }
  CHECK(columns > 100);
  CHECK(marked * 3 > columns);  // by chance one of 16

  // Without them lines carry little: most of all pairs are needed.
  auto plain = engine::cuda::llama::random(small_llama(), 1);
  const auto other = small_cache("loopserve_prefill", 16400, 0, {});
  other->trace_lines();
  plain.prefill(prompt, *other->on_device(), whole);
  const tessera::prompt_lines lines = other->lines(0);
  for (const tessera::line_set& head : lines.heads) CHECK(head.slash.size() + head.vertical.size() > prompt.size() / 2);

  auto narrow = small_llama();
  narrow.head_dim = 64;
  CHECK_THROWS_WITH(engine::cuda::llama::with_lines(narrow, 1), contains("head_dim is 64"));
}

TEST_CASE("ten conversations that decode together answer as each alone") {
  if (cannot_run()) return;
  auto model = engine::cuda::llama::random(small_llama(), 3);
  constexpr int count = 10;
  tool::cache_request request = small_request(400, 0, {});
  request.conversations = count;
  const auto together = tool::make_cache(tool::find_method("full"), tool::backend::cuda, request);
  engine::cuda::kv_cache& all = *together->on_device();
  std::vector<std::unique_ptr<tool::method_cache>> alone;
  std::vector<token_t> tokens;
  for (int i = 0; i < count; ++i) {
    const auto prompt = random_tokens(std::size_t(100 + 20 * i), unsigned(i));
    all.select(i);
    const auto logits = model.prefill(prompt, all);
    alone.push_back(small_cache("full", 400, 0, {}));
    CHECK(model.prefill(prompt, *alone.back()->on_device()) == logits);
    tokens.push_back(token_t(i + 7));
  }
  int same = 0;
  for (int step = 0; step < 20; ++step) {
    // The same tokens go on in both, whatever was answered: products of ten rows round otherwise than those of one.
    const auto answers = model.next(tokens, all);
    for (std::size_t i = 0; i < count; ++i) {
      same += model.next(tokens[i], *alone[i]->on_device()) == answers[i];
      tokens[i] = (tokens[i] * 31 + 5) % 4096;
    }
  }
  CHECK(same >= 20 * count * 9 / 10);
  request.conversations = engine::cuda::llama::most_together + 1;
  const auto many = tool::make_cache(tool::find_method("full"), tool::backend::cuda, request);
  tokens.resize(std::size_t(request.conversations));
  CHECK_THROWS_WITH(model.next(tokens, *many->on_device()), contains("one for each of at most 64 conversations"));
}

TEST_CASE("a context that is packed turn by turn is the same in a pool for one turn") {
  if (cannot_run() || !tool_tests::has_method("mosaickv")) return;
  auto model = engine::cuda::llama::random(small_llama(), 3);
  constexpr index_t turn = 4096, turns = 3, tokens = turn * turns + 200;
  const auto all = small_cache("mosaickv", tokens, 0, 2048), one = small_cache("mosaickv", tokens, turn, 2048);
  for (index_t i = 0; i < turns; ++i) {
    const auto prompt = random_tokens(std::size_t(turn), unsigned(10 + i));
    CHECK(model.prefill(prompt, *all->on_device()) == model.prefill(prompt, *one->on_device()));
  }
  CHECK(all->bytes() == one->bytes());
  token_t a = 1, b = 1;
  for (int step = 0; step < 70; ++step) {  // full tails are packed, too
    a = model.next(a, *all->on_device()), b = model.next(b, *one->on_device());
    CHECK(a == b);
  }
  // A prompt that is longer than a turn may be has no room.
  CHECK_THROWS_WITH(model.prefill(random_tokens(2 * turn, 20), *one->on_device()), contains("tokens of a kv_head"));
  const auto another = small_cache("mosaickv", tokens, turn, 2048);
  CHECK_THROWS_WITH(model.prefill(random_tokens(2 * turn, 20), *another->on_device()), contains("rows of the cache"));
}
#endif
