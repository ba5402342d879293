// A pass of rows of several conversations through the engine on CUDA, against each conversation alone.
#include "catch.hpp"

#ifdef TESSERA_TOOL_CUDA
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <tessera/core/error.hpp>
#include <vector>

#include "../tiny_model.hpp"
#include "built_dims.hpp"
#include "engine/cuda/kv_cache.hpp"
#include "engine/cuda/model.hpp"
#include "tool/backend.hpp"
#include "tool/methods/registry.hpp"

using engine::token_t;
using tessera::index_t;

namespace {

constexpr int q_heads = 4, kv_heads = 2, dim = 64, layers = 2;

bool no_device() {
  try {
    engine::cuda::require_device();
    return false;
  } catch (const tessera::error&) {
    WARN("skipped: no CUDA device on this machine");
    return true;
  }
}

std::unique_ptr<tool::method_cache> empty_cache() {
  const tool::cache_request request{{layers, q_heads, kv_heads},
                                    dim,
                                    tool::element_type::bf16,
                                    {},
                                    {},
                                    std::make_shared<tessera::cpu::executor>(2),
                                    400};
  return tool::make_cache(tool::find_method("full"), tool::backend::cuda, request);
}

/// Tokens of one conversation in a pass: a chunk of its prompt, or a step.
struct part {
  tool::method_cache* cache;
  std::vector<token_t> tokens;
  std::int32_t begin;
  bool is_prompt;
};

/// A pass of all parts, in which the last row of each is wanted.
std::vector<token_t> pass(engine::cuda::llama& model, const std::vector<part>& parts) {
  std::vector<token_t> tokens;
  std::vector<std::int32_t> positions, wanted;
  for (const part& one : parts) {
    auto& cache = *one.cache->on_device();
    if (!one.is_prompt) {
      cache.begin_step(int(one.tokens.size()), model.stream());
      cache.begin_step_on_device(int(one.tokens.size()), model.stream());
    }
    for (std::size_t t = 0; t < one.tokens.size(); ++t) {
      tokens.push_back(one.tokens[t]);
      positions.push_back(one.begin + std::int32_t(t));
    }
    wanted.push_back(std::int32_t(tokens.size()) - 1);
  }
  const auto attend = [&](int layer, const void* q, const void* k, const void* v, float* out) {
    const auto rows = [](const void* all, std::size_t first, int heads) {
      return static_cast<const std::byte*>(all) + first * std::size_t(heads * dim) * 2;
    };
    std::size_t first = 0;
    for (const part& one : parts) {
      auto& cache = *one.cache->on_device();
      const int count = int(one.tokens.size());
      float* const to = out + first * std::size_t(q_heads * dim);
      const void *own_q = rows(q, first, q_heads), *own_k = rows(k, first, kv_heads), *own_v = rows(v, first, kv_heads);
      one.is_prompt ? cache.prefill(layer, own_q, own_k, own_v, count, to, model.stream())
                    : cache.decode(layer, own_q, own_k, own_v, count, to, model.stream());
      first += one.tokens.size();
    }
  };
  const std::vector<token_t> best = model.pass({tokens, positions, wanted}, attend);
  for (const part& one : parts) {
    if (!one.is_prompt) one.cache->on_device()->end_step();
  }
  return best;
}

std::vector<token_t> random_tokens(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<token_t> tokens(count);
  for (token_t& token : tokens) token = token_t(random() % 2048);
  return tokens;
}

/// The token is one of those that rounding may make the best.
void check_best(token_t best, const std::vector<float>& logits) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  CHECK(logits[std::size_t(best)] >= largest - 0.02f * std::max(1.0f, std::abs(largest)));
}

}  // namespace

TEST_CASE("rows of several conversations pass the CUDA engine together as each alone") {
  if (no_device() || !tool_tests::has_dim(dim)) return;
  const tool_tests::tiny_model folder;
  auto model = engine::cuda::llama::load(folder.path());
  const auto first = random_tokens(150, 1), second = random_tokens(61, 2);
  const auto alone_a = empty_cache(), alone_b = empty_cache(), a = empty_cache(), b = empty_cache();
  auto expected_a = model.prefill(first, *alone_a->on_device());
  auto expected_b = model.prefill(second, *alone_b->on_device());

  // A chunk of one prompt, then its rest beside all of the other one.
  const auto rest = [&](std::size_t from) {
    return std::vector<token_t>(first.begin() + std::ptrdiff_t(from), first.end());
  };
  for (auto* cache : {a.get(), b.get()}) cache->on_device()->reserve(300, model.stream());
  pass(model, {{a.get(), {first.begin(), first.begin() + 70}, 0, true}});
  auto best = pass(model, {{a.get(), rest(70), 70, true}, {b.get(), second, 0, true}});
  check_best(best[0], expected_a), check_best(best[1], expected_b);
  for (auto* cache : {a.get(), b.get()}) cache->on_device()->end_prefill(model.stream());

  // Steps of both; then a step beside the prompt of a third one.
  best = pass(model, {{a.get(), {7}, 150, false}, {b.get(), {9}, 61, false}});
  expected_a = model.decode(std::vector<token_t>{7}, *alone_a->on_device());
  expected_b = model.decode(std::vector<token_t>{9}, *alone_b->on_device());
  check_best(best[0], expected_a), check_best(best[1], expected_b);
  const auto c = empty_cache(), alone_c = empty_cache();
  c->on_device()->reserve(300, model.stream());
  best = pass(model, {{c.get(), second, 0, true}, {a.get(), {11}, 151, false}});
  check_best(best[0], model.prefill(second, *alone_c->on_device()));
  check_best(best[1], model.decode(std::vector<token_t>{11}, *alone_a->on_device()));
  CHECK(a->next_position() == 152);
}

TEST_CASE("a pass of the CUDA engine refuses rows that do not fit together") {
  if (no_device() || !tool_tests::has_dim(dim)) return;
  const tool_tests::tiny_model folder;
  auto model = engine::cuda::llama::load(folder.path());
  const auto nothing = [](int, const void*, const void*, const void*, float*) {};
  const std::vector<token_t> tokens{1, 2, 3};
  const std::vector<std::int32_t> positions{0, 1, 2}, two{0, 1}, beyond{3};
  CHECK_THROWS_AS(model.pass({tokens, two, {}}, nothing), tessera::error);
  CHECK_THROWS_AS(model.pass({tokens, positions, beyond}, nothing), tessera::error);
  CHECK_THROWS_AS(model.pass({{}, {}, {}}, nothing), tessera::error);
}
#endif
