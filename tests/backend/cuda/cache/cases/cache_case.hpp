// Random conversations held with the CPU's cache and the device's side by side.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "backend/cuda/device.hpp"
#include "support/calls/called_cache.hpp"
#include "support/random.hpp"
#include "tessera/backend/cuda/cache.cuh"
#include "tessera/cache.hpp"

namespace gpu_test {

/// What a conversation's caches disagreed on. Scores that differ by rounding may swap tokens at the cut.
struct disagreement {
  long selections = 0, swapped = 0;
};

/// Rows as they are, or such that an encoding's scale is a power of two: decoded to 16 bits they lose nothing then.
enum class scales { any, even };

/// The largest magnitude of rows of this encoding, between 1 and 2; 0: whatever it is.
template <class Encoding>
float row_largest(scales kind) {
  if constexpr (Encoding::scaled) {
    int exponent = 0;
    if (kind == scales::even) return 2 * std::frexp(std::round(1 / Encoding::scale_of(1)), &exponent);
  }
  return 0;
}

template <class T>
std::vector<T> random_rows(std::size_t elements, int dim, float deviation, float largest = 0) {
  std::vector<T> rows(elements);  // by a table: logarithms would take most of a conversation's time
  for (T& x : rows) x = T(deviation * support::rng::normal_numbers()[rng()() >> 16]);
  for (std::size_t i = 0; largest > 0 && i < elements; ++i) {
    const float x = float(rows[i]);
    rows[i] = T(i % std::size_t(dim) == 0 ? std::copysign(largest, x) : std::clamp(x, -largest, largest));
  }
  return rows;
}

template <class T>
struct step_rows {
  std::vector<T> q, k, v;
  buffer<T> dq, dk, dv;
  index_t sequences, tokens, q_heads, kv_heads;
  int dim;
  step_rows(index_t batch, index_t n, const model_shape& shape, int d, float largest = 0)
      : q(random_rows<T>(std::size_t(batch * n * shape.q_heads * d), d, 1.5f)),
        k(random_rows<T>(std::size_t(batch * n * shape.kv_heads * d), d, 1.5f, largest)),
        v(random_rows<T>(std::size_t(batch * n * shape.kv_heads * d), d, 1, largest)),
        dq(q),
        dk(k),
        dv(v),
        sequences(batch),
        tokens(n),
        q_heads(shape.q_heads),
        kv_heads(shape.kv_heads),
        dim(d) {}
  rows_view<const T> rows(const T* data, index_t heads, index_t skip = 0) const {
    rows_view<const T> all = nhd_rows<const T>(data, tokens, heads, dim, sequences);
    all.data += skip * all.token_stride;
    all.tokens -= skip;
    return all;
  }
};

/// Where the segments of so many new tokens end, for a method that wants to know.
template <class Method>
std::vector<std::uint8_t> random_boundaries(index_t tokens) {
  std::vector<std::uint8_t> ends;
  for (index_t t = 0; Method::needs_segments && t < tokens; ++t) ends.push_back(draw(0, 11) == 0);
  return ends;
}

inline double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] != got[i]) return 1e9;
    difference += (double(got[i]) - expected[i]) * (double(got[i]) - expected[i]);
    size += double(expected[i]) * expected[i];
  }
  return std::sqrt(difference / std::max(size, 1e-30));
}

/// One conversation: turns of chunked prompts and decode steps over a batch of sequences, compared after every call.
/// Below TESSERA_TEST_SCALE 1 shapes and conversations are smaller too: racecheck takes seconds for each launch of a
/// cluster of blocks (H200, CUDA 13.0), and of those a step has one a layer.
template <class Method>
class conversation {
  using T = typename Method::layout_type::element_type;
  static constexpr int D = Method::layout_type::k_dim;
  using encoding = typename Method::layout_type::rows_type::encoding_type;
  // Each backend rounds packed rows to 16 bits in a basis of its own.
  static constexpr bool packs = packing_layout<typename Method::layout_type>;
  // e4m3 is multiplied exactly, any other encoding is rounded to 16 bits first.
  static constexpr double lse_margin =
      !packs && (raw_encoding<encoding> || std::is_same_v<typename encoding::stored_type, fp8>) ? 4e-3 : 2e-2;
  static constexpr double margin = packs && std::is_same_v<T, bf16> ? 2e-2 : 8e-3;

