#include "evaluate.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <tessera/core/error.hpp>
#include <utility>

#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace tool {

using engine::token_t;

double cell::score() const { return std::accumulate(scores.begin(), scores.end(), 0.0); }

index_t longest_answer(const std::vector<planned_turn>& turns) {
  index_t longest = 1;
  for (const planned_turn& turn : turns) longest = std::max<index_t>(longest, turn.max_new);
  return longest;
}

std::vector<planned_turn> plan_turns(const conversation& conversation, const std::string& place,
                                     const engine::llama_config& config, const engine::tokenizer& tokenizer) {
  std::vector<planned_turn> turns;
  std::int64_t tokens = 0;
  for (const turn& turn : conversation.turns) {
    planned_turn planned{tokenizer.encode(turn.prompt), turn.answer, 0, turn.references};
    if (turns.empty() && tokenizer.bos()) planned.prompt.insert(planned.prompt.begin(), *tokenizer.bos());
    planned.max_new = std::int32_t(tokenizer.encode(" " + turn.answer + "\n").size());
    tokens += std::int64_t(planned.prompt.size()) + planned.max_new;
    turns.push_back(std::move(planned));
  }
  const std::int64_t most = config.max_position_embeddings;
  tessera::require(tokens <= most, place, std::to_string(tokens) + " tokens with its answers",
                   "at most the model's context, which is " + std::to_string(most), "shorten its prompts");
  // An answer may be cut into twice as many tokens, and have white space at its ends.
  const std::int64_t room = (most - tokens) / std::int64_t(turns.size());
  for (planned_turn& turn : turns) turn.max_new += std::int32_t(std::min<std::int64_t>(turn.max_new + 2, room));
  return turns;
}

void require_caches(const std::vector<variant>& variants, const engine::llama_config& config, element_type element,
                    const std::shared_ptr<tessera::cpu::executor>& workers) {
  for (const variant& row : variants) {
    cache_request request{shape_of(config), config.head_dim, element, row.budget, row.settings, workers, 0};
    row.method->make(request);  // takes no memory for tokens
  }
}

evaluation::evaluation(runner& model, const engine::tokenizer& tokenizer, std::vector<variant> variants,
                       element_type element, std::shared_ptr<tessera::cpu::executor> workers)
    : model_(model), tokenizer_(tokenizer), variants_(std::move(variants)) {
  const engine::llama_config& config = model.config();
  require_caches(variants_, config, element, workers);
  request_ = {shape_of(config), config.head_dim, element, {}, {}, std::move(workers), 0};
  for (std::size_t i = 0; i < variants_.size(); ++i) {
    const variant& variant = variants_[i];
    if (variant.method->fuses_chunks) {
      cache_of_variant_.push_back(own_prefill);
      continue;
    }
    const bool shares =
        i > 0 && variant.method == variants_[i - 1].method && variant.differs == variants_[i - 1].differs;
    if (!shares) first_of_method_.push_back(i);
    cache_of_variant_.push_back(first_of_method_.size() - 1);
  }
}

std::unique_ptr<method_cache> evaluation::empty_cache(const variant& variant,
                                                      const std::vector<planned_turn>& turns) const {
  std::int64_t tokens = 0;
  for (const planned_turn& turn : turns) tokens += std::int64_t(turn.prompt.size()) + turn.max_new;
  cache_request request = request_;
  request.budget = variant.budget;
  request.settings = with_answer_limit(*variant.method, variant.settings, longest_answer(turns));
  request.tokens = index_t(tokens);
  return make_cache(*variant.method, model_.where(), request);
}

void evaluation::run(const std::string& family, const std::vector<planned_turn>& turns) {
  const std::vector<cell> before = cells_;
  try {
    ask_all(family, turns);
  } catch (...) {
    cells_ = before;
    throw;
  }
}

engine::prefill_options evaluation::ticking() const {
  engine::prefill_options options;
  options.progress = [this](std::int64_t, std::int64_t) { tick_(); };
  options.repeat = repeat_sentences(tokenizer_);
  return options;
}

// Counts the pairs of a prompt whose rows attend lines, chunk by chunk.
engine::prefill_options evaluation::counting(const method_info& method, const method_cache& cache,
                                             engine::prefill_options options, pair_count& pairs) const {
  if (!method.chooses_lines) return options;
  options.progress = [this, &cache, &pairs, next = index_t(cache.next_position())](std::int64_t, std::int64_t) mutable {
    const index_t first = std::exchange(next, index_t(cache.next_position()));
    count_pairs(cache, request_.shape, first, next, pairs);
    tick_();
  };
  return options;
}

void evaluation::ask_all(const std::string& family, const std::vector<planned_turn>& turns) {
  prompt_all(turns, [&](std::size_t variant, std::vector<float> logits, method_cache& cache) {
    answer(variant, family, turns, std::move(logits), cache);
  });
}

