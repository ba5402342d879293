// Strategies that are searched beside a cache on the device: answers are those of the rows that it stores, of the CPU's cache, and of a search
// that is done at once; a stopped thread.
#include <chrono>
#include <map>
#include <thread>

#include "searched_conversation.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace gpu_test::searched;

TEST_CASE(
    "a searching cache on the device answers as with strategies computed at once, put in place before the same steps",
    "[gpu][cache][packed][long]") {
  if (gpu_missing()) return;
  const index_t steps = shrunk(1500, 300);
  searched_conversation threaded(searching(), steps);
  std::vector<index_t> swaps;
  std::vector<std::vector<float>> answers;
  for (index_t i = 0; i < steps; ++i) {
    const index_t before = threaded.report().searched;
    for (int wait = 0; i % 97 == 96 && wait < 2000 && threaded.report().searching; ++wait)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    threaded.step();
    if (threaded.report().searched > before) swaps.push_back(i);
    answers.push_back(threaded.out.get());
  }
  CHECK(swaps.size() >= std::size_t(steps / 300));
  CHECK(threaded.report().problem.empty());

  searched_conversation again(searching(), steps);
  const auto worker = std::make_shared<at_once>();
  again.held.search_on(worker);
  int wrong = 0;
  for (index_t i = 0; i < steps; ++i) {
    if (std::binary_search(swaps.begin(), swaps.end(), i)) worker->publish();
    again.step(i % 3 > 0);
    wrong += !same_bits(again.out.get(), answers[std::size_t(i)]);
  }
  CHECK(wrong == 0);
  CHECK(again.report().searched == threaded.report().searched);
  for (index_t layer = 0; layer < layers; ++layer) CHECK(again.rows(layer) == threaded.rows(layer));
}

TEST_CASE("a step over segments that were searched is attention over what the device stores",
          "[gpu][cache][packed][long]") {
  if (gpu_missing()) return;
  searched_conversation now(searching(), 1400);
  const auto worker = std::make_shared<at_once>();
  now.held.search_on(worker);
  double worst = 0;
  const index_t steps = shrunk(1300, 400);
  for (index_t i = 0; i < steps; ++i) {
    if (i % 50 == 49) worker->publish();
    if (i % 37 == 0)
      worst = std::max(worst, error_of_step(now));
    else
      now.step();
  }
  CHECK(worst < 1.6e-2);
  CHECK(now.report().searched >= 2);
  // What is stored of a searched segment is near what was given; and segments differ.
  std::map<index_t, int> kept, blocks;
  for (const auto& one : now.segments(0))
    ++kept[one.k.format.stored_channels * 8 + one.k.format.group], ++blocks[one.block];
  CHECK(kept.size() >= 2);
  std::printf("searched cache: worst %.2e, %d segments, %d formats, %d blocks\n", worst, int(now.segments(0).size()),
              int(kept.size()), int(blocks.size()));
  buffer<float> k(std::size_t(kv_heads * now.tokens) * dim), v(k.count);
  cuda::unpack_rows(now.held.view(0, 0), now.tokens, k.data, v.data, now.stream);
  now.finish();
  const auto keys = k.get();
  const auto rows = now.rows(0);
  double error = 0, energy = 0;
  for (index_t t = rows[0]; t < rows[0] + rows[1]; ++t) {
    const auto given = rows_of(t, 0, 0, kv_heads);
    for (index_t h = 0; h < kv_heads; ++h) {
      for (index_t d = 0; d < dim; ++d) {
        const double x = double(float(given[std::size_t(h * dim + d)]));
        error += std::pow(double(keys[std::size_t((h * now.tokens + t) * dim + d)]) - x, 2), energy += x * x;
      }
    }
  }
  CHECK(error / energy < 0.15);
}

TEST_CASE("a searching cache on the device holds the CPU's conversation", "[gpu][cache][packed][long]") {
  if (gpu_missing()) return;
  // Prompts keep every element, whose losses would be noise: segments end where they are full.
  mosaic recipe = searching();
  support::keep_all_elements(recipe);
  recipe.layout.rows.strategy.segment_loss = 1e7f;
  const index_t steps = shrunk(700, 200);
  searched_conversation device(recipe, steps);
  cache<mosaic> host({layers, q_heads, kv_heads}, recipe, std::make_shared<cpu::executor>(1));
  host.open();
  const auto given = [](const std::vector<bf16>& rows, index_t heads) {
    return nhd_rows<const bf16>(rows.data(), 1, heads, dim);
  };
  for (index_t t = 0; t < 128; ++t) {
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto k = rows_of(t, layer, 0, kv_heads), v = rows_of(t, layer, 1, kv_heads),
                 q = rows_of(t, layer, 2, q_heads);
      host.prefill(layer, 0, given(q, q_heads), given(k, kv_heads), given(v, kv_heads));
    }
  }
  host.end_prefill(0);
  const auto beside_host = std::make_shared<at_once>(), beside_device = std::make_shared<at_once>();
  host.search_on(beside_host), device.held.search_on(beside_device);
  host.trace_attended(true), device.held.trace_attended(true);
  index_t choices = 0, swapped = 0;
  double worst = 0;
  for (index_t i = 0; i < steps; ++i) {
    if (!beside_host->held.empty() && !beside_device->held.empty()) beside_host->publish(), beside_device->publish();
    const index_t token = device.tokens;
    device.step(false);
    const auto got = device.out.get();
    const batch now = host.prepare_step({0}, 1);
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto k = rows_of(token, layer, 0, kv_heads), v = rows_of(token, layer, 1, kv_heads),
                 q = rows_of(token, layer, 2, q_heads);
      std::vector<float> out(q_heads * dim);
      host.decode(layer, now, given(q, q_heads), given(k, kv_heads), given(v, kv_heads),
                  nhd_rows(out.data(), 1, q_heads, dim));
      bool alike = true;
      for (index_t h = 0; h < kv_heads; ++h) {
        const bool same = host.attended(layer, 0)[std::size_t(h)] == device.held.attended(layer, 0)[std::size_t(h)];
        ++choices, swapped += !same, alike = alike && same;
      }
      double difference = 0, size = 1e-12;
      for (std::size_t d = 0; alike && d < out.size(); ++d) {
        const double x = double(out[d]), y = double(got[std::size_t(layer) * out.size() + d]);
        difference += (x - y) * (x - y), size += x * x;
      }
      worst = std::max(worst, std::sqrt(difference / size));
    }
  }
  std::printf("searched cache beside the CPU's: worst %.2e, swapped %d of %d, searched %d\n", worst, int(swapped),
              int(choices), int(device.report().searched));
  CHECK(device.report().searched == host.strategies(0).searched);
  CHECK(device.report().searched >= 1);
  CHECK(swapped <= 2 + choices / 10);
  CHECK(worst < 3e-2);
  for (index_t layer = 0; layer < layers; ++layer) {
    const auto own = device.segments(layer);
    const auto view = host.view(layer, 0);
    REQUIRE(view.segments->size() >= own.size() - 1);
    for (std::size_t i = 0; i + 1 < own.size(); ++i) {
      const auto& other = *(*view.segments)[i];
      CHECK(own[i].k.format.stored_channels == other.format.k.stored_channels);
      CHECK(own[i].k.format.group == other.format.k.group);
      CHECK(own[i].block == other.format.block);
      CHECK(device.rows(layer)[i] == other.lengths[0]);
    }
  }
}

