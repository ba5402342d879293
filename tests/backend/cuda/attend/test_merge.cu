// Parts of attention, merged on the GPU: against a double oracle over the whole, sinks counted once, NaN and nothing.
#include <memory>

#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/attend/merge.cuh"
#include "tessera/backend/cuda/attend/prefill/prefill_attention.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

constexpr double no_key = -std::numeric_limits<double>::infinity();

/// One query row's softmax in double.
struct row_sum {
  std::vector<double> out;
  double lse = no_key;
};

/// Over `count` logits and values, and a sink logit that adds to the sum alone.
row_sum softmax_of(const double* logits, const double* values, index_t count, int dim, double sink) {
  row_sum sum{std::vector<double>(std::size_t(dim), 0.0)};
  double top = sink, total = 0;
  for (index_t i = 0; i < count; ++i) top = std::max(top, logits[i]);
  if (top == no_key) return sum;
  for (index_t i = 0; i < count; ++i) total += std::exp(logits[i] - top);
  total += std::exp(sink - top);
  for (index_t i = 0; i < count; ++i) {
    for (int d = 0; d < dim; ++d) {
      sum.out[std::size_t(d)] +=
          std::exp(logits[i] - top) / total * values[std::size_t(i) * std::size_t(dim) + std::size_t(d)];
    }
  }
  sum.lse = top + std::log(total);
  return sum;
}

/// Device rows of one part or of the result.
template <class Out>
struct result_rows {
  index_t sequences, tokens, heads, dim;
  buffer<Out> out;
  buffer<float> lse;
  result_rows(index_t sequences_, index_t tokens_, index_t heads_, index_t dim_)
      : sequences(sequences_),
        tokens(tokens_),
        heads(heads_),
        dim(dim_),
        out(std::size_t(sequences_ * tokens_ * heads_ * dim_)),
        lse(std::size_t(sequences_ * tokens_ * heads_)) {
    out.fill(0xff), lse.fill(0xff);
  }
  rows_view<Out> rows() const { return nhd_rows(out.data, tokens, heads, dim, sequences); }
  rows_view<float> lses() const { return nhd_rows(lse.data, tokens, heads, 1, sequences); }
  attention_part part() const {
    return {nhd_rows<const float>(out.data, tokens, heads, dim, sequences),
            nhd_rows<const float>(lse.data, tokens, heads, 1, sequences)};
  }
};

/// Random rows of `dim`, their tokens dealt out to `parts` parts; merges the parts' sums, which are made in double, and
/// returns the worst error of outputs and log-sum-exps.
template <int Dim, class Out>
double error_of_merge(index_t parts, bool sinks, bool last_is_everything = false) {
  const index_t sequences = draw(1, 3), tokens = draw(1, 4), heads = draw(1, 9);
  const std::size_t rows = std::size_t(sequences * tokens * heads);
  const std::vector<float> no_rows(rows * Dim), no_lses(rows);
  std::vector<std::vector<float>> outs(static_cast<std::size_t>(parts), no_rows);
  std::vector<std::vector<float>> lses(static_cast<std::size_t>(parts), no_lses);
  const auto sink_logits = normal<float>(std::size_t(heads), 3);
  std::vector<row_sum> expected;
  for (std::size_t row = 0; row < rows; ++row) {
    const index_t count = draw(0, 40);
    std::vector<double> logits, values;
    for (const float x : normal<float>(std::size_t(count), 4)) logits.push_back(x);
    for (const float x : normal<float>(std::size_t(count) * Dim)) values.push_back(x);
    expected.push_back(softmax_of(logits.data(), values.data(), count, Dim,
                                  sinks ? double(sink_logits[row % std::size_t(heads)]) : no_key));
    index_t begin = 0;
    for (index_t part = 0; part < parts; ++part) {
      const index_t end = part + 1 == parts ? count : last_is_everything ? 0 : draw(begin, count);
      const row_sum one =
          softmax_of(logits.data() + begin, values.data() + std::size_t(begin) * Dim, end - begin, Dim, no_key);
      lses[std::size_t(part)][row] = float(one.lse);
      for (int d = 0; d < Dim; ++d) {
        // What an empty part's row holds is nobody's business.
        outs[std::size_t(part)][row * Dim + std::size_t(d)] = end > begin ? float(one.out[std::size_t(d)]) : float(NAN);
      }
      begin = end;
    }
  }
  std::vector<std::unique_ptr<result_rows<float>>> stored;
  std::vector<attention_part> views;
  for (index_t part = 0; part < parts; ++part) {
    stored.push_back(std::make_unique<result_rows<float>>(sequences, tokens, heads, Dim));
    stored.back()->out.set(outs[std::size_t(part)]), stored.back()->lse.set(lses[std::size_t(part)]);
    views.push_back(stored.back()->part());
  }
  buffer<float> d_sinks(sink_logits);
  result_rows<Out> merged(sequences, tokens, heads, Dim);
  cuda::merge_parts<Dim>(views, sinks ? d_sinks.data : nullptr, merged.rows(), merged.lses(), nullptr);
  cuda::check(cudaDeviceSynchronize(), "merge");
  const auto got = merged.out.get();
  const auto got_lse = merged.lse.get();
  double worst = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    const row_sum& right = expected[row];
    if (right.lse == no_key ? got_lse[row] != -infinity : !(std::abs(got_lse[row] - right.lse) < 1e-5)) return 1e9;
    for (std::size_t d = 0; d < Dim; ++d) {
      const double error = std::abs(double(float(got[row * Dim + d])) - right.out[d]);
      if (!(error < 1)) return 1e9;
      worst = std::max(worst, error);
    }
  }
  // The same bits again, with the lse or without.
  merged.out.fill(0xff);
  cuda::merge_parts<Dim>(views, sinks ? d_sinks.data : nullptr, merged.rows(), rows_view<float>{}, nullptr);
  cuda::check(cudaDeviceSynchronize(), "merge");
  return same_bits(got, merged.out.get()) ? worst : 1e9;
}

}  // namespace

