// Random conversations held with the CPU's cache and the device's side by side.
#pragma once
#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "conversation_calls.hpp"
#include "device_scores.hpp"
#include "step_rows.hpp"
#include "support/calls/called_cache.hpp"
#include "support/random.hpp"
#include "support/shrink/shortest_failure.hpp"
#include "support/shrink/shrink_shape.hpp"
#include "tessera/backend/cuda/cache.cuh"
#include "tessera/cache.hpp"

namespace gpu_test {
using support::must;

/// What a conversation's caches disagreed on. Scores that differ by rounding may swap tokens at the cut.
struct disagreement {
  long selections = 0, swapped = 0;
};

/// What both caches of a conversation are made of.
template <class Method>
struct conversation_setup {
  model_shape shape;
  Method method;
  scales kind;
};

/// One conversation: turns of chunked prompts and decode steps over a batch of sequences, compared after every call. It throws
/// support::broken_rule where the caches disagree, and passes over calls that are not possible.
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
  static constexpr index_t smallest_budget = 40;

  conversation(const conversation_setup<Method>& setup, disagreement& seen)
      : shape_(setup.shape),
        method_(setup.method),
        seen_(seen),
        largest_(row_largest<encoding>(setup.kind)),
        workers_(std::make_shared<cpu::executor>(1)),
        host_(shape_, method_, workers_),
        device_(shape_, method_, options()) {}

  void make(const conversation_call& call) {
    if (!same_) return;
    engine_.seed(call.seed);
    const bool is_open = std::count(ids_.begin(), ids_.end(), call.id) > 0;
    switch (call.verb) {
      case conversation_verb::open:
        if (ids_.size() < 3) open();
        return;
      case conversation_verb::close:
        if (is_open) close(call.id);
        return;
      case conversation_verb::fork:
        if (is_open && ids_.size() < 3) fork(call.id);
        return;
      case conversation_verb::prompt:
        if (is_open) prompt(call);
        return;
      case conversation_verb::step:
        if (!ids_.empty() &&
            std::all_of(ids_.begin(), ids_.end(), [&](index_t id) { return has_prompt_[std::size_t(id)]; }))
          step(call.tokens);
    }
  }

 private:
  static cuda::cache_options options() {
    cuda::cache_options chosen;
    chosen.sequences = 3;
    chosen.tokens = 1024;
    chosen.step_tokens = 8;
    chosen.smallest_budget = smallest_budget;
    return chosen;
  }

  /// Some sequences have budgets of their own.
  void open() {
    sequence_options own;
    bool has_profile = false;
    if constexpr (Method::retain_type::shares) has_profile = method_.retain.planned({}).budget.knows_shares();
    index_t least = smallest_budget;
    if constexpr (requires { method_.retain.scorer.window; }) least = std::max(least, method_.retain.scorer.window);
    if (Method::budgets.largest > 0 && !has_profile && engine_() % 2 == 0)
      own.budget.tokens = least + index_t(engine_() % unsigned(method_.budget() - least + 1));
    const index_t id = host_.open(own);
    must(device_.open(own) == id, "both caches open the same id", id);
    ids_.push_back(id);
    has_prompt_[std::size_t(id)] = false;
  }
  void close(index_t id) {
    host_.close(id);
    device_.close(id);
    std::erase(ids_, id);
    compare_stored();
  }
  void fork(index_t id) {
    const index_t forked = host_.fork(id);
    must(device_.fork(id) == forked, "both caches give a fork the same id", forked);
    ids_.push_back(forked);
    has_prompt_[std::size_t(forked)] = has_prompt_[std::size_t(id)];
    compare_stored();
  }

  void prompt(const conversation_call& call) {
    const index_t id = call.id, total = std::accumulate(call.chunks.begin(), call.chunks.end(), index_t(0));
    if (call.reserves) device_.reserve(id, total, nullptr);
    if (call.announces) {
      host_.announce(id, total);
      device_.announce(id, total);
    }
    index_t done = 0;
    for (const index_t n : call.chunks) {
      done += n;
      const auto boundaries = random_boundaries<Method>(n, engine_);
      for (index_t layer = 0; layer < shape_.layers; ++layer) {
        const step_rows<T> x(1, n, shape_, D, largest_, engine_);
        give_scores(layer, id);
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
        must_be_near(dout.get(), out, "a prompt's attention is the CPU's");
        if (call.ends_layers && done == total) {
          give_scores(layer, id);
          host_.end_layer(layer, id);
          device_.end_layer(layer, id, nullptr);
        }
      }
    }
    reread(id, total);
    for (index_t layer = 0; layer < shape_.layers; ++layer) give_scores(layer, id);
    host_.end_prefill(id);
    device_.end_prefill(id, nullptr);
    has_prompt_[std::size_t(id)] = true;
    compare_stored();
  }

  void give_scores(index_t layer, index_t id) {
    support::give_scores<Method>(host_, layer, id);
    give_device_scores(device_, layer, id);
  }

