// What a window remembers of attention: the log-sum-exps of its own rows, and of no others.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cuda/observe/detail/query_window.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

/// A window of the newest of some queries in place 1, and what attention has made of all of them.
struct attended_window {
  static constexpr int dim = 80;
  index_t q_heads = draw(1, 8), longest = draw(1, 20), tokens = draw(1, 40), rows = std::min(longest, tokens);
  std::vector<bf16> q = normal<bf16>(std::size_t(tokens * q_heads * dim));
  std::vector<float> lse = normal<float>(std::size_t(tokens * q_heads));
  buffer<bf16> device_q{q};
  buffer<float> device_lse{lse};
  cuda::query_window<bf16> window{3, longest, q_heads, dim};

  attended_window() { window.remember(1, queries(), nullptr); }
  rows_view<const bf16> queries() const { return nhd_rows<const bf16>(device_q.data, tokens, q_heads, dim); }
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
    CAPTURE(i, of.q_heads, of.longest, of.tokens);
    cuda::window_lse<bf16> stored(3, of.longest, of.q_heads);
    const std::vector<float> expected(of.lse.end() - std::ptrdiff_t(of.rows * of.q_heads), of.lse.end());
    stored.store(1, of.window, of.queries(), of.all_lse(), nullptr);
    REQUIRE(same_bits(values(stored.lse(1, of.rows)), expected));

    // Attention that writes the newest rows alone, of queries of which one bit is another.
    const index_t other = draw(0, of.rows * of.q_heads - 1);
    of.q[of.q.size() - (expected.size() - std::size_t(other)) * of.dim + std::size_t(draw(0, of.dim - 1))].bits ^= 1;
    of.device_q.set(of.q);
    const rows_view<float> output = stored.output(of.tokens);
    REQUIRE(output.tokens == of.rows);
    cuda::check(cudaMemcpy(output.data, expected.data(), expected.size() * sizeof(float), cudaMemcpyHostToDevice),
                "copy");
    stored.store(1, of.window, of.queries(), output, nullptr);
    const auto got = values(stored.lse(1, of.rows));
    for (std::size_t r = 0; r < got.size(); ++r) {
      if (index_t(r) == other) REQUIRE(std::isnan(got[r]));
      if (index_t(r) != other) REQUIRE(got[r] == expected[r]);
    }
  }
}

TEST_CASE("a window knows no log-sum-exps of rows that attention has not gone over", "[gpu]") {
  if (gpu_missing()) return;
  attended_window of;
  cuda::window_lse<bf16> stored(3, of.longest, of.q_heads);
  const auto known = [&](index_t place, index_t rows) { return stored.lse(place, rows).data != nullptr; };
  const auto take = [&](const rows_view<const bf16>& attended, index_t place = 1) {
    stored.store(place, of.window, attended, of.all_lse(), nullptr);
  };
  REQUIRE(!known(1, of.rows));
  take(of.queries());
  REQUIRE(known(1, of.rows));
  REQUIRE(!known(1, of.rows + 1));  // the window has grown
  REQUIRE(!known(1, 0));            // or has been emptied
  REQUIRE(!known(2, of.rows));
  take(of.queries(), 2);  // a window without rows
  REQUIRE(!known(2, of.rows));
  auto fewer = of.queries();
  fewer.tokens = of.rows - 1;
  take(fewer);  // a shorter call of attention than the window
  REQUIRE(!known(1, of.rows));
  take(of.queries());
  stored.forget(1);
  REQUIRE(!known(1, of.rows));
  cuda::check(cudaDeviceSynchronize(), "take_lse");
}
