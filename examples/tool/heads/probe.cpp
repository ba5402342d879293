#include "probe.hpp"

#include <algorithm>
#include <cmath>
#include <tessera/core/error.hpp>

#include "tool/methods/registry.hpp"

namespace tool {
namespace {

/// The uncompressed cache of one conversation; keys and the newest queries are remembered on the way.
class watched_cache final : public method_cache {
 public:
  watched_cache(std::unique_ptr<method_cache> held, const engine::llama_config& config, index_t rows)
      : held_(std::move(held)),
        q_size_(std::size_t(config.q_size())),
        kv_size_(std::size_t(config.kv_size())),
        rows_(rows),
        keys_(std::size_t(config.num_hidden_layers)),
        queries_(keys_.size()) {}

  /// [tokens, kv_heads, head_dim] of a layer, and of its newest `rows` tokens [rows, q_heads, head_dim].
  const std::vector<float>& keys(int layer) const { return keys_[std::size_t(layer)]; }
  const std::vector<float>& queries(int layer) const { return queries_[std::size_t(layer)]; }

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    auto &keys = keys_[std::size_t(layer)], &queries = queries_[std::size_t(layer)];
    keys.insert(keys.end(), k, k + std::size_t(tokens) * kv_size_);
    queries.insert(queries.end(), q, q + std::size_t(tokens) * q_size_);
    const std::size_t most = std::size_t(rows_) * q_size_;
    if (queries.size() > most) queries.erase(queries.begin(), queries.end() - std::ptrdiff_t(most));
    held_->prefill(layer, q, k, v, tokens, out);
  }
  void end_prefill() override { held_->end_prefill(); }
  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    held_->decode(layer, q, k, v, tokens, out);
  }
  std::int64_t next_position() const override { return held_->next_position(); }
  void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) override {
    held_->observe(layer, q, k, v);
  }
  void step(int layer, const input_rows& q, const input_rows& k, const input_rows& v, float* out, float* lse) override {
    held_->step(layer, q, k, v, out, lse);
  }
  std::unique_ptr<method_cache> clone() const override { return held_->clone(); }
  void set_budget(index_t tokens) override { held_->set_budget(tokens); }
  index_t queries_needed(index_t tokens) const override { return held_->queries_needed(tokens); }
  offset_t bytes() const override { return held_->bytes(); }
  offset_t full_bytes(index_t tokens) const override { return held_->full_bytes(tokens); }
  read_count reads() const override { return held_->reads(); }
  std::vector<index_t> positions(int layer, index_t head) const override { return held_->positions(layer, head); }
  void trace_attended() override { held_->trace_attended(); }
  std::vector<std::vector<index_t>> attended(int layer) const override { return held_->attended(layer); }

 private:
  std::unique_ptr<method_cache> held_;
  std::size_t q_size_, kv_size_;
  index_t rows_;
  std::vector<std::vector<float>> keys_, queries_;
};

/// The part of a query's mass that lies on keys [sinks, position - recent], of keys [0, position].
double mass_beyond(const float* query, const float* keys, std::size_t stride, int dim, index_t position, index_t sinks,
                   index_t recent) {
  std::vector<double> logits;
  double top = -std::numeric_limits<double>::infinity();
  for (index_t token = 0; token <= position; ++token) {
    const float* key = keys + std::size_t(token) * stride;
    double sum = 0;
    for (int d = 0; d < dim; ++d) sum += double(query[d]) * double(key[d]);
    logits.push_back(sum / std::sqrt(double(dim)));
    top = std::max(top, logits.back());
  }
  double beyond = 0, all = 0;
  for (index_t token = 0; token <= position; ++token) {
    const double weight = std::exp(logits[std::size_t(token)] - top);
    all += weight;
    if (token >= sinks && token + recent <= position) beyond += weight;
  }
  return beyond / all;
}

}  // namespace

head_probe::head_probe(runner& model, index_t sinks, index_t recent, std::shared_ptr<tessera::cpu::executor> workers)
    : model_(model), sinks_(sinks), recent_(recent), workers_(std::move(workers)) {
  const engine::llama_config& config = model.config();
  sums_.assign(std::size_t(config.num_hidden_layers) * std::size_t(config.num_key_value_heads), 0.0);
}

void head_probe::add(const std::vector<engine::token_t>& prompt, const std::vector<engine::token_t>& answer) {
  const engine::llama_config& config = model_.config();
  std::vector<engine::token_t> text = prompt;
  text.insert(text.end(), answer.begin(), answer.end() - 1);
  const index_t tokens = index_t(text.size()), rows = index_t(answer.size());
  cache_request request;
  request.shape = shape_of(config);
  request.head_dim = config.head_dim;
  request.workers = workers_;
  request.tokens = tokens;
  watched_cache cache(find_method("full").make(request), config, rows);
  model_.prefill(text, cache);
  const index_t heads = config.num_key_value_heads, group = config.num_attention_heads / heads;
  const std::size_t stride = std::size_t(config.kv_size());
  workers_->for_each(config.num_hidden_layers * heads, [&](index_t item, int) {
    const int layer = int(item / heads);
    const index_t head = item % heads;
    for (index_t row = 0; row < rows; ++row) {
      double most = 0;
      for (index_t g = 0; g < group; ++g) {
        const float* query = cache.queries(layer).data() + std::size_t(row) * std::size_t(config.q_size()) +
                             std::size_t(head * group + g) * std::size_t(config.head_dim);
        const float* keys = cache.keys(layer).data() + std::size_t(head) * std::size_t(config.head_dim);
        most = std::max(most, mass_beyond(query, keys, stride, config.head_dim, tokens - rows + row, sinks_, recent_));
      }
      sums_[std::size_t(item)] += most;
    }
  });
  rows_ += rows;
  ++questions_;
}

head_gates head_probe::found() const {
  tessera::require(rows_ > 0, "questions", 0, "at least 1", "ask something");
  head_gates result;
  result.layers = model_.config().num_hidden_layers;
  result.kv_heads = model_.config().num_key_value_heads;
  result.sinks = sinks_;
  result.recent = recent_;
  result.questions = questions_;
  for (const double sum : sums_) result.gates.push_back(std::min(1.0, sum / double(rows_)));
  return result;
}

}  // namespace tool
