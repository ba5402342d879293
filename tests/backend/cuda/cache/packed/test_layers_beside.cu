// Layers of a prompt that are packed on a stream of the cache's own while the next ones run: same answers, less memory.
#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <vector>

#include "backend/cuda/cache/cases/cache_case.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/methods/mosaickv.hpp"
#include "tessera/methods/think.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {
namespace beside {

using rows = std::deque<step_rows<bf16>>;  // by layer
constexpr int dim = 64;
const model_shape shape{5, 4, 2, 40, {false, true, false, false, false}};  // one slides

/// Two sequences: one steps while the layers of the other one's prompt are read. Rows of the same seed in every cache.
template <class Method>
class conversation {
 public:
  cuda::cache<Method> held;
  std::vector<float> outputs;
  cudaStream_t stream{};

  conversation(const rows& prompt, const rows& steps, const Method& method, offset_t pool_rows)
      : held(shape, method, options(prompt[0].tokens + 200, pool_rows)), prompt_(prompt), steps_(steps) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (index_t id = 0; id < 2; ++id) REQUIRE(held.open(stream) == id);
    for (index_t layer = 0; layer < shape.layers; ++layer) append(layer, 1, steps_);
    held.end_prefill(1, stream);
  }
  conversation(const conversation& other)
      : held(other.held), outputs(other.outputs), prompt_(other.prompt_), steps_(other.steps_) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  conversation& operator=(const conversation&) = delete;
  ~conversation() { cudaStreamDestroy(stream); }

  void read_layers(index_t first, index_t last, bool ends, bool steps_between, bool moves = false) {
    for (index_t layer = first; layer < last; ++layer) {
      append(layer, 0, prompt_);
      if (ends) held.end_layer(layer, 0, stream);
      if (moves) move_rows(layer);
      if (steps_between) step({1});
    }
  }
  /// While a layer is being packed its rows, and others, go elsewhere.
  void move_rows(index_t layer) {
    if (layer == 0) held.reserve(0, 150, stream);
    if (layer == 2) {
      const index_t fork = held.fork(1, stream);
      held.close(fork, stream);
    }
    if (layer == 3) held.fit_memory(prompt_[0].tokens, stream);
  }
  void answer() {
    held.end_prefill(0, stream);
    for (int i = 0; i < 3; ++i) step({0, 1});
  }
  void append(index_t layer, index_t id, const rows& all) {
    const auto& x = all[std::size_t(layer)];
    held.prefill(layer, id, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), stream);
    buffer<float> out(std::size_t(x.tokens) * 4 * dim);
    held.prefill_attention(layer, id, x.rows(x.dq.data, 4), nhd_rows(out.data, x.tokens, 4, dim), {}, stream);
    note(out);
  }
  void step(const std::vector<index_t>& ids) {
    const batch now = held.prepare_step(ids, 1, stream);
    held.begin_step(now, stream);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const auto& x = steps_[std::size_t(layer)];
      const auto taken = [&](const bf16* data, index_t heads) {
        auto first = nhd_rows<const bf16>(data, x.tokens, heads, dim);
        first.tokens = 1, first.sequences = index_t(ids.size()), first.sequence_stride = heads * dim;
        return first;
      };
      buffer<float> out(ids.size() * 4 * dim);
      held.decode(layer, now, taken(x.dq.data, 4), taken(x.dk.data, 2), taken(x.dv.data, 2),
                  nhd_rows(out.data, 1, 4, dim, index_t(ids.size())), {}, stream);
      note(out);
    }
  }

 private:
  static cuda::cache_options options(index_t tokens, offset_t rows) {
    cuda::cache_options chosen;
    chosen.sequences = 3;
    chosen.tokens = tokens;
    chosen.rows = rows;
    return chosen;
  }
  static void check(cudaError_t status) { cuda::check(status, "stream"); }
  void note(const buffer<float>& out) {
    check(cudaStreamSynchronize(stream));
    const auto values = out.get();
    outputs.insert(outputs.end(), values.begin(), values.end());
  }

  const rows& prompt_;
  const rows& steps_;
};

