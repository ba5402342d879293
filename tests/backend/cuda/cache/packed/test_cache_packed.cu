// The CUDA cache of packed rows: against the CPU's over shapes, segments and turns; recorded steps; what it refuses.
#include "backend/cuda/cache/cases/steps_case.hpp"
#include "tessera/backend/cuda/store/packed/unpack_rows.cuh"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/fp8_rows.hpp"
#include "tessera/layout/ragged_pages.hpp"
#include "tessera/methods/h2o.hpp"
#include "tessera/methods/mosaickv.hpp"
#include "tessera/methods/quest.hpp"
#include "tessera/methods/snapkv.hpp"
#include "tessera/methods/think.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

// What a first stage drops in steps or in pages, and what steps score by another index, is not packed on the device.
static_assert(runs_on_devices<mosaickv<bf16, 64>> && runs_on_devices<think<fp16, 128>>);
static_assert(runs_on_devices<snapkv<bf16, 64, 64, mosaic_rows<dense<bf16, 64>>>>);
static_assert(runs_on_devices<snapkv<bf16, 64, 64, mosaic_rows<stored<dense_rows<bf16, 64>, fixed_pages<16>>>>>);
static_assert(!runs_on_devices<snapkv<bf16, 64, 64, mosaic_rows<stored<dense_rows<bf16, 64>, ragged_pages>>>>);
static_assert(!runs_on_devices<h2o<bf16, 64, 64, mosaic_rows<dense<bf16, 64>>>>);
static_assert(!runs_on_devices<quest<bf16, 64, 64, mosaic_rows<dense<bf16, 64>>>>);
static_assert(!runs_on_devices<mosaickv<bf16, 64, 64, stored<fp8_rows<bf16, 64>, runs>>>);

/// Side by side with the CPU: what is stored and read is the same, outputs to rounding. What is rotated keeps every element: which of a
/// vector's are the largest hangs on the last bits of a basis, and one other element of a key is another logit.
template <class Method>
class twin_caches {
  using T = typename Method::layout_type::element_type;
  static constexpr int D = Method::layout_type::k_dim, Dv = Method::layout_type::v_dim;

 public:
  twin_caches(const Method& method, const model_shape& shape, index_t sequences, index_t tokens)
      : shape_(shape),
        host_(shape, method, std::make_shared<cpu::executor>(1)),
        device_(shape, method, options(sequences + 1, tokens)) {
    for (index_t i = 0; i < sequences; ++i) ids_.push_back(device_.open()), host_.open();
  }

