// One decode attention problem on the host and on the device, for its tests.
#pragma once

#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "tessera/backend/cpu/attend/attend.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"

namespace decode_test {

using namespace tessera;
using namespace gpu_test;

struct decode_shape {
  index_t sequences = 2, heads = 2, group = 4, tokens = 1, capacity = 500;
  float soft_cap = 0;
  index_t window = 0;
  bool gather = false, sinks = false;
  bool by_offsets = draw(0, 1) == 1;  // of a selection, whose stride then does not say how long its rows may be
  index_t usual_row = 0;
  index_t most_sequences = 0, max_tokens = 0;  // of the operation; 0: those of the problem
  int multiprocessors = 0;                     // that the operation believes in; 0: the device's
};

constexpr index_t page = 16;

/// Random rows as `E` stores them, of very different sizes where they have scales.
template <class E>
std::vector<typename E::stored_type> random_rows(std::size_t rows, int dim, std::vector<float>& scales) {
  const auto units = std::size_t(dim / elements_of_unit<typename E::stored_type>);
  std::vector<typename E::stored_type> stored(rows * units);
  scales.resize(rows);
  for (std::size_t row = 0; row < rows; ++row) {
    const auto given = normal<float>(std::size_t(dim), E::scaled ? float(draw(1, 8)) / 4 : 1.0f);
    scales[row] = encode_row<E>(given.data(), dim, stored.data() + row * units, 1);
  }
  return stored;
}

/// One problem on the host and on the device. `E`: an element type, or an encoding of rows.
template <class E, int D, class Table = contiguous, int Dv = D, class Out = float>
struct decode_case {
  using view_type = kv_view<const E, D, Table, Dv>;
  using T = typename view_type::element_type;
  using encoding_type = typename view_type::encoding_type;
  using stored_type = typename encoding_type::stored_type;
  using problem_type = cuda::decode_problem<view_type, Out>;
  static constexpr bool paged = std::is_same_v<Table, block_table>;
  static constexpr int k_units = view_type::k_units, v_units = view_type::v_units;
  // e4m3 is multiplied exactly, any other encoding is rounded to 16 bits first.
  static constexpr float lse_margin = view_type::is_raw || std::is_same_v<stored_type, fp8> ? 0.01f : 0.05f;

  decode_shape s;
  index_t rows, q_heads, capacity;
  std::size_t queries;
  std::vector<float> k_scales, v_scales;
  std::vector<stored_type> k, v;
  std::vector<T> q;
  std::vector<float> sinks;
  std::vector<index_t> lengths, first, chosen, counts, positions, table;
  buffer<stored_type> d_k, d_v;
  buffer<T> d_q;
  buffer<float> d_k_scales, d_v_scales;
  buffer<float> d_sinks, lse;
  buffer<Out> out;
  buffer<index_t> d_lengths, d_first, d_chosen, d_counts, d_positions, d_table;
  buffer<offset_t> d_offsets;
  cpu::executor workers;

  explicit decode_case(const decode_shape& of)
      : s(of),
        rows(s.sequences * s.heads),
        q_heads(s.heads * s.group),
        capacity(ceil_div(s.capacity, page) * page),
        queries(std::size_t(s.sequences * s.tokens * q_heads)),
        k(random_rows<encoding_type>(std::size_t(rows) * std::size_t(capacity), D, k_scales)),
        v(random_rows<encoding_type>(std::size_t(rows) * std::size_t(capacity), Dv, v_scales)),
        q(normal<T>(queries * D)),
        sinks(normal<float>(std::size_t(q_heads))),
        lengths(std::size_t(rows)),
        first(std::size_t(s.sequences), capacity - s.tokens),
        chosen(std::size_t(rows) * std::size_t(capacity), no_index),
        counts(std::size_t(rows)),
        positions(std::size_t(rows) * std::size_t(capacity)),
        table(std::size_t(s.sequences) * std::size_t(capacity / page)),
        d_k(k),
        d_v(v),
        d_q(q),
        d_k_scales(k_scales),
        d_v_scales(v_scales),
        d_sinks(sinks),
        lse(queries),
        out(queries * Dv),
        d_lengths(std::size_t(rows)),
        d_first(first),
        d_chosen(chosen.size()),
        d_counts(std::size_t(rows)),
        d_positions(positions.size()),
        d_table(table.size()),
        d_offsets(std::size_t(rows)) {
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = index_t(i);
    std::shuffle(table.begin(), table.end(), rng());
    d_table.set(table);
    std::vector<offset_t> offsets;
    for (index_t r = 0; r < rows; ++r) offsets.push_back(offset_t(r) * capacity);
    d_offsets.set(offsets);
    std::vector<index_t> drawn(static_cast<std::size_t>(rows));
    // Some rows hold nothing and some one token, the others whatever.
    for (auto& length : drawn) length = draw(0, 5) == 0 ? draw(0, 1) : draw(0, capacity);
    set_lengths(drawn);
  }

