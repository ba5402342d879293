#include <utility>

#include "any_conversation.hpp"
#include "tool/rows/row_settings.hpp"

namespace tool {
namespace {

class conversation final : public any_conversation {
 public:
  conversation(std::unique_ptr<tessera::any_cache> cache, element_type given, bool rotates)
      : any_conversation(std::move(cache), given), of_q_(rotates), of_k_(rotates), of_v_(rotates) {
    sequence_ = cache_->open();
  }
  conversation(const conversation& other) = default;
  conversation(const conversation& other, index_t sequence)
      : any_conversation(other, sequence), of_q_(other.of_q_), of_k_(other.of_k_), of_v_(other.of_v_) {}

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    observe(layer, queries(q, tokens), keys(k, tokens), values(v, tokens));
    attend_prompt(layer, queries(q, tokens), out, nullptr);
  }
  void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) override {
    cache_->prefill(layer, sequence_, stored_q(q), stored_k(k), stored_v(v), boundaries_);
  }
  void reread(int layer, std::int64_t first, std::int64_t count, const float* q, const float* k, const float* v,
              int tokens, float* out) override {
    cache_->reread(layer, sequence_, index_t(first), index_t(count), stored_q(queries(q, tokens)),
                   stored_k(keys(k, tokens)), stored_v(values(v, tokens)), outputs(out, tokens));
    restore(out, tokens);
  }
  void set_scores(int layer, std::int64_t first, const float* scores, int tokens) override {
    cache_->set_scores(layer, sequence_, index_t(first), tokens, scores);
  }
  void end_prefill() override {
    cache_->end_prefill(sequence_);
    ended_prompt();
  }
  void attend_prompt(int layer, const input_rows& q, float* out, float* lse) override {
    cache_->prefill_attention(layer, sequence_, stored_q(q), outputs(out, q.tokens), lse_rows(lse, q.tokens));
    restore(out, q.tokens);
  }

  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    step(layer, queries(q, tokens), keys(k, tokens), values(v, tokens), out, nullptr);
  }
  void step(int layer, const input_rows& q, const input_rows& k, const input_rows& v, float* out, float* lse) override {
    if (layer == 0) step_ = cache_->prepare_step({sequence_}, q.tokens, std::exchange(boundaries_, {}));
    cache_->decode(layer, step_, stored_q(q), stored_k(k), stored_v(v), outputs(out, q.tokens),
                   lse_rows(lse, q.tokens));
    restore(out, q.tokens);
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

  /// In the channels that the model gives.
  std::optional<unpacked_rows> unpacked(int layer) override {
    std::optional<unpacked_rows> rows = any_conversation::unpacked(layer);
    if (!rows) return rows;
    of_k_.restore(rows->k.data(), offset_t(rows->k.size()) / facts().k_dim, facts().k_dim);
    of_v_.restore(rows->v.data(), offset_t(rows->v.size()) / facts().v_dim, facts().v_dim);
    return rows;
  }

 private:
  tessera::rows_view<float> outputs(float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, shape().q_heads, facts().v_dim);
  }
  tessera::rows_view<float> lse_rows(float* data, index_t tokens) const {
    return data ? tessera::nhd_rows(data, tokens, shape().q_heads, 1) : tessera::rows_view<float>{};
  }
  // Rows as the cache gets them, and outputs as the model does.
  input_rows stored_q(const input_rows& rows) { return of_q_.rotated(rows, facts().k_dim); }
  input_rows stored_k(const input_rows& rows) { return of_k_.rotated(rows, facts().k_dim); }
  input_rows stored_v(const input_rows& rows) { return of_v_.rotated(rows, facts().v_dim); }
  void restore(float* out, index_t tokens) const {
    of_v_.restore(out, offset_t(tokens) * shape().q_heads, facts().v_dim);
  }

  row_rotation of_q_, of_k_, of_v_;
};

}  // namespace

std::unique_ptr<method_cache> cpu_conversation(std::unique_ptr<tessera::any_cache> cache, element_type given,
                                               bool rotates) {
  return std::make_unique<conversation>(std::move(cache), given, rotates);
}

}  // namespace tool