TEST_CASE("where the thread is stopped, a cache on the device goes on with the old strategy and says so",
          "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  searched_conversation now(searching(), 1000);
  const auto worker = std::make_shared<at_once>();
  worker->stopping = true;
  now.held.search_on(worker);
  while (worker->held.empty()) {
    now.step();
    REQUIRE(now.tokens < 1100);
  }
  CHECK(now.report().searching);
  auto copy = std::make_unique<cuda::cache<mosaic>>(now.held);
  worker->publish();
  now.step();
  CHECK(now.report().unchanged == 1);
  CHECK(now.report().searched == 0);
  CHECK_THAT(now.report().problem, contains("stopped"));
  CHECK(copy->strategies(0).unchanged == 0);
}

TEST_CASE("a cache on the device whose thread was stopped before goes on, and opens again",
          "[gpu][cache][packed][long]") {
  if (gpu_missing()) return;
  searched_conversation other(searching(), shrunk(900, 400));
  other.held.searcher()->stop();
  for (index_t i = 0; i < shrunk(900, 400); ++i) other.step();
  CHECK(other.report().unchanged >= 1);
  for (const auto& one : other.segments(1)) {
    CHECK(one.k.format == other.segments(1).front().k.format);
    CHECK(one.k.basis == other.segments(1).front().k.basis);
  }
  other.held.close(0);
  REQUIRE(other.held.open() == 0);
  CHECK(other.report().unchanged == 0);
}

TEST_CASE("a fork of a searching cache on the device goes on as a copy of the cache, whoever is closed",
          "[gpu][cache][packed][long]") {
  if (gpu_missing()) return;
  searched_conversation now(searching(), 1000);
  const auto worker = std::make_shared<at_once>();
  now.held.search_on(worker);
  while (worker->held.empty()) {
    now.step(false);
    REQUIRE(now.tokens < 1000);
  }
  cuda::cache<mosaic> copy(now.held);
  const index_t fork = now.held.fork(0, now.stream);
  REQUIRE(fork == 1);
  CHECK(now.held.strategies(fork).searching);
  const auto step_of = [&](cuda::cache<mosaic>& held, index_t id) {
    const batch step = held.prepare_step({id}, 1, now.stream);
    held.begin_step(step, now.stream);
    for (index_t layer = 0; layer < layers; ++layer) {
      held.decode(layer, step, now.given(now.q, layer, q_heads), now.given(now.k, layer, kv_heads),
                  now.given(now.v, layer, kv_heads), nhd_rows(now.out.data + layer * q_heads * dim, 1, q_heads, dim),
                  {}, now.stream);
    }
    now.finish();
    return now.out.get();
  };
  const index_t steps = shrunk(400, 60);
  int wrong = 0;
  for (index_t i = 0; i < steps; ++i, ++now.tokens) {
    if (i == steps / 4) worker->publish();                // what it made takes its place in both
    if (i < steps / 2) now.give(), step_of(now.held, 0);  // what the other one goes on with changes nothing here
    if (i == steps / 2) {
      now.held.close(0, now.stream);
      REQUIRE(now.held.open(now.stream) == 0);
      for (index_t t = 0; t < 128; ++t) {  // over the rows that were shared
        for (index_t layer = 0; layer < layers; ++layer)
          now.held.prefill(layer, 0, now.given(now.q, layer, q_heads), now.given(now.k, layer, kv_heads),
                           now.given(now.v, layer, kv_heads), now.stream);
      }
      now.held.end_prefill(0, now.stream);
    }
    now.give();
    const auto expected = step_of(copy, 0);
    wrong += !same_bits(step_of(now.held, fork), expected);
  }
  CHECK(wrong == 0);
  CHECK(now.held.strategies(fork).searched == copy.strategies(0).searched);
  CHECK(now.held.strategies(fork).searched >= 1);
}