 public:
  /// `configure(method, shape)`: what of the method depends on the model.
  template <class Configure>
  conversation(const Method& method, disagreement& seen, scales kind, const Configure& configure)
      : shape_(random_shape()),
        method_(method),
        seen_(seen),
        largest_(row_largest<encoding>(kind)),
        workers_(std::make_shared<cpu::executor>(1)),
        host_((configure(method_, shape_), shape_), method_, workers_),
        device_(shape_, method_, options()) {}

  void hold() {
    const index_t opened = draw(1, 3);
    for (index_t i = 0; i < opened; ++i) {
      host_.open();
      device_.open();
    }
    if (opened == 3 && draw(0, 1)) {  // a hole: ids do not follow one another
      host_.close(1);
      device_.close(1);
      ids_ = {0, 2};
    } else {
      for (index_t i = 0; i < opened; ++i) ids_.push_back(i);
    }
    for (index_t turn = 0, turns = draw(1, shrunk(3, 2)); turn < turns && same_; ++turn) {
      for (const index_t id : ids_) prompt(id);
      for (index_t i = 0, steps = draw(0, shrunk(6, 2)); i < steps && same_; ++i) step();
      if (same_ && ids_.size() < 3 && draw(0, 2) == 0) fork();
    }
  }

 private:
  static cuda::cache_options options() {
    cuda::cache_options chosen;
    chosen.sequences = 3;
    chosen.tokens = 1024;
    chosen.step_tokens = 8;
    return chosen;
  }

  /// One sequence becomes two; at times the older one is closed then.
  void fork() {
    const std::size_t at = std::size_t(draw(0, int(ids_.size()) - 1));
    const index_t id = ids_[at], fresh = host_.fork(id);
    REQUIRE(device_.fork(id) == fresh);
    ids_.push_back(fresh);
    compare_stored();
    for (index_t i = 0, steps = draw(0, 2); i < steps && same_; ++i) step();
    if (draw(0, 1)) return;
    host_.close(id);
    device_.close(id);
    ids_.erase(ids_.begin() + std::ptrdiff_t(at));
    compare_stored();
  }

  static model_shape random_shape() {
    const index_t layers = draw(1, shrunk(3, 1)), kv_heads = draw(1, shrunk(4, 2));
    return support::called_shape<Method>({layers, kv_heads * draw(1, shrunk(8, 4)), kv_heads});
  }

  void prompt(index_t id) {
    const index_t total = draw(1, shrunk(220, 150));
    if (draw(0, 1)) device_.reserve(id, total, nullptr);
    if (Method::retain_type::settles && draw(0, 1)) {
      host_.announce(id, total);
      device_.announce(id, total);
    }
    const bool ends_layers = !Method::retain_type::rereads && draw(0, 1) == 1;
    for (index_t done = 0; done < total;) {
      const index_t n = std::min(total - done, draw(1, 130));
      done += n;
      const auto boundaries = random_boundaries<Method>(n);
      for (index_t layer = 0; layer < shape_.layers; ++layer) {
        const step_rows<T> x(1, n, shape_, D, largest_);
        host_.prefill(layer, id, x.rows(x.q.data(), x.q_heads), x.rows(x.k.data(), x.kv_heads),
                      x.rows(x.v.data(), x.kv_heads), boundaries);
        device_.prefill(layer, id, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                        x.rows(x.dv.data, x.kv_heads), nullptr, boundaries);
        std::vector<float> out(std::size_t(n * x.q_heads * D));
        buffer<float> dout(out.size());
        host_.prefill_attention(layer, id, x.rows(x.q.data(), x.q_heads), nhd_rows(out.data(), n, x.q_heads, D));
        device_.trace_lines(true);
        device_.prefill_attention(layer, id, x.rows(x.dq.data, x.q_heads), nhd_rows(dout.data, n, x.q_heads, D), {},
                                  nullptr);
        if constexpr (Method::prefill_type::chooses_lines) attend_device_lines(layer, id, x, out);
        REQUIRE(relative_error(dout.get(), out) < margin);
        if (ends_layers && done == total) {
          host_.end_layer(layer, id);
          device_.end_layer(layer, id, nullptr);
        }
      }
    }
    reread(id, total);
    host_.end_prefill(id);
    device_.end_prefill(id, nullptr);
    compare_stored();
  }