  void prompt(index_t id, index_t tokens, index_t chunk) {
    for (index_t done = 0; done < tokens; done += chunk) {
      const index_t n = std::min(chunk, tokens - done);
      for (index_t layer = 0; layer < shape_.layers; ++layer) {
        const step_rows<T> x(1, n, shape_, D);
        host_.prefill(layer, id, x.rows(x.q.data(), x.q_heads), x.rows(x.k.data(), x.kv_heads),
                      x.rows(x.v.data(), x.kv_heads));
        device_.prefill(layer, id, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                        x.rows(x.dv.data, x.kv_heads), nullptr);
        std::vector<float> out(x.q.size());
        buffer<float> dout(out.size());
        host_.prefill_attention(layer, id, x.rows(x.q.data(), x.q_heads), nhd_rows(out.data(), n, x.q_heads, Dv));
        device_.prefill_attention(layer, id, x.rows(x.dq.data, x.q_heads), nhd_rows(dout.data, n, x.q_heads, Dv), {},
                                  nullptr);
        note(relative_error(dout.get(), out));
      }
    }
    host_.end_prefill(id);
    device_.end_prefill(id, nullptr);
    compare_stored();
  }
  /// Finished segments are not copied, the last one is.
  void fork(index_t id) {
    ids_.push_back(device_.fork(id));
    REQUIRE(host_.fork(id) == ids_.back());
    const auto segments = [&](index_t of) {
      const auto view = device_.view(0, of);
      return cuda::downloaded(view.segments, std::size_t(cuda::downloaded(view.counts, 1)[0]));
    };
    const auto own = segments(ids_.back()), shared = segments(id);
    REQUIRE(own.size() == shared.size());
    for (std::size_t i = 0; i < own.size(); ++i) CHECK((own[i].k.values == shared[i].k.values) == (i + 1 < own.size()));
  }
  void close(index_t id) {
    host_.close(id), device_.close(id);
    std::erase(ids_, id);
  }
  void step(index_t tokens) {
    const index_t batch = index_t(ids_.size());
    std::swap(ids_.front(), ids_.back());
    const auto host_step = host_.prepare_step(ids_, tokens), device_step = device_.prepare_step(ids_, tokens, nullptr);
    device_.begin_step(device_step, nullptr);
    host_.trace_attended(true);
    device_.trace_attended(true);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      const step_rows<T> x(batch, tokens, shape_, D);
      std::vector<float> out(x.q.size()), lse(out.size() / D);
      buffer<float> dout(out.size()), dlse(lse.size());
      host_.decode(layer, host_step, x.rows(x.q.data(), x.q_heads), x.rows(x.k.data(), x.kv_heads),
                   x.rows(x.v.data(), x.kv_heads), nhd_rows(out.data(), tokens, x.q_heads, Dv, batch),
                   nhd_rows(lse.data(), tokens, x.q_heads, 1, batch));
      device_.decode(layer, device_step, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                     x.rows(x.dv.data, x.kv_heads), nhd_rows(dout.data, tokens, x.q_heads, Dv, batch),
                     nhd_rows(dlse.data, tokens, x.q_heads, 1, batch), nullptr);
      bool alike = true;
      for (const index_t id : ids_) {
        for (index_t h = 0; h < shape_.kv_heads; ++h) {
          const auto &expected = host_.attended(layer, id)[std::size_t(h)],
                     &got = device_.attended(layer, id)[std::size_t(h)];
          ++choices;
          if (got == expected) continue;
          REQUIRE(got.size() == expected.size());
          ++swapped, alike = false;
        }
      }
      if (!alike) continue;  // other blocks, other outputs; what is stored is alike
      note(relative_error(dout.get(), out));
      const auto got = dlse.get();
      for (std::size_t i = 0; i < lse.size(); ++i) worst_lse = std::max(worst_lse, std::abs(double(got[i]) - lse[i]));
    }
    compare_stored();
    for (const index_t id : ids_) REQUIRE(host_.bytes_read(id) <= device_.bytes_read(id));
  }
  /// What both store of a sequence in the last layer, in the engine's basis. Behind a prompt: what steps have filled, the device packs before
  /// the next one.
  double difference_of_rows(index_t id) {
    const index_t layer = shape_.layers - 1, slots = host_.next_position(id);
    const auto view = host_.view(layer, id);
    std::vector<float> keys, values;
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      for (index_t slot = 0; slot < slots; ++slot) {
        float key[D], value[Dv];
        load_key(view, 0, h, slot, key);
        load_value(view, 0, h, slot, value);
        keys.insert(keys.end(), key, key + D);
        values.insert(values.end(), value, value + Dv);
      }
    }
    buffer<float> k(keys.size()), v(values.size());
    cuda::unpack_rows(device_.view(layer, id), slots, k.data, v.data, nullptr);
    return std::max(relative_error(k.get(), keys), relative_error(v.get(), values));
  }
  double worst = 0, worst_lse = 0;
  index_t choices = 0, swapped = 0;

 private:
  static cuda::cache_options options(index_t sequences, index_t tokens) {
    cuda::cache_options chosen;
    chosen.sequences = sequences;
    chosen.tokens = tokens;
    chosen.step_tokens = 8;
    return chosen;
  }
  void note(double error) { worst = std::max(worst, error); }
  void compare_stored() {
    for (const index_t id : ids_) {
      REQUIRE(host_.next_position(id) == device_.next_position(id));
      REQUIRE(host_.positions(shape_.layers - 1, id, 0) == device_.positions(shape_.layers - 1, id, 0));
    }
  }

  model_shape shape_;
  cache<Method> host_;
  cuda::cache<Method> device_;
  std::vector<index_t> ids_;
};

