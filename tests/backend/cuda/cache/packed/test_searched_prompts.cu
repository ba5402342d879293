// Segments of a prompt on the device, each by a strategy that is searched for it: those that the CPU finds, and steps over them.
#include <map>

#include "searched_conversation.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace gpu_test::searched;

namespace {

/// The CPU's cache after the same prompt.
std::unique_ptr<cache<mosaic>> on_host(const mosaic& recipe, index_t prompt) {
  auto held = std::make_unique<cache<mosaic>>(model_shape{layers, q_heads, kv_heads}, recipe,
                                              std::make_shared<cpu::executor>(2));
  held->open();
  for (index_t layer = 0; layer < layers; ++layer) {
    std::vector<bf16> all[3];
    for (index_t t = 0; t < prompt; ++t) {
      for (const index_t side : {0, 1, 2}) {
        const auto rows = rows_of(t, layer, side, side == 2 ? q_heads : kv_heads);
        all[side].insert(all[side].end(), rows.begin(), rows.end());
      }
    }
    held->prefill(layer, 0, nhd_rows<const bf16>(all[2].data(), prompt, q_heads, dim),
                  nhd_rows<const bf16>(all[0].data(), prompt, kv_heads, dim),
                  nhd_rows<const bf16>(all[1].data(), prompt, kv_heads, dim));
  }
  held->end_prefill(0);
  return held;
}

}  // namespace

TEST_CASE("segments of a prompt are packed by the strategies that the CPU finds, and steps read what is stored",
          "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  std::map<index_t, int> formats;
  index_t segments = 0, unlike = 0;
  for (const float loss : {0.0005f, 0.01f, 0.1f}) {
    mosaic recipe = searching(4096);
    recipe.layout.rows.segment = 320;  // `drift` lies in the first one: others are of other rows
    recipe.layout.rows.strategy.channel_loss = loss;
    const index_t prompt = shrunk(1664, 700) / 32 * 32;
    searched_conversation now(recipe, 100, prompt);
    const auto host = on_host(recipe, prompt);
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto own = now.segments(layer);
      const auto view = host->view(layer, 0);
      REQUIRE(own.size() == view.segments->size());
      for (std::size_t i = 0; i < own.size(); ++i) {
        const auto& other = *(*view.segments)[i];
        CHECK(now.rows(layer)[i] == other.lengths[0]);
        CHECK(own[i].k.format.stored_channels == own[i].v.format.stored_channels);
        ++segments;
        unlike += own[i].k.format.stored_channels != other.format.k.stored_channels ||
                  own[i].k.format.group != other.format.k.group || own[i].block != other.format.block;
        ++formats[own[i].k.format.stored_channels * 8 + own[i].k.format.group];
      }
    }
    double worst = 0;
    for (int i = 0; i < 6; ++i) worst = std::max(worst, error_of_step(now));
    for (int i = 0; i < 60; ++i) now.step();
    for (int i = 0; i < 3; ++i) worst = std::max(worst, error_of_step(now));
    CHECK(worst < 1.6e-2);
  }
  CHECK(formats.size() >= 3);
  CHECK(unlike <= segments / 20);  // losses next to the limit
}
