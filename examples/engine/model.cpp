#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tessera/core/error.hpp>
#include <utility>

namespace engine {
namespace {

// 340 squares of it fit float: a head's scores and norms can neither overflow nor cancel to NaN and rank tokens by chance.
constexpr float largest_factor = 1e18f;
constexpr float largest_float = std::numeric_limits<float>::max();

// Stacks weights that share their input, so that one product computes them all.
matrix stacked(const checkpoint& weights, std::initializer_list<std::pair<std::string, std::int32_t>> parts,
               std::int32_t inputs) {
  matrix result{0, inputs, {}};
  for (const auto& [name, outputs] : parts) {
    const std::vector<float> values = weights.weight(name, {outputs, inputs});
    result.outputs += outputs;
    result.values.insert(result.values.end(), values.begin(), values.end());
  }
  return result;
}

}  // namespace

llama::llama(llama_config config, const checkpoint& weights, tessera::cpu::executor& executor)
    : config_(std::move(config)), executor_(&executor), frequencies_(rope_frequencies(config_)) {
  const std::int32_t hidden = config_.hidden_size, inner = config_.intermediate_size;
  embedding_ = stacked(weights, {{"model.embed_tokens.weight", config_.vocab_size}}, hidden);
  if (!config_.tie_word_embeddings) head_ = stacked(weights, {{"lm_head.weight", config_.vocab_size}}, hidden);
  final_norm_ = weights.weight("model.norm.weight", {hidden});
  for (std::int32_t index = 0; index < config_.num_hidden_layers; ++index) {
    const std::string prefix = "model.layers." + std::to_string(index) + ".";
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    layer loaded;
    loaded.attention_norm = weights.weight(prefix + "input_layernorm.weight", {hidden});
    loaded.mlp_norm = weights.weight(prefix + "post_attention_layernorm.weight", {hidden});
    loaded.qkv = stacked(weights,
                         {{attention + "q_proj.weight", config_.q_size()},
                          {attention + "k_proj.weight", config_.kv_size()},
                          {attention + "v_proj.weight", config_.kv_size()}},
                         hidden);
    if (config_.qkv_bias) {
      for (const auto& [name, size] : {std::pair("q_proj.bias", config_.q_size()),
                                       {"k_proj.bias", config_.kv_size()},
                                       {"v_proj.bias", config_.kv_size()}}) {
        const std::vector<float> bias = weights.weight(attention + name, {size});
        loaded.qkv_bias.insert(loaded.qkv_bias.end(), bias.begin(), bias.end());
      }
    }
    if (config_.qk_norm) {
      loaded.q_norm = weights.weight(attention + "q_norm.weight", {config_.head_dim});
      loaded.k_norm = weights.weight(attention + "k_norm.weight", {config_.head_dim});
    }
    loaded.attention_out = stacked(weights, {{attention + "o_proj.weight", hidden}}, config_.q_size());
    loaded.gate_up = stacked(weights, {{mlp + "gate_proj.weight", inner}, {mlp + "up_proj.weight", inner}}, hidden);
    loaded.down = stacked(weights, {{mlp + "down_proj.weight", hidden}}, inner);
    layers_.push_back(std::move(loaded));
  }
}

llama llama::load(const std::filesystem::path& directory, tessera::cpu::executor& executor) {
  llama_config config = config_of_model(directory);
  const checkpoint weights = checkpoint::open(directory);
  require_agreement(directory, config, weights);
  auto gate = load_gate(directory, config);
  llama loaded(std::move(config), weights, executor);
  loaded.gate_ = std::move(gate);
  return loaded;
}

void llama::workspace::resize(const llama_config& config, std::int32_t tokens) {
  const auto rows = std::size_t(tokens);
  const auto grow = [rows](std::vector<float>& values, std::int32_t width) {
    values.resize(std::max(values.size(), rows * std::size_t(width)));
  };
  grow(hidden, config.hidden_size);
  grow(normed, config.hidden_size);
  grow(projected, config.hidden_size);
  grow(qkv, config.q_size() + 2 * config.kv_size());
  grow(q, config.q_size());
  grow(k, config.kv_size());
  grow(v, config.kv_size());
  grow(attended, config.q_size());
  grow(gate_up, 2 * config.intermediate_size);
  grow(activated, config.intermediate_size);
}

void llama::attend(const layer& weights, int index, std::int64_t first, std::int32_t tokens, const rope_table& table,
                   kv_cache& cache, phase now) {
  rms_norm(*executor_, work_.hidden.data(), tokens, weights.attention_norm, config_.rms_norm_eps, work_.normed.data());
  linear(*executor_, work_.normed.data(), tokens, weights.qkv, work_.qkv.data());
  if (config_.qkv_bias) add_bias(*executor_, weights.qkv_bias, tokens, work_.qkv.data());
  if (config_.qk_norm) norm_heads(*executor_, config_, weights.q_norm, weights.k_norm, tokens, work_.qkv.data());
  split_and_rotate(*executor_, config_, table, work_.qkv.data(), tokens, work_.q.data(), work_.k.data(),
                   work_.v.data());
  require_numbers("a query", index, work_.q, config_.q_size(), first, tokens, largest_factor);
  require_numbers("a key", index, work_.k, config_.kv_size(), first, tokens, largest_factor);
  require_numbers("a value", index, work_.v, config_.kv_size(), first, tokens, largest_factor);
  const float *q = work_.q.data(), *k = work_.k.data(), *v = work_.v.data();
  if (now == phase::prefill)
    cache.prefill(index, q, k, v, tokens, work_.attended.data());
  else
    cache.decode(index, q, k, v, tokens, work_.attended.data());
  require_numbers("the attention", index, work_.attended, config_.q_size(), first, tokens, largest_float);
  if (cache.takes_scores()) score(index, first, tokens, cache);
}

// Hands over the gate's scores of the tokens whose rows are in work_.normed.
void llama::score(int index, std::int64_t first, std::int32_t tokens, kv_cache& cache) {
  const gate_layer& gate = (*gate_)[std::size_t(index)];
  work_.gated.resize(std::size_t(tokens) * std::size_t(gate.projections.outputs));
  work_.scores.resize(std::size_t(tokens) * std::size_t(config_.num_key_value_heads));
  gate_scores(*executor_, config_, gate, work_.normed.data(), tokens, work_.gated.data(), work_.scores.data());
  cache.set_scores(index, first, work_.scores.data(), tokens);
}

// Errors: a value of a layer that is no number or above `most`. `values` [tokens, width], `first` the first token's position.
void llama::require_numbers(const char* what, int index, const std::vector<float>& values, std::int32_t width,
                            std::int64_t first, std::int32_t tokens, float most) const {
  for (std::int64_t i = 0; i < std::int64_t(tokens) * width; ++i) {
    const float value = values[std::size_t(i)];
    if (std::abs(value) <= most) continue;
    tessera::fail(std::string(what) + " of layer " + std::to_string(index) + ", head " +
                      std::to_string(i % width / config_.head_dim) + ", token " + std::to_string(first + i / width),
                  value,
                  most == largest_float ? "a finite number" : "at most 1e18: products of larger ones overflow float",
                  "check the weights");
  }
}

// The part of a layer behind its attention, where no token sees another. Updates `hidden` [rows, hidden] in place.
void llama::finish_layer(const layer& weights, float* hidden, const float* attended, std::int32_t rows) {
  linear(*executor_, attended, rows, weights.attention_out, work_.projected.data());
  add(*executor_, work_.projected.data(), rows, config_.hidden_size, hidden);
  rms_norm(*executor_, hidden, rows, weights.mlp_norm, config_.rms_norm_eps, work_.normed.data());
  linear(*executor_, work_.normed.data(), rows, weights.gate_up, work_.gate_up.data());
  swiglu(*executor_, work_.gate_up.data(), rows, config_.intermediate_size, work_.activated.data());
  linear(*executor_, work_.activated.data(), rows, weights.down, work_.projected.data());
  add(*executor_, work_.projected.data(), rows, config_.hidden_size, hidden);
}

// Passes a chunk through every layer. Afterwards work_.hidden holds the final states of the last `wanted` tokens, at
// their rows; the others stop at the last layer's attention, which saves a sixth of a six-layer model's prefill.
void llama::forward(std::span<const token_t> tokens, kv_cache& cache, phase now, std::int32_t wanted) {
  const auto count = std::int32_t(tokens.size());
  const std::int64_t position = cache.next_position();
  const rope_table table = make_rope_table(frequencies_, position, count);
  const rope_table still = config_.rotates.empty() ? rope_table{} : make_still_table(frequencies_.size(), count);
  work_.resize(config_, count);
  const std::int64_t width = config_.hidden_size;
  for (std::int64_t row = 0; row < count; ++row)
    std::copy_n(embedding_.values.data() + tokens[std::size_t(row)] * width, width, work_.hidden.data() + row * width);

  for (std::int32_t index = 0; index < config_.num_hidden_layers; ++index) {
    const layer& weights = layers_[std::size_t(index)];
    attend(weights, index, position, count, config_.turns(index) ? table : still, cache, now);
    const std::int32_t rows = index + 1 < config_.num_hidden_layers ? count : wanted;
    const std::int64_t first = count - rows;
    if (rows > 0)
      finish_layer(weights, work_.hidden.data() + first * width, work_.attended.data() + first * config_.q_size(),
                   rows);
  }
}

// The logits [wanted, vocab] of the last `wanted` of `tokens` rows.
std::vector<float> llama::logits_of(std::int32_t tokens, std::int32_t wanted) {
  const float* hidden = work_.hidden.data() + std::int64_t(tokens - wanted) * config_.hidden_size;
  rms_norm(*executor_, hidden, wanted, final_norm_, config_.rms_norm_eps, work_.normed.data());
  std::vector<float> logits(std::size_t(wanted) * std::size_t(config_.vocab_size));
  linear(*executor_, work_.normed.data(), wanted, config_.tie_word_embeddings ? embedding_ : head_, logits.data());
  return logits;
}

std::vector<float> llama::prefill(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options) {
  require_prompt(config_, prompt, options, cache.next_position());
  require_gate(cache.takes_scores(), gate_.has_value());
  std::size_t done = 0;
  std::int32_t count = 0;
  while (done < prompt.size()) {
    count = std::int32_t(std::min(prompt.size() - done, std::size_t(options.chunk)));
    const auto chunk = prompt.subspan(done, std::size_t(count));
    cache.begin_chunk(options.boundaries.empty() ? options.boundaries
                                                 : options.boundaries.subspan(done, std::size_t(count)));
    done += chunk.size();
    forward(chunk, cache, phase::prefill, done == prompt.size() ? 1 : 0);
    if (options.progress) options.progress(std::int64_t(done), std::int64_t(prompt.size()));
  }
  std::vector<float> logits = logits_of(count, 1);  // before the working memory is used again
  if (cache.rereads()) reread(prompt, cache, options);
  cache.end_prefill();
  return logits;
}

namespace {

/// What a model writes down for a part of a prompt: a cache that hands over a re-reading in place of a chunk.
class rereading_cache final : public kv_cache {
 public:
  rereading_cache(kv_cache& held, const repeated_part& part) : held_(held), part_(part) {}
  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    held_.reread(layer, part_.first, part_.count, q, k, v, tokens, out);
  }
  void end_prefill() override {}
  void decode(int, const float*, const float*, const float*, int, float*) override {}
  std::int64_t next_position() const override { return held_.next_position(); }

