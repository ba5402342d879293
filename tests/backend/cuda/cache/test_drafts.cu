// Drafts on the device: recorded ones are replayed behind every verb, launches are counted, and a window and a sink enter
// once.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cases/step_rows.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/h2o.hpp"
#include "tessera/methods/quest.hpp"
#include "tessera/methods/rocketkv.hpp"
#include "tessera/methods/snapkv.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

constexpr index_t D = 64;

template <class Method>
cuda::cache<Method> made_cache(const model_shape& shape, index_t draft_tokens) {
  Method method;
  method.set_budget(64);
  cuda::cache_options options;
  options.sequences = 6;
  options.tokens = 1024;
  options.step_tokens = 8;
  options.draft_tokens = draft_tokens;
  options.smallest_budget = 48;
  return {shape, method, options};
}

template <class Method, class T>
void write_prompt(cuda::cache<Method>& kv, index_t id, const step_rows<T>& x, cudaStream_t stream) {
  buffer<float> unread(x.q.size());
  for (index_t layer = 0; layer < kv.shape().layers; ++layer) {
    kv.prefill(layer, id, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
               stream);
    kv.prefill_attention(layer, id, x.rows(x.dq.data, x.q_heads), nhd_rows(unread.data, x.tokens, x.q_heads, D), {},
                         stream);
  }
  kv.end_prefill(id, stream);
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

/// A step, or a draft, in every layer; layer after layer of outputs.
template <class Method, class Step, class T>
void all_layers(cuda::cache<Method>& kv, const Step& step, const step_rows<T>& x, float* out, cudaStream_t stream) {
  kv.begin_step(step, stream);
  for (index_t layer = 0; layer < kv.shape().layers; ++layer) {
    kv.decode(
        layer, step, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
        nhd_rows(out + offset_t(layer) * x.sequences * x.tokens * x.q_heads * D, x.tokens, x.q_heads, D, x.sequences),
        {}, stream);
  }
}

/// One draft and, for each set of actions, one step are recorded when they first come. From then on they are replayed
/// while sequences are opened, closed, forked, truncated, given budgets and accept what they like. Another cache makes the
/// same calls without graphs.
template <class Method>
void replay_behind_verbs() {
  using T = typename Method::layout_type::element_type;
  CAPTURE(std::string(Method::name));
  const model_shape shape{2, 8, 2};
  auto recorded = made_cache<Method>(shape, 8), launched = made_cache<Method>(shape, 8);
  cudaStream_t stream;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const auto both = [&](const auto& call) {
    const index_t id = call(recorded);
    REQUIRE(call(launched) == id);
    return id;
  };
  const auto new_sequence = [&] {
    const step_rows<T> x(1, draw(70, 200), shape, D);
    const bool own = Method::budgets.largest > 0 && draw(0, 1) == 0;
    return both([&](auto& kv) {
      const index_t id = kv.open(own ? sequence_options{{48, 0}, {}} : sequence_options{}, stream);
      write_prompt(kv, id, x, stream);
      return id;
    });
  };
  std::vector<index_t> open{new_sequence(), new_sequence(), new_sequence()};
  step_rows<T> drafted(2, 4, shape, D), stepped(2, 1, shape, D);
  buffer<float> out(std::size_t(2 * 2 * 4 * 8 * D)), other(out.count);
  std::unique_ptr<graph> draft_graph;
  std::map<std::pair<bool, bool>, std::unique_ptr<graph>> step_graphs;
  const auto compare = [&] {
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    REQUIRE(same_bits(out.get(), other.get()));
  };
  for (index_t round = 0; round < shrunk(40, 10); ++round) {
    CAPTURE(round);
    std::swap(open[std::size_t(draw(0, 2))], open[std::size_t(draw(0, 2))]);
    const host_vector<index_t> ids{open[0], open[1]};
    drafted.dq.set(normal<T>(drafted.q.size(), 1.5f)), drafted.dk.set(normal<T>(drafted.k.size(), 1.5f));
    host_vector<index_t> parents{-1};
    for (index_t t = 1; t < 4; ++t) parents.push_back(draw(-1, t - 1));
    const host_vector<draft_tree> trees{draft_tree(parents)};
    const draft_step now = recorded.prepare_draft(ids, trees, stream);
    if (!draft_graph)
      draft_graph = std::make_unique<graph>(stream, [&] { all_layers(recorded, now, drafted, out.data, stream); });
    draft_graph->launch();
    all_layers(launched, launched.prepare_draft(ids, trees, stream), drafted, other.data, stream);
    compare();
    host_vector<index_t> path;
    for (index_t node = draw(-1, 3); node >= 0; node = parents[std::size_t(node)]) path.insert(path.begin(), node);
    for (auto* kv : {&recorded, &launched}) {
      kv->accept(ids[0], path, stream);
      round % 3 == 0 ? kv->cancel(ids[1], stream) : kv->accept(ids[1], host_vector<index_t>{0}, stream);
    }

    stepped.dq.set(normal<T>(stepped.q.size(), 1.5f)), stepped.dk.set(normal<T>(stepped.k.size(), 1.5f));
    const batch step = recorded.prepare_step(ids, 1, stream);
    auto& step_graph = step_graphs[{step.evicts_first, step.evicts_last}];
    if (!step_graph)
      step_graph = std::make_unique<graph>(stream, [&] { all_layers(recorded, step, stepped, out.data, stream); });
    step_graph->launch();
    all_layers(launched, launched.prepare_step(ids, 1, stream), stepped, other.data, stream);
    compare();

    switch (round % 4) {
      case 0:
        both([&](auto& kv) { return kv.close(open[2], stream), 0; });
        open[2] = new_sequence();
        break;
      case 1: {
        const index_t copy = both([&](auto& kv) { return kv.fork(open[1], stream); });
        both([&](auto& kv) { return kv.close(open[0], stream), 0; });
        open[0] = copy;
        break;
      }
      case 2:
        both([&](auto& kv) {
          const index_t next = kv.next_position(open[0]);
          kv.truncate(open[0], std::max(kv.settled(open[0]), next - 1), stream);  // behind the prompt
          return kv.next_position(open[0]);
        });
        break;
      default:
        break;
    }
    for (const index_t id : open)
      REQUIRE(recorded.positions(shape.layers - 1, id, 1) == launched.positions(shape.layers - 1, id, 1));
  }
  draft_graph.reset(), step_graphs.clear();
  cuda::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

/// Launches of a draft do not grow with its sequences, and a layer has one more than a step's.
template <class Method>
void count_launches() {
  using T = typename Method::layout_type::element_type;
  CAPTURE(std::string(Method::name));
  const model_shape shape{2, 8, 2};
  auto kv = made_cache<Method>(shape, 4);
  host_vector<index_t> ids;
  cudaStream_t stream;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (index_t id = 0; id < 6; ++id) {
    ids.push_back(kv.open());
    write_prompt(kv, id, step_rows<T>(1, 90, shape, D), stream);
  }
  std::size_t counted[2];
  for (const index_t batch : {1, 6}) {
    const host_vector<index_t> some(ids.begin(), ids.begin() + batch);
    const step_rows<T> x(batch, 4, shape, D);
    buffer<float> out(x.q.size() * 2);
    const draft_step now = kv.prepare_draft(some, 4, stream);
    const graph recorded(stream, [&] { all_layers(kv, now, x, out.data, stream); });
    counted[batch > 1] = recorded.nodes();
    for (const index_t id : some) kv.cancel(id, stream);
  }
  REQUIRE(counted[0] == counted[1]);
  cuda::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

/// A window, a sink and a soft cap, against the same tokens taken one by one.
void attend_with_rules() {
  using method = full<bf16, D>;
  const buffer<float> sinks(std::vector<float>{1, -1, 0.5f, 2, 0, 0.25f, -2, 1.5f});
  model_shape shape{2, 8, 2};
  shape.sliding = {false, true};
  shape.window = 24;
  method recipe;
  recipe.attention.rule.soft_cap = 20;
  recipe.attention.rule.sink_logits = sinks.data;
  cuda::cache_options options;
  options.sequences = 2, options.tokens = 512, options.step_tokens = 8, options.draft_tokens = 8;
  cuda::cache<method> kv(shape, recipe, options);
  const index_t id = kv.open();
  write_prompt(kv, id, step_rows<bf16>(1, 100, shape, D), nullptr);
  const step_rows<bf16> x(1, 8, shape, D);
  buffer<float> out(x.q.size() * 2), one(std::size_t(2 * 8 * D));
  all_layers(kv, kv.prepare_draft({id}, 8, nullptr), x, out.data, nullptr);
  const std::vector<float> got = out.get();
  kv.cancel(id);
  for (index_t t = 0; t < 8; ++t) {
    const batch step = kv.prepare_step({id}, 1, nullptr);
    kv.begin_step(step, nullptr);
    for (index_t layer = 0; layer < 2; ++layer) {
      const auto token = [&](auto rows) {
        rows.data += offset_t(t) * rows.token_stride;
        rows.tokens = 1;
        return rows;
      };
      kv.decode(layer, step, token(x.rows(x.dq.data, 8)), token(x.rows(x.dk.data, 2)), token(x.rows(x.dv.data, 2)),
                nhd_rows(one.data + layer * 8 * D, 1, 8, D), {}, nullptr);
    }
    const std::vector<float> all = one.get();
    for (index_t layer = 0; layer < 2; ++layer) {
      const std::vector<float> expected(all.begin() + layer * 8 * D, all.begin() + (layer + 1) * 8 * D);
      const auto first = got.begin() + offset_t(layer * 8 + t) * 8 * D;
      CHECK(relative_error({first, first + 8 * D}, expected) < 5e-3);
    }
  }
}

}  // namespace

TEST_CASE("recorded drafts and steps are valid behind every verb", "[gpu][cache][drafts]") {
  if (gpu_missing()) return;
  replay_behind_verbs<full<bf16, D>>();
  replay_behind_verbs<snapkv<bf16, D>>();
  replay_behind_verbs<h2o<bf16, D>>();
  replay_behind_verbs<quest<bf16, D>>();
  replay_behind_verbs<rocketkv<bf16, D>>();
}
TEST_CASE("launches of a draft do not grow with its sequences", "[gpu][cache][drafts]") {
  if (gpu_missing()) return;
  count_launches<full<bf16, D>>();
  count_launches<quest<bf16, D>>();
}
TEST_CASE("windows, sinks and soft caps hold for drafts", "[gpu][cache][drafts]") {
  if (gpu_missing()) return;
  attend_with_rules();
}
