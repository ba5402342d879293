#include "evaluate.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <tessera/core/error.hpp>
#include <utility>

#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"
#include "tool/rows/row_settings.hpp"

namespace tool {

using engine::token_t;

namespace {

class stopwatch {
 public:
  /// Seconds since the last call, or the beginning.
  double restart() {
    const auto now = clock::now();
    return std::chrono::duration<double>(now - std::exchange(start_, now)).count();
  }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point start_ = clock::now();
};

}  // namespace

double cell::score() const { return std::accumulate(scores.begin(), scores.end(), 0.0); }

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
    std::vector<setting> settings = variant.settings;
    if (variant.method->fuses_chunks || !row_settings::taken_from(settings).as_given()) {
      cache_of_variant_.push_back(own_prefill);
      continue;
    }
    const bool shares =
        i > 0 && variant.method == variants_[i - 1].method && variant.differs == variants_[i - 1].differs;
    if (!shares) first_of_method_.push_back(i);
    cache_of_variant_.push_back(first_of_method_.size() - 1);
  }
}

std::unique_ptr<method_cache> evaluation::empty_cache(const variant& variant, const std::vector<planned_turn>& turns,
                                                      index_t forks) const {
  cache_request request = request_;
  request.budget = variant.budget;
  request.settings = with_answer_limit(*variant.method, variant.settings, longest_answer(turns));
  request.tokens = group_.tokens;
  request.forks = forks;
  return make_cache(*variant.method, model_.where(), request);
}

