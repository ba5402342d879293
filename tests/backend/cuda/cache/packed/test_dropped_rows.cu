// First stages that drop packed rows on the device, against the CPU's caches.
#include "backend/cuda/cache/cases/cache_case.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/methods/ada_snapkv.hpp"
#include "tessera/methods/mosaickv.hpp"
#include "tessera/methods/snapkv.hpp"
#include "tessera/methods/think.hpp"
#include "tessera/scorer/position.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

template <class Layout>
using newest_rows_kept = recipe<retain<position, uniform, top_tokens>, Layout, retrieve_all, dense_decode, once>;

/// Keys lose channels of their own: those that are stored are what the engine gave, so both caches score the same rows.
struct thin_keys {
  template <class Method>
  void operator()(Method& method, const model_shape&) const {
    method.layout.rows.key.channels = draw(0, 1) ? 0.5f : 1.0f;
  }
};

/// A choice that does not hang on rounding, and chunks that are packed before it.
struct packed_chunks {
  template <class Method>
  void operator()(Method& method, const model_shape&) const {
    method.layout.rows.prefill = draw(0, 1) ? prefill_rows::packed : prefill_rows::whole;
  }
};

}  // namespace

TEST_CASE("SnapKV over thinned keys holds the CPU's conversations on the device", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<snapkv<bf16, 64, 64, tessera::think_rows<dense<bf16, 64>>>>(40, scales::any, thin_keys{});
}
TEST_CASE("heads that compete keep as many packed rows as on the CPU", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<ada_snapkv<fp16, 128, 128, tessera::think_rows<dense<fp16, 128>>>>(40, scales::any, thin_keys{});
}
TEST_CASE("heads that compete over rotated rows hold the CPU's conversations on the device", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<ada_snapkv<fp16, 64, 64, mosaic_rows<dense<fp16, 64>>>>(40);  // bf16 would swap more tokens
}
TEST_CASE("the newest of rotated rows stay on both backends", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<newest_rows_kept<mosaic_rows<dense<bf16, 64>>>>(40, scales::any, packed_chunks{});
}
TEST_CASE("heads that compete over thinned keys in pages hold the CPU's conversations on the device",
          "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  using in_pages = stored<dense_rows<bf16, 64>, fixed_pages<4>>;  // heads end pages apart, and forks share those
  hold_conversations<ada_snapkv<bf16, 64, 64, tessera::think_rows<in_pages>>>(40, scales::any, thin_keys{});
}
