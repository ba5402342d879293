// Scores by what is stored, on the GPU, against the CPU's: keys and values, one pass and two, partitions and their ranks.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cpu/score/contents.hpp"
#include "tessera/backend/cuda/score/detail/contents.cuh"
#include "tessera/backend/cuda/score/detail/lagged.cuh"
#include "tessera/scorer/key_difference.hpp"
#include "tessera/scorer/key_norm.hpp"
#include "tessera/scorer/lag_relative.hpp"
#include "tessera/scorer/value_norm.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

/// Rows of a batch, heads of uneven length, on both sides. `odd`: strides that forbid 16-byte loads.
template <class E, int D, int Dv>
struct stored_rows_case {
  using view_type = kv_view<E, D, contiguous, Dv>;
  using stored = typename view_type::encoding_type::stored_type;
  index_t sequences, heads, capacity;
  offset_t k_row, v_row;
  std::vector<stored> k, v;
  std::vector<float> k_scales, v_scales;
  std::vector<index_t> lengths;
  buffer<stored> d_k, d_v;
  buffer<float> d_k_scales, d_v_scales;
  buffer<index_t> d_lengths;

  template <class Element>
  stored_rows_case(index_t b, index_t h, index_t n, bool odd, const Element& element)
      : sequences(b),
        heads(h),
        capacity(n),
        k_row(view_type::k_units + (odd ? 3 : 0)),
        v_row(view_type::v_units + (odd ? 1 : 0)),
        k(cells() * std::size_t(k_row), stored{}),
        v(cells() * std::size_t(v_row), stored{}),
        d_k(k.size()),
        d_v(v.size()),
        d_k_scales(cells()),
        d_v_scales(cells()),
        d_lengths(std::size_t(b * h)) {
    for (std::size_t row = 0; row < cells(); ++row) {
      fill(k.data() + row * std::size_t(k_row), D, row, element);
      fill(v.data() + row * std::size_t(v_row), Dv, row, element);
      k_scales.push_back(float(draw(1, 16)) * 0.125f), v_scales.push_back(float(draw(1, 16)) * 0.125f);
    }
    for (index_t r = 0; r < b * h; ++r) lengths.push_back(r == 1 ? 0 : draw(1, n));
    d_k.set(k), d_v.set(v), d_k_scales.set(k_scales), d_v_scales.set(v_scales), d_lengths.set(lengths);
  }
  template <class Element>
  static void fill(stored* to, int dim, std::size_t row, const Element& element) {
    if constexpr (element_block<stored>) {
      std::vector<float> given;
      for (int d = 0; d < dim; ++d) given.push_back(element(row, d));
      encode_row<typename view_type::encoding_type>(given.data(), dim, to, 1);
    } else {
      for (int d = 0; d < dim; ++d) to[d] = stored(element(row, d));
    }
  }
  std::size_t cells() const { return std::size_t(sequences) * std::size_t(heads) * std::size_t(capacity); }
  view_type view(bool device) {
    view_type all;
    all.k = device ? d_k.data : k.data(), all.v = device ? d_v.data : v.data();
    all.k_strides = {heads * capacity * k_row, capacity * k_row, k_row, 1};
    all.v_strides = {heads * capacity * v_row, capacity * v_row, v_row, 1};
    all.sequences = sequences, all.kv_heads = heads;
    all.lengths = device ? d_lengths.data : lengths.data(), all.length_strides = {heads, 1};
    all.scales.k = device ? d_k_scales.data : k_scales.data(),
    all.scales.v = device ? d_v_scales.data : v_scales.data();
    all.scales.outer = offset_t(heads) * capacity, all.scales.head = capacity;
    return all;
  }
  /// Scores of the device, and of the CPU; slots that are not stored are 7 in both.
  template <class Op, class Scorer, class OnHost>
  std::pair<std::vector<float>, std::vector<float>> scores(const Op& op, const Scorer& scorer, const OnHost& on_host) {
    const std::vector<float> untouched(cells(), 7.0f);
    const buffer<float> out(untouched);
    buffer<unsigned char> workspace(op.workspace_bytes());
    workspace.fill(0xff);
    op.run(view(true), scorer, out.data, capacity, workspace.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "scores of what is stored");
    auto first = out.get();
    op.run(view(true), scorer, out.data, capacity, workspace.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "scores of what is stored");
    REQUIRE(same_bits(first, out.get()));
    std::vector<float> expected = untouched;
    for (index_t r = 0; r < sequences * heads; ++r) {
      on_host(view(false), r / heads, r % heads, scorer, expected.data() + offset_t(r) * capacity);
    }
    return {first, expected};
  }
};

const auto on_cpu = [](const auto& view, index_t b, index_t h, const auto& scorer, float* out) {
  cpu::score_contents(view, b, h, scorer, out);
};

/// Small whole numbers add up exactly in any order; what is not finite ranks alike.
template <class E, int D, int Dv, class Scorer>
void compare_exactly() {
  for (const int i : scaled(cases(12), 3)) {
    const auto element = [&](std::size_t, int) {
      return i % 4 == 3 && draw(0, 200) == 0   ? float(NAN)
             : i % 5 == 4 && draw(0, 300) == 0 ? infinity
                                               : float(draw(-3, 3));
    };
    stored_rows_case<E, D, Dv> c(draw(1, 3), draw(1, 4), i % 3 ? draw(1, 70) : draw(1, scaled(3000, 300)), i % 2,
                                 element);
    const cuda::score_contents<typename stored_rows_case<E, D, Dv>::view_type, Scorer> op(c.sequences * c.heads + 2,
                                                                                          c.capacity);
    const auto [got, expected] = c.scores(op, Scorer{}, on_cpu);
    for (std::size_t s = 0; s < got.size(); ++s) {
      CAPTURE(Scorer::name, D, Dv, i, s, got[s], expected[s]);
      REQUIRE((expected[s] != expected[s] ? got[s] != got[s] : got[s] == expected[s]));
    }
  }
}

