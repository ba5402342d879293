#include "probe.hpp"

#include <algorithm>
#include <cmath>
#include <tessera/core/error.hpp>

#include "tool/heads/watched_cache.hpp"
#include "tool/methods/registry.hpp"

namespace tool {
namespace {

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
