// A conversation with a cache on the device that searches strategies: rows that change on the way, and recorded steps.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "backend/cuda/cache/cases/cache_case.hpp"
#include "support/searched_rows.hpp"
#include "tessera/backend/cuda/store/packed/unpack_rows.cuh"
#include "tessera/methods/mosaickv.hpp"

namespace gpu_test::searched {

using namespace support::searched;
using mosaic = mosaickv<bf16, dim>;

inline mosaic searching(index_t least = 64) { return support::searched::searching<mosaic>(least); }

/// Later fewer channels are strong.
inline std::vector<bf16> rows_of(index_t token, index_t layer, index_t side, index_t heads) {
  return support::searched::rows_of<bf16>(token, layer, side, heads, 0.5);
}

/// One sequence. Steps are recorded once, and replayed then.
struct searched_conversation {
  cuda::cache<mosaic> held;
  index_t tokens = 0;
  buffer<bf16> q, k, v;
  buffer<float> out;
  cudaStream_t stream{};
  std::unique_ptr<graph> recorded;

  explicit searched_conversation(const mosaic& recipe, index_t most, index_t prompt = 128)
      : held({layers, q_heads, kv_heads}, recipe, options(prompt + most)),
        q(layers * q_heads * dim),
        k(layers * kv_heads * dim),
        v(layers * kv_heads * dim),
        out(layers * q_heads * dim) {
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    REQUIRE(held.open(stream) == 0);
    for (index_t t = 0; t < prompt; ++t, ++tokens) {
      give();
      for (index_t layer = 0; layer < layers; ++layer)
        held.prefill(layer, 0, given(q, layer, q_heads), given(k, layer, kv_heads), given(v, layer, kv_heads), stream);
      finish();
    }
    held.end_prefill(0, stream);
  }
  ~searched_conversation() {
    recorded = nullptr;
    cudaStreamDestroy(stream);
  }
  static cuda::cache_options options(index_t tokens) {
    cuda::cache_options chosen;
    chosen.sequences = 2;
    chosen.tokens = tokens;
    return chosen;
  }
  static rows_view<const bf16> given(const buffer<bf16>& rows, index_t layer, index_t heads) {
    return nhd_rows<const bf16>(rows.data + layer * heads * dim, 1, heads, dim);
  }
  void give() {
    std::vector<bf16> all[3];
    for (index_t layer = 0; layer < layers; ++layer) {
      for (const index_t side : {0, 1, 2}) {
        const auto rows = rows_of(tokens, layer, side, side == 2 ? q_heads : kv_heads);
        all[side].insert(all[side].end(), rows.begin(), rows.end());
      }
    }
    k.set(all[0]), v.set(all[1]), q.set(all[2]);
  }
  void finish() const { cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }
  void layers_of(const batch& now) {
    held.begin_step(now, stream);
    for (index_t layer = 0; layer < layers; ++layer) {
      held.decode(layer, now, given(q, layer, q_heads), given(k, layer, kv_heads), given(v, layer, kv_heads),
                  nhd_rows(out.data + layer * q_heads * dim, 1, q_heads, dim), {}, stream);
    }
  }
  /// `before` and `after` are called around what the host and the device do.
  template <class Before, class After>
  void step(bool replay, const Before& before, const After& after) {
    give();
    before();
    const batch now = held.prepare_step({0}, 1, stream);
    if (!replay) {
      layers_of(now);
    } else {
      if (!recorded) recorded = std::make_unique<graph>(stream, [&] { layers_of(now); });
      cuda::check(cudaGraphLaunch(recorded->ready, stream), "cudaGraphLaunch");
    }
    after();
    finish();
    ++tokens;
  }
  void step(bool replay = true) {
    step(replay, [] {}, [] {});
  }
  /// The segments of a layer as the device knows them.
  std::vector<cuda::device_segment> segments(index_t layer) {
    const auto view = held.view(layer, 0);
    return cuda::downloaded(view.segments, std::size_t(cuda::downloaded(view.counts, 1)[0]));
  }
  std::vector<index_t> rows(index_t layer) {
    std::vector<index_t> all;
    for (const auto& one : segments(layer)) all.push_back(cuda::downloaded(one.rows, 1)[0]);
    return all;
  }
  strategy_report report() const { return held.strategies(0); }
};

/// The largest error of a step's outputs, relative to their length, against attention in double over the slots that the step says it read, of
/// what the device stores.
inline double error_of_step(searched_conversation& now) {
  now.held.trace_attended(true);
  now.step(false);
  now.held.trace_attended(false);
  double worst = 0;
  const auto out = now.out.get();
  const index_t slots = now.tokens, group = q_heads / kv_heads;
  for (index_t layer = 0; layer < layers; ++layer) {
    buffer<float> k(std::size_t(kv_heads * slots) * dim), v(k.count);
    cuda::unpack_rows(now.held.view(layer, 0), slots, k.data, v.data, now.stream);
    now.finish();
    const auto keys = k.get(), values = v.get();
    const auto queries = rows_of(now.tokens - 1, layer, 2, q_heads);
    for (index_t head = 0; head < q_heads; ++head) {
      const float* own_k = keys.data() + offset_t(head / group) * slots * dim;
      const float* own_v = values.data() + offset_t(head / group) * slots * dim;
      std::vector<double> logits, sum(dim, 0.0);
      double most = -1e300, total = 0, difference = 0, size = 1e-12;
      const auto& read = now.held.attended(layer, 0)[std::size_t(head / group)];
      REQUIRE(read.back() == slots - 1);
      for (const index_t slot : read) {
        double x = 0;
        for (index_t d = 0; d < dim; ++d)
          x += double(float(queries[std::size_t(head * dim + d)])) * own_k[slot * dim + d];
        logits.push_back(x / std::sqrt(double(dim))), most = std::max(most, logits.back());
      }
      for (std::size_t i = 0; i < read.size(); ++i) {
        const double p = std::exp(logits[i] - most);
        total += p;
        for (index_t d = 0; d < dim; ++d) sum[std::size_t(d)] += p * own_v[read[i] * dim + d];
      }
      for (index_t d = 0; d < dim; ++d) {
        const double x = sum[std::size_t(d)] / total;
        difference += std::pow(double(out[std::size_t((layer * q_heads + head) * dim + d)]) - x, 2), size += x * x;
      }
      worst = std::max(worst, std::sqrt(difference / size));
    }
  }
  return worst;
}

}  // namespace gpu_test::searched