TEST_CASE("one to five parts merged on the GPU are the whole, and sinks count once") {
  if (gpu_missing()) return;
  for (const index_t parts : {1, 2, 3, 4, 5, 32}) {
    for (const bool sinks : {false, true}) {
      INFO("parts " << parts << " sinks " << sinks);
      CHECK(error_of_merge<128, float>(parts, sinks) < 1e-5);
      CHECK(error_of_merge<64, float>(parts, sinks) < 1e-5);
      CHECK(error_of_merge<80, fp16>(parts, sinks) < 2e-3);
      CHECK(error_of_merge<192, bf16>(parts, sinks) < 2e-2);
      CHECK(error_of_merge<256, float>(parts, sinks, true) < 1e-5);
    }
  }
}

TEST_CASE("any number of parts merges in rounds, and a merge is a part again") {
  if (gpu_missing()) return;
  const index_t heads = 3, rows = 6, parts = 75;
  std::vector<std::unique_ptr<result_rows<float>>> stored;
  std::vector<attention_part> views;
  double top = 1.5, total = std::exp(1.5 - 1.5);
  std::vector<double> lses, value;
  for (index_t i = 0; i < parts; ++i) {
    stored.push_back(std::make_unique<result_rows<float>>(1, 2, heads, 64));
    lses.push_back(double(float(std::sin(double(i))))), value.push_back(double(float(std::cos(double(i) * 2))));
    stored.back()->lse.set(std::vector<float>(std::size_t(rows), float(lses.back())));
    stored.back()->out.set(std::vector<float>(std::size_t(rows) * 64, float(value.back())));
    views.push_back(stored.back()->part());
  }
  double sum = 0;
  for (std::size_t i = 0; i < lses.size(); ++i) {
    total += std::exp(lses[i] - top), sum += std::exp(lses[i] - top) * value[i];
  }
  const std::vector<float> sinks(std::size_t(heads), 1.5f);
  buffer<float> d_sinks(sinks);
  const auto check_rows = [&](const result_rows<float>& merged) {
    cuda::check(cudaDeviceSynchronize(), "merge");
    for (const float x : merged.out.get()) CHECK(std::abs(x - sum / total) < 1e-5);
    for (const float x : merged.lse.get()) CHECK(std::abs(x - (top + std::log(total))) < 1e-5);
  };
  result_rows<float> merged(1, 2, heads, 64), first(1, 2, heads, 64);
  cuda::merge_parts<64>(views, d_sinks.data, merged.rows(), merged.lses(), nullptr);
  check_rows(merged);
  const std::span<const attention_part> all(views);
  cuda::merge_parts<64>(all.first(20), nullptr, first.rows(), first.lses(), nullptr);
  std::vector<attention_part> rest(views.begin() + 20, views.begin() + 45);
  rest.push_back(first.part());
  cuda::merge_parts<64>(rest, nullptr, first.rows(), first.lses(), nullptr);  // the output is one of the parts
  rest.assign(views.begin() + 45, views.end());
  rest.push_back(first.part());
  cuda::merge_parts<64>(rest, d_sinks.data, merged.rows(), merged.lses(), nullptr);
  check_rows(merged);

  result_rows<bf16> small(1, 2, heads, 64);
  CHECK_THROWS_WITH(cuda::merge_parts<64>(views, nullptr, small.rows(), small.lses(), nullptr),
                    contains("parts is 75; expected at most 32"));
}

