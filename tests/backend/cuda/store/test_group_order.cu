// The order of a basis' channels on the GPU, for groups of several, against the host's.
#include "packed_case.hpp"
#include "tessera/backend/cuda/store/packed/detail/bases/channel_orders.cuh"
#include "tessera/channels/top_groups.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

/// In the engine's own channels, so that both choose of the same numbers: row c of the basis has a 1 at c.
template <class T, int D>
void check_order(index_t group, index_t count) {
  using view_type = cuda::packed_view<typename whole_rows<T, D, D>::view_type>;
  const index_t heads = 3, first = 5, channels = D * 3 / 4;
  const packed_format format = format_of(as_bf16, channels, group, D / 4);
  const whole_rows<T, D, D> rows(1, heads, {first + count});
  view_type view;
  view.whole = rows.view();
  std::vector<float> basis(std::size_t(heads * channels * D), 0.0f);
  for (index_t i = 0; i < heads * channels; ++i) basis[std::size_t(i * D + i % channels)] = 1;
  buffer<float> ordered(basis);
  buffer<float> values(basis);  // in another order: they lie behind a sample of other rows
  const int kept = int(format.stored_channels);
  cuda::channel_orders<view_type> order({int(channels), int(channels), 2, {kept / 2, kept}, {kept / 2, kept}}, heads,
                                        2);
  for (const index_t i : {0, 1}) order.sample(i, {view, 0, first, count}, ordered.data, values.data, nullptr);
  order.find(2, nullptr);
  order.apply(1, true, 1, group, ordered.data, nullptr);
  order.apply(0, false, 0, group, values.data, nullptr);
  const auto got = ordered.get(), got_values = values.get();
  index_t wrong = 0, moved = 0;
  for (index_t h = 0; h < heads; ++h) {
    std::vector<float> row(static_cast<std::size_t>(D));
    const auto expected = order_of_channels(top_groups{0.25f, group}, format, count, [&](index_t i) {
      for (int d = 0; d < D; ++d) row[std::size_t(d)] = float(rows.key(0, h, first + i)[d]);
      return row.data();
    });
    packed_format half = format;
    half.stored_channels = kept / 2;
    const auto of_values = order_of_channels(top_groups{0.125f, group}, half, count, [&](index_t i) {
      for (int d = 0; d < D; ++d) row[std::size_t(d)] = float(rows.value(0, h, first + i)[d]);
      return row.data();
    });
    for (index_t c = 0; c < channels; ++c) {
      wrong += got_values[std::size_t((h * channels + c) * D + of_values[std::size_t(c)])] != 1;
      wrong += got[std::size_t((h * channels + c) * D + expected[std::size_t(c)])] != 1;
      moved += expected[std::size_t(c)] != c;
    }
  }
  INFO("dim " << D << ", group " << group << ", rows " << count);
  CHECK(wrong == 0);
  CHECK(moved > 0);
}

}  // namespace

TEST_CASE("channels that are often chosen together become neighbours on the GPU, in the host's order") {
  if (gpu_missing()) return;
  for (const index_t group : {2, 4}) {
    check_order<bf16, 64>(group, 100);
    check_order<fp16, 128>(group, shrunk(3000, 1200));
  }
}
