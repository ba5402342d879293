// CUDA caches whose first stage chooses again while an answer grows, by the newest queries: against the CPU's, recorded, and by
// turns and chunks of every length.
#include <deque>

#include "cases/steps_case.hpp"
#include "support/open_policies.hpp"
#include "tessera/budget/adaptive.hpp"
#include "tessera/methods/loopserve.hpp"
#include "tessera/methods/loopserve_decode.hpp"
#include "tessera/prefill/covering_lines.hpp"
#include "tessera/scorer/observation_window.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

using whole = tessera::loopserve<bf16, 64, 64>;
using decoding = tessera::loopserve_decode<bf16, 64, 64>;
using dropping = recipe<retain<newest_queries, uniform, top_tokens>, dense<bf16, 64>, retrieve_all, dense_decode,
                        every_outputs, covering_lines>;
using uneven =
    recipe<filter<newest_queries, adaptive, top_tokens>, dense<bf16, 64>, retrieve_all, dense_decode, every_outputs>;
using skipping = recipe<filter<observation_window, uniform, top_tokens>, dense<bf16, 64>, retrieve_all, dense_decode,
                        support::every_other_turn>;

/// Often and soon, so that short conversations choose in most of their steps, and begin with some that read everything.
struct often {
  template <class Method>
  void operator()(Method& method, const model_shape&) const {
    const index_t choices[] = {1, 3, 5}, first[] = {0, 1, 4, 16};
    method.schedule.every = choices[draw(0, 2)];
    method.schedule.first = first[draw(0, 3)];
    if constexpr (Method::retain_type::splits) {
      if (draw(0, 1)) method.retain.scope.per = reading_head::q_head;
    }
  }
};

/// A prompt in chunks of at most `chunk` tokens, and its attention, in every layer.
template <class Method>
void take_chunks(cuda::cache<Method>& cache, index_t id, const std::deque<step_rows<bf16>>& layers, index_t chunk) {
  constexpr int D = Method::layout_type::k_dim;
  const index_t total = layers[0].tokens;
  for (index_t done = 0; done < total; done += chunk) {
    for (index_t layer = 0; layer < index_t(layers.size()); ++layer) {
      const step_rows<bf16>& x = layers[std::size_t(layer)];
      const auto some = [&](const bf16* data, index_t heads) {
        auto rows = x.rows(data, heads, done);
        rows.tokens = std::min(chunk, rows.tokens);
        return rows;
      };
      const auto q = some(x.dq.data, x.q_heads);
      cache.prefill(layer, id, q, some(x.dk.data, x.kv_heads), some(x.dv.data, x.kv_heads), nullptr);
      buffer<float> out(std::size_t(q.tokens * x.q_heads * D));
      cache.prefill_attention(layer, id, q, nhd_rows(out.data, q.tokens, x.q_heads, D), {}, nullptr);
      cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
  }
}
/// The same, and the prompt ends.
template <class Method>
void take_prompt(cuda::cache<Method>& cache, index_t id, const std::deque<step_rows<bf16>>& layers, index_t chunk) {
  take_chunks(cache, id, layers, chunk);
  cache.end_prefill(id, nullptr);
}

/// Every layer of a step that has been prepared.
template <class Method>
void take_layers(cuda::cache<Method>& cache, const batch& step, const step_rows<bf16>& x, float* out,
                 cudaStream_t stream) {
  constexpr int D = Method::layout_type::k_dim;
  cache.begin_step(step, stream);
  for (index_t layer = 0; layer < cache.shape().layers; ++layer) {
    cache.decode(
        layer, step, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
        nhd_rows(out + offset_t(layer) * offset_t(x.q.size()), x.tokens, x.q_heads, D, x.sequences), {}, stream);
  }
}
template <class Method>
std::vector<float> take_step(cuda::cache<Method>& cache, const std::vector<index_t>& ids, const step_rows<bf16>& x) {
  buffer<float> out(x.q.size() * std::size_t(cache.shape().layers));
  take_layers(cache, cache.prepare_step(ids, x.tokens, nullptr), x, out.data, nullptr);
  return out.get();
}

cuda::cache_options options_of(index_t sequences) {
  cuda::cache_options options;
  options.sequences = sequences;
  options.tokens = 700;
  options.step_tokens = 8;
  return options;
}

}  // namespace

