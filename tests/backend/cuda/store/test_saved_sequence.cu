// Sequences saved in page-locked memory: the bytes of a sink, copies while other sequences step, damage, and use again.
#include "backend/cuda/cache/cases/step_rows.hpp"
#include "backend/cuda/cache/cases/steps_case.hpp"
#include "laws/cpu_side.hpp"
#include "support/calls/saved_bytes.hpp"
#include "tessera/cache.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/fp8_rows.hpp"
#include "tessera/layout/ragged_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/h2o.hpp"
#include "tessera/methods/mosaickv.hpp"
#include "tessera/methods/snapkv.hpp"
#include "tessera/methods/tangram.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

constexpr int saved_dim = 64;
const model_shape saved_shape{3, 4, 2};

template <class Method>
class saving_cache {
 public:
  using input = typename Method::layout_type::element_type;

  explicit saving_cache(Method method, index_t tokens = 1200) : kv_(saved_shape, method, options_of(tokens)) {}
  cuda::cache<Method>& kv() { return kv_; }
  index_t written(index_t tokens) { return written(step_rows<input>(1, tokens, saved_shape, saved_dim)); }
  index_t written(const step_rows<input>& x) {
    const index_t id = kv_.open();
    for (index_t layer = 0; layer < saved_shape.layers; ++layer)
      kv_.prefill(layer, id, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
                  nullptr);
    kv_.end_prefill(id, nullptr);
    return id;
  }
  std::vector<float> step(index_t id, const step_rows<input>& x, cudaStream_t stream = nullptr) {
    const std::size_t count = std::size_t(x.tokens * saved_shape.q_heads * saved_dim);
    buffer<float> out(count * std::size_t(saved_shape.layers));
    const batch now = kv_.prepare_step({id}, x.tokens, stream);
    kv_.begin_step(now, stream);
    for (index_t layer = 0; layer < saved_shape.layers; ++layer)
      kv_.decode(layer, now, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
                 nhd_rows(out.data + offset_t(layer) * offset_t(count), x.tokens, saved_shape.q_heads, saved_dim), {},
                 stream);
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return out.get();
  }

 private:
  static cuda::cache_options options_of(index_t tokens) {
    cuda::cache_options options;
    options.sequences = 6;
    options.tokens = tokens;
    options.step_tokens = 4;
    return options;
  }
  cuda::cache<Method> kv_;
};

template <class Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const error& refusal) {
    return refusal.what();
  }
  return {};
}

/// The bytes of both ways of a save, and what goes on behind both ways of a load.
template <class Method>
void saves_both_ways(const Method& method) {
  saving_cache<Method> held(method), other(method);
  const step_rows<typename saving_cache<Method>::input> one(1, 1, saved_shape, saved_dim),
      three(1, 3, saved_shape, saved_dim);
  cuda::saved_sequence saved;
  for (const index_t tokens : {1, 2, 17, 511, 1000}) {
    const index_t id = held.written(tokens);
    for (int steps = 0; steps < 2; ++steps) {
      CAPTURE(Method::name, tokens, steps);
      held.kv().save(id, saved);
      const auto bytes = support::saved(held.kv(), id);
      CHECK(support::bytes_of(saved) == bytes);
      CHECK(saved.bytes() == bytes.size());
      const index_t from_memory = other.kv().load(saved), from_source = support::loaded(other.kv(), bytes);
      CHECK(support::saved(other.kv(), from_memory) == bytes);
      CHECK(support::saved(other.kv(), from_source) == bytes);
      const auto expected = held.step(id, three);
      CHECK(other.step(from_memory, three) == expected);
      CHECK(other.step(from_source, three) == expected);
      other.kv().close(from_memory), other.kv().close(from_source);
      held.step(id, one);
    }
    held.kv().close(id);
  }
}

}  // namespace