TEST_CASE("NaN in a part shows in its rows alone, and no part at all is the sink or no_key") {
  if (gpu_missing()) return;
  const index_t heads = 4;
  result_rows<float> a(1, 1, heads, 64), b(1, 1, heads, 64), merged(1, 1, heads, 64);
  // Rows: both parts seen, one empty, one of NaN beside an empty one, one with NaN in its output.
  a.lse.set({0, -infinity, NAN, 0}), b.lse.set({0, 1, -infinity, 0});
  std::vector<float> ones(heads * 64, 1.0f), twos(heads * 64, 2.0f);
  twos[3 * 64 + 5] = NAN;
  a.out.set(ones), b.out.set(twos);
  const std::vector<attention_part> parts = {a.part(), b.part()};
  const std::vector<float> sinks = {-infinity, 1, 5, -infinity};
  buffer<float> d_sinks(sinks);
  for (const bool sink : {false, true}) {
    cuda::merge_parts<64>(parts, sink ? d_sinks.data : nullptr, merged.rows(), merged.lses(), nullptr);
    cuda::check(cudaDeviceSynchronize(), "merge");
    const auto out = merged.out.get(), lse = merged.lse.get();
    for (std::size_t d = 0; d < 64; ++d) {
      CHECK(std::abs(out[d] - 1.5f) < 1e-6f);
      CHECK(std::abs(out[64 + d] - (sink ? 1.0f : 2.0f)) < 1e-6f);
      CHECK(std::isnan(out[128 + d]));
      CHECK(std::isnan(out[192 + d]) == (d == 5));
    }
    CHECK(std::abs(lse[0] - std::log(2.0f)) < 1e-6f);
    CHECK(std::abs(lse[1] - (sink ? 1 + std::log(2.0f) : 1.0f)) < 1e-6f);
    CHECK(std::isnan(lse[2]));
    CHECK(std::abs(lse[3] - std::log(2.0f)) < 1e-6f);
  }
  const std::span<const attention_part> none;
  cuda::merge_parts<64>(none, nullptr, merged.rows(), merged.lses(), nullptr);
  cuda::check(cudaDeviceSynchronize(), "merge");
  for (const float x : merged.out.get()) CHECK(x == 0);
  for (const float x : merged.lse.get()) CHECK(x == -infinity);
  cuda::merge_parts<64>(none, d_sinks.data, merged.rows(), merged.lses(), nullptr);
  cuda::check(cudaDeviceSynchronize(), "merge");
  for (const float x : merged.out.get()) CHECK(x == 0);
  CHECK(same_bits(merged.lse.get(), sinks));
}