TEST_CASE("loopserve_decode chooses again as the CPU does, by kv_head and by query head", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  hold_conversations<decoding>(60, scales::any, often{});
}
TEST_CASE("loopserve_decode observes as many as 96 queries, as the CPU does", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  hold_conversations<decoding>(20, scales::any, [](auto& method, const model_shape& shape) {
    often{}(method, shape);
    const index_t windows[] = {1, 33, 48, 64, 95, 96};
    method.retain.scorer.window = windows[draw(0, 5)];
    method.set_budget(draw(96, 120));
  });
}
TEST_CASE("steps that read slash lines are the CPU's alone", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  whole method;
  method.prefill.lines = read_lines::both;
  CHECK_THROWS_WITH((cuda::cache<whole>({2, 4, 2}, method, options_of(1))),
                    contains("lines is both; expected off or vertical on a GPU"));
}
TEST_CASE("loopserve chooses again as the CPU does, behind prompts along lines", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  hold_conversations<whole>(40, scales::any, often{});
}
TEST_CASE("prompts along the lines of LoopServe's own greedy hold the CPU's conversations", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  hold_conversations<whole>(15, scales::any, [](auto& method, const model_shape& shape) {
    often{}(method, shape);
    method.prefill.algorithm = line_search::paper;
    const float alphas[] = {0.3f, 0.955f, 0.9999f};
    method.prefill.alpha = alphas[draw(0, 2)];
  });
}
TEST_CASE("a cache that drops by the newest queries in steps holds the CPU's conversations",
          "[gpu][cache][following]") {
  if (gpu_missing()) return;
  hold_conversations<dropping>(40, scales::any, often{});
}
TEST_CASE("lists of uneven heads are chosen again where they lie", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  hold_conversations<uneven>(40, scales::any, often{});
}

TEST_CASE("a filter that lets a prompt's end pass reads what the CPU's reads: everything", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  hold_conversations<skipping>(40);
}