void evaluation::run(const std::string& family, const std::vector<planned_turn>& turns) {
  const std::vector<cell> before = cells_;
  if (left_ > 0 && group_.count > 1 && group_.shared == 0) use_.dissimilar.insert(family);
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

// Whether a plan counts the longest answer: a cache of such a method is one question's.
bool evaluation::plans_by_answer(const variant& row) const {
  return with_answer_limit(*row.method, row.settings, 1).size() != row.settings.size();
}

void evaluation::begin_group(const question_group& group) {
  group_ = group;
  left_ = group.count;
  make_passes();
  if (group.count == 1) return;
  for (std::size_t i = 0; i < variants_.size(); ++i) {
    if (cache_of_variant_[i] == own_prefill) use_.need_length.insert(variants_[i].method->name);
    if (plans_by_answer(variants_[i]) && !group.same_limit) use_.need_answer_limit.insert(variants_[i].method->name);
  }
}

// Methods whose prompts attend lines see other hidden states than dense ones: each passes a prompt through the model alone, all others
// together, but those that cannot go on behind what another question has read.
void evaluation::make_passes() {
  passes_.clear();
  for (std::size_t i = 0; i < first_of_method_.size(); ++i) {
    const variant& row = variants_[first_of_method_[i]];
    const bool alone = row.method->chooses_lines;
    const bool stores = stores_prefixes_ && group_.shared > 0 && (group_.same_limit || !plans_by_answer(row));
    const auto joins = [&](const std::unique_ptr<prompt_pass>& pass) {
      return !alone && pass->stores == stores && !variants_[first_of_method_[pass->members[0]]].method->chooses_lines;
    };
    auto found = std::ranges::find_if(passes_, joins);
    if (found == passes_.end()) {
      passes_.push_back(std::make_unique<prompt_pass>());
      found = passes_.end() - 1;
    }
    (*found)->stores = stores;
    (*found)->members.push_back(i);
  }
}

void evaluation::prompt_all(const std::vector<planned_turn>& turns, const visitor& visit) {
  if (left_ == 0) begin_group(question_group::of(turns));
  const std::size_t left = std::exchange(left_, 0) - 1;  // none, where something throws
  const std::vector<token_t>& prompt = turns[0].prompt;
  const std::vector<std::uint8_t> boundaries = tokenizer_.boundaries(prompt);
  engine::prefill_options options = ticking();
  options.boundaries = boundaries;
  first_.clear();
  first_.resize(first_of_method_.size());
  for (const auto& pass : passes_) read_first(*pass, turns, options);
  for (const first_prompt& read : first_) {
    if (read.cache->rereads()) model_.reread(prompt, *read.cache, options);
  }
  for (std::size_t i = 0; i < variants_.size(); ++i) {
    const std::size_t shared = cache_of_variant_[i];
    if (shared == own_prefill) {  // what it drops on the way, or how it stores rows, changes what the model sees
      const method_info& method = *variants_[i].method;
      const auto own = empty_cache(variants_[i], turns, 0);
      own->announce(index_t(prompt.size()));
      if (method.chooses_lines) (void)own->trace_lines();
      own_pairs_ = {};
      std::vector<float> own_logits = model_.prefill(prompt, *own, counting(method, *own, options, own_pairs_));
      visit(i, std::move(own_logits), *own);
      continue;
    }
    first_prompt& read = first_[shared];
    const bool is_last = i + 1 == variants_.size() || cache_of_variant_[i + 1] != shared;
    const std::unique_ptr<method_cache> cache = is_last        ? std::move(read.cache)
                                                : read.is_fork ? read.cache->fork()
                                                               : read.cache->clone();
    if (variants_[i].budget) cache->set_budget(*variants_[i].budget);
    cache->end_prefill();
    visit(i, read.logits, *cache);
  }
  left_ = left;
  if (left_ == 0) passes_.clear();
}

// Passes a first prompt through the model for the caches of a pass, behind what they have stored of it.
void evaluation::read_first(prompt_pass& pass, const std::vector<planned_turn>& turns,
                            const engine::prefill_options& options) {
  const std::span<const token_t> prompt = turns[0].prompt;
  const variant& front = variants_[first_of_method_[pass.members[0]]];
  prompt_readers::conversations together;
  pair_count pairs;
  std::size_t done = 0;
  stopwatch since;
  if (const auto match = pass.prefixes.fork(prompt); match.id >= 0) {
    together = pass.sequences.take(match.id);
    done = match.tokens;
    pairs = pass.pairs;
    use_.forks.add(done, since.restart());
  }
  const std::size_t reused = done;
  for (std::size_t i = 0; i < pass.members.size(); ++i) {
    const std::size_t cache = pass.members[i];
    const variant& row = variants_[first_of_method_[cache]];
    const auto rows = std::ranges::count(cache_of_variant_, cache);
    if (reused == 0) {
      // The stored beginning, and a copy for every budget but the last, one after the other.
      together.push_back(empty_cache(row, turns, pass.stores ? 1 + (rows > 1) : 0));
      if (row.method->chooses_lines) (void)together.back()->trace_lines();
    } else if (rows > 1) {
      together[i]->set_budget(*row.budget);  // the last row's was set behind the question before
    }
  }
  const auto pass_through = [&](std::size_t end) {
    engine::prefill_options part = options;
    part.boundaries = options.boundaries.subspan(done, end - done);
    part = counting(*front.method, *together[0], std::move(part), pairs);
    return model_.prefill_all(prompt.subspan(std::exchange(done, end), end - done), together, part);
  };
  if (done < group_.shared) {
    (void)pass_through(group_.shared);
    use_.beginnings.add(done, since.restart());
    if (pass.stores) {
      use_.beginning_bytes = std::max(use_.beginning_bytes, prompt_readers::bytes_of(together));
      const index_t id = pass.sequences.add(std::move(together));
      pass.prefixes.insert(prompt.first(done), id);
      together = pass.sequences.take(id);
      pass.pairs = pairs;
    }
  }
  const std::vector<float> logits = pass_through(prompt.size());
  if (group_.shared > 0)
    (reused > 0 ? use_.rest_of_fork : use_.rest).add(prompt.size() - group_.shared, since.restart());
  if (pass.stores)
    use_.most_bytes = std::max(use_.most_bytes, pass.sequences.bytes() + prompt_readers::bytes_of(together));
  for (std::size_t i = 0; i < pass.members.size(); ++i)
    first_[pass.members[i]] = {std::move(together[i]), logits, pairs, reused, pass.stores};
}

// All turns of one variant, from the logits and the cache after the first prompt.
void evaluation::answer(std::size_t variant, const std::string& family, const std::vector<planned_turn>& turns,
                        std::vector<float> logits, method_cache& cache) {
  std::vector<token_t> pending;  // generated, not in the cache yet
  const method_info& method = *variants_[variant].method;
  const std::size_t shared = cache_of_variant_[variant];
  if (method.chooses_lines) (void)cache.trace_lines();
  pair_count pairs = shared == own_prefill ? own_pairs_ : first_[shared].pairs;
  std::size_t reused = shared == own_prefill ? 0 : first_[shared].reused;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    if (i > 0) {
      pending.insert(pending.end(), turns[i].prompt.begin(), turns[i].prompt.end());
      const std::vector<std::uint8_t> boundaries = tokenizer_.boundaries(pending);
      engine::prefill_options options = ticking();
      options.boundaries = boundaries;
      pairs = {};
      reused = 0;
      cache.announce(index_t(pending.size()));
      logits = model_.prefill(pending, cache, counting(method, cache, options, pairs));
    }
    cell& sums = cell_of(variant, family, int(i) + 1);
    sums.prompt_tokens += std::int64_t(i > 0 ? pending.size() : turns[0].prompt.size());
    sums.reused_tokens += std::int64_t(reused);
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