TEST_CASE("decode and prefill attention over parts of what is stored merge into attention over all of it") {
  if (gpu_missing()) return;
  constexpr int D = 64;
  using view_type = kv_view<const bf16, D>;
  const index_t heads = 2, group = 3, q_heads = heads * group, tokens = 2, capacity = scaled(900, 200);
  const auto k = normal<bf16>(std::size_t(heads * capacity) * D), v = normal<bf16>(k.size());
  const auto q = normal<bf16>(std::size_t(tokens * q_heads) * D);
  const auto sinks = normal<float>(std::size_t(q_heads), 4);
  std::vector<index_t> positions(static_cast<std::size_t>(capacity));
  std::iota(positions.begin(), positions.end(), 0);
  buffer<bf16> d_k(k), d_v(v), d_q(q);
  buffer<float> d_sinks(sinks);
  buffer<index_t> d_positions(positions), first(std::vector<index_t>{capacity - tokens});
  const logit_rule rule{.sliding_window = capacity / 2, .sink_logits = d_sinks.data};
  const auto device = cuda::device_info::current();
  const cuda::decode_attention<view_type> decode(1, heads, q_heads, tokens, device);
  const cuda::prefill_attention<view_type> prefill(1, heads, q_heads, device);
  buffer<unsigned char> decode_space(decode.workspace_bytes()), prefill_space(prefill.workspace_bytes());

  std::vector<row_sum> expected;
  for (index_t token = 0; token < tokens; ++token) {
    for (index_t h = 0; h < q_heads; ++h) {
      std::vector<double> logits, values;
      for (index_t i = 0; i < capacity; ++i) {
        if (!rule.visible(capacity - tokens + token, i)) continue;
        const std::size_t row = std::size_t(h / group * capacity + i) * D;
        double dot = 0;
        for (std::size_t d = 0; d < D; ++d) {
          dot += double(float(q[std::size_t(token * q_heads + h) * D + d])) * double(float(k[row + d]));
          values.push_back(double(float(v[row + d])));
        }
        logits.push_back(dot / std::sqrt(double(D)));
      }
      expected.push_back(
          softmax_of(logits.data(), values.data(), index_t(logits.size()), D, double(sinks[std::size_t(h)])));
    }
  }
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  decode.prepare(decode_space.data, stream);
  for (const bool in_prefill : {false, true}) {
    for (index_t parts = 1; parts <= 5; ++parts) {
      std::vector<index_t> ends = {0};
      for (index_t i = 1; i < parts; ++i) ends.push_back(draw(0, capacity));
      ends.push_back(capacity);
      std::sort(ends.begin(), ends.end());
      std::vector<index_t> lengths;
      for (std::size_t i = 0; i < std::size_t(parts); ++i) lengths.push_back(ends[i + 1] - ends[i]);
      buffer<index_t> d_lengths(lengths);
      std::vector<std::unique_ptr<result_rows<float>>> stored;
      std::vector<attention_part> views;
      for (index_t i = 0; i < parts; ++i) {
        stored.push_back(std::make_unique<result_rows<float>>(1, tokens, q_heads, D));
        views.push_back(stored.back()->part());
      }
      result_rows<float> merged(1, tokens, q_heads, D);
      cuda::check(cudaDeviceSynchronize(), "poison");
      graph step(stream, [&] {
        for (std::size_t i = 0; i < std::size_t(parts); ++i) {
          view_type view;
          view.k = d_k.data + offset_t(ends[i]) * D, view.v = d_v.data + offset_t(ends[i]) * D;
          view.k_strides = view.v_strides = {0, offset_t(capacity) * D, D, 1};
          view.sequences = 1, view.kv_heads = heads;
          view.lengths = d_lengths.data + i;
          view.positions = d_positions.data + ends[i];
          const auto rows = nhd_rows<const bf16>(d_q.data, tokens, q_heads, D);
          if (in_prefill) {
            prefill.run_part({view, rows, first.data, rule, stored[i]->rows(), stored[i]->lses()}, prefill_space.data,
                             stream);
          } else {
            decode.run_part({view, rows, first.data, rule, stored[i]->rows(), stored[i]->lses(), {}}, decode_space.data,
                            stream);
          }
        }
        cuda::merge_parts<D>(views, rule.sink_logits, merged.rows(), merged.lses(), stream);
      });
      step.launch();
      const auto got = merged.out.get();
      const auto lse = merged.lse.get();
      for (std::size_t row = 0; row < expected.size(); ++row) {
        double difference = 0, size = 0;
        for (std::size_t d = 0; d < D; ++d) {
          difference += std::pow(double(got[row * D + d]) - expected[row].out[d], 2);
          size += std::pow(expected[row].out[d], 2);
        }
        INFO("prefill " << in_prefill << " parts " << parts << " row " << row);
        CHECK(std::sqrt(difference / size) < 1.2e-2);  // weights are rounded to 16 bits before they meet the values
        CHECK(std::abs(lse[row] - expected[row].lse) < 1e-3);
      }
    }
  }
  cudaStreamDestroy(stream);
}

TEST_CASE("a merge refuses parts of other shapes, without lse, or out of line, before a launch") {
  if (gpu_missing()) return;
  result_rows<float> a(1, 2, 4, 64), b(1, 1, 4, 64), merged(1, 2, 4, 64);
  const auto refused = [&](const attention_part& part, const char* name) {
    const std::vector<attention_part> parts = {a.part(), part};
    CHECK_THROWS_WITH(cuda::merge_parts<64>(parts, nullptr, merged.rows(), merged.lses(), nullptr), contains(name));
  };
  refused(b.part(), "out of a part is [1, 1, 4]; expected [1, 2, 4]");
  refused({a.part().out, b.part().lse}, "lse of a part is [1, 1, 4]");
  auto bad = a.part();
  bad.lse.data = nullptr;
  refused(bad, "lse of a part is null");
  bad = a.part();
  bad.out.data += 2;
  refused(bad, "address of out of a part");
  bad = a.part();
  bad.out.token_stride += 1;
  refused(bad, "stride of out of a part");
}
