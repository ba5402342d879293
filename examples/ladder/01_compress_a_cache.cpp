// Rung 1: compress the cache of one model with one method, from prompt to decode step.
// The region between the markers stands in README.md word for word; a check compares the two.
// [readme]
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include <tessera/methods/snapkv.hpp>
#include <tessera/tessera.hpp>

using namespace tessera;

int main() {
  constexpr index_t layers = 2, q_heads = 8, kv_heads = 2, dim = 64, prompt = 2048;

  using method = snapkv<bf16, dim>;  // structure is a type: what is stored, and by which policies
  method recipe;                     // parameters are members
  recipe.set_budget(256);            // tokens per KV head
  recipe.retain.scorer.window = 16;  // the last 16 prompt queries choose
  cache<method> kv({layers, q_heads, kv_heads}, recipe, std::make_shared<cpu::executor>());

  std::mt19937 bits(1);  // stands for the model: queries and keys come after RoPE
  std::normal_distribution<float> normal;
  std::vector<float> q(prompt * q_heads * dim), k(prompt * kv_heads * dim), v(k.size()), out(q_heads * dim);
  for (auto* tensor : {&q, &k, &v}) {
    for (float& x : *tensor) x = normal(bits);
  }
  const auto rows = [](const std::vector<float>& x, index_t tokens, index_t heads) {
    return nhd_rows(x.data(), tokens, heads, dim);  // [tokens, heads, dim]; other strides work too
  };

  const index_t id = kv.open();
  for (index_t layer = 0; layer < layers; ++layer) {
    kv.prefill(layer, id, rows(q, prompt, q_heads), rows(k, prompt, kv_heads), rows(v, prompt, kv_heads));
  }
  kv.end_prefill(id);                           // chooses what stays, frees the rest
  const batch step = kv.prepare_step({id}, 1);  // one decode step: every layer appends and attends
  for (index_t layer = 0; layer < layers; ++layer) {
    kv.decode(layer, step, rows(q, 1, q_heads), rows(k, 1, kv_heads), rows(v, 1, kv_heads),
              nhd_rows(out.data(), 1, q_heads, dim));
  }
  const long long whole = kv.full_bytes(prompt + 1), held = kv.bytes(id), read = kv.bytes_read(id);
  std::printf("%d tokens: %lld bytes whole, %lld held, %lld read by a step\n", prompt + 1, whole, held, read);
  return held * 5 < whole && read < held && kv.length(0, id, 0) == 256 + 1 ? 0 : 1;
}
// [readme]