TEST_CASE("a saved sequence in page-locked memory has the bytes of a sink, and loads as they do", "[gpu]") {
  snapkv<fp16, saved_dim> first;
  first.set_budget(100);
  saves_both_ways(first);
  h2o<bf16, saved_dim> accumulates;
  accumulates.set_budget(200);
  saves_both_ways(accumulates);
  snapkv<bf16, saved_dim, saved_dim, stored<dense_rows<bf16, saved_dim>, fixed_pages<16>>> paged;
  paged.set_budget(300);
  saves_both_ways(paged);
  saves_both_ways(full<bf16, saved_dim, saved_dim, stored<fp8_rows<bf16, saved_dim>, fixed_pages<16>>>{});
  tangram<bf16, saved_dim> ragged;
  ragged.set_budget(90);
  saves_both_ways(ragged);
}

TEST_CASE("a sequence without tokens is saved and loaded", "[gpu]") {
  saving_cache<snapkv<bf16, saved_dim>> held(snapkv<bf16, saved_dim>{});
  const index_t id = held.kv().open();
  cuda::saved_sequence saved;
  held.kv().save(id, saved);
  const auto bytes = support::saved(held.kv(), id);
  CHECK(support::bytes_of(saved) == bytes);
  CHECK(held.kv().next_position(held.kv().load(saved)) == 0);
  CHECK(held.kv().next_position(support::loaded(held.kv(), bytes)) == 0);
}

TEST_CASE("packed rows are saved with their bases, and load as they do", "[gpu]") {
  mosaickv<bf16, saved_dim> method;
  method.layout.rows.segment = 256;
  saves_both_ways(method);
  method.layout.rows.element = packed_element::int4;
  saves_both_ways(method);
  method.layout.rows.element = packed_element::fp8;
  saves_both_ways(method);
  method.layout.rows.strategy.strategy = strategy_choice::searched;
  saving_cache<mosaickv<bf16, saved_dim>> searching(method);
  CHECK(!searching.kv().can_save());
  const index_t id = searching.written(40);
  CHECK_THAT(refusal_of([&] { support::saved(searching.kv(), id); }),
             contains("one whose packing strategies a GPU searches"));
}

TEST_CASE("a saved sequence that is used again keeps its memory", "[gpu]") {
  using method = full<bf16, saved_dim, saved_dim, stored<dense_rows<bf16, saved_dim>, fixed_pages<16>>>;
  saving_cache<method> held({}, 20000);
  const step_rows<bf16> one(1, 1, saved_shape, saved_dim);
  const index_t id = held.written(15000);
  cuda::saved_sequence saved, moved;
  held.kv().save(id, saved);
  const std::size_t first = saved.capacity();
  for (int i = 0; i < 6; ++i) {  // a little larger each time
    held.step(id, one);
    held.kv().save(id, saved);
  }
  CHECK(saved.capacity() <= first + first / 4);
  const auto bytes = support::bytes_of(saved);
  moved = std::move(saved);
  CHECK(!saved.is_whole());
  CHECK(support::bytes_of(moved) == bytes);
  held.kv().save(id, saved);
  CHECK(support::bytes_of(saved) == bytes);
}

TEST_CASE("a load is refused while a step has layers left", "[gpu]") {
  using method = snapkv<bf16, saved_dim>;
  method recipe;
  recipe.set_budget(64);
  saving_cache<method> held(recipe);
  const index_t id = held.written(300), other = held.written(100);
  const auto bytes = support::saved(held.kv(), id);
  const step_rows<bf16> x(1, 1, saved_shape, saved_dim);
  buffer<float> out(std::size_t(saved_shape.q_heads) * saved_dim);
  const batch now = held.kv().prepare_step({other}, 1, nullptr);
  held.kv().begin_step(now, nullptr);
  for (index_t layer = 0; layer < saved_shape.layers; ++layer) {
    CHECK_THROWS_AS(support::loaded(held.kv(), bytes), error);
    held.kv().decode(layer, now, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                     x.rows(x.dv.data, x.kv_heads), nhd_rows(out.data, 1, saved_shape.q_heads, saved_dim), {}, nullptr);
  }
  CHECK(support::loaded(held.kv(), bytes) == 2);
}

