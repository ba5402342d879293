// Forks of a CUDA cache share pages: what they take, and that nobody sees what another one writes.
#include "backend/cuda/cache/cases/calls_case.hpp"
#include "backend/cuda/cache/cases/step_rows.hpp"
#include "backend/cuda/cache/cases/steps_case.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/ragged_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/h2o.hpp"
#include "tessera/methods/snapkv.hpp"
#include "tessera/methods/tangram.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

constexpr int forked_dim = 64;
using plain_rows = dense_rows<bf16, forked_dim>;
using in_pages = stored<plain_rows, fixed_pages<16>>;
const model_shape forked_shape{2, 4, 2};

/// The pages that are free, and what a sequence does next, in the words of one cache.
template <class Method>
class forked_cache {
 public:
  explicit forked_cache(Method method, index_t sequences = 6) : kv_(forked_shape, method, options_of(sequences)) {}

  cuda::cache<Method>& kv() { return kv_; }
  offset_t pages() const { return kv_.available().pages; }
  void prefill(index_t id, const step_rows<bf16>& x) {
    for (index_t layer = 0; layer < forked_shape.layers; ++layer) {
      kv_.prefill(layer, id, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
                  nullptr);
    }
  }
  std::vector<float> step(index_t id, const step_rows<bf16>& x) {
    const std::size_t count = std::size_t(x.tokens * forked_shape.q_heads * forked_dim);
    buffer<float> out(count * std::size_t(forked_shape.layers));
    const batch now = kv_.prepare_step({id}, x.tokens, nullptr);
    kv_.begin_step(now, nullptr);
    for (index_t layer = 0; layer < forked_shape.layers; ++layer) {
      kv_.decode(layer, now, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
                 nhd_rows(out.data + offset_t(layer) * offset_t(count), x.tokens, forked_shape.q_heads, forked_dim), {},
                 nullptr);
    }
    return out.get();
  }
  std::vector<index_t> positions(index_t id) {
    std::vector<index_t> all;
    for (index_t layer = 0; layer < forked_shape.layers; ++layer) {
      for (index_t head = 0; head < forked_shape.kv_heads; ++head) {
        for (const index_t position : kv_.positions(layer, id, head)) all.push_back(position);
      }
    }
    return all;
  }

 private:
  static cuda::cache_options options_of(index_t sequences) {
    cuda::cache_options options;
    options.sequences = sequences;
    options.tokens = 1200;
    options.step_tokens = 4;
    return options;
  }
  cuda::cache<Method> kv_;
};

/// A prompt is forked before it ends; both end it, and one of them writes first. Both have the outputs of a sequence alone.
template <class Method>
void forks_of_a_prompt(const Method& method) {
  forked_cache<Method> cache(method);
  const step_rows<bf16> first(1, 500, forked_shape, forked_dim), second(1, 77, forked_shape, forked_dim),
      other(1, 33, forked_shape, forked_dim), one(1, 1, forked_shape, forked_dim), four(1, 4, forked_shape, forked_dim);
  const index_t alone = cache.kv().open();
  cache.prefill(alone, first), cache.prefill(alone, second);
  cache.kv().end_prefill(alone, nullptr);
  const auto expected_one = cache.step(alone, one), expected_four = cache.step(alone, four);
  const auto expected_positions = cache.positions(alone);
  cache.kv().close(alone);
  const offset_t all = cache.pages();

  const index_t prefix = cache.kv().open();
  cache.prefill(prefix, first);
  const offset_t behind_prefix = cache.pages();
  REQUIRE(all - behind_prefix > 0);
  std::vector<index_t> forks;
  for (int i = 0; i < 4; ++i) forks.push_back(cache.kv().fork(prefix));
  CHECK(cache.pages() == behind_prefix);
  for (std::size_t i = 0; i < forks.size(); ++i) {
    const index_t id = forks[i];
    if (i == 1) {  // goes its own way, over the same pages
      cache.prefill(id, other);
      cache.kv().end_prefill(id, nullptr);
      cache.step(id, four);
      continue;
    }
    cache.prefill(id, second);
    cache.kv().end_prefill(id, nullptr);
    CHECK(cache.step(id, one) == expected_one);
    const index_t later = cache.kv().fork(id);
    CHECK(cache.step(id, four) == expected_four);
    CHECK(cache.positions(id) == expected_positions);
    CHECK(cache.step(later, four) == expected_four);
    CHECK(cache.positions(later) == expected_positions);
    cache.kv().close(later);
  }
  cache.prefill(prefix, second);
  cache.kv().end_prefill(prefix, nullptr);
  CHECK(cache.step(prefix, one) == expected_one);
  cache.kv().close(prefix);
  for (const index_t id : forks) cache.kv().close(id);
  CHECK(cache.pages() == all);
}

}  // namespace