void evaluation::prompt_all(const std::vector<planned_turn>& turns, const visitor& visit) {
  std::vector<std::unique_ptr<method_cache>> shared;
  for (const std::size_t first : first_of_method_) {
    shared.push_back(empty_cache(variants_[first], turns));
    if (variants_[first].method->chooses_lines) (void)shared.back()->trace_lines();
  }
  pairs_of_cache_.assign(shared.size(), {});
  const std::vector<std::uint8_t> boundaries = tokenizer_.boundaries(turns[0].prompt);
  engine::prefill_options options = ticking();
  options.boundaries = boundaries;
  const auto logits = prefill_first(turns[0].prompt, shared, options);
  for (const auto& cache : shared) {
    if (cache->rereads()) model_.reread(turns[0].prompt, *cache, options);
  }
  for (std::size_t i = 0; i < variants_.size(); ++i) {
    if (cache_of_variant_[i] == own_prefill) {  // what it drops on the way changes what the model sees
      const auto own = empty_cache(variants_[i], turns);
      own->announce(index_t(turns[0].prompt.size()));
      std::vector<float> own_logits = model_.prefill(turns[0].prompt, *own, options);
      visit(i, std::move(own_logits), *own);
      continue;
    }
    const auto cache = shared[cache_of_variant_[i]]->clone();
    if (variants_[i].budget) cache->set_budget(*variants_[i].budget);
    cache->end_prefill();
    visit(i, logits[cache_of_variant_[i]], *cache);
  }
}

// Logits of a document's last token by cache. Methods whose prompts attend lines see other hidden states than dense ones: each
// passes the document through the model alone, all others together.
std::vector<std::vector<float>> evaluation::prefill_first(const std::vector<token_t>& prompt,
                                                          std::vector<std::unique_ptr<method_cache>>& caches,
                                                          const engine::prefill_options& options) {
  std::vector<std::vector<std::size_t>> passes;
  std::optional<std::size_t> dense;
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const bool alone = variants_[first_of_method_[i]].method->chooses_lines;
    if (alone || !dense) passes.emplace_back();
    if (!alone && !dense) dense = passes.size() - 1;
    passes[alone ? passes.size() - 1 : *dense].push_back(i);
  }
  std::vector<std::vector<float>> logits(caches.size());
  for (const auto& pass : passes) {
    std::vector<std::unique_ptr<method_cache>> together;
    for (const std::size_t i : pass) together.push_back(std::move(caches[i]));
    const method_info& method = *variants_[first_of_method_[pass[0]]].method;
    const std::vector<float> last =
        model_.prefill_all(prompt, together, counting(method, *together[0], options, pairs_of_cache_[pass[0]]));
    for (std::size_t i = 0; i < pass.size(); ++i) {
      caches[pass[i]] = std::move(together[i]);
      logits[pass[i]] = last;
    }
  }
  return logits;
}

// All turns of one variant, from the logits and the cache after the first prompt.
void evaluation::answer(std::size_t variant, const std::string& family, const std::vector<planned_turn>& turns,
                        std::vector<float> logits, method_cache& cache) {
  std::vector<token_t> pending;  // generated, not in the cache yet
  const method_info& method = *variants_[variant].method;
  const std::size_t shared = cache_of_variant_[variant];
  if (method.chooses_lines) (void)cache.trace_lines();
  pair_count pairs = shared == own_prefill ? pair_count{} : pairs_of_cache_[shared];
  for (std::size_t i = 0; i < turns.size(); ++i) {
    if (i > 0) {
      pending.insert(pending.end(), turns[i].prompt.begin(), turns[i].prompt.end());
      const std::vector<std::uint8_t> boundaries = tokenizer_.boundaries(pending);
      engine::prefill_options options = ticking();
      options.boundaries = boundaries;
      pairs = {};
      cache.announce(index_t(pending.size()));
      logits = model_.prefill(pending, cache, counting(method, cache, options, pairs));
    }
    cell& sums = cell_of(variant, family, int(i) + 1);
    sums.pairs.attended += pairs.attended;
    sums.pairs.visible += pairs.visible;
    sums.bytes_held += double(cache.bytes());
    sums.bytes_full += double(cache.full_bytes(index_t(cache.next_position())));
    const std::vector<token_t> generated = generate(turns[i], logits, cache);
    sums.bytes_read += double(cache.reads().bytes);
    sums.steps += cache.reads().steps;
    const index_t limit = longest_answer(turns);
    sums.least_limit = sums.questions == 0 ? limit : std::min(sums.least_limit, limit);
    sums.most_limit = std::max(sums.most_limit, limit);
    sums.questions += 1;
    sums.answers.push_back(tokenizer_.decode(generated));
    const std::vector<std::string> only{turns[i].answer};
    sums.scores.push_back(scoring_(sums.answers.back(), turns[i].references.empty() ? only : turns[i].references));
    sums.verdicts.push_back(sums.scores.back() == 1);
    sums.right += sums.verdicts.back();
    pending.clear();
    if (!generated.empty() && !ends(generated, turns[i].answer)) pending.push_back(generated.back());
  }
}

std::vector<token_t> evaluation::generate(const planned_turn& turn, const std::vector<float>& logits,
                                          method_cache& cache) const {
  engine::generate_options options;
  options.max_new = turn.max_new;
  options.ends_segment = tokenizer_.ends_segment();
  options.stop = [&](std::span<const token_t> tokens) {
    tick_();
    return ends({tokens.begin(), tokens.end()}, turn.answer);
  };
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