TEST_CASE("others step while a sequence is saved on a stream of its own", "[gpu]") {
  using method = full<bf16, saved_dim, saved_dim, stored<dense_rows<bf16, saved_dim>, fixed_pages<16>>>;
  saving_cache<method> held({}, 20000);
  const step_rows<bf16> one(1, 1, saved_shape, saved_dim);
  const step_rows<bf16> prompt(1, 700, saved_shape, saved_dim);
  const index_t saved_id = held.written(20000 - 64), steps_id = held.written(prompt), alone = held.written(prompt);
  std::vector<std::vector<float>> expected;
  for (int i = 0; i < 20; ++i) expected.push_back(held.step(alone, one));
  const auto bytes = support::saved(held.kv(), saved_id);
  cudaStream_t copies = nullptr, steps = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "cudaStreamCreate");
  cuda::check(cudaStreamCreateWithFlags(&steps, cudaStreamNonBlocking), "cudaStreamCreate");
  cuda::saved_sequence saved(bytes.size() * 2);
  for (int round = 0; round < 10; ++round) {
    held.kv().save(saved_id, saved, copies);
    CHECK(held.step(steps_id, one, steps) == expected[std::size_t(2 * round)]);
    CHECK(held.step(steps_id, one, steps) == expected[std::size_t(2 * round + 1)]);
    CHECK(support::bytes_of(saved) == bytes);
    CHECK(saved.has_arrived());
  }
  held.kv().close(saved_id);
  const index_t back = held.kv().load(saved, steps);
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  CHECK(support::saved(held.kv(), back) == bytes);
  cudaStreamDestroy(copies), cudaStreamDestroy(steps);
}

TEST_CASE("saved bytes that are damaged anywhere are refused by the device's checksums, and nothing is opened",
          "[gpu]") {
  snapkv<bf16, saved_dim> method;
  method.set_budget(40);
  saving_cache<snapkv<bf16, saved_dim>> held(method), target(method);
  const auto bytes = support::saved(held.kv(), held.written(200));
  const index_t id = support::loaded(target.kv(), bytes);
  target.kv().close(id);
  for (std::size_t at = 0; at < bytes.size(); at += 1 + at % 1009) {
    CAPTURE(at);
    auto damaged = bytes;
    damaged[at] = static_cast<unsigned char>(damaged[at] ^ (1u << (at % 8)));
    REQUIRE(refusal_of([&] { support::loaded(target.kv(), damaged); }).find("; expected ") != std::string::npos);
    REQUIRE(refusal_of([&] {
              support::loaded(target.kv(), {bytes.begin(), bytes.begin() + std::ptrdiff_t(at)});
            }).find("; expected ") != std::string::npos);
  }
  CHECK(support::loaded(target.kv(), bytes) == id);
  const cuda::saved_sequence none;
  CHECK_THAT(refusal_of([&] { none.wait(); }), contains("saved sequence is none; expected a whole one"));
  CHECK_THAT(refusal_of([&] { target.kv().load(none); }), contains("saved sequence is none; expected a whole one"));
  CHECK_THROWS_AS(held.kv().save(5, *std::make_unique<cuda::saved_sequence>()), error);
}

/// A sequence goes to a cache on the CPU and back.
template <class Method>
void moves_both_ways(const Method& recipe) {
  saving_cache<Method> held(recipe);
  const index_t id = held.written(700);
  cuda::saved_sequence saved;
  held.kv().save(id, saved);
  cache<Method> on_host(saved_shape, recipe, std::make_shared<cpu::executor>(1));
  const auto bytes = support::bytes_of(saved);
  const index_t there = support::loaded(on_host, bytes);
  CHECK(on_host.positions(1, there, 1) == held.kv().positions(1, id, 1));
  CHECK(support::saved(on_host, there) == bytes);
  const index_t back = support::loaded(held.kv(), support::saved(on_host, there));
  CHECK(support::saved(held.kv(), back) == bytes);
}

TEST_CASE("a sequence moves between a GPU's page-locked memory and a cache on the CPU", "[gpu]") {
  snapkv<bf16, saved_dim> first;
  first.set_budget(64);
  moves_both_ways(first);
  mosaickv<bf16, saved_dim> packed;
  packed.layout.rows.segment = 256;
  moves_both_ways(packed);
  packed.layout.rows.element = packed_element::int4;
  moves_both_ways(packed);
}
