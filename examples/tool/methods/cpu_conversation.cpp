#include <utility>

#include "any_conversation.hpp"

namespace tool {
namespace {

class conversation final : public any_conversation {
 public:
  explicit conversation(std::unique_ptr<tessera::any_cache> cache) : any_conversation(std::move(cache)) {
    sequence_ = cache_->open();
  }
  conversation(const conversation& other) = default;
  conversation(const conversation& other, index_t sequence) : any_conversation(other, sequence) {}

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    observe(layer, queries(q, tokens), keys(k, tokens), values(v, tokens));
    cache_->prefill_attention(layer, sequence_, queries(q, tokens), outputs(out, tokens));
  }
  void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) override {
    cache_->prefill(layer, sequence_, q, k, v, boundaries_);
  }
  void reread(int layer, std::int64_t first, std::int64_t count, const float* q, const float* k, const float* v,
              int tokens, float* out) override {
    cache_->reread(layer, sequence_, index_t(first), index_t(count), queries(q, tokens), keys(k, tokens),
                   values(v, tokens), outputs(out, tokens));
  }
  void set_scores(int layer, std::int64_t first, const float* scores, int tokens) override {
    cache_->set_scores(layer, sequence_, index_t(first), tokens, scores);
  }
  void end_prefill() override {
    cache_->end_prefill(sequence_);
    ended_prompt();
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

  void load(const std::function<std::size_t(void*, std::size_t)>& source) override {
    const index_t loaded = cache_->load(source);
    cache_->close(std::exchange(sequence_, loaded));
  }
  std::unique_ptr<method_cache> clone() const override { return std::make_unique<conversation>(*this); }
  std::unique_ptr<method_cache> fork() override {
    return std::make_unique<conversation>(*this, cache_->fork(sequence_));
  }
  offset_t bytes() const override { return cache_->bytes(sequence_); }

  bool trace_ranked() override {
    cache_->trace_ranked(true);
    return true;
  }
  ranked_tokens ranked(int layer) const override { return cache_->ranked(layer, sequence_); }

 private:
  tessera::rows_view<float> outputs(float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, shape().q_heads, facts().v_dim);
  }
};

}  // namespace

std::unique_ptr<method_cache> cpu_conversation(std::unique_ptr<tessera::any_cache> cache) {
  return std::make_unique<conversation>(std::move(cache));
}

}  // namespace tool