rows rows_of(index_t tokens) {
  rows all;
  for (index_t layer = 0; layer < shape.layers; ++layer) all.emplace_back(1, tokens, shape, dim);
  return all;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Rows of a pool's pages that the packed rows of a layer take: none where they do not lie in pages.
template <class Method>
offset_t packed_room(const Method& method, index_t tokens) {
  if constexpr (requires { Method::layout_type::placement_type::page; }) {
    constexpr index_t page = Method::layout_type::placement_type::page;
    const index_t segments = ceil_div(tokens, method.layout.rows.segment) + 1;
    return offset_t(2) * page * (ceil_div(tokens, 3 * page) + 2 * segments);
  }
  return 0;
}

/// With room for all layers' whole rows, for two layers' and for one's.
template <class Method>
void answers_as_without(const Method& method, index_t tokens) {
  const auto prompt = rows_of(tokens), steps = rows_of(50);
  const offset_t layer = offset_t(2) * (tokens + 200), others = shape.layers * (2 * 100 + packed_room(method, tokens));
  for (const bool between : {false, true}) {
    CAPTURE(tokens, between);
    conversation<Method> plain(prompt, steps, method, 0);
    plain.read_layers(0, shape.layers, false, between);
    plain.answer();
    conversation<Method> moved(prompt, steps, method, 0);
    moved.read_layers(0, shape.layers, true, between, true);
    moved.answer();
    REQUIRE(same_bits(moved.outputs, plain.outputs));
    for (const offset_t room : {offset_t(0), 2 * layer + others, layer + others}) {
      CAPTURE(room);
      conversation<Method> one(prompt, steps, method, room);
      one.read_layers(0, 3, true, between);
      conversation<Method> copied(one);  // in the middle of a layer that is being packed
      for (conversation<Method>* each : {&one, &copied}) {
        each->read_layers(3, shape.layers, true, between);
        each->answer();
        REQUIRE(same_bits(each->outputs, plain.outputs));
        for (index_t id = 0; id < 2; ++id) {
          for (index_t at = 0; at < shape.layers; ++at)
            REQUIRE(each->held.positions(at, id, 1) == plain.held.positions(at, id, 1));
        }
      }
      if (room == 0 && tokens > 100) CHECK(one.held.peak_bytes() < plain.held.peak_bytes());
    }
  }
}

template <class Method>
Method with_segments(index_t segment) {
  Method method;
  method.layout.rows.segment = segment;
  method.set_budget(64);
  return method;
}

}  // namespace beside
}  // namespace

TEST_CASE("layers of a prompt that are packed beside the next ones answer as without that, in room for one of them",
          "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  using paged = mosaickv<bf16, beside::dim, beside::dim, stored<dense_rows<bf16, beside::dim>, fixed_pages<16>>>;
  for (const index_t tokens : {shrunk(3000, 700), 37, 31}) {
    beside::answers_as_without(beside::with_segments<mosaickv<bf16, beside::dim>>(65536), tokens);
    beside::answers_as_without(beside::with_segments<mosaickv<bf16, beside::dim>>(256), tokens);
    beside::answers_as_without(beside::with_segments<paged>(512), tokens);
    beside::answers_as_without(beside::with_segments<think<bf16, beside::dim>>(400), tokens);
  }
  auto neighbours = beside::with_segments<mosaickv<bf16, beside::dim>>(256);
  neighbours.layout.rows.key.group = neighbours.layout.rows.value.group = 2;
  beside::answers_as_without(neighbours, 500);
  auto searching = beside::with_segments<mosaickv<bf16, beside::dim>>(512);
  searching.layout.rows.strategy.strategy = strategy_choice::searched;
  beside::answers_as_without(searching, shrunk(3000, 700));
  auto searching_pages = beside::with_segments<paged>(512);
  searching_pages.layout.rows.strategy.strategy = strategy_choice::searched;
  beside::answers_as_without(searching_pages, shrunk(3000, 700));
}

TEST_CASE("without layers that end a prompt of all layers needs room for them", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  const auto prompt = beside::rows_of(3000), steps = beside::rows_of(50);
  beside::conversation<mosaickv<bf16, beside::dim>> held(prompt, steps, {},
                                                         2 * (2 * 3200 + 100 * beside::shape.layers));
  CHECK_THROWS_WITH(held.read_layers(0, beside::shape.layers, false, false), contains("rows of the cache"));
}

TEST_CASE("rows without a basis wait for the prompt's end, which refuses them; a closed sequence's layer is forgotten",
          "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  auto prompt = beside::rows_of(300);
  const auto steps = beside::rows_of(50);
  prompt[2].v[100 * 2 * beside::dim] = bf16(std::numeric_limits<float>::quiet_NaN());
  prompt[2].dv.set(prompt[2].v);
  beside::conversation<mosaickv<bf16, beside::dim>> held(prompt, steps, {}, 0);
  held.read_layers(0, beside::shape.layers, true, true);
  CHECK_THROWS_WITH(held.held.end_prefill(0, held.stream),
                    contains("the second moment of values of layer 2, kv_head 0 is NaN or infinity"));
  CHECK_THROWS_WITH(held.held.end_layer(2, 0, held.stream), contains("one that end_layer has not ended"));
  CHECK(held.held.positions(2, 0, 0).size() == 300);
  held.step({1});
  held.held.close(0, held.stream);
  REQUIRE(held.held.open(held.stream) == 0);
  held.read_layers(0, 2, true, false);
  held.held.close(0, held.stream);  // while layer 1 is being packed
  REQUIRE(held.held.open(held.stream) == 0);
  prompt[2].v[100 * 2 * beside::dim] = bf16(1);
  prompt[2].dv.set(prompt[2].v);
  held.outputs.clear();
  held.read_layers(0, beside::shape.layers, true, false);
  held.answer();
  CHECK(std::all_of(held.outputs.begin(), held.outputs.end(), [](float x) { return x == x; }));
}