  void set_lengths(const std::vector<index_t>& to) {
    lengths = to;
    for (index_t r = 0; r < rows; ++r) {
      const index_t length = lengths[std::size_t(r)];
      // As after an eviction: a gap before the newest tokens.
      for (index_t i = 0; i < capacity; ++i) {
        positions[std::size_t(r * capacity + i)] = i + (i >= length - s.tokens ? capacity - length : 0);
      }
      counts[std::size_t(r)] = 0;
      for (index_t i = 0; i < length; ++i) {
        if (draw(0, 2) == 0) chosen[std::size_t(r * capacity + counts[std::size_t(r)]++)] = i;
      }
    }
    d_lengths.set(lengths), d_positions.set(positions), d_chosen.set(chosen), d_counts.set(counts);
  }

  view_type view_of(const stored_type* keys, const stored_type* values, const float* key_scales,
                    const float* value_scales, const index_t* length, const index_t* position,
                    const index_t* blocks) const {
    view_type view;
    view.k = keys, view.v = values;
    const index_t step = paged ? page : capacity;
    if (encoding_type::scaled) view.scales = {key_scales, value_scales, offset_t(s.heads) * step, step, 1};
    if constexpr (paged) {
      view.k_strides = {offset_t(s.heads) * page * k_units, offset_t(page) * k_units, k_units, 1};
      view.v_strides = {offset_t(s.heads) * page * v_units, offset_t(page) * v_units, v_units, 1};
      view.table = {blocks, page, capacity / page, 0};
    } else {
      view.k_strides = {offset_t(s.heads) * capacity * k_units, offset_t(capacity) * k_units, k_units, 1};
      view.v_strides = {offset_t(s.heads) * capacity * v_units, offset_t(capacity) * v_units, v_units, 1};
    }
    view.sequences = s.sequences, view.kv_heads = s.heads;
    view.lengths = length, view.length_strides = {s.heads, 1};
    view.positions = position, view.position_strides = {offset_t(s.heads) * capacity, capacity};
    return view;
  }

  problem_type problem() const {
    problem_type p;
    p.view =
        view_of(d_k.data, d_v.data, d_k_scales.data, d_v_scales.data, d_lengths.data, d_positions.data, d_table.data);
    p.q = nhd_rows<const T>(d_q.data, s.tokens, q_heads, D, s.sequences);
    p.first_position = d_first.data;
    p.rule =
        logit_rule{.soft_cap = s.soft_cap, .sliding_window = s.window, .sink_logits = s.sinks ? d_sinks.data : nullptr};
    p.out = nhd_rows(out.data, s.tokens, q_heads, Dv, s.sequences);
    p.lse = nhd_rows(lse.data, s.tokens, q_heads, 1, s.sequences);
    p.usual_row = s.usual_row;
    p.chosen = {};
    if (!s.gather) return p;
    p.chosen = {d_chosen.data, d_counts.data, s.by_offsets ? d_offsets.data : nullptr, s.by_offsets ? 0 : capacity};
    return p;
  }
  template <cuda::decode_split Split = cuda::decode_split::each_step>
  cuda::decode_attention<view_type, Out, Split> operation() const {
    auto device = cuda::device_info::current();
    if (s.multiprocessors) device.multiprocessors = s.multiprocessors;
    return {s.most_sequences ? s.most_sequences : s.sequences, s.heads, q_heads, s.max_tokens ? s.max_tokens : s.tokens,
            device};
  }
  void poison() { out.fill(0xff), lse.fill(0xff); }

