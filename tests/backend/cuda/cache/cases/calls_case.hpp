// The device's cache behind the interface of random calls.
#pragma once

#include <array>
#include <functional>

#include "cache_case.hpp"
#include "called_on_both.hpp"

namespace gpu_test {

/// Rows come from `call_inputs`, which lie on the device too; what a call writes is brought back.
template <class Method>
class device_calls : public support::called_cache {
  using T = typename Method::layout_type::element_type;
  struct memory {
    buffer<T> inputs;
    buffer<float> out{1 << 14}, lse{1 << 10};
    std::array<std::unique_ptr<buffer<T>>, 3> others;  // rows that are not of `call_inputs`
    std::size_t next = 0;
    cuda::saved_sequence swapped;
    std::vector<unsigned char> swapped_bytes;
    bool swaps = false;
    memory() : inputs(rounded(support::call_inputs(true))) {}
    static std::vector<T> rounded(const std::vector<float>& values) {
      std::vector<T> all;
      for (const float value : values) all.push_back(T(value));
      return all;
    }
  };

 public:
  device_calls(const model_shape& shape, const Method& method, const cuda::cache_options& options)
      : held_(shape, method, options), memory_(std::make_shared<memory>()) {}
  std::unique_ptr<called_cache> copy() const override { return std::make_unique<device_calls>(*this); }
  index_t open(const sequence_options& options) override { return held_.open(options); }
  index_t fork(index_t id) override { return held_.fork(id); }
  /// Every other time in page-locked memory, and from there if nothing else was saved meanwhile.
  std::vector<unsigned char> saved_bytes(index_t id) override {
    if (held_.can_save()) {
      memory_->swaps = !memory_->swaps;
      if (!memory_->swaps) return support::saved(held_, id);
      held_.save(id, memory_->swapped);
      return memory_->swapped_bytes = support::bytes_of(memory_->swapped);
    }
    return {};
  }
  index_t load_bytes(const std::vector<unsigned char>& bytes) override {
    if (held_.can_save()) {
      if (!memory_->swapped_bytes.empty() && memory_->swapped_bytes == bytes) return held_.load(memory_->swapped);
      return support::loaded(held_, bytes);
    }
    return -1;
  }
  void truncate(index_t id, index_t position) override { held_.truncate(id, position); }
  index_t settled(index_t id) const override { return held_.settled(id); }
  void close(index_t id) override { held_.close(id); }
  void reserve(index_t id, index_t tokens) override { held_.reserve(id, tokens, nullptr); }
  void prefill(index_t layer, index_t id, const rows& q, const rows& k, const rows& v) override {
    give_device_scores(held_, layer, id);
    held_.prefill(layer, id, there(q), there(k), there(v), nullptr,
                  support::with_fault(support::called_boundaries<Method>(k), fault));
  }
  void prefill_attention(index_t layer, index_t id, const rows& q, const results& out, const results& lse) override {
    held_.prefill_attention(layer, id, there(q), there(out, memory_->out), there(lse, memory_->lse), nullptr);
    bring_back(out, memory_->out);
    bring_back(lse, memory_->lse);
  }
  void end_layer(index_t layer, index_t id) override {
    give_device_scores(held_, layer, id);
    held_.end_layer(layer, id, nullptr);
  }
  void end_prefill(index_t id) override {
    give_device_scores(held_, id);
    held_.end_prefill(id, nullptr);
  }
  batch prepare_step(const std::vector<index_t>& ids, index_t tokens) override {
    return held_.prepare_step(ids, tokens, nullptr,
                              support::with_fault(support::called_step_boundaries<Method>(held_, ids, tokens), fault));
  }
  batch prepare_uneven(const std::vector<index_t>& ids, const std::vector<index_t>& lengths) override {
    return held_.prepare_step(ids, host_vector<index_t>(lengths.begin(), lengths.end()), nullptr,
                              support::with_fault(support::uneven_boundaries<Method>(held_, ids, lengths), fault));
  }
  void begin_step(const batch& step) override { held_.begin_step(step, nullptr); }
  void decode(index_t layer, const batch& step, const rows& q, const rows& k, const rows& v, const results& out,
              const results& lse) override {
    held_.decode(layer, step, there(q), there(k), there(v), there(out, memory_->out), there(lse, memory_->lse),
                 nullptr);
    bring_back(out, memory_->out);
    bring_back(lse, memory_->lse);
    support::clear_behind(step, out), support::clear_behind(step, lse);
  }
  void attend(index_t layer, const batch& step, const rows& q, const results& out, const results& lse) override {
    held_.attend(layer, step, there(q), there(out, memory_->out), there(lse, memory_->lse), nullptr);
    bring_back(out, memory_->out);
    bring_back(lse, memory_->lse);
    support::clear_behind(step, out), support::clear_behind(step, lse);
  }
  draft_step prepare_draft(const std::vector<index_t>& ids, const draft_tree& tree) override {
    return held_.prepare_draft(ids, {tree}, nullptr, support::called_draft_boundaries<Method>(held_, ids, tree));
  }
  void begin_draft(const draft_step& draft) override { held_.begin_step(draft, nullptr); }
  void decode_draft(index_t layer, const draft_step& draft, const rows& q, const rows& k, const rows& v,
                    const results& out, const results& lse) override {
    held_.decode(layer, draft, there(q), there(k), there(v), there(out, memory_->out), there(lse, memory_->lse),
                 nullptr);
    bring_back(out, memory_->out);
    bring_back(lse, memory_->lse);
  }
  void accept(const std::vector<accepted_tokens>& accepted) override {
    held_.accept(host_vector<accepted_tokens>(accepted.begin(), accepted.end()), nullptr);
  }
  void cancel(index_t id) override { held_.cancel(id); }
  void set_budget(index_t tokens) override { held_.set_budget(tokens); }
  index_t next_position(index_t id) const override { return held_.next_position(id); }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const override {
    return held_.positions(layer, id, head);
  }
  std::vector<index_t> readable(index_t layer, index_t id, index_t head) const override {
    return held_.readable(layer, id, head);
  }
  stage_plan plan(index_t id) const override { return held_.plan(id); }
  void trace_attended(bool on) override { held_.trace_attended(on); }
  std::vector<std::vector<index_t>> attended(index_t layer, index_t id) const override {
    return held_.attended(layer, id);
  }
  offset_t bytes(index_t id) const override { return held_.bytes(id); }
  offset_t bytes_read(index_t id) const override { return held_.bytes_read(id); }
  tessera::capacity bound(const tessera::turn_extent& turn, const tessera::sequence_options& options) const override {
    return held_.bound(turn, options);
  }
  tessera::capacity available() const override { return held_.available(); }

