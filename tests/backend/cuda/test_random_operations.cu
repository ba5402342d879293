// Calls of the device's operations with random arguments, valid and not: a refused one writes nothing, another gives what
// the CPU's gives.
#include "backend/cuda/device.hpp"
#include "support/small_batch.hpp"
#include "tessera/backend/cpu/attend/attend.hpp"
#include "tessera/backend/cpu/store/pack.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/attend/prefill/prefill_attention.cuh"
#include "tessera/backend/cuda/store/append.cuh"
#include "tessera/backend/cuda/store/pack.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

using support::must;
using support::operation_call;
using support::small_batch;
constexpr int dim = small_batch::dim;
constexpr index_t most_tokens_of_a_step = 4;

std::vector<float>& in_bf16(std::vector<float>& values) {
  for (float& x : values) x = float(bf16(x));
  return values;
}
std::vector<bf16> as_bf16(const std::vector<float>& values) {
  std::vector<bf16> all;
  for (const float x : values) all.push_back(bf16(x));
  return all;
}
std::vector<float> as_floats(const buffer<bf16>& values) {
  std::vector<float> all;
  for (const bf16 x : values.get()) all.push_back(float(x));
  return all;
}

/// The rows of a small batch on both sides, which bf16 holds exactly.
class device_operations : public small_batch {
  using device_view = kv_view<bf16, dim, ragged>;

 public:
  explicit device_operations(support::rng& random)
      : small_batch(random),
        d_k_(as_bf16(in_bf16(k_))),
        d_v_(as_bf16(in_bf16(v_))),
        d_inputs_(as_bf16(in_bf16(inputs_))),
        d_begins_(begins_),
        d_lengths_(lengths_),
        d_positions_(positions_),
        d_first_(first_),
        d_sinks_(sinks_),
        decode_(sequences_, kv_heads_, q_heads(), most_tokens_of_a_step, device_),
        prefill_(sequences_, kv_heads_, q_heads(), device_),
        append_(sequences_, kv_heads_),
        fresh_(sequences_, kv_heads_, room, device_),
        in_place_(sequences_, kv_heads_, room, device_),
        decoding_(decode_.workspace_bytes()),
        prefilling_(prefill_.workspace_bytes()),
        moving_(in_place_.workspace_bytes()) {
    decode_.prepare(decoding_.data, nullptr);
    in_place_.prepare(moving_.data, nullptr);
  }

  static constexpr const char* names[] = {"prefill_attention", "decode_attention", "decode_attention", "append",
                                          "pack"};

  void call(const operation_call& now) {
    random_ = support::rng(now.seed);
    switch (now.operation) {
      case 0:
        return attend(false);
      case 1:
      case 2:
        return attend(true);
      case 3:
        return append();
      default:
        return pack();
    }
  }

 private:
  device_view on_device(const buffer<bf16>& k, const buffer<bf16>& v) const {
    device_view all;
    all.k = k.data;
    all.v = v.data;
    all.k_strides = all.v_strides = {0, 0, dim, 1};
    all.sequences = sequences_;
    all.kv_heads = kv_heads_;
    all.lengths = d_lengths_.data;
    all.length_strides = {kv_heads_, 1};
    all.positions = d_positions_.data;
    all.position_begin = d_begins_.data;
    all.table = {d_begins_.data, kv_heads_};
    return all;
  }
  /// The same rows in the device's copy of the inputs.
  rows_view<const bf16> there(const rows_view<const float>& rows) const {
    return {d_inputs_.data + (rows.data - inputs_.data()),
            rows.sequence_stride,
            rows.token_stride,
            rows.head_stride,
            rows.sequences,
            rows.tokens,
            rows.heads,
            rows.dim};
  }
  template <class T>
  static rows_view<T> with_data(rows_view<T> rows, T* data) {
    rows.data = data;
    return rows;
  }
  /// One thing is null, or does not begin on 16 bytes: what no view of a shape can say.
  template <class Rows>
  void misplace(Rows& q, rows_view<float>& out, bool& right) {
    if (!random_.chance(0.06)) return;
    right = false;
    switch (random_.between(0, 2)) {
      case 0:
        q.data = nullptr;
        return;
      case 1:
        out.data = nullptr;
        return;
      default:
        ++q.data;
    }
  }