 private:
  kv_cache& held_;
  const repeated_part& part_;
};

}  // namespace

void llama::reread(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options) {
  const std::int64_t end = cache.next_position(), total = std::int64_t(prompt.size());
  for (const repeated_part& part : repeat_in_parts(config_, prompt, options.repeat, end)) {
    rereading_cache again(cache, part);
    forward(part.text, again, phase::prefill, 0);
    if (options.progress) options.progress(part.first + part.count - (end - total), total);
  }
}

std::vector<float> llama::decode(std::span<const token_t> tokens, kv_cache& cache) {
  require_step(config_, tokens, cache.next_position());
  require_gate(cache.takes_scores(), gate_.has_value());
  const auto count = std::int32_t(tokens.size());
  forward(tokens, cache, phase::decode, count);
  return logits_of(count, count);
}

std::vector<token_t> llama::generate(std::span<const token_t> prompt, kv_cache& cache,
                                     const generate_options& options) {
  tessera::require(options.max_new >= 0, "max_new", options.max_new, "at least 0", "pass a number of tokens");
  // The last new token is never decoded, so it takes no position.
  require_room(config_, prompt, std::max(options.max_new - 1, 0), cache.next_position());
  return extend(prefill(prompt, cache, options.prefill), cache, options);
}

std::vector<token_t> llama::extend(std::span<const float> logits, kv_cache& cache, const generate_options& options) {
  return answer_greedily(config_, logits, cache.next_position(), options, [&](token_t token) {
    if (!options.ends_segment.empty()) cache.begin_chunk(options.ends_segment.subspan(std::size_t(token), 1));
    return best_token(decode({&token, 1}, cache));
  });
}

}  // namespace engine