  /// The prompt passes through the model once more, in parts, where the method wants it.
  void reread([[maybe_unused]] index_t id, [[maybe_unused]] index_t total) {
    if constexpr (Method::retain_type::rereads) {
      const index_t end = host_.next_position(id);
      for (index_t first = end - total, count; first < end; first += count) {
        count = std::min(end - first, draw(1, 100));
        const index_t n = count + draw(0, 20);
        for (index_t layer = 0; layer < shape_.layers; ++layer) {
          const step_rows<T> x(1, n, shape_, D, largest_);
          std::vector<float> out(x.q.size());
          buffer<float> dout(out.size());
          host_.reread(layer, id, first, count, x.rows(x.q.data(), x.q_heads), x.rows(x.k.data(), x.kv_heads),
                       x.rows(x.v.data(), x.kv_heads), nhd_rows(out.data(), n, x.q_heads, D));
          device_.reread(layer, id, first, count, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                         x.rows(x.dv.data, x.kv_heads), nhd_rows(dout.data, n, x.q_heads, D), nullptr);
          REQUIRE(relative_error(dout.get(), out) < margin);
        }
      }
      compare_stored();
    }
  }

  /// What the CPU makes of the device's lines: weights that differ by rounding may choose others.
  void attend_device_lines(index_t layer, index_t id, const step_rows<T>& x, std::vector<float>& out) {
    const prompt_lines& lines = device_.lines(layer, id);
    REQUIRE(lines.next - lines.first == x.tokens);
    REQUIRE(lines.next == host_.next_position(id));  // of layer 0, which has the chunk
    std::vector<float> lse(std::size_t(x.tokens * x.q_heads));
    cpu::line_attention(host_.view(layer, id), cpu::query_rows<T>{x.rows(x.q.data(), x.q_heads), &lines.first},
                        logit_rule{}, lines,
                        cpu::attention_output{nhd_rows(out.data(), x.tokens, x.q_heads, D),
                                              nhd_rows(lse.data(), x.tokens, x.q_heads, 1)},
                        *workers_);
  }

  void step() {
    const index_t batch = index_t(ids_.size()), n = draw(0, 2) ? 1 : draw(2, 8);
    const auto ends = random_boundaries<Method>(batch * n);
    const auto host_step = host_.prepare_step(ids_, n, ends);
    const auto device_step = device_.prepare_step(ids_, n, nullptr, ends);
    device_.begin_step(device_step, nullptr);
    for (index_t layer = 0; layer < shape_.layers && same_; ++layer) {
      const step_rows<T> x(batch, n, shape_, D, largest_);
      std::vector<float> out(std::size_t(batch * n * x.q_heads * D)), lse(std::size_t(batch * n * x.q_heads));
      buffer<float> dout(out.size()), dlse(lse.size());
      host_.trace_attended(true);
      device_.trace_attended(true);
      host_.decode(layer, host_step, x.rows(x.q.data(), x.q_heads), x.rows(x.k.data(), x.kv_heads),
                   x.rows(x.v.data(), x.kv_heads), nhd_rows(out.data(), n, x.q_heads, D, batch),
                   nhd_rows(lse.data(), n, x.q_heads, 1, batch));
      device_.decode(layer, device_step, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                     x.rows(x.dv.data, x.kv_heads), nhd_rows(dout.data, n, x.q_heads, D, batch),
                     nhd_rows(dlse.data, n, x.q_heads, 1, batch), nullptr);
      for (const index_t id : ids_) {
        const auto &expected = host_.attended(layer, id), &got = device_.attended(layer, id);
        REQUIRE(got.size() == expected.size());
        for (std::size_t list = 0; list < got.size(); ++list) compare(expected[list], got[list]);
      }
      if (!same_) return;
      REQUIRE(relative_error(dout.get(), out) < margin);
      const std::vector<float> got = dlse.get();
      for (std::size_t i = 0; i < lse.size(); ++i) REQUIRE(got[i] == Approx(lse[i]).margin(lse_margin));
    }
    compare_stored();
    for (const index_t id : ids_) {
      if (!same_) continue;
      if constexpr (Method::retrieve_type::estimates || packs) {
        // The device counts both extrema where heads may differ in sign, and whole keys for pages of one slot. Packed rows
        // are padded there, and it counts the bases of all segments.
        REQUIRE(host_.bytes_read(id) <= device_.bytes_read(id));
      } else {
        REQUIRE(host_.bytes_read(id) == device_.bytes_read(id));
      }
    }
  }

