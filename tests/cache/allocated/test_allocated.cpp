// bytes() against what the allocator hands out: operator new counts in this program.
#include "catch.hpp"

#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>

#include <tessera/cache.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/fp8_rows.hpp>

#include "every_method.hpp"
#include "support/calls/called_cache.hpp"
#include "support/random.hpp"
#include "support/subsets.hpp"

using namespace tessera;

namespace {

std::atomic<offset_t> live{0};
std::atomic<index_t> until_failure{-1};  // so many allocations succeed, one fails; -1: none fails
constexpr std::size_t header = 16;       // the size stands before each block, which stays aligned

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t size) {
  if (until_failure >= 0 && until_failure-- == 0) throw std::bad_alloc();
  auto* block = static_cast<char*>(std::malloc(size + header));
  if (!block) throw std::bad_alloc();
  *reinterpret_cast<std::size_t*>(block) = size;
  live += offset_t(size);
  return block + header;
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  if (!p) return;
  char* block = static_cast<char*>(p) - header;
  live -= offset_t(*reinterpret_cast<std::size_t*>(block));
  std::free(block);
}
void operator delete(void* p, std::size_t) noexcept { operator delete(p); }

namespace {

/// What is measured: the prompt as it came, after its end, and behind an answer.
enum class stage { prompt, ended, answered };

template <class Recipe>
void holds_what_it_says(stage last) {
  constexpr int dim = Recipe::layout_type::k_dim;
  support::rng random(241);
  const model_shape shape = support::called_shape<Recipe>({3, 4, 2});
  Recipe recipe;
  recipe.set_budget(64);
  if constexpr (requires { recipe.retain.budget.max_new; }) recipe.retain.budget.max_new = 130;
  cache<Recipe> now(shape, recipe, std::make_shared<cpu::executor>(1));
  const index_t id = now.open();
  const auto q = support::normals(random, std::size_t(1000 * 4 * dim)),
             k = support::normals(random, std::size_t(1000 * 2 * dim));
  std::vector<float> out(std::size_t(4 * dim));
  for (index_t layer = 0; layer < 3; ++layer) {
    now.prefill(layer, id, nhd_rows<const float>(q.data(), 900, 4, dim), nhd_rows<const float>(k.data(), 900, 2, dim),
                nhd_rows<const float>(k.data(), 900, 2, dim), std::vector<std::uint8_t>(900, 0));
  }
  support::give_scores<Recipe>(now, id);
  if (last != stage::prompt) now.end_prefill(id);
  for (index_t t = 900; t < 930 && last == stage::answered; ++t) {
    const batch step = now.prepare_step({id}, 1, std::vector<std::uint8_t>{0});
    for (index_t layer = 0; layer < 3; ++layer) {
      now.decode(layer, step, nhd_rows<const float>(q.data() + t * 4 * dim, 1, 4, dim),
                 nhd_rows<const float>(k.data() + t * 2 * dim, 1, 2, dim),
                 nhd_rows<const float>(k.data() + t * 2 * dim, 1, 2, dim), nhd_rows(out.data(), 1, 4, dim));
    }
  }
  // A copy has the sequences without the scratch of operations and without room to grow; what copies share it holds
  // alone once the sequence has been closed in the original.
  std::optional<cache<Recipe>> copy(now);
  const offset_t held = now.bytes(id), said = copy->bytes(id);
  now.close(id);
  const offset_t before = live;
  copy.reset();
  const offset_t taken = before - live;
  // Beside what is counted, up to 2 KiB a layer: one vector of lengths, begins and the like after another, each a few
  // words long; packed rows have them by segment.
  CAPTURE(Recipe::name, int(last), taken, said, held);
  CHECK(taken >= said);
  CHECK(taken <= said + 3 * 2 * 1024);
  CHECK(held >= said);
  CHECK(held <= said * 5 / 4 + 4096);
}

template <class Recipe>
void holds_what_it_says() {
  for (const stage last : {stage::prompt, stage::ended, stage::answered}) holds_what_it_says<Recipe>(last);
}

}  // namespace

TEST_CASE("bytes() is what the allocator has handed out, index, candidates and sums included") {
  methods_test::for_every_method<bf16, 64>([]<class Method>() { holds_what_it_says<Method>(); });
  holds_what_it_says<h2o<fp32, 64>>();
  holds_what_it_says<quest<fp16, 80>>();
  holds_what_it_says<rocketkv<bf16, 128>>();
}

namespace {

template <class Store>
std::vector<float> contents(Store& store) {
  std::vector<float> all;
  for (index_t id = 0; id < 2; ++id) {
    const auto view = store.view({0, id});
    for (index_t h = 0; h < view.kv_heads; ++h) {
      for (index_t s = 0; s < view.length(0, h); ++s) {
        all.push_back(float(view.position(0, h, s)));
        for (int d = 0; d < 64; ++d) {
          all.push_back(float(view.key(0, h, s)[d]) * view.key_scale(0, h, s));
          all.push_back(float(view.value(0, h, s)[d]) * view.value_scale(0, h, s));
        }
        auto& beside = store.beside({0, id});
        all.push_back(beside.scores()[beside.begins()[std::size_t(h)] + s]);
      }
    }
  }
  return all;
}

/// Each allocation of an operation fails once: it throws, and the store holds what it held.
template <class Store, class Operation>
index_t fails_and_holds(Store& store, Operation&& operation) {
  for (index_t failures = 0;; ++failures) {
    const auto before = contents(store);
    until_failure = failures;
    bool failed = false;
    try {
      operation();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    const bool reached = until_failure < 0;  // an operation may live with a failure
    until_failure = -1;
    if (!failed && !reached) return failures;
    if (!failed) return failures + 1;
    REQUIRE(contents(store) == before);
  }
}

template <class Layout>
void stores_outlive_failures(std::uint64_t seed) {
  support::rng random(seed);
  cpu::executor workers(1);
  cpu::kv_store<Layout> store(1, 2, {.scores = true});
  store.open(0);
  store.open(1);
  const auto rows = support::normals(random, 100 * 2 * 64);
  index_t next = 0, failed = 0;
  for (int round = 0; round < 12; ++round) {
    const index_t id = random.between(0, 1), tokens = random.pick({1, 3, 60});
    const auto view = nhd_rows<const float>(rows.data(), tokens, 2, 64);
    const auto lengths = store.lengths({0, id});
    failed += fails_and_holds(store, [&] { store.append({0, id}, view, view, next); });
    REQUIRE(store.lengths({0, id})[0] == lengths[0] + tokens);
    next += tokens;
    const auto chosen = support::random_subset(random, store.lengths({0, id}), random.pick({0.3, 0.9}));
    auto expected = store;
    expected.keep({0, id}, chosen, workers);
    failed += fails_and_holds(store, [&] { store.keep({0, id}, chosen, workers); });
    REQUIRE(contents(store) == contents(expected));
  }
  CHECK(failed > 12);
}

}  // namespace

TEST_CASE("a store holds what it held when any allocation of an append or a keep fails") {
  stores_outlive_failures<dense<fp32, 64>>(331);
  stores_outlive_failures<stored<fp8_rows<bf16, 64>, runs>>(332);
  stores_outlive_failures<stored<dense_rows<bf16, 64>, fixed_pages<16>>>(333);
}