  void attend(bool step) {
    bool right = true;
    const index_t tokens = random_.between(1, step ? most_tokens_of_a_step : most_tokens_of_q);
    logit_rule rule;
    rule.soft_cap = random_.chance(0.2) ? 5.0f : 0.0f;
    rule.sliding_window = random_.chance(0.3) ? random_.between(1, 30) : 0;
    const bool sinks = random_.chance(0.3);
    const auto q = queries(tokens, right);
    std::vector<float> out(std::size_t(sequences_ * tokens * q_heads() * dim), 3.0f),
        lse(std::size_t(sequences_ * tokens * q_heads()), 7.0f);
    buffer<float> d_out(out), d_lse(lse);
    auto out_rows = nhd_rows(d_out.data, tokens, q_heads(), dim, sequences_);
    auto lse_rows = random_.chance(0.6) ? nhd_rows(d_lse.data, tokens, q_heads(), 1, sequences_) : rows_view<float>{};
    spoil(out_rows, right);
    auto d_q = there(q);
    misplace(d_q, out_rows, right);
    const selection chosen = some_slots();
    const bool selects = step && random_.chance(0.5);
    const buffer<index_t> indices(chosen.indices), counts(chosen.counts);
    const buffer<offset_t> offsets(chosen.offsets);
    rule.sink_logits = sinks ? d_sinks_.data : nullptr;
    const auto view = on_device(d_k_, d_v_);
    const auto made = [&] {
      if (step) {
        cuda::decode_problem<device_view> problem{view, d_q, d_first_.data, rule, out_rows, lse_rows, {}};
        if (selects) problem.chosen = {indices.data, counts.data, offsets.data, 0};
        decode_.run(problem, decoding_.data, nullptr);
      } else {
        prefill_.run({view, d_q, d_first_.data, rule, out_rows, lse_rows}, prefilling_.data, nullptr);
      }
    };
    const bool no = refused(step ? "decode_attention" : "prefill_attention", right, {}, made);
    const auto got = d_out.get(), got_lse = d_lse.get();
    if (no) {
      must(got == out && got_lse == lse, "a refused call writes nothing",
           step ? "decode_attention" : "prefill_attention");
      return;
    }
    rule.sink_logits = sinks ? sinks_.data() : nullptr;
    const cpu::attention_output to{nhd_rows(out.data(), tokens, q_heads(), dim, sequences_),
                                   nhd_rows(lse.data(), tokens, q_heads(), 1, sequences_)};
    const selection_view read = chosen.view();
    const cpu::query_rows<float> asked{q, first_.data()};
    if (step) {
      cpu::decode_workspace scratch;
      decode_attention(small_batch::view(), asked, rule, selects ? &read : nullptr, to, scratch, one_);
    } else {
      prefill_attention(small_batch::view(), asked, rule, to, one_);
    }
    double difference = 0, size = 1e-30;
    for (std::size_t i = 0; i < out.size(); ++i) {
      difference += (double(got[i]) - out[i]) * (double(got[i]) - out[i]);
      size += double(out[i]) * out[i];
    }
    const double error = std::sqrt(difference / size);
    must(error < 8e-3, "attention is the CPU's", "error ", error);
    for (std::size_t i = 0; lse_rows.data && i < lse.size(); ++i) {
      must(got_lse[i] == lse[i] || got_lse[i] == Approx(lse[i]).margin(4e-3), "log-sum-exps are the CPU's", "number ",
           i, ": ", got_lse[i], ", of the CPU ", lse[i]);
    }
  }