TEST_CASE("a recorded step reads everything before a turn's first choice, and lists behind it",
          "[gpu][cache][following]") {
  if (gpu_missing()) return;
  const model_shape shape{2, 4, 2};
  cudaStream_t stream;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (const reading_head per : {reading_head::kv_head, reading_head::q_head}) {
    decoding method;
    method.set_budget(40);
    method.retain.scope.per = per;
    method.schedule.first = 5;
    method.schedule.every = 3;
    cuda::cache<decoding> recorded(shape, method, options_of(1));
    const index_t id = recorded.open();
    cuda::cache<decoding> launched(recorded);
    step_rows<bf16> x(1, 1, shape, 64);
    buffer<float> out(x.q.size() * 2), other(x.q.size() * 2);
    std::map<bool, std::unique_ptr<graph>> graphs;  // the same ones in every turn
    for (const index_t prompt : {index_t(120), index_t(1), index_t(60)}) {
      std::deque<step_rows<bf16>> rows;
      for (index_t layer = 0; layer < shape.layers; ++layer) rows.emplace_back(1, prompt, shape, 64);
      for (auto* cache : {&recorded, &launched}) {
        take_chunks(*cache, id, rows, 50);
        for (index_t h = 0; h < shape.kv_heads; ++h)  // an earlier turn's lists have ended
          REQUIRE(cache->readable(1, id, h) == cache->positions(1, id, h));
        cache->end_prefill(id, nullptr);
      }
      cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      for (index_t outputs = 1; outputs <= shrunk(12, 6); ++outputs) {
        x.dq.set(random_rows<bf16>(x.q.size(), 64, 1.5f));
        x.dk.set(random_rows<bf16>(x.k.size(), 64, 1.5f));
        const batch now = recorded.prepare_step({id}, 1, stream);
        REQUIRE(now.evicts_last == (outputs >= 5 && (outputs - 5) % 3 == 0));
        auto& step = graphs[now.evicts_last];
        if (!step) step = std::make_unique<graph>(stream, [&] { take_layers(recorded, now, x, out.data, stream); });
        step->launch();
        take_layers(launched, launched.prepare_step({id}, 1, stream), x, other.data, stream);
        cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        REQUIRE(same_bits(out.get(), other.get()));
        for (index_t h = 0; h < shape.kv_heads; ++h) {
          const auto read = recorded.readable(1, id, h);
          REQUIRE(read == launched.readable(1, id, h));
          if (outputs < 5) REQUIRE(read == recorded.positions(1, id, h));
          if (outputs >= 5 && per == reading_head::kv_head && recorded.next_position(id) > 60)
            REQUIRE(index_t(read.size()) == 40 + (outputs - 5) % 3);
        }
      }
    }
    REQUIRE(graphs.size() == 2);
  }
  cuda::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

TEST_CASE("steps that choose again are recorded apart, and replayed to the bit", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  const auto with = [](auto change) {
    return [=](auto& method) {
      method.schedule.first = 3;
      method.schedule.every = 4;
      change(method);
    };
  };
  REQUIRE(replay_steps_of<decoding>(with([](auto&) {})) == 2);
  REQUIRE(replay_steps_of<decoding>(with([](auto& m) { m.retain.scope.per = reading_head::q_head; })) == 2);
  REQUIRE(replay_steps_of<whole>(with([](auto& m) { m.prefill.lines = read_lines::vertical; })) == 2);
  REQUIRE(replay_steps_of<dropping>(with([](auto&) {})) == 2);
  REQUIRE(replay_steps_of<uneven>(with([](auto&) {})) == 2);
}

TEST_CASE("columns of all prompts join what loopserve's steps read", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  const model_shape shape{2, 8, 2};
  for (const reading_head per : {reading_head::kv_head, reading_head::q_head}) {
    whole method;
    method.set_budget(40);
    method.schedule.first = 2;
    method.schedule.every = 3;
    method.retain.scope.per = per;
    method.prefill.alpha = 0.6f;
    cuda::cache<whole> without(shape, method, options_of(2));
    method.prefill.lines = read_lines::vertical;
    cuda::cache<whole> with(shape, method, options_of(2));
    for (index_t round = 0; round < 2; ++round) {  // the second conversation knows nothing of the first one's columns
      const index_t id = with.open();
      REQUIRE(without.open() == id);
      const std::size_t lists = std::size_t(per == reading_head::kv_head ? shape.kv_heads : shape.q_heads);
      const std::size_t joining = std::size_t(shape.q_heads) / lists;
      std::vector<std::vector<index_t>> columns(lists);  // of the last layer
      for (const index_t prompt : {index_t(shrunk(150, 70)), index_t(1), index_t(shrunk(60, 20))}) {
        std::deque<step_rows<bf16>> rows;
        for (index_t layer = 0; layer < shape.layers; ++layer) rows.emplace_back(1, prompt, shape, 64);
        for (auto* cache : {&with, &without}) {
          cache->trace_lines(true);
          cache->trace_attended(true);
          take_prompt(*cache, id, rows, prompt);
        }
        const prompt_lines& lines = with.lines(shape.layers - 1, id);
        for (std::size_t h = 0; h < lines.heads.size(); ++h) {
          auto& to = columns[h / joining];
          to.insert(to.end(), lines.heads[h].vertical.begin(), lines.heads[h].vertical.end());
          std::sort(to.begin(), to.end());
          to.erase(std::unique(to.begin(), to.end()), to.end());
        }
        for (index_t i = 0; i < shrunk(8, 4); ++i) {
          const step_rows<bf16> x(1, 1, shape, 64);
          take_step(with, {id}, x);
          take_step(without, {id}, x);
          const auto &got = with.attended(shape.layers - 1, id), &chosen = without.attended(shape.layers - 1, id);
          REQUIRE((got.size() == lists && chosen.size() == lists));
          for (std::size_t list = 0; list < lists; ++list) {
            std::vector<index_t> expected;
            std::set_union(chosen[list].begin(), chosen[list].end(), columns[list].begin(), columns[list].end(),
                           std::back_inserter(expected));
            REQUIRE(got[list] == expected);
          }
        }
        REQUIRE(with.bytes_read(id) > without.bytes_read(id));
      }
      for (auto* cache : {&with, &without}) cache->close(id);
    }
  }
}

TEST_CASE("what steps choose does not depend on how a dense prompt was cut", "[gpu][cache][following]") {
  if (gpu_missing()) return;
  const model_shape shape{2, 4, 2};
  decoding method;
  method.set_budget(40);
  method.schedule.first = 1;
  method.schedule.every = 2;
  const std::vector<index_t> chunks{1, 2, 15, 17, 90};
  std::vector<cuda::cache<decoding>> caches;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    caches.emplace_back(shape, method, options_of(1));
    caches.back().open();
  }
  for (const index_t prompt : {index_t(90), index_t(1), index_t(1), index_t(33)}) {
    std::deque<step_rows<bf16>> rows;
    for (index_t layer = 0; layer < shape.layers; ++layer) rows.emplace_back(1, prompt, shape, 64);
    for (std::size_t i = 0; i < chunks.size(); ++i) take_prompt(caches[i], 0, rows, chunks[i]);
    for (index_t i = 0; i < 7; ++i) {
      const step_rows<bf16> x(1, i == 3 ? 8 : 1, shape, 64);
      const auto expected = take_step(caches[0], {0}, x);
      for (std::size_t other = 1; other < caches.size(); ++other) {
        REQUIRE(same_bits(take_step(caches[other], {0}, x), expected));
        for (index_t h = 0; h < shape.kv_heads; ++h)
          REQUIRE(caches[other].readable(1, 0, h) == caches[0].readable(1, 0, h));
      }
    }
  }
}

TEST_CASE("a larger budget is read from the next choice on, in lists that have room for it",
          "[gpu][cache][following]") {
  if (gpu_missing()) return;
  const model_shape shape{1, 4, 2};
  decoding method;
  method.set_budget(20);
  method.schedule.first = 0;
  method.schedule.every = 4;
  cuda::cache<decoding> cache(shape, method, options_of(1));
  cache.open();
  std::deque<step_rows<bf16>> rows;
  rows.emplace_back(1, 300, shape, 64);
  take_prompt(cache, 0, rows, 300);
  cache.set_budget(200);
  for (index_t i = 1; i <= 8; ++i) {
    take_step(cache, {0}, step_rows<bf16>(1, 1, shape, 64));
    REQUIRE(index_t(cache.readable(0, 0, 1).size()) == (i < 4 ? 20 + i : 200 + i % 4));
  }
  cache.set_budget(30);
  for (index_t i = 1; i <= 4; ++i) take_step(cache, {0}, step_rows<bf16>(1, 1, shape, 64));
  REQUIRE(cache.readable(0, 0, 1).size() == 30);
}
