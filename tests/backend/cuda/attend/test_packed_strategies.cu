// Segments of one sequence that are packed by other strategies, on the GPU: scores, choice, attention and unpacking.
#include "backend/cuda/attend/packed_step.hpp"
#include "tessera/backend/cuda/store/packed/unpack_rows.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

/// A segment as a search may make it of a head dim of D: a share of 2, 4 or 6 sixteenths stays.
template <int D>
segment_plan plan_of(packed_element element, index_t sixteenths, index_t group, index_t block, index_t rows) {
  const packed_format format = format_of(element, D * 3 / 4, group, D * sixteenths / 16);
  return {format, format, block, rows};
}

/// A prompt and four segments of an answer. The last ones end with blocks that are not whole.
template <int D>
std::vector<segment_plan> all_strategies(packed_element element, index_t long_rows) {
  return {plan_of<D>(element, 4, 1, 8, long_rows), plan_of<D>(element, 2, 4, 16, 96), plan_of<D>(element, 6, 2, 4, 64),
          plan_of<D>(element, 4, 2, 16, 70), plan_of<D>(element, 6, 1, 4, 33)};
}

}  // namespace

TEST_CASE("blocks of segments of other strategies score what their packed means and the queries give") {
  if (gpu_missing()) return;
  for (const auto element : {as_bf16, as_fp8, as_int4}) {
    packed_step<bf16, 128> step(2, all_strategies<128>(element, shrunk(400, 88)), {5, 2, 0}, {8, 8, 8}, 2, 4);
    step.check_scores(row_reduction::sum);
    step.check_scores(row_reduction::max);
  }
}

TEST_CASE("attention over segments of other strategies is attention over what is stored") {
  if (gpu_missing()) return;
  for (const auto element : {as_bf16, as_fp8, as_int4}) {
    packed_step<bf16, 128> step(2, all_strategies<128>(element, shrunk(400, 88)), {5, 3, 1, 0}, {8, 33, 1, 5}, 1, 4);
    step.template check_attention<float>({}, 1, 1.2e-2);
    step.template check_attention<float>(step.random_units(0, 30), 0, 1.2e-2);
    step.template check_attention<float>(step.random_units(4, 30), 4, 1.2e-2);
  }
  packed_step<fp16, 64> small(1, all_strategies<64>(as_fp16, 72), {5, 4}, {7, 1}, 3, 8);
  small.template check_attention<float>(small.random_units(0, 60), 0, 2e-3);
}

TEST_CASE("a decode step over segments of other strategies reads the best blocks until they hold its tokens") {
  if (gpu_missing()) return;
  for (const index_t group : scaled<index_t>({1, 3, 8}, 2)) {
    packed_step<bf16, 128> step(2, all_strategies<128>(as_bf16, shrunk(2048, 128)), {5, 2, 1, 0}, {8, 33, 5, 2}, 1,
                                group);
    for (const index_t budget : scaled<index_t>({16, 17, 61, 62, 63, 64, shrunk(512, 96), 100000}, 3))
      step.check_decoding(0, budget);
  }
  packed_step<fp16, 64> small(3, all_strategies<64>(as_fp16, shrunk(30000, 128)), {5, 3}, {8, 3}, 4, 2);
  for (const index_t budget : {16, shrunk(2000, 90), shrunk(20000, 200)}) small.check_decoding(0, budget);
  // Blocks that are alike may be trimmed too: the same ones stay.
  packed_step<bf16, 64> alike(2, {plan_of<64>(as_bf16, 4, 1, 8, 640), plan_of<64>(as_bf16, 4, 1, 8, 64)}, {2, 1},
                              {8, 3}, 1, 4);
  alike.check_decoding(8, 128);
  alike.check_decoding(0, 128);
}

TEST_CASE("rows of segments of other strategies come back in the engine's basis") {
  if (gpu_missing()) return;
  packed_batch<bf16, 128> batch(1, 2, all_strategies<128>(as_bf16, 72), {5}, {9});
  const index_t slots = batch.packed(0) + 9;
  buffer<float> k(std::size_t(2 * slots) * 128), v(std::size_t(2 * slots) * 128);
  cuda::unpack_rows(batch.view(), slots, k.data, v.data, nullptr);
  const auto keys = k.get(), values = v.get();
  double worst = 0;
  for (index_t h = 0; h < 2; ++h) {
    for (index_t slot = 0; slot < slots; ++slot) {
      const numbers key = batch.key(0, h, slot), value = batch.value(0, h, slot);
      for (std::size_t d = 0; d < 128; ++d) {
        const std::size_t at = std::size_t(h * slots + slot) * 128 + d;
        worst = std::max({worst, std::abs(double(keys[at]) - key[d]), std::abs(double(values[at]) - value[d])});
      }
    }
  }
  CHECK(worst < 1e-4);
}
