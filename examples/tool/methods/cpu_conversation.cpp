#include "cpu_conversation.hpp"

#include <utility>

namespace tool {
namespace {

class conversation final : public method_cache {
 public:
  explicit conversation(std::unique_ptr<tessera::any_cache> cache)
      : cache_(std::move(cache)), sequence_(cache_->open()) {}
  conversation(const conversation& other)
      : method_cache(other),
        cache_(other.cache_->clone()),
        reserved_(other.reserved_),
        step_(other.step_),
        sequence_(other.sequence_),
        boundaries_(other.boundaries_),
        reads_(other.reads_) {}
  conversation& operator=(const conversation&) = delete;

  index_t judged_together() const override { return facts().chunk; }
  void announce(index_t tokens) override {
    if (facts().chunk == 0) return;
    if (facts().shares_pages) reserved_ = cache_->plan_pages(sequence_, tokens).final_pages;
    cache_->announce(sequence_, tokens);
  }
  std::optional<page_counts> pages() const override {
    if (!facts().shares_pages) return std::nullopt;
    const auto used = cache_->pages(sequence_);
    return page_counts{{used.begin(), used.end()}, {reserved_.begin(), reserved_.end()}};
  }

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    observe(layer, queries(q, tokens), keys(k, tokens), values(v, tokens));
    cache_->prefill_attention(layer, sequence_, queries(q, tokens), outputs(out, tokens));
  }
  void begin_chunk(std::span<const std::uint8_t> boundaries) override { boundaries_ = boundaries; }
  void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) override {
    cache_->prefill(layer, sequence_, q, k, v, boundaries_);
  }

  bool rereads() const override { return facts().rereads; }
  void reread(int layer, std::int64_t first, std::int64_t count, const float* q, const float* k, const float* v,
              int tokens, float* out) override {
    cache_->reread(layer, sequence_, index_t(first), index_t(count), queries(q, tokens), keys(k, tokens),
                   values(v, tokens), outputs(out, tokens));
  }
  void end_prefill() override {
    cache_->end_prefill(sequence_);
    boundaries_ = {};
    reads_ = {};
  }
  void attend_prompt(int layer, const input_rows& q, float* out, float* lse) override {
    cache_->prefill_attention(layer, sequence_, q, outputs(out, q.tokens),
                              tessera::nhd_rows(lse, q.tokens, shape().q_heads, 1));
  }

  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    step(layer, queries(q, tokens), keys(k, tokens), values(v, tokens), out, nullptr);
  }
  void step(int layer, const input_rows& q, const input_rows& k, const input_rows& v, float* out, float* lse) override {
    const tessera::rows_view<float> lse_rows =
        lse ? tessera::nhd_rows(lse, q.tokens, shape().q_heads, 1) : tessera::rows_view<float>{};
    if (layer == 0) step_ = cache_->prepare_step({sequence_}, q.tokens, std::exchange(boundaries_, {}));
    cache_->decode(layer, step_, q, k, v, outputs(out, q.tokens), lse_rows);
    if (layer + 1 == shape().layers) {
      reads_.bytes += cache_->bytes_read(sequence_);
      ++reads_.steps;
    }
  }

  std::int64_t next_position() const override { return cache_->next_position(sequence_); }
  bool saves() const override { return facts().saves; }
  void save(const std::function<void(const void*, std::size_t)>& sink) override { cache_->save(sequence_, sink); }
  void load(const std::function<std::size_t(void*, std::size_t)>& source) override {
    const index_t loaded = cache_->load(source);
    cache_->close(std::exchange(sequence_, loaded));
  }
  std::unique_ptr<method_cache> clone() const override { return std::make_unique<conversation>(*this); }
  void set_budget(index_t tokens) override { cache_->set_budget(tokens); }

  index_t queries_needed(index_t tokens) const override { return cache_->queries_needed(tokens); }
  offset_t bytes() const override { return cache_->bytes(sequence_); }
  offset_t full_bytes(index_t tokens) const override { return cache_->full_bytes(tokens); }
  read_count reads() const override { return reads_; }
  std::vector<index_t> positions(int layer, index_t head) const override {
    return cache_->positions(layer, sequence_, head);
  }

  void trace_attended() override { cache_->trace_attended(true); }
  std::vector<std::vector<index_t>> attended(int layer) const override { return cache_->attended(layer, sequence_); }
  bool trace_ranked() override {
    cache_->trace_ranked(true);
    return true;
  }
  ranked_tokens ranked(int layer) const override { return cache_->ranked(layer, sequence_); }
  bool trace_lines() override {
    cache_->trace_lines(true);
    return true;
  }
  tessera::prompt_lines lines(int layer) const override { return cache_->lines(layer, sequence_); }
  std::optional<unpacked_rows> unpacked(int layer) override {
    if (!facts().packs) return std::nullopt;
    return cache_->unpacked(layer, sequence_);
  }

 private:
  const tessera::any_cache_facts& facts() const { return cache_->facts(); }
  const tessera::model_shape& shape() const { return cache_->shape(); }
  input_rows queries(const float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, shape().q_heads, facts().k_dim);
  }
  input_rows keys(const float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, shape().kv_heads, facts().k_dim);
  }
  input_rows values(const float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, shape().kv_heads, facts().v_dim);
  }
  tessera::rows_view<float> outputs(float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, shape().q_heads, facts().v_dim);
  }

  std::unique_ptr<tessera::any_cache> cache_;
  std::vector<index_t> reserved_;  // pages by group, for when the prompt has ended
  tessera::batch step_;
  index_t sequence_;
  std::span<const std::uint8_t> boundaries_{};  // of the chunk, or the step, that passes through the layers
  read_count reads_;
};

}  // namespace

std::unique_ptr<method_cache> cpu_conversation(std::unique_ptr<tessera::any_cache> cache) {
  return std::make_unique<conversation>(std::move(cache));
}

}  // namespace tool
