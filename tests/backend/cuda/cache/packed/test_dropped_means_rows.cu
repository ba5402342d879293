// The means of blocks that lose rows on the device: the CPU's bits, those of forks, and what many turns leave; pages beside
// planes.
#include "backend/cuda/cache/cases/placed_calls.hpp"
#include "dropped_means.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

const model_shape means_shape{2, 4, 2};
constexpr int means_dim = 64;

template <class Method>
struct both_caches {
  using T = typename Method::layout_type::element_type;
  Method method;
  tessera::cache<Method> host;
  cuda::cache<Method> device;
  std::mt19937 random{7};

  both_caches(const Method& made, index_t tokens)
      : method(made),
        host(means_shape, made, std::make_shared<cpu::executor>(1)),
        device(means_shape, made, {.sequences = 2, .tokens = tokens}) {}

  void host_prompt(index_t tokens) {
    for (index_t layer = 0; layer < means_shape.layers; ++layer) {
      const step_rows<T> x(1, tokens, means_shape, means_dim, 0, random);
      host.prefill(layer, 0, x.rows(x.q.data(), 4), x.rows(x.k.data(), 2), x.rows(x.v.data(), 2));
    }
    host.end_prefill(0);
  }
  void prompt(index_t tokens) {
    for (index_t layer = 0; layer < means_shape.layers; ++layer) {
      const step_rows<T> x(1, tokens, means_shape, means_dim, 0, random);
      host.prefill(layer, 0, x.rows(x.q.data(), 4), x.rows(x.k.data(), 2), x.rows(x.v.data(), 2));
      device.prefill(layer, 0, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
      cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    host.end_prefill(0);
    device.end_prefill(0, nullptr);
  }
  /// The relative error of the device's step.
  double step() {
    double worst = 0;
    const batch of_host = host.prepare_step({0}, 1), of_device = device.prepare_step({0}, 1, nullptr);
    device.begin_step(of_device, nullptr);
    for (index_t layer = 0; layer < means_shape.layers; ++layer) {
      const step_rows<T> x(1, 1, means_shape, means_dim, 0, random);
      std::vector<float> out(4 * means_dim);
      buffer<float> dout(out.size());
      host.decode(layer, of_host, x.rows(x.q.data(), 4), x.rows(x.k.data(), 2), x.rows(x.v.data(), 2),
                  nhd_rows(out.data(), 1, 4, means_dim));
      device.decode(layer, of_device, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2),
                    nhd_rows(dout.data, 1, 4, means_dim), {}, nullptr);
      worst = std::max(worst, relative_error(dout.get(), out));
    }
    return worst;
  }
};

/// A sequence that the CPU has packed loses rows on both backends; nothing is packed behind it.
template <class Layout>
void keep_the_same_means(packed_element element, index_t group) {
  using method_type = means_behind<random_score, uniform, Layout>;
  method_type method;
  auto& rows = method.layout.rows;
  rows.element = element, rows.segment = 64, rows.key.group = rows.value.group = group;
  method.set_budget(200);
  both_caches<method_type> both(method, 512);
  REQUIRE(both.host.open() == 0);
  both.host_prompt(300);
  REQUIRE(support::loaded(both.device, support::saved(both.host, 0)) == 0);
  REQUIRE(both.device.fork(0) == 1);
  std::vector<std::vector<float>> before;
  for (index_t layer = 0; layer < means_shape.layers; ++layer) before.push_back(means_of(both.host, layer, 0));
  for (int turn = 0; turn < 2; ++turn) {
    both.prompt(11);
    const auto kept = on_host(both.device, 0, method), fork = on_host(both.device, 1, method);
    for (index_t layer = 0; layer < means_shape.layers; ++layer) {
      REQUIRE(both.host.positions(layer, 0, 0) == both.device.positions(layer, 0, 0));
      const std::vector<float> means = means_of(both.host, layer, 0);
      CHECK(means.size() > 10 * std::size_t(means_shape.kv_heads * means_dim));
      CHECK(means != before[std::size_t(layer)]);
      CHECK(means == means_of(*kept, layer, 0));
      CHECK(before[std::size_t(layer)] == means_of(*fork, layer, 0));
    }
  }
}

}  // namespace

TEST_CASE("means of blocks that lose rows have the CPU's bits, and those of forks stay", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  for (const auto element : {packed_element::same, packed_element::fp8, packed_element::int4}) {
    for (const index_t group : {1, 2, 4}) {
      CAPTURE(int(element), group);
      keep_the_same_means<dense<bf16, means_dim>>(element, group);
      keep_the_same_means<packed_in_pages<bf16, 16>>(element, group);
    }
  }
}

TEST_CASE("conversations that drop in every turn go on when there is no room for a segment", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  using method_type = means_behind<random_score, uniform, packed_in_pages<fp16, 4>>;
  method_type method;
  support::keep_all_elements(method);
  method.layout.rows.tail.tail = 16;
  method.set_budget(300);
  method.retrieve.tokens = 300;  // whatever blocks there are, all are read
  both_caches<method_type> both(method, 9000);
  REQUIRE(both.host.open() == 0);
  REQUIRE(both.device.open() == 0);
  std::size_t most = 0;
  index_t taken = 0;
  const int turns = shrunk(55, 3);
  for (int turn = 0; turn < turns; ++turn) {
    CAPTURE(turn);
    // Positions decide what stays: as many rows leave in every turn when there are always a tenth more of them.
    const index_t tokens = turn == 0 ? 400 : taken / 10;
    both.prompt(tokens);
    taken += tokens;
    for (index_t layer = 0; layer < means_shape.layers; ++layer)
      REQUIRE(both.host.positions(layer, 0, 1) == both.device.positions(layer, 0, 1));
    REQUIRE(both.step() < 8e-3);
    if (turn == 30) REQUIRE(both.device.fork(0) == 1);
    if (turn == 50) both.device.close(1);
    if (turn % 5 != 4) continue;
    const auto kept = on_host(both.device, 0, method);
    for (index_t layer = 0; layer < means_shape.layers; ++layer) {
      most = std::max(most, std::size_t(kept->view(layer, 0).segments->size()));
      const std::vector<float> means = means_of(*kept, layer, 0), averages = averages_of(*kept, layer, 0);
      REQUIRE(means.size() == averages.size());
      double worst = 0;
      for (std::size_t i = 0; i < means.size(); ++i) worst = std::max(worst, double(std::abs(means[i] - averages[i])));
      CHECK(worst < 2e-2);
    }
  }
  CAPTURE(most);
  CHECK((turns < 55 || most == std::size_t(8 + cuda::segments_behind_choices)));  // eight for 9,000 tokens
}

TEST_CASE("random calls that read blocks behind a choice have the outputs of planes in pages, to the bit",
          "[gpu][calls][packed]") {
  if (gpu_missing()) return;
  call_both<means_behind<observation_window, adaptive, packed_in_pages<bf16, 16>>,
            means_behind<observation_window, adaptive, dense<bf16, means_dim>>>(50300);
}
TEST_CASE("random calls of blocks in small pages under a budget over two stages have the outputs of planes",
          "[gpu][calls][packed]") {
  if (gpu_missing()) return;
  call_both<means_behind<observation_window, two_stage<adaptive>, packed_in_pages<bf16, 4>>,
            means_behind<observation_window, two_stage<adaptive>, dense<bf16, means_dim>>>(50400);
}