/// Several segments, turns, and steps that fill tails. Prompts leave no segment with fewer rows than channels: what others lack of the
/// space is any basis, and later tokens join it.
template <class Method>
void hold_twins(const Method& method, const model_shape& shape, double margin) {
  INFO("layers " << shape.layers << ", q_heads " << shape.q_heads << ", kv_heads " << shape.kv_heads);
  twin_caches<Method> twins(method, shape, 2, 2048);
  for (const index_t id : {0, 1}) {
    const index_t segment = method.layout.rows.segment;
    twins.prompt(id, segment < 300 ? 2 * segment + draw(0, 31) : draw(300, 600), draw(100, 400));
    CHECK(twins.difference_of_rows(id) < margin);
  }
  for (index_t i = 0; i < shrunk(24, 6); ++i) twins.step(draw(0, 2) ? 1 : draw(2, 8));
  twins.prompt(0, draw(1, 200), 150);  // joins the last segment
  CHECK(twins.difference_of_rows(0) < margin);
  for (index_t i = 0; i < shrunk(12, 4); ++i) twins.step(draw(1, 8));
  twins.fork(0);  // what it shares it takes over when the other one is closed, whose memory others get then
  for (index_t i = 0; i < shrunk(6, 2); ++i) twins.step(draw(1, 8));
  twins.close(0);
  twins.fork(1);
  for (index_t i = 0; i < shrunk(6, 2); ++i) twins.step(draw(1, 8));
  twins.prompt(2, draw(200, 500), 300);  // joins what a fork has; long chunks attend to rows that are turned back
  CHECK(twins.difference_of_rows(2) < margin);
  std::printf("packed cache D %d group %d: worst %.2e, lse %.2e, swapped %d of %d\n", Method::layout_type::k_dim,
              int(shape.q_heads / shape.kv_heads), twins.worst, twins.worst_lse, int(twins.swapped),
              int(twins.choices));
  CHECK(twins.worst < margin);
  CHECK(twins.worst_lse < 2e-2);
  CHECK(twins.swapped <= 2 + twins.choices / 10);  // blocks whose means are alike but for 16 bits
}

template <class Method>
Method with_segments(index_t segment, index_t budget) {
  Method method;
  if constexpr (Method::layout_type::rows_type::basis_type::rotates) support::keep_all_elements(method);
  method.layout.rows.segment = segment;
  method.set_budget(budget);
  return method;
}

/// What making a cache, or calling it, is refused with.
template <class Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const error& refused) {
    return refused.what();
  }
  return "nothing was thrown";
}

template <class Configure>
std::string refused(const Configure& configure) {
  mosaickv<bf16, 64> method;
  configure(method.layout.rows);
  cuda::cache_options options;
  options.tokens = 512;
  return refusal_of([&] { cuda::cache<mosaickv<bf16, 64>>({1, 2, 1}, method, options); });
}

/// The greatest error of one head's log-sum-exps, and of all outputs, against attention in double over the slots that a step
/// says it read, of what the device itself stores.
struct own_rows_error {
  double out = 0, lse = 0;
};