  void must_be_near(const std::vector<float>& got, const std::vector<float>& expected, const char* rule) const {
    const double error = relative_error(got, expected);
    must(error < margin, rule, "relative error ", error, ", at most ", margin);
  }

  /// The prompt passes through the model once more, in parts, where the method wants it.
  void reread([[maybe_unused]] index_t id, [[maybe_unused]] index_t total) {
    if constexpr (Method::retain_type::rereads) {
      const index_t end = host_.next_position(id);
      for (index_t first = end - total, count; first < end; first += count) {
        count = std::min(end - first, draw(1, 100, engine_));
        const index_t n = count + draw(0, 20, engine_);
        for (index_t layer = 0; layer < shape_.layers; ++layer) {
          const step_rows<T> x(1, n, shape_, D, largest_, engine_);
          std::vector<float> out(x.q.size());
          buffer<float> dout(out.size());
          host_.reread(layer, id, first, count, x.rows(x.q.data(), x.q_heads), x.rows(x.k.data(), x.kv_heads),
                       x.rows(x.v.data(), x.kv_heads), nhd_rows(out.data(), n, x.q_heads, D));
          device_.reread(layer, id, first, count, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                         x.rows(x.dv.data, x.kv_heads), nhd_rows(dout.data, n, x.q_heads, D), nullptr);
          must_be_near(dout.get(), out, "a text that is read again is attended as on the CPU");
        }
      }
      compare_stored();
    }
  }

  /// What the CPU makes of the device's lines: weights that differ by rounding may choose others.
  void attend_device_lines(index_t layer, index_t id, const step_rows<T>& x, std::vector<float>& out) {
    const prompt_lines& lines = device_.lines(layer, id);
    const bool is_chunk =
        lines.next - lines.first == x.tokens && lines.next == host_.next_position(id);  // of layer 0, which has it
    must(is_chunk, "lines are those of the chunk", lines.first, " to ", lines.next, ", tokens ", x.tokens);
    std::vector<float> lse(std::size_t(x.tokens * x.q_heads));
    cpu::line_attention(host_.view(layer, id), cpu::query_rows<T>{x.rows(x.q.data(), x.q_heads), &lines.first},
                        logit_rule{}, lines,
                        cpu::attention_output{nhd_rows(out.data(), x.tokens, x.q_heads, D),
                                              nhd_rows(lse.data(), x.tokens, x.q_heads, 1)},
                        *workers_);
  }

  void step(index_t n) {
    const index_t batch = index_t(ids_.size());
    const auto ends = random_boundaries<Method>(batch * n, engine_);
    const auto host_step = host_.prepare_step(ids_, n, ends);
    const auto device_step = device_.prepare_step(ids_, n, nullptr, ends);
    device_.begin_step(device_step, nullptr);
    for (index_t layer = 0; layer < shape_.layers && same_; ++layer) {
      const step_rows<T> x(batch, n, shape_, D, largest_, engine_);
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
        must(got.size() == expected.size(), "both caches attend as many lists", got.size(), ", ", expected.size());
        for (std::size_t list = 0; list < got.size(); ++list) compare(expected[list], got[list]);
      }
      if (!same_) return;
      must_be_near(dout.get(), out, "a step's attention is the CPU's");
      const std::vector<float> got = dlse.get();
      for (std::size_t i = 0; i < lse.size(); ++i) {
        must(got[i] == Approx(lse[i]).margin(lse_margin), "log-sum-exps are the CPU's", "number ", i, " of layer ",
             layer, ": ", got[i], ", of the CPU ", lse[i]);
      }
    }
    compare_stored();
    for (const index_t id : ids_) {
      if (!same_) continue;
      const offset_t host = host_.bytes_read(id), device = device_.bytes_read(id);
      // The device counts both extrema where heads may differ in sign, and whole keys for pages of one slot. Packed rows
      // are padded there, and it counts the bases of all segments.
      const bool counts_more = Method::retrieve_type::estimates || packs;
      must(counts_more ? host <= device : host == device, "both caches count the bytes that a step reads", device,
           ", of the CPU ", host);
    }
  }

  void compare_stored() {
    most_swapped_ = std::max(most_swapped_, chosen_together());
    for (const index_t id : ids_) {
      if constexpr (Method::retrieve_type::estimates) most_swapped_ = std::max(most_swapped_, page_of(id));
      must(host_.next_position(id) == device_.next_position(id), "both caches know the next position",
           device_.next_position(id), ", of the CPU ", host_.next_position(id));
      for (index_t layer = 0; layer < shape_.layers; ++layer) {
        for (index_t h = 0; h < shape_.kv_heads; ++h) {
          compare(host_.readable(layer, id, h), device_.readable(layer, id, h));
          compare(host_.positions(layer, id, h), device_.positions(layer, id, h));
        }
      }
      if constexpr (cuda::kv_store<typename Method::layout_type>::in_groups) {
        if (same_) must(host_.pages(id) == device_.pages(id), "both caches hold as many pages");
      }
    }
  }

  /// Equal, or one token swapped at the cut: then the caches go different ways and the conversation ends.
  void compare(const std::vector<index_t>& expected, const std::vector<index_t>& got) {
    ++seen_.selections;
    if (expected == got) return;
    std::vector<index_t> missing;
    std::set_difference(expected.begin(), expected.end(), got.begin(), got.end(), std::back_inserter(missing));
    must(std::is_sorted(got.begin(), got.end()), "positions ascend", support::listed(got));
    const bool is_near =
        std::abs(index_t(expected.size()) - index_t(got.size())) <= most_swapped_ &&  // adaptive budgets count by score
        index_t(missing.size()) <= most_swapped_;
    must(is_near, "what is chosen is the CPU's but for scores that are equal to rounding", "expected ", expected.size(),
         " tokens, got ", got.size(), ", missing ", support::listed(missing), ", of which ", most_swapped_, " may be");
    ++seen_.swapped;
    same_ = false;
  }

  /// What is chosen together: where estimates of two pages cannot be told apart, so much may differ.
  index_t page_of(index_t id) const {
    const stage_plan expected = host_.plan(id), got = device_.plan(id);
    const bool is_same = expected.read == got.read && expected.retained == got.retained && expected.ratio == got.ratio;
    must(is_same, "both caches plan alike", "read ", got.read, ", retained ", got.retained, ", ratio ", got.ratio,
         "; of the CPU ", expected.read, ", ", expected.retained, ", ", expected.ratio);
    return method_.retrieve.planned(expected, D).scorer.page;
  }

  /// Two segments of which one token more and one less is chosen may take other blocks; other units are swapped whole.
  index_t chosen_together() const {
    const index_t lists =
        reading_members(method_.retain, shape_.q_heads / shape_.kv_heads);  // each of them may swap one
    if (lists > 1) return lists;
    if constexpr (packs && requires { method_.retain.scorer.pool; }) {
      // Rows that are rounded in other bases have other scores, and a peak brings its neighbours.
      if (Method::layout_type::rows_type::basis_type::rotates) return 3 * method_.retain.scorer.pool;
    }
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
  bool has_prompt_[3] = {};  // by id
  bool same_ = true;
  std::mt19937 engine_;  // of the call's rows
};

