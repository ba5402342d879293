// Scores by what queries are like, on the GPU, against the CPU's: sums over queries, and what keys make of their moments.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cpu/score/expected.hpp"
#include "tessera/backend/cpu/score/query_sums.hpp"
#include "tessera/backend/cuda/score/expected/query_sums.cuh"
#include "tessera/backend/cuda/score/expected/score_expected.cuh"
#include "tessera/scorer/expected_weight.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

std::vector<float> frequencies_of(int dim) {
  std::vector<float> all;
  for (int d = 0; d < dim / 2; ++d) all.push_back(std::pow(10'000.0f, -2.0f * float(d) / float(dim)));
  return all;
}

/// Sums on both sides of the same queries, the device's in random chunks.
template <class T, int D>
struct both_sums {
  index_t heads;
  std::vector<float> frequencies = frequencies_of(D);
  cpu::query_sums<D> host;
  cuda::query_sums<T, D> device;

  explicit both_sums(index_t q_heads) : heads(q_heads), device(2, q_heads, frequencies) { host.prepare(q_heads); }

  /// Returns how many queries there were. `center`: of the channels, so that there is a mean.
  index_t add(index_t tokens, index_t first, index_t least, float deviation) {
    std::vector<T> q = normal<T>(std::size_t(tokens * heads * D), deviation);
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = T(float(q[i]) + float(int(i / 7 % 5) - 2) * 0.25f);
    for (int i = draw(0, 2); i > 0; --i) q[std::size_t(draw(0, int(q.size()) - 1))] = T(draw(0, 1) ? NAN : infinity);
    const buffer<T> there(q);
    cpu::executor alone(1);
    host.add(nhd_rows<const T>(q.data(), tokens, heads, D), first, least, frequencies.data(), alone);
    for (index_t done = 0; done < tokens;) {
      const index_t n = std::min(tokens - done, index_t(draw(1, 40)));
      rows_view<const T> some = nhd_rows<const T>(there.data, tokens, heads, D);
      some.data += done * some.token_stride;
      some.tokens = n;
      device.add(1, some, first + done, least, nullptr);
      done += n;
    }
    cuda::check(cudaDeviceSynchronize(), "sums over queries");
    return tokens;
  }
  template <class X>
  std::vector<X> downloaded(const X* from, std::size_t count) {
    std::vector<X> all(count);
    cuda::check(cudaMemcpy(all.data(), from, count * sizeof(X), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return all;
  }
};

template <class T, int D>
void compare_sums() {
  for (int i = 0; i < gpu_test::scaled(6, 2); ++i) {
    both_sums<T, D> both(index_t(draw(1, 5)));
    const index_t least = draw(0, 6);
    index_t next = draw(0, 2) ? 0 : 5000;
    for (int chunk = 0; chunk < 2; ++chunk) next += both.add(index_t(draw(1, 130)), next, least, 1.5f);
    const query_statistics expected = both.host.view(), got = both.device.statistics(1, nullptr);
    const std::size_t heads = std::size_t(both.heads);
    const auto counts = both.downloaded(got.counts, heads);
    const auto sums = both.downloaded(got.sums, heads * D), products = both.downloaded(got.products, heads * D * D);
    for (std::size_t h = 0; h < heads; ++h) {
      CAPTURE(D, i, h, least, next);
      REQUIRE(counts[h] == expected.counts[h]);
      for (std::size_t d = 0; d < D; ++d) {
        REQUIRE(sums[h * D + d] == Approx(expected.sums[h * D + d]).margin(1e-9));
        for (std::size_t e = 0; e <= d; ++e) {
          const std::size_t at = (h * D + d) * D + e;
          REQUIRE(products[at] == Approx(expected.products[at]).margin(1e-9));
        }
      }
    }
    const query_statistics other = both.device.statistics(0, nullptr);
    REQUIRE(both.downloaded(other.counts, heads) == std::vector<offset_t>(heads, 0));
    both.device.forget(1);
    const auto forgotten = both.device.statistics(1, nullptr);
    REQUIRE(both.downloaded(forgotten.products, heads * D * D) == std::vector<double>(heads * D * D, 0.0));
  }
}

template <class E, int D>
void compare_scores() {
  using view_type = kv_view<E, D, contiguous>;
  using T = typename view_type::element_type;
  using stored = typename view_type::encoding_type::stored_type;
  for (const int i : gpu_test::scaled(cases(8), 3)) {
    const index_t heads = index_t(draw(1, 3)), group = index_t(draw(1, 5)), q_heads = heads * group;
    const index_t sequences = index_t(draw(1, 2)), n = index_t(i % 3 ? draw(1, 90) : draw(1, scaled(3000, 400)));
    expected_weight scorer;
    scorer.sinks = index_t(draw(0, 6)), scorer.future = index_t(draw(1, 600)), scorer.covariance = index_t(i % 4 != 3);
    const index_t next = n + index_t(draw(0, 1000));
    std::vector<stored> k;
    for (const float x : normal<float>(std::size_t(sequences * heads * n * D), 1.0f)) k.push_back(stored(x));
    if (i % 4 == 2) k[std::size_t(draw(0, int(k.size()) - 1))] = stored(NAN);
    std::vector<float> k_scales(std::size_t(sequences * heads * n), 0.5f);
    std::vector<index_t> lengths, nexts(std::size_t(sequences), next);
    for (index_t r = 0; r < sequences * heads; ++r) lengths.push_back(r == 1 ? 0 : index_t(draw(1, n)));
    const buffer<stored> d_k(k);
    const buffer<float> d_scales(k_scales);
    const buffer<index_t> d_lengths(lengths), d_next(nexts);
    const auto view = [&](bool device) {
      view_type all;
      all.k = device ? d_k.data : k.data();
      all.v = all.k;
      all.k_strides = all.v_strides = {heads * n * D, n * D, D, 1};
      all.sequences = sequences, all.kv_heads = heads;
      all.lengths = device ? d_lengths.data : lengths.data(), all.length_strides = {heads, 1};
      all.scales.k = all.scales.v = device ? d_scales.data : k_scales.data();
      all.scales.outer = offset_t(heads) * n, all.scales.head = n;
      return all;
    };
    // The same statistics on both sides, so that only scoring is compared.
    both_sums<T, D> both(q_heads);
    if (i % 5 != 4) both.add(index_t(draw(2, 200)), scorer.sinks, scorer.sinks, i % 2 ? 1.0f : 0.3f);
    const query_statistics seen = both.host.view();
    const buffer<offset_t> counts(std::vector<offset_t>(seen.counts, seen.counts + q_heads));
    const buffer<double> sums(std::vector<double>(seen.sums, seen.sums + q_heads * D)),
        products(std::vector<double>(seen.products, seen.products + offset_t(q_heads) * D * D));
    const buffer<query_statistics> statistics(
        std::vector<query_statistics>(std::size_t(sequences), query_statistics{counts.data, sums.data, products.data}));
    const buffer<float> frequencies(both.frequencies);
    const cuda::score_expected<view_type, expected_weight> op(sequences, heads, q_heads, n,
                                                              cuda::device_info::current());
    buffer<unsigned char> workspace(op.workspace_bytes());
    workspace.fill(0xff);
    const buffer<float> out(std::vector<float>(std::size_t(sequences * heads * n), 7.0f));
    const auto scores = [&] {
      op.run(view(true), scorer, statistics.data, frequencies.data, d_next.data, logit_rule{}, out.data, n,
             workspace.data, nullptr);
      cuda::check(cudaDeviceSynchronize(), "expected scores");
      return out.get();
    };
    const auto got = scores();
    REQUIRE(same_bits(got, scores()));
    cpu::expected_workspace host;
    for (index_t r = 0; r < sequences * heads; ++r) {
      std::vector<float> expected(std::size_t(n), 7.0f);
      cpu::score_expected(view(false), r / heads, r % heads, scorer, seen, group, logit_rule{}, both.frequencies.data(),
                          next, expected.data(), host);
      for (index_t s = 0; s < n; ++s) {
        const float own = got[std::size_t(r * n + s)], wanted = expected[std::size_t(s)];
        CAPTURE(D, i, r, s, n, group, scorer.sinks, scorer.future, scorer.covariance, own, wanted);
        // A logit of some units is known to about 2^-16 of the terms of its sums, and so is its exponential in proportion.
        REQUIRE(
            (wanted != wanted ? own != own : wanted == own || std::fabs(own - wanted) <= 2e-4f * std::fabs(wanted)));
      }
    }
  }
}

}  // namespace

TEST_CASE("sums over queries are the CPU's, in any chunks", "[gpu]") {
  if (gpu_missing()) return;
  compare_sums<bf16, 128>();
  compare_sums<fp16, 64>();
  compare_sums<bf16, 80>();
  compare_sums<bf16, 256>();
}

TEST_CASE("keys score by the queries to come as on the CPU, to rounding", "[gpu]") {
  if (gpu_missing()) return;
  compare_scores<bf16, 128>();
  compare_scores<fp16, 64>();
  compare_scores<bf16, 80>();
  compare_scores<fp16, 96>();
  compare_scores<bf16, 256>();
  compare_scores<fp16, 192>();
  compare_scores<fp8_elements<bf16>, 128>();
}