/// At the method's own rates, which the CPU's cache cannot judge: what stays of a vector hangs on the last bits of a basis.
template <class Method>
own_rows_error error_against_own_rows(const Method& method, const model_shape& shape, index_t prompt, index_t steps) {
  using T = typename Method::layout_type::element_type;
  constexpr int D = Method::layout_type::k_dim;
  cuda::cache_options options;
  options.tokens = prompt + steps;
  cuda::cache<Method> held(shape, method, options);
  held.open();
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    const step_rows<T> x(1, prompt, shape, D);
    held.prefill(layer, 0, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
                 nullptr);
  }
  held.end_prefill(0, nullptr);
  held.trace_attended(true);
  own_rows_error worst;
  const index_t group = shape.q_heads / shape.kv_heads;
  for (index_t i = 0; i < steps; ++i) {
    const batch step = held.prepare_step({0}, 1, nullptr);
    held.begin_step(step, nullptr);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const step_rows<T> x(1, 1, shape, D);
      buffer<float> out(x.q.size()), lse(std::size_t(shape.q_heads));
      held.decode(layer, step, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                  x.rows(x.dv.data, x.kv_heads), nhd_rows(out.data, 1, shape.q_heads, D, 1),
                  nhd_rows(lse.data, 1, shape.q_heads, 1, 1), nullptr);
      const index_t slots = held.next_position(0);
      buffer<float> unpacked_k(std::size_t(shape.kv_heads) * slots * D), unpacked_v(unpacked_k.count);
      cuda::unpack_rows(held.view(layer, 0), slots, unpacked_k.data, unpacked_v.data, nullptr);
      const auto k = unpacked_k.get(), v = unpacked_v.get(), got_lse = lse.get();
      std::vector<float> expected(x.q.size());
      for (index_t head = 0; head < shape.q_heads; ++head) {
        const std::size_t of = std::size_t(head / group) * std::size_t(slots) * D;
        const auto& read = held.attended(layer, 0)[std::size_t(head / group)];
        REQUIRE(read.back() == slots - 1);  // the step's own token
        std::vector<double> logits;
        for (const index_t slot : read) {
          double dot = 0;
          for (int d = 0; d < D; ++d)
            dot += double(float(x.q[std::size_t(head * D + d)])) * double(k[of + std::size_t(slot * D + d)]);
          logits.push_back(dot / std::sqrt(double(D)));
        }
        const double most = *std::max_element(logits.begin(), logits.end());
        double total = 0;
        std::vector<double> sums(D);
        for (std::size_t at = 0; at < read.size(); ++at) {
          const double weight = std::exp(logits[at] - most);
          total += weight;
          for (int d = 0; d < D; ++d) sums[std::size_t(d)] += weight * v[of + std::size_t(read[at] * D + d)];
        }
        for (int d = 0; d < D; ++d) expected[std::size_t(head * D + d)] = float(sums[std::size_t(d)] / total);
        worst.lse = std::max(worst.lse, std::abs(most + std::log(total) - double(got_lse[std::size_t(head)])));
      }
      worst.out = std::max(worst.out, relative_error(out.get(), expected));
    }
  }
  return worst;
}

template <class Method>
void attends_own_rows(index_t segment, index_t budget, index_t group, double margin) {
  Method method;
  method.layout.rows.segment = segment;
  method.set_budget(budget);
  const own_rows_error worst =
      error_against_own_rows(method, {2, 2 * group, 2}, draw(600, 900), index_t(shrunk(70, 4)));
  INFO("segment " << segment << ", budget " << budget << ", group " << group);
  CHECK(worst.out < margin);
  CHECK(worst.lse < 2e-2);
}

}  // namespace

TEST_CASE("a packed cache on the device holds the CPU's conversations: one segment and several",
          "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  for (const index_t group : scaled<index_t>({1, 3, 8}, 2)) {
    hold_twins(with_segments<mosaickv<bf16, 64>>(65536, 64), {2, 2 * group, 2}, 2e-2);
    hold_twins(with_segments<mosaickv<fp16, 128>>(256, 128), {2, 2 * group, 2}, 1e-2);
  }
  hold_twins(with_segments<mosaickv<bf16, 64>>(128, 96), {1, 8, 4}, 2e-2);
  for (const index_t segment : {256, 65536}) {
    auto method = with_segments<mosaickv<bf16, 64>>(segment, 64);
    method.layout.rows.prefill = prefill_rows::packed;
    hold_twins(method, {2, 8, 2}, 2e-2);
  }
  hold_twins(with_segments<mosaickv<bf16, 80>>(320, 64), {2, 8, 2}, 2e-2);
  // Which channels are neighbours hangs on near ties of counts: with all of them kept it does not matter.
  for (const index_t neighbours : {2, 4}) {
    auto method = with_segments<mosaickv<fp16, 128>>(256, 64);
    method.layout.rows.key.group = method.layout.rows.value.group = neighbours;
    hold_twins(method, {2, 8, 2}, 1e-2);
  }
}

TEST_CASE("a step of a packed cache at the paper's rates is attention over what the device stores",
          "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  for (const index_t group : {1, 4}) {
    attends_own_rows<mosaickv<bf16, 64>>(65536, 96, group, 1.6e-2);
    attends_own_rows<mosaickv<bf16, 64>>(256, 64, group, 1.6e-2);
    attends_own_rows<mosaickv<fp16, 128>>(256, 128, group, 3e-3);
    attends_own_rows<mosaickv<bf16, 80>>(320, 64, group, 1.6e-2);
  }
}