  /// Relative error of what the device wrote, over the outputs; large where a log-sum-exp or an empty row is wrong.
  double error_now() {
    std::vector<float> expected(queries * Dv), expected_lse(queries);
    cpu::decode_workspace scratch;
    const selection_view selected{chosen.data(), counts.data(), nullptr, capacity};
    const logit_rule rule{
        .soft_cap = s.soft_cap, .sliding_window = s.window, .sink_logits = s.sinks ? sinks.data() : nullptr};
    cpu::decode_attention(
        view_of(k.data(), v.data(), k_scales.data(), v_scales.data(), lengths.data(), positions.data(), table.data()),
        cpu::query_rows<T>{nhd_rows<const T>(q.data(), s.tokens, q_heads, D, s.sequences), first.data()}, rule,
        s.gather ? &selected : nullptr,
        {nhd_rows(expected.data(), s.tokens, q_heads, Dv, s.sequences),
         nhd_rows(expected_lse.data(), s.tokens, q_heads, 1, s.sequences)},
        scratch, workers);
    const auto got = out.get();
    const auto got_lse = lse.get();
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const float value = float(got[i]), other = expected[i];
      if (!std::isfinite(other)) {
        if (std::isnan(other) ? !std::isnan(value) : value != other) return 1e9;
        continue;
      }
      if (!std::isfinite(value) || (expected_lse[i / Dv] == -infinity && value != 0)) return 1e9;
      difference += std::pow(double(value) - other, 2);
      size += std::pow(double(other), 2);
    }
    for (std::size_t i = 0; i < got_lse.size(); ++i) {
      const float value = got_lse[i], other = expected_lse[i];
      const bool same = std::isfinite(other) ? std::abs(value - other) < lse_margin
                                             : (std::isnan(other) ? std::isnan(value) : value == other);
      if (!same) return 1e9;
    }
    return size > 0 ? std::sqrt(difference / size) : 0;
  }
};

/// The error of one case, run twice: the second run must repeat the first to the bit.
template <class Case>
double error_of(const decode_shape& s) {
  Case one(s);
  const auto op = one.operation();
  buffer<unsigned char> workspace(op.workspace_bytes());
  workspace.fill(0xff);
  op.prepare(workspace.data, nullptr);
  std::vector<decltype(one.out.get())> outs;
  for (int run = 0; run < 2; ++run) {
    one.poison();
    op.run(one.problem(), workspace.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "decode attention");
    outs.push_back(one.out.get());
  }
  return same_bits(outs[0], outs[1]) ? one.error_now() : 1e9;
}

template <class Case>
void try_shapes(int cases, double bound = 5e-3) {  // weights are rounded to 16 bits before they meet the values
  for (int i = 0; i < scaled(cases, 6); ++i) {     // each sort at least once
    const index_t groups[] = {1, 2, 3, 4, 5, 7, 8, 16};
    decode_shape s{draw(1, 3), draw(1, 4), groups[draw(0, 7)], draw(1, 8), draw(8, shrunk(2000, 600))};
    if (i % 6 == 1) s.soft_cap = 20;
    if (i % 6 == 2) s.window = 100;
    s.gather = i % 6 == 3 || i % 6 == 4;
    s.sinks = i % 6 == 5;
    if (i % 2) s.most_sequences = s.sequences + draw(0, 3), s.max_tokens = s.tokens + draw(0, 8);
    INFO("sequences " << s.sequences << " heads " << s.heads << " group " << s.group << " tokens " << s.tokens
                      << " capacity " << s.capacity << " case " << i);
    CHECK(error_of<Case>(s) < bound);
  }
}

/// Spoils elements of some tokens of a row, and returns the error of the step.
template <class Case>
double error_of_spoiled(const decode_shape& s, bool keys, float special, const std::vector<index_t>& back) {
  Case one(s);
  // Full rows: the step's own tokens are the last ones.
  one.set_lengths(std::vector<index_t>(std::size_t(one.rows), one.capacity));
  const auto units = index_t(one.v.size() / (std::size_t(one.rows) * std::size_t(one.capacity)));
  for (index_t row = 0; row < one.rows; row += 2) {
    for (const index_t i : back) {
      const auto token = std::size_t(row * one.capacity + one.capacity - i);
      if constexpr (finite_only<typename Case::encoding_type>) {
        (keys ? one.k_scales : one.v_scales)[token] = special;
        continue;
      }
      auto& spoiled = (keys ? one.k : one.v)[token * std::size_t(units) + std::size_t(draw(0, units - 1))];
      if constexpr (element_block<typename Case::stored_type>) {
        spoiled.step = fp16(special);
      } else {
        spoiled = typename Case::stored_type(special);
      }
    }
  }
  one.d_k.set(one.k), one.d_v.set(one.v), one.d_k_scales.set(one.k_scales), one.d_v_scales.set(one.v_scales);
  const auto op = one.operation();
  buffer<unsigned char> workspace(op.workspace_bytes());
  op.prepare(workspace.data, nullptr);
  one.poison();
  op.run(one.problem(), workspace.data, nullptr);
  cuda::check(cudaDeviceSynchronize(), "decode attention");
  return one.error_now();
}

}  // namespace decode_test
