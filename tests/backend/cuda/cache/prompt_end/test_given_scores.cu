// Scores that an engine gives, on the device: what stays is what stays on the CPU.
#include "backend/cuda/cache/cases/cache_case.hpp"
#include "cache/callers/gated_method.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

namespace given_case {

using gated::dim, gated::kv_heads, gated::layers, gated::q_heads;

/// Turns in random chunks, with scores in other pieces; both caches keep the same.
template <class Method>
void hold_both(const Method& method, index_t conversations) {
  const model_shape shape{layers, q_heads, kv_heads};
  for (index_t round = 0; round < conversations; ++round) {
    cuda::cache<Method> device(shape, method, {.sequences = 2, .tokens = 400, .step_tokens = 2});
    cache<Method> host(shape, method, std::make_shared<cpu::executor>(1));
    const index_t id = device.open();
    REQUIRE(host.open() == id);
    index_t next = 0;
    for (index_t turn = 0; turn < 3; ++turn) {
      const index_t prompt = draw(1, 100);
      device.announce(id, prompt), host.announce(id, prompt);
      index_t scored = next;
      for (index_t done = 0, more = 0; done < prompt; done += more) {
        more = draw(1, prompt - done);
        const index_t end = next + done + more;
        const step_rows<bf16> x(1, more, shape, dim);
        for (index_t layer = 0; layer < layers; ++layer) {
          device.prefill(layer, id, x.rows(x.dq.data, q_heads), x.rows(x.dk.data, kv_heads),
                         x.rows(x.dv.data, kv_heads), nullptr);
          host.prefill(layer, id, x.rows(x.q.data(), q_heads), x.rows(x.k.data(), kv_heads),
                       x.rows(x.v.data(), kv_heads));
          for (index_t first = scored, count = 0; first < end; first += count) {
            count = draw(1, end - first);
            const auto scores = gated::scores_of(layer, first, count);
            buffer<float> on_device(scores.size());
            on_device.set(scores);
            device.set_scores(layer, id, first, count, on_device.data, nullptr);
            host.set_scores(layer, id, first, count, scores.data());
            cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
          }
        }
        scored = end;
      }
      device.end_prefill(id, nullptr), host.end_prefill(id);
      for (index_t layer = 0; layer < layers; ++layer) {
        for (index_t h = 0; h < kv_heads; ++h) REQUIRE(device.positions(layer, id, h) == host.positions(layer, id, h));
      }
      next += prompt;
    }
  }
}

}  // namespace given_case
}  // namespace

TEST_CASE("scores that an engine gives keep on the device what they keep on the CPU", "[gpu][cache]") {
  if (gpu_missing()) return;
  gated::at_the_end<bf16> whole;
  whole.set_budget(30);
  whole.retain.scorer.recent = 3;
  given_case::hold_both(whole, index_t(shrunk(30, 4)));
  gated::by_chunks<bf16> chunks;
  chunks.retain.budget.tokens = 40;
  chunks.schedule.chunk = 24;
  given_case::hold_both(chunks, index_t(shrunk(30, 4)));
}

TEST_CASE("a prompt without an engine's scores is refused on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  const model_shape shape{gated::layers, gated::q_heads, gated::kv_heads};
  gated::at_the_end<bf16> method;
  method.set_budget(4);
  cuda::cache<gated::at_the_end<bf16>> kv(shape, method, {.tokens = 64});
  const index_t id = kv.open();
  const step_rows<bf16> x(1, 20, shape, gated::dim);
  for (index_t layer = 0; layer < gated::layers; ++layer)
    kv.prefill(layer, id, x.rows(x.dq.data, gated::q_heads), x.rows(x.dk.data, gated::kv_heads),
               x.rows(x.dv.data, gated::kv_heads), nullptr);
  CHECK_THROWS_WITH(kv.end_prefill(id, nullptr), contains("tokens with scores in layer 0 is 0; expected all"));
  CHECK(kv.positions(0, id, 0).size() == 20);
}
