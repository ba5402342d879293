#include "evaluate.hpp"

#include <algorithm>
#include <tessera/core/error.hpp>

#include "values.hpp"

namespace tool {

using engine::token_t;

/// One prompt through the model for many caches: the first computes the attention, which is the same for all while
/// nothing has been dropped; the others only observe. Ends nobody's prefill: each copy does that at its own budget.
class evaluation::shared_prefill : public engine::kv_cache {
 public:
  shared_prefill(const std::vector<std::unique_ptr<method_cache>>& empty, const engine::llama_config& config)
      : config_(config) {
    for (const auto& cache : empty) caches_.push_back(cache->clone());
  }

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    caches_[0]->prefill(layer, q, k, v, tokens, out);
    const input_rows queries = tessera::nhd_rows(q, tokens, config_.num_attention_heads, config_.head_dim);
    const input_rows keys = tessera::nhd_rows(k, tokens, config_.num_key_value_heads, config_.head_dim);
    const input_rows values = tessera::nhd_rows(v, tokens, config_.num_key_value_heads, config_.head_dim);
    for (std::size_t i = 1; i < caches_.size(); ++i) caches_[i]->observe(layer, queries, keys, values);
  }
  void end_prefill() override {}
  void decode(int, const float*, const float*, const float*, int, float*) override {
    tessera::fail("decode step", "for all methods at once", "a step of one method", "decode with a copy of its cache");
  }
  std::int64_t next_position() const override { return caches_[0]->next_position(); }

  std::unique_ptr<method_cache> copy(std::size_t index) const { return caches_[index]->clone(); }

 private:
  const engine::llama_config& config_;
  std::vector<std::unique_ptr<method_cache>> caches_;
};

evaluation::evaluation(engine::llama& model, const engine::tokenizer& tokenizer, std::vector<variant> variants,
                       element_type element, std::shared_ptr<tessera::cpu::executor> workers)
    : model_(model), tokenizer_(tokenizer), variants_(std::move(variants)) {
  const engine::llama_config& config = model.config();
  request_ = {{config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads},
              config.head_dim,
              element,
              {},
              {},
              std::move(workers)};
  const method_info* newest = nullptr;
  for (const variant& variant : variants_) {
    request_.budget = variant.budget;
    request_.settings = variant.settings;
    auto cache = variant.method->make(request_);  // checks the budget
    if (variant.method != newest) empty_.push_back(std::move(cache));
    newest = variant.method;
    cache_of_variant_.push_back(empty_.size() - 1);
  }
}

std::vector<planned_turn> evaluation::plan(const conversation& conversation, const std::string& place) const {
  std::vector<planned_turn> turns;
  std::int64_t tokens = 0;
  for (const turn& turn : conversation.turns) {
    planned_turn planned{tokenizer_.encode(turn.prompt), turn.answer, 0};
    if (turns.empty() && tokenizer_.bos()) planned.prompt.insert(planned.prompt.begin(), *tokenizer_.bos());
    planned.max_new = std::int32_t(tokenizer_.encode(" " + turn.answer + "\n").size());
    tokens += std::int64_t(planned.prompt.size()) + planned.max_new;
    turns.push_back(std::move(planned));
  }
  const std::int64_t most = model_.config().max_position_embeddings;
  tessera::require(tokens <= most, place, std::to_string(tokens) + " tokens with its answers",
                   "at most the model's context, which is " + std::to_string(most), "shorten its prompts");
  // Some slack for an answer that begins with white space or is cut into other tokens.
  const auto slack = std::min<std::int64_t>(16, (most - tokens) / std::int64_t(turns.size()));
  for (planned_turn& turn : turns) turn.max_new += std::int32_t(slack);
  return turns;
}

void evaluation::run(const std::string& family, const std::vector<planned_turn>& turns) {
  shared_prefill shared(empty_, model_.config());
  const std::vector<float> logits = model_.prefill(turns[0].prompt, shared);
  for (std::size_t i = 0; i < variants_.size(); ++i) {
    const auto cache = shared.copy(cache_of_variant_[i]);
    if (variants_[i].budget) cache->set_budget(*variants_[i].budget);
    cache->end_prefill();
    answer(i, family, turns, logits, *cache);
  }
}

// All turns of one variant, from the logits and the cache after the first prompt.
void evaluation::answer(std::size_t variant, const std::string& family, const std::vector<planned_turn>& turns,
                        std::vector<float> logits, method_cache& cache) {
  std::vector<token_t> pending;  // generated, not in the cache yet
  for (std::size_t i = 0; i < turns.size(); ++i) {
    if (i > 0) {
      pending.insert(pending.end(), turns[i].prompt.begin(), turns[i].prompt.end());
      logits = model_.prefill(pending, cache);
    }
    cell& sums = cell_of(variant, family, int(i) + 1);
    sums.bytes_held += double(cache.bytes());
    sums.bytes_full += double(cache.full_bytes(index_t(cache.next_position())));
    const std::vector<token_t> generated = generate(turns[i], logits, cache);
    sums.bytes_read += double(cache.reads().bytes);
    sums.steps += cache.reads().steps;
    sums.questions += 1;
    sums.right += answers(tokenizer_.decode(generated), turns[i].answer);
    pending.clear();
    if (!generated.empty() && !ends(generated, turns[i].answer)) pending.push_back(generated.back());
  }
}

std::vector<token_t> evaluation::generate(const planned_turn& turn, const std::vector<float>& logits,
                                          method_cache& cache) const {
  engine::generate_options options;
  options.max_new = turn.max_new;
  options.stop = [&](std::span<const token_t> tokens) { return ends({tokens.begin(), tokens.end()}, turn.answer); };
  return model_.extend(logits, cache, options);
}

// An answer ends with eos, or with a line break once it has as many lines as the expected one.
bool evaluation::ends(const std::vector<token_t>& answer, const std::string& expected) const {
  const auto& eos = model_.config().eos;
  if (std::find(eos.begin(), eos.end(), answer.back()) != eos.end()) return true;
  const auto breaks = tokenizer_.newline_tokens();
  if (!std::binary_search(breaks.begin(), breaks.end(), answer.back())) return false;
  const std::string text = tokenizer_.decode(answer);
  const std::size_t start = std::min(text.find_first_not_of(" \t\r\n"), text.size());
  const std::string_view wanted = trimmed(expected);
  return std::count(text.begin() + std::ptrdiff_t(start), text.end(), '\n') >
         std::count(wanted.begin(), wanted.end(), '\n');
}

cell& evaluation::cell_of(std::size_t variant, const std::string& family, int turn) {
  const auto is_it = [&](const cell& cell) {
    return cell.variant == variant && cell.family == family && cell.turn == turn;
  };
  const auto found = std::find_if(cells_.begin(), cells_.end(), is_it);
  if (found != cells_.end()) return *found;
  cell fresh;
  fresh.variant = variant;
  fresh.family = family;
  fresh.turn = turn;
  return cells_.emplace_back(fresh);
}

}  // namespace tool
