// GPU decode attention against the CPU's, in bf16: every head dim, caps, windows, selections, sinks.
#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "tessera/backend/cpu/attend.hpp"
#include "tessera/backend/cuda/decode_attention.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

struct shape {
  index_t sequences, heads, group, tokens, capacity;
  float soft_cap = 0;
  index_t window = 0;
  bool gather = false, sinks = false;
};

/// Relative error over the outputs; large where a log-sum-exp differs, an output is missing or two runs differ.
template <int D>
double error_of(const shape& s) {
  using view_type = kv_view<const bf16, D>;
  const index_t rows = s.sequences * s.heads, q_heads = s.heads * s.group, capacity = s.capacity;
  std::vector<index_t> lengths, first(std::size_t(s.sequences), capacity - s.tokens), chosen, counts;
  std::vector<index_t> positions(std::size_t(rows) * std::size_t(capacity));
  for (index_t r = 0; r < rows; ++r) {
    lengths.push_back(r == 1 ? 0 : draw(0, capacity));
    // As after an eviction: a gap before the newest tokens.
    for (index_t i = 0; i < capacity; ++i) {
      positions[std::size_t(r * capacity + i)] = i + (i >= lengths.back() - s.tokens ? capacity - lengths.back() : 0);
    }
    counts.push_back(0);
    chosen.resize(std::size_t(rows) * std::size_t(capacity), no_index);
    for (index_t i = 0; i < lengths.back(); ++i) {
      if (draw(0, 2) == 0) chosen[std::size_t(r * capacity + counts.back()++)] = i;
    }
  }
  const std::size_t stored = std::size_t(rows) * std::size_t(capacity) * D;
  const std::size_t queries = std::size_t(s.sequences * s.tokens * q_heads);
  const auto k = normal<bf16>(stored), v = normal<bf16>(stored), q = normal<bf16>(queries * D);
  const auto sinks = normal<float>(std::size_t(q_heads));
  const auto view_of = [&](const bf16* keys, const bf16* values, const index_t* length, const index_t* position) {
    view_type view;
    view.k = keys, view.v = values;
    view.k_strides = view.v_strides = {offset_t(s.heads) * capacity * D, offset_t(capacity) * D, D, 1};
    view.sequences = s.sequences, view.kv_heads = s.heads;
    view.lengths = length, view.length_strides = {s.heads, 1};
    view.positions = position, view.position_strides = {offset_t(s.heads) * capacity, capacity};
    return view;
  };
  logit_rule rule{.soft_cap = s.soft_cap, .sliding_window = s.window};

  std::vector<float> expected(queries * D), expected_lse(queries);
  cpu::executor workers;
  cpu::decode_workspace scratch;
  const selection_view on_host{chosen.data(), counts.data(), nullptr, capacity};
  logit_rule host_rule = rule;
  if (s.sinks) host_rule.sink_logits = sinks.data();
  cpu::decode_attention(view_of(k.data(), v.data(), lengths.data(), positions.data()),
                        cpu::query_rows<bf16>{nhd_rows(q.data(), s.tokens, q_heads, D, s.sequences), first.data()},
                        host_rule, s.gather ? &on_host : nullptr,
                        {nhd_rows(expected.data(), s.tokens, q_heads, D, s.sequences),
                         nhd_rows(expected_lse.data(), s.tokens, q_heads, 1, s.sequences)},
                        scratch, workers);

  buffer<bf16> d_k(k), d_v(v), d_q(q);
  buffer<index_t> d_lengths(lengths), d_positions(positions), d_first(first), d_chosen(chosen), d_counts(counts);
  buffer<float> d_sinks(sinks), out(expected.size()), lse(expected_lse.size());
  out.fill(0xff), lse.fill(0xff);
  if (s.sinks) rule.sink_logits = d_sinks.data;
  const cuda::decode_attention<view_type> op(s.sequences, s.heads, q_heads, s.tokens, cuda::device_info::current());
  buffer<unsigned char> workspace(op.workspace_bytes());
  op.prepare(workspace.data, nullptr);
  cuda::decode_problem<view_type> problem{view_of(d_k.data, d_v.data, d_lengths.data, d_positions.data),
                                          nhd_rows<const bf16>(d_q.data, s.tokens, q_heads, D, s.sequences),
                                          d_first.data,
                                          rule,
                                          nhd_rows(out.data, s.tokens, q_heads, D, s.sequences),
                                          nhd_rows(lse.data, s.tokens, q_heads, 1, s.sequences),
                                          {}};
  if (s.gather) problem.chosen = {d_chosen.data, d_counts.data, nullptr, capacity};
  std::vector<float> got;
  for (int run = 0; run < 2; ++run) {
    op.run(problem, workspace.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "decode attention");
    const auto again = out.get();
    if (run == 1) REQUIRE(same_bits(got, again));
    got = again;
  }
  const auto got_lse = lse.get();
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] != got[i]) return 1e9;
    difference += std::pow(double(got[i]) - expected[i], 2);
    size += std::pow(double(expected[i]), 2);
  }
  for (std::size_t i = 0; i < got_lse.size(); ++i) {
    if (std::isinf(expected_lse[i]) ? got_lse[i] != expected_lse[i]
                                    : !(std::abs(got_lse[i] - expected_lse[i]) < 0.01)) {
      return 1e9;
    }
  }
  return size > 0 ? std::sqrt(difference / size) : 0;
}

template <int D>
void try_shapes() {
  for (int i = 0; i < 12; ++i) {
    const index_t groups[] = {1, 2, 3, 4, 5, 7, 8, 16};
    shape s{draw(1, 3), draw(1, 4), groups[draw(0, 7)], draw(1, 8), draw(8, 2000)};
    if (i % 6 == 1) s.soft_cap = 20;
    if (i % 6 == 2) s.window = 100;
    s.gather = i % 6 == 3 || i % 6 == 4;
    s.sinks = i % 6 == 5;
    INFO("sequences " << s.sequences << " heads " << s.heads << " group " << s.group << " tokens " << s.tokens
                      << " capacity " << s.capacity << " case " << i % 6);
    CHECK(error_of<D>(s) < 5e-3);  // weights are rounded to bf16 before they meet the values
  }
}

}  // namespace

TEST_CASE("GPU decode attention equals the CPU's at every head dim, and repeats to the bit") {
  if (gpu_missing()) return;
  try_shapes<64>();
  try_shapes<80>();
  try_shapes<96>();
  try_shapes<128>();
  try_shapes<192>();
  try_shapes<256>();
}