TEST_CASE("a cache of thinner keys on the device drops the CPU's channels", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_twins(with_segments<think<bf16, 128>>(65536, 64), {2, 8, 2}, 8e-3);
  hold_twins(with_segments<think<bf16, 128>>(100, 64), {1, 3, 3}, 8e-3);
}

TEST_CASE("a recorded step of a packed cache follows tails that are packed between steps", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  for (const index_t segment : {32, 65536}) {
    replay_steps_of<mosaickv<bf16, 64>>([&](auto& method) { method.layout.rows.segment = segment; });
    replay_steps_of<mosaickv<fp16, 128>>([&](auto& method) { method.layout.rows.segment = segment; });
  }
}

TEST_CASE("packed caches of other sizes and budgets stand side by side", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  const model_shape shape{1, 8, 1};
  cuda::cache_options long_one, short_one;
  long_one.tokens = 100000, long_one.step_tokens = 8, short_one.tokens = 100, short_one.sequences = 64;
  const auto method = with_segments<mosaickv<bf16, 64>>(64, 32);
  cuda::cache<mosaickv<bf16, 64>> held(shape, method, long_one), other(shape, method, short_one);
  REQUIRE(held.open() == 0);
  const step_rows<bf16> x(1, 200, shape, 64);
  buffer<float> out(x.q.size());
  for (int turn = 0; turn < 2; ++turn) {  // the second one reads segments
    held.prefill(0, 0, x.rows(x.dq.data, 8), x.rows(x.dk.data, 1), x.rows(x.dv.data, 1), nullptr);
    held.prefill_attention(0, 0, x.rows(x.dq.data, 8), nhd_rows(out.data, 200, 8, 64), {}, nullptr);
    held.end_prefill(0, nullptr);
    other.set_budget(48 + turn);
    const batch step = held.prepare_step({0}, 8, nullptr);
    held.begin_step(step, nullptr);
    const step_rows<bf16> y(1, 8, shape, 64);
    held.decode(0, step, y.rows(y.dq.data, 8), y.rows(y.dk.data, 1), y.rows(y.dv.data, 1), nhd_rows(out.data, 8, 8, 64),
                {}, nullptr);
  }
  CHECK(held.next_position(0) == 416);
}

TEST_CASE("a packed cache on the device refuses what it does not pack, and rows without a basis",
          "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  CHECK_THAT(refused([](auto& rows) { rows.element = packed_element::fp16; }), contains("element is the other type"));
  CHECK_THAT(refused([](auto& rows) { rows.segment = 100; }),
             contains("segment is 100; expected a multiple of the block"));

  cuda::cache_options options;
  options.tokens = 512;
  const model_shape shape{2, 4, 2};
  cuda::cache<mosaickv<bf16, 64>> held(shape, {}, options);
  REQUIRE(held.open() == 0);
  step_rows<bf16> x(1, 300, shape, 64), wrong(1, 300, shape, 64);
  wrong.k[70 * 2 * 64] = bf16(infinity);
  wrong.dk.set(wrong.k);
  for (index_t layer = 0; layer < 2; ++layer) {
    const auto& rows = layer == 1 ? wrong : x;
    held.prefill(layer, 0, x.rows(x.dq.data, 4), rows.rows(rows.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
  }
  const offset_t before = held.bytes(0);
  const std::string said = refusal_of([&] { held.end_prefill(0, nullptr); });
  CHECK_THAT(said, contains("the second moment of keys of layer 1, kv_head 0 is NaN or infinity"));
  CHECK(held.bytes(0) == before);
  CHECK(held.positions(0, 0, 0).size() == 300);
  held.close(0);
  REQUIRE(held.open() == 0);
  for (index_t layer = 0; layer < 2; ++layer)
    held.prefill(layer, 0, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
  held.end_prefill(0, nullptr);
  CHECK(held.positions(1, 0, 1).size() == 300);
}