  void compare_stored() {
    most_swapped_ = std::max(most_swapped_, chosen_together());
    for (const index_t id : ids_) {
      if constexpr (Method::retrieve_type::estimates) most_swapped_ = std::max(most_swapped_, page_of(id));
      REQUIRE(host_.next_position(id) == device_.next_position(id));
      for (index_t layer = 0; layer < shape_.layers; ++layer) {
        for (index_t h = 0; h < shape_.kv_heads; ++h) {
          compare(host_.readable(layer, id, h), device_.readable(layer, id, h));
          compare(host_.positions(layer, id, h), device_.positions(layer, id, h));
        }
      }
      if constexpr (cuda::kv_store<typename Method::layout_type>::in_groups) {
        if (same_) REQUIRE(host_.pages(id) == device_.pages(id));
      }
    }
  }

  /// Equal, or one token swapped at the cut: then the caches go different ways and the conversation ends.
  void compare(const std::vector<index_t>& expected, const std::vector<index_t>& got) {
    ++seen_.selections;
    if (expected == got) return;
    std::vector<index_t> missing;
    std::set_difference(expected.begin(), expected.end(), got.begin(), got.end(), std::back_inserter(missing));
    INFO("layers " << shape_.layers << ", kv_heads " << shape_.kv_heads << ", q_heads " << shape_.q_heads
                   << ", expected " << expected.size() << " tokens, got " << got.size() << ", missing "
                   << missing.size());
    REQUIRE(std::is_sorted(got.begin(), got.end()));
    REQUIRE(std::abs(index_t(expected.size()) - index_t(got.size())) <=
            most_swapped_);  // adaptive budgets count by score
    REQUIRE(index_t(missing.size()) <= most_swapped_);
    ++seen_.swapped;
    same_ = false;
  }

  /// What is chosen together: where estimates of two pages cannot be told apart, so much may differ.
  index_t page_of(index_t id) const {
    const stage_plan expected = host_.plan(id), got = device_.plan(id);
    REQUIRE(expected.read == got.read);
    REQUIRE(expected.retained == got.retained);
    REQUIRE(expected.ratio == got.ratio);
    return method_.retrieve.planned(expected, D).scorer.page;
  }

  /// Two segments of which one token more and one less is chosen may take other blocks; other units are swapped whole.
  index_t chosen_together() const {
    const index_t lists =
        reading_members(method_.retain, shape_.q_heads / shape_.kv_heads);  // each of them may swap one
    if (lists > 1) return lists;
    if constexpr (packs) return std::max(1, method_.retrieve.mean_block());
    if (Method::needs_step_segments) return 2 * max_segment_tokens;
    if constexpr (requires { typename Method::retain_type::selector_type; }) {
      using selector = typename Method::retain_type::selector_type;
      if constexpr (segment_selector<selector>) return 2 * max_segment_tokens;
      if constexpr (best_units_selector<selector>) return method_.retain.selector.unit_slots();
    }
    return 1;
  }

  index_t most_swapped_ = 1;
  model_shape shape_;
  Method method_;
  disagreement& seen_;
  float largest_;
  std::shared_ptr<cpu::executor> workers_;
  cache<Method> host_;
  cuda::cache<Method> device_;
  std::vector<index_t> ids_;
  bool same_ = true;
};

struct as_it_is {
  template <class Method>
  void operator()(Method&, const model_shape&) const {}
};

template <class Method, class Configure = as_it_is>
requires runs_on_devices<Method>
void hold_conversations(int count, scales kind = scales::any, const Configure& configure = {}) {
  disagreement seen;
  for (int i = 0; i < support::scaled(count); ++i) {
    Method method;
    support::keep_all_elements(method);
    method.set_budget(draw(40, 120));
    if constexpr (requires { method.retain.scorer.window; }) method.retain.scorer.window = draw(1, 32);
    conversation<Method>(method, seen, kind, configure).hold();
  }
  INFO(seen.swapped << " of " << seen.selections << " selections differ by a token at the cut");
  CHECK(seen.swapped <= 2 + seen.selections / 100);
}

/// Of a method that runs on the host alone there is nothing to hold or to record, and the test says so.
inline void say_host_only() { WARN("skipped: this method runs on the host alone"); }
template <class Method, class Configure = as_it_is>
void hold_conversations(int, scales = scales::any, const Configure& = {}) {
  say_host_only();
}

}  // namespace gpu_test