template <class E, int D, int Dv, class Scorer>
void compare_closely() {
  for (const int i : scaled(cases(8), 2)) {
    std::normal_distribution<float> normal_of;
    const auto element = [&](std::size_t, int d) {
      return i % 4 == 3 && draw(0, 2000) == 0 ? float(NAN) : normal_of(gpu_test::rng()) + (d % 3 == 0 ? 1.0f : 0.0f);
    };
    stored_rows_case<E, D, Dv> c(draw(1, 3), draw(1, 4), i % 3 ? draw(1, 70) : draw(1, scaled(3000, 300)), i % 2,
                                 element);
    const cuda::score_contents<typename stored_rows_case<E, D, Dv>::view_type, Scorer> op(c.sequences * c.heads + 2,
                                                                                          c.capacity);
    const auto [got, expected] = c.scores(op, Scorer{}, on_cpu);
    for (std::size_t s = 0; s < got.size(); ++s) {
      CAPTURE(Scorer::name, D, Dv, i, s, got[s], expected[s]);
      // Sums of D products in two orders, and a cosine that is at most 1.
      const float margin = float(D + Dv) * 0x1p-24f * std::max(1.0f, std::fabs(expected[s]));
      REQUIRE((expected[s] != expected[s] ? got[s] != got[s] : std::fabs(got[s] - expected[s]) <= margin));
    }
  }
}

template <class Scorer>
void compare_all() {
  compare_exactly<bf16, 128, 128, Scorer>();
  compare_exactly<fp16, 64, 64, Scorer>();
  compare_exactly<bf16, 80, 96, Scorer>();
  compare_exactly<fp16, 256, 192, Scorer>();
  compare_exactly<fp8_elements<bf16>, 128, 64, Scorer>();
  compare_exactly<int8_elements<fp16>, 64, 64, Scorer>();
  compare_closely<bf16, 128, 128, Scorer>();
  compare_closely<fp16, 80, 64, Scorer>();
}

/// Rows whose spreads are far apart, so that rounding cannot swap two ranks: half of the channels do not vary, the others have
/// a number that no other row of a partition has. The smallest and the largest are always finite: without them the
/// next smaller ones would spread alike on both sides.
template <class E, int D, int Dv>
void compare_ranks() {
  for (const int i : scaled(cases(12), 3)) {
    lag_relative scorer;
    scorer.sinks = draw(0, 6);
    scorer.lag = i % 4 == 0 ? 128 : i % 4 == 1 ? draw(129, 300) : draw(2, 100);
    std::vector<int> order(std::size_t(scorer.lag));
    std::iota(order.begin(), order.end(), 1);
    std::shuffle(order.begin(), order.end(), gpu_test::rng());
    const auto element = [&](std::size_t row, int d) {
      const int own = order[row % order.size()];
      if (i % 3 == 2 && row % 17 == 5 && own > 1 && own < scorer.lag)
        return row % 2 ? float(NAN) : row % 4 ? infinity : -infinity;
      return d % 2 ? float(i % 8 == 4 ? own / 2 * 2 : own) : 0.0f;  // sometimes rows come in pairs that tie
    };
    stored_rows_case<E, D, Dv> c(draw(1, 2), draw(1, 3), draw(1, i % 4 < 2 ? 2600 : 700), i % 2, element);
    const cuda::score_lagged<typename stored_rows_case<E, D, Dv>::view_type, lag_relative> op(c.sequences * c.heads,
                                                                                              c.capacity);
    std::vector<float> scratch(std::size_t(2 * scorer.lag));
    const auto [got, expected] =
        c.scores(op, scorer, [&](const auto& view, index_t b, index_t h, const auto& of, float* out) {
          cpu::score_lagged(view, b, h, of, out, scratch.data());
        });
    for (std::size_t s = 0; s < got.size(); ++s) {
      CAPTURE(D, Dv, i, scorer.sinks, scorer.lag, s, got[s], expected[s]);
      REQUIRE((expected[s] != expected[s] ? got[s] != got[s] : got[s] == expected[s]));
    }
  }
}

}  // namespace

TEST_CASE("norms of keys and values are the CPU's", "[gpu]") {
  if (gpu_missing()) return;
  compare_all<key_norm>();
  compare_all<value_norm>();
}

TEST_CASE("keys are compared with their mean as on the CPU, to rounding", "[gpu]") {
  if (gpu_missing()) return;
  compare_closely<bf16, 128, 128, key_difference>();
  compare_closely<fp16, 64, 64, key_difference>();
  compare_closely<bf16, 80, 96, key_difference>();
  compare_closely<fp16, 256, 192, key_difference>();
  compare_closely<fp8_elements<bf16>, 128, 64, key_difference>();
  compare_closely<grouped_elements<bf16, 4, 64>, 128, 64, key_difference>();
}

TEST_CASE("tokens rank in their partition as on the CPU", "[gpu]") {
  if (gpu_missing()) return;
  compare_ranks<bf16, 128, 128>();
  compare_ranks<fp16, 64, 64>();
  compare_ranks<bf16, 80, 256>();
  compare_ranks<fp16, 256, 256>();
  compare_ranks<grouped_elements<bf16, 4, 64>, 128, 128>();
}