TEST_CASE("forks in the middle of a prompt share its pages, and each goes on as a sequence alone", "[gpu][cache]") {
  if (gpu_missing()) return;
  full<bf16, forked_dim, forked_dim, in_pages> everything;
  forks_of_a_prompt(everything);
  snapkv<bf16, forked_dim, forked_dim, in_pages> compressed;
  compressed.set_budget(64);
  compressed.retain.scorer.window = 16;
  forks_of_a_prompt(compressed);
  h2o<bf16, forked_dim, forked_dim, in_pages> in_steps;
  in_steps.set_budget(64);
  forks_of_a_prompt(in_steps);
}

TEST_CASE("a fork behind many steps that drop in place writes to pages of its own", "[gpu][cache]") {
  if (gpu_missing()) return;
  h2o<bf16, forked_dim, forked_dim, in_pages> method;
  method.set_budget(72);
  forked_cache<h2o<bf16, forked_dim, forked_dim, in_pages>> cache(method);
  const step_rows<bf16> first(1, 200, forked_shape, forked_dim), second(1, 9, forked_shape, forked_dim),
      other(1, 5, forked_shape, forked_dim), one(1, 1, forked_shape, forked_dim);
  const auto begin = [&] {
    const index_t id = cache.kv().open();
    cache.prefill(id, first);
    cache.kv().end_prefill(id, nullptr);
    for (int i = 0; i < 150; ++i) cache.step(id, one);
    return id;
  };
  const auto go_on = [&](index_t id) {
    cache.prefill(id, second);
    cache.kv().end_prefill(id, nullptr);
    return cache.step(id, one);
  };
  const index_t alone = begin();
  const auto expected = go_on(alone);
  cache.kv().close(alone);
  const index_t id = begin(), fork = cache.kv().fork(id);
  cache.prefill(id, second);
  cache.prefill(fork, other);
  cache.kv().end_prefill(fork, nullptr);
  cache.step(fork, one);
  cache.kv().end_prefill(id, nullptr);
  CHECK(cache.step(id, one) == expected);
}

TEST_CASE("random calls of h2o in pages, whose rows move in steps, do what the contract says", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  hold_conversations<h2o<bf16, forked_dim, forked_dim, in_pages>>(20);
  call_at_random<h2o<bf16, forked_dim, forked_dim, in_pages>>();
}

TEST_CASE("forks share ragged pages, under a method that chooses after every chunk too", "[gpu][cache]") {
  if (gpu_missing()) return;
  tangram<bf16, forked_dim, forked_dim, stored<plain_rows, ragged_pages>> clustered;
  const std::vector<double> shares{0.2, 0.5, 0.3, 0.1};
  clustered.retain.budget.shares = {shares.data(), forked_shape.layers, forked_shape.kv_heads};
  clustered.retain.scorer.window = 16;
  clustered.schedule.chunk = 128;
  clustered.placement.heads = 2;
  for (const auto among : {clustering::layer, clustering::model}) {
    clustered.placement.cluster = among;
    forks_of_a_prompt(clustered);
  }
}

TEST_CASE("a fork that goes back writes to pages of its own, and a pool without free pages refuses", "[gpu][cache]") {
  if (gpu_missing()) return;
  using paged = full<bf16, forked_dim, forked_dim, in_pages>;
  forked_cache<paged> cache(paged{}, 3);
  const step_rows<bf16> prompt(1, 100, forked_shape, forked_dim), one(1, 1, forked_shape, forked_dim),
      two(1, 1, forked_shape, forked_dim);
  const index_t id = cache.kv().open();
  cache.prefill(id, prompt);
  cache.kv().end_prefill(id, nullptr);
  cache.step(id, one);
  const auto expected = cache.step(id, two);
  cache.kv().truncate(id, 101);
  const offset_t before = cache.pages();
  const index_t back = cache.kv().fork(id, 101);
  CHECK(cache.pages() == before);
  cache.step(back, one);  // in the slot that holds `two` of the original
  CHECK(before - cache.pages() == forked_shape.layers);
  CHECK(cache.step(id, two) == expected);
  CHECK(cache.pages() == before - forked_shape.layers);
}
