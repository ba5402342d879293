// One decode step over a batch, run by the library and by the oracle.
#pragma once

#include <memory>

#include <tessera/backend/cpu/attend/attend.hpp>

#include "support/kv_tensor.hpp"
#include "support/tolerance.hpp"

namespace support {

struct attention_result {
  std::vector<float> out, lse;
};

/// Queries for a step of `q_len` tokens behind what each sequence stores: the last of them is its newest position.
struct step_queries {
  index_t q_len, q_heads;
  std::vector<float> q;
  std::vector<index_t> first;

  template <class Tensor>
  step_queries(rng& random, const Tensor& kv, index_t q_len_, index_t group, int dim)
      : q_len(q_len_),
        q_heads(kv.kv_heads * group),
        q(normals(random, std::size_t(kv.sequences * q_len * q_heads * dim))) {
    for (index_t b = 0; b < kv.sequences; ++b) first.push_back(std::max(0, kv.newest(b) - q_len + 1));
  }
};

template <class T, int D, int Dv>
attention_result decode(const kv_tensor<T, D, Dv>& kv, const step_queries& step, const tessera::logit_rule& rule,
                        tessera::cpu::executor& workers, const tessera::selection* chosen = nullptr) {
  using namespace tessera;
  attention_result result;
  // What nobody writes must not pass for a result.
  result.out.assign(std::size_t(kv.sequences * step.q_len * step.q_heads * Dv), 1e9f);
  result.lse.assign(std::size_t(kv.sequences * step.q_len * step.q_heads), 1e9f);
  cpu::decode_workspace workspace;
  const selection_view read = chosen ? chosen->view() : selection_view{};
  cpu::decode_attention(
      kv.view(),
      cpu::query_rows<float>{nhd_rows(step.q.data(), step.q_len, step.q_heads, D, kv.sequences), step.first.data()},
      rule, chosen ? &read : nullptr,
      cpu::attention_output{nhd_rows(result.out.data(), step.q_len, step.q_heads, Dv, kv.sequences),
                            nhd_rows(result.lse.data(), step.q_len, step.q_heads, 1, kv.sequences)},
      workspace, workers);
  return result;
}

/// The largest relative error of a result over all rows, output and log-sum-exp.
template <class T, int D, int Dv>
double worst_error(const attention_result& result, const kv_tensor<T, D, Dv>& kv, const step_queries& step,
                   const tessera::logit_rule& rule, const tessera::selection* chosen = nullptr) {
  const index_t group = step.q_heads / kv.kv_heads;
  double worst = 0;
  for (index_t b = 0; b < kv.sequences; ++b) {
    for (index_t t = 0; t < step.q_len; ++t) {
      for (index_t h = 0; h < step.q_heads; ++h) {
        const std::size_t row = std::size_t((b * step.q_len + t) * step.q_heads + h);
        std::vector<index_t> slots;
        if (chosen) {
          const index_t r = b * kv.kv_heads + h / group;
          slots.assign(chosen->row(r), chosen->row(r) + chosen->counts[std::size_t(r)]);
        }
        const auto expected = kv.attend(step.q.data() + row * D, step.first[std::size_t(b)] + t, b, h, group, rule,
                                        chosen ? &slots : nullptr);
        worst = std::max({worst, row_error(result.out.data() + row * std::size_t(Dv), expected.out),
                          number_error(result.lse[row], expected.lse)});
      }
    }
  }
  return worst;
}

}  // namespace support