  void append() {
    bool right = true;
    const index_t tokens = random_.between(1, room - 20);
    auto k = nhd_rows<const float>(inputs_.data(), tokens, kv_heads_, dim, sequences_), v = k;
    v.data += random_.pick({1, int(dim)});  // rows need not be aligned
    spoil(random_.chance(0.5) ? k : v, right);
    std::vector<float> keys = k_, values = v_;
    buffer<bf16> d_keys(as_bf16(keys)), d_values(as_bf16(values));
    append_problem<device_view, bf16> problem;
    problem.view = on_device(d_keys, d_values);
    problem.k = there(k);
    problem.v = there(v);
    if (random_.chance(0.03)) {
      (random_.chance(0.5) ? problem.k : problem.v).data = nullptr;
      right = false;
    }
    if (!refused("append", right, {}, [&] { append_.run(problem, nullptr, nullptr); }))
      cpu::append(small_batch::view(keys, values), k, v);
    must(as_floats(d_keys) == keys && as_floats(d_values) == values, "append writes what the CPU's writes", "tokens ",
         tokens);
  }

  void pack() {
    const selection chosen = some_slots();
    std::vector<float> keys = k_, values = v_;
    const buffer<bf16> d_keys(as_bf16(keys)), d_values(as_bf16(values));
    const buffer<index_t> indices(chosen.indices), counts(chosen.counts);
    const buffer<offset_t> offsets(chosen.offsets);
    device_view to = on_device(d_keys, d_values);
    const bool in_place = random_.chance(0.5);
    const device_view from = in_place ? to : on_device(d_k_, d_v_);
    const bool right = !random_.chance(0.1);
    if (!right) {
      if (in_place && random_.chance(0.3)) {
        to.k += dim;
      } else {
        (random_.chance(0.5) ? to.sequences : to.kv_heads) += random_.pick({-1, 1});
      }
    }
    const pack_problem<device_view, device_view> problem{from, {indices.data, counts.data, offsets.data, 0}, to};
    if (!refused("pack", right, {}, [&] {
          in_place ? in_place_.run(problem, moving_.data, nullptr) : fresh_.run(problem, nullptr, nullptr);
        })) {
      const auto host = small_batch::view(keys, values);
      cpu::pack(in_place ? host : small_batch::view(), chosen.view(), host, one_);
      // Behind what is kept anything may stand.
      const auto got_keys = as_floats(d_keys), got_values = as_floats(d_values);
      for (index_t row = 0; row < rows(); ++row) {
        const auto begin = offset_t(begins_[std::size_t(row)]) * dim,
                   end = begin + offset_t(chosen.counts[std::size_t(row)]) * dim;
        const bool is_same = std::equal(keys.begin() + begin, keys.begin() + end, got_keys.begin() + begin) &&
                             std::equal(values.begin() + begin, values.begin() + end, got_values.begin() + begin);
        must(is_same, "pack brings together what the CPU's does", "row ", row);
      }
      return;
    }
    must(as_floats(d_keys) == keys && as_floats(d_values) == values, "a refused call writes nothing", "pack");
  }

  cuda::device_info device_ = cuda::device_info::current();
  cpu::executor one_{1};
  buffer<bf16> d_k_, d_v_, d_inputs_;
  buffer<offset_t> d_begins_;
  buffer<index_t> d_lengths_, d_positions_, d_first_;
  buffer<float> d_sinks_;
  cuda::decode_attention<device_view> decode_;
  cuda::prefill_attention<device_view> prefill_;
  cuda::append<device_view, bf16> append_;
  cuda::pack<device_view, device_view> fresh_;
  cuda::pack<device_view, device_view, true> in_place_;
  buffer<unsigned char> decoding_, prefilling_, moving_;
};

}  // namespace

TEST_CASE("random calls of the operations do what the contract says on the device", "[gpu][calls]") {
  if (gpu_missing()) return;
  constexpr index_t at_once = 100;  // over one batch
  for (index_t done = 0, calls = support::scaled(3000); done < calls; done += at_once) {
    const auto seed = std::uint64_t(80001 + done);
    const std::string wrong = support::wrong_of_operations<device_operations>(seed, std::min(at_once, calls - done));
    REQUIRE(wrong == "");
  }
}
