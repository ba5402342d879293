// bytes() against what the allocator hands out: operator new counts in this program.
#include "catch.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

#include <tessera/cache.hpp>

#include "every_method.hpp"
#include "support/random.hpp"

using namespace tessera;

namespace {

std::atomic<offset_t> live{0};
constexpr std::size_t header = 16;  // the size stands before each block, which stays aligned

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t size) {
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

template <class Recipe>
void holds_what_it_says() {
  constexpr int dim = Recipe::layout_type::k_dim;
  support::rng random(241);
  const model_shape shape{3, 4, 2};
  Recipe recipe;
  recipe.set_budget(64);
  if constexpr (Recipe::retain_type::plans) recipe.retain.budget.max_new = 130;
  cache<Recipe> now(shape, recipe, std::make_shared<cpu::executor>(1));
  const index_t id = now.open();
  const auto q = support::normals(random, std::size_t(1000 * 4 * dim)),
             k = support::normals(random, std::size_t(1000 * 2 * dim));
  std::vector<float> out(std::size_t(4 * dim));
  const auto measured = [&] {
    const offset_t before = live;
    const cache<Recipe> copy = now;  // sequences, without the scratch of operations
    const offset_t taken = live - before;
    // Beside what is counted: one vector of lengths, begins and the like after another, each a few words long.
    CAPTURE(Recipe::name, taken, copy.bytes(id));
    CHECK(taken >= copy.bytes(id));
    CHECK(taken <= copy.bytes(id) + 3 * 1024);
    CHECK(now.bytes(id) >= copy.bytes(id));  // a copy has no room to grow
    CHECK(now.bytes(id) <= copy.bytes(id) * 5 / 4 + 4096);
  };
  for (index_t layer = 0; layer < 3; ++layer) {
    now.prefill(layer, id, nhd_rows<const float>(q.data(), 900, 4, dim), nhd_rows<const float>(k.data(), 900, 2, dim),
                nhd_rows<const float>(k.data(), 900, 2, dim));
  }
  measured();
  now.end_prefill(id);
  measured();
  for (index_t t = 900; t < 930; ++t) {
    const batch step = now.prepare_step({id}, 1);
    for (index_t layer = 0; layer < 3; ++layer) {
      now.decode(layer, step, nhd_rows<const float>(q.data() + t * 4 * dim, 1, 4, dim),
                 nhd_rows<const float>(k.data() + t * 2 * dim, 1, 2, dim),
                 nhd_rows<const float>(k.data() + t * 2 * dim, 1, 2, dim), nhd_rows(out.data(), 1, 4, dim));
    }
  }
  measured();
}

}  // namespace

TEST_CASE("bytes() is what the allocator has handed out, index, candidates and sums included") {
  methods_test::for_every_method<bf16, 64>([]<class Method>() { holds_what_it_says<Method>(); });
  holds_what_it_says<h2o<fp32, 64>>();
  holds_what_it_says<quest<fp16, 80>>();
  holds_what_it_says<rocketkv<bf16, 128>>();
}