 private:
  template <class To, class From>
  static rows_view<To> with_data(const rows_view<From>& rows, To* data) {
    return {data,           rows.sequence_stride, rows.token_stride, rows.head_stride,
            rows.sequences, rows.tokens,          rows.heads,        rows.dim};
  }
  rows_view<const T> there(const rows& given) const {
    const auto& inputs = support::call_inputs(true);
    if (!given.data) return with_data<const T>(given, static_cast<const T*>(nullptr));
    const bool is_input =
        !std::less<>()(given.data, inputs.data()) && std::less<>()(given.data, inputs.data() + inputs.size());
    if (is_input) return with_data<const T>(given, memory_->inputs.data + (given.data - inputs.data()));
    const std::size_t count = std::size_t(given.sequences) * std::size_t(given.sequence_stride);
    auto& other = memory_->others[memory_->next++ % memory_->others.size()];
    other = std::make_unique<buffer<T>>(memory::rounded(std::vector<float>(given.data, given.data + count)));
    return with_data<const T>(given, static_cast<const T*>(other->data));
  }
  /// Not a number until it is written.
  static results there(const results& wanted, buffer<float>& to) {
    if (wanted.data) to.fill(0xff);
    return with_data<float>(wanted, wanted.data ? to.data : nullptr);
  }
  static void bring_back(const results& wanted, const buffer<float>& from) {
    if (!wanted.data) return;
    const std::size_t count = std::size_t(wanted.sequences * wanted.tokens * wanted.heads * wanted.dim);
    support::must(count <= from.count, "results are not more than a test has room for", count);
    cuda::check(cudaMemcpy(wanted.data, from.data, count * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

  cuda::cache<Method> held_;
  std::shared_ptr<memory> memory_;  // copies share it: one is called at a time
};

template <class Method>
requires runs_on_devices<Method> called_on_both on_both() {
  using retain_type = typename Method::retain_type;
  using retrieve_type = typename Method::retrieve_type;
  called_on_both method;
  method.known.has_budget = retain_type::chooses || retrieve_type::retrieves;
  method.known.has_two = retain_type::chooses;
  method.known.accumulates = retain_type::observed == observes::every_query;
  method.known.filters = retain_type::chooses && !retain_type::drops;
  method.known.by_layer = chooses_by_layer<Method>;
  method.known.packs = packing_layout<typename Method::layout_type>;
  method.known.segments = Method::needs_segments;
  method.known.step_segments = Method::needs_step_segments;
  if constexpr (retrieve_type::retrieves) method.known.exact = !retrieve_type::estimates && !retain_type::plans;
  method.numbers = support::numbers<Method>();
  const auto configured = [](const called_numbers& numbers) {
    Method made;
    support::keep_all_elements(made);
    support::shorten_segments(made);
    made.set_budget(numbers.budget);
    support::set_numbers(made, numbers.values);
    return made;
  };
  method.on_device = [=](const called_numbers& numbers, const cuda::cache_options& options) {
    return std::unique_ptr<support::called_cache>(std::make_unique<device_calls<Method>>(
        support::called_shape<Method>(numbers.shape), configured(numbers), options));
  };
  method.on_host = [=](const called_numbers& numbers) {
    cache<Method> held(support::called_shape<Method>(numbers.shape), configured(numbers),
                       std::make_shared<cpu::executor>(1));
    return std::unique_ptr<support::called_cache>(std::make_unique<support::plain_cpu_calls<Method>>(std::move(held)));
  };
  return method;
}

template <class Method>
void call_at_random() {
  if constexpr (runs_on_devices<Method>) {
    make_random_calls(on_both<Method>());
  } else {
    say_host_only();
  }
}
template <class Method>
void take_parameter_ends() {
  if constexpr (runs_on_devices<Method>) {
    take_ends(on_both<Method>());
  } else {
    say_host_only();
  }
}

}  // namespace gpu_test