/// The rule that a conversation breaks, after its shortest form has been printed; empty: none.
template <class Method>
std::string wrong_of(const conversation_setup<Method>& setup, const std::vector<conversation_call>& calls,
                     disagreement& seen) {
  const auto hold = [&](const model_shape& shape, const std::vector<conversation_call>& list, disagreement& counts) {
    return support::failure_of([&] {
      conversation<Method> both({shape, setup.method, setup.kind}, counts);
      for (const conversation_call& call : list) both.make(call);
    });
  };
  const auto found = hold(setup.shape, calls, seen);
  if (!found) return {};
  // The model first: each try of the calls then takes less time. A smaller one gets other rows of the same seeds.
  const auto parts = support::fewest_parts(setup.shape, [&](const support::shape_parts& some) {
    disagreement unused;
    const auto broken = hold(some.shape(setup.shape), calls, unused);
    return broken && broken->rule == found->rule;
  });
  const model_shape shape = parts.shape(setup.shape);
  const auto replay = [&](const std::vector<conversation_call>& list) {
    disagreement unused;
    return hold(shape, list, unused);
  };
  std::cout << support::shortest_failure(calls, *found, replay, conversation_code{}, simpler_conversations{})
            << "with layers " << shape.layers << ", kv_heads " << shape.kv_heads << ", q_heads " << shape.q_heads
            << ", budget " << setup.method.budget() << std::endl;
  return found->rule;
}

struct as_it_is {
  template <class Method>
  void operator()(Method&, const model_shape&) const {}
};

/// `configure(method, shape)`: what of the method depends on the model.
template <class Method, class Configure = as_it_is>
requires runs_on_devices<Method>
void hold_conversations(int count, scales kind = scales::any, const Configure& configure = {}) {
  disagreement seen;
  for (int i = 0; i < support::scaled(count); ++i) {
    conversation_setup<Method> setup{support::called_shape<Method>(random_conversation_shape()), {}, kind};
    support::keep_all_elements(setup.method);
    support::shorten_segments(setup.method, draw(0, 3) > 0 ? 32 * draw(1, 3) : 65536);
    setup.method.set_budget(draw(conversation<Method>::smallest_budget, 120));
    if constexpr (requires { setup.method.retain.scorer.window; }) setup.method.retain.scorer.window = draw(1, 32);
    if constexpr (Method::retain_type::takes_scores)
      setup.method.retain.scorer.recent = draw(0, conversation<Method>::smallest_budget);
    configure(setup.method, std::as_const(setup.shape));
    const auto calls = random_conversation(Method::retain_type::settles, !Method::retain_type::rereads);
    const std::string wrong = wrong_of(setup, calls, seen);
    REQUIRE(wrong == "");
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
