// What a window remembers of attention: the log-sum-exps of its own rows, and of no others.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cuda/score/queries/window_lse.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

/// A window of the newest of some queries, and what attention has made of all of them.
struct attended_window {
  static constexpr int dim = 80;
  index_t q_heads = draw(1, 8), window = draw(1, 20), tokens = draw(1, 40), remembered = std::min(window, tokens);
  std::vector<bf16> q = normal<bf16>(std::size_t(tokens * q_heads * dim));
  std::vector<bf16> held{q.end() - std::ptrdiff_t(remembered * q_heads * dim), q.end()};
  std::vector<float> lse = normal<float>(std::size_t(tokens * q_heads));
  buffer<bf16> device_q{q}, device_held{held};
  buffer<float> device_lse{lse};

  rows_view<const bf16> asked() const { return nhd_rows<const bf16>(device_q.data, tokens, q_heads, dim); }
  rows_view<const bf16> rows() const { return nhd_rows<const bf16>(device_held.data, remembered, q_heads, dim); }
  rows_view<float> all_lse() const { return nhd_rows(device_lse.data, tokens, q_heads, 1); }
};

std::vector<float> values(const rows_view<const float>& rows) {
  return cuda::downloaded(rows.data, std::size_t(rows.tokens * rows.heads));
}

}  // namespace

TEST_CASE("a window takes the log-sum-exps of its rows, and NaN for queries that are not its own", "[gpu]") {
  if (gpu_missing()) return;
  for (int i = 0; i < gpu_test::scaled(60, 5); ++i) {
    attended_window of;
    CAPTURE(i, of.q_heads, of.window, of.tokens);
    cuda::window_lse<bf16> kept(3, of.window, of.q_heads);
    std::vector<float> expected(of.lse.end() - std::ptrdiff_t(of.remembered * of.q_heads), of.lse.end());
    kept.take(1, of.asked(), of.all_lse(), of.rows(), nullptr);
    REQUIRE(same_bits(values(kept.of(1, of.remembered)), expected));

    const index_t other = draw(0, of.remembered * of.q_heads - 1);  // one bit of one row
    of.held[std::size_t(other * of.dim + draw(0, of.dim - 1))].bits ^= 1;
    of.device_held.set(of.held);
    // Attention that writes the newest rows alone.
    const rows_view<float> room = kept.room(of.tokens);
    REQUIRE(room.tokens == std::min(of.window, of.tokens));
    cuda::check(cudaMemcpy(room.data, expected.data(), expected.size() * sizeof(float), cudaMemcpyHostToDevice),
                "copy");
    kept.take(1, of.asked(), room, of.rows(), nullptr);
    const auto got = values(kept.of(1, of.remembered));
    for (std::size_t r = 0; r < got.size(); ++r) {
      if (index_t(r) == other) REQUIRE(std::isnan(got[r]));
      if (index_t(r) != other) REQUIRE(got[r] == expected[r]);
    }
  }
}

TEST_CASE("a window knows no log-sum-exps of rows that attention has not gone over", "[gpu]") {
  if (gpu_missing()) return;
  attended_window of;
  cuda::window_lse<bf16> kept(2, of.window, of.q_heads);
  REQUIRE(kept.of(0, of.remembered).data == nullptr);
  kept.take(0, of.asked(), of.all_lse(), of.rows(), nullptr);
  REQUIRE(kept.of(0, of.remembered).data != nullptr);
  REQUIRE(kept.of(0, of.remembered + 1).data == nullptr);  // the window has grown
  REQUIRE(kept.of(0, 0).data == nullptr);                  // or has been emptied
  REQUIRE(kept.of(1, of.remembered).data == nullptr);
  auto fewer = of.asked();
  fewer.tokens = of.remembered - 1;
  kept.take(0, fewer, of.all_lse(), of.rows(), nullptr);  // a shorter call of attention than the window
  REQUIRE(kept.of(0, of.remembered).data == nullptr);
  kept.take(0, of.asked(), of.all_lse(), of.rows(), nullptr);
  kept.forget(0);
  REQUIRE(kept.of(0, of.remembered).data == nullptr);
}
