// Speculation with the shipped model: greedy answers with drafts are those without.
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "catch.hpp"
#include "engine/files/input_file.hpp"
#include "engine/model.hpp"
#include "engine/tokenizer.hpp"
#include "support/random.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/h2o.hpp"
#include "tessera/methods/quest.hpp"
#include "tessera/methods/rocketkv.hpp"
#include "tessera/methods/snapkv.hpp"
#include "tessera/tessera.hpp"

namespace {

const std::filesystem::path source = TESSERA_SOURCE_DIR;
constexpr int head_dim = 64, drafted = 4, answer_tokens = 40;

/// A method's cache behind the engine's interface. Between `draft` and `accept` the engine's steps are drafts.
template <class Recipe>
class speculative_cache : public engine::kv_cache {
 public:
  speculative_cache(const engine::llama_config& config, tessera::index_t budget,
                    std::shared_ptr<tessera::cpu::executor> workers)
      : heads_(config.num_attention_heads),
        kv_heads_(config.num_key_value_heads),
        cache_({config.num_hidden_layers, heads_, kv_heads_}, recipe(budget), std::move(workers)),
        id_(cache_.open()) {}

  void draft() { is_draft_ = true; }
  void accept(tessera::index_t tokens) {
    cache_.accept(id_, tokens);
    is_draft_ = false;
  }

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    cache_.prefill(layer, id_, rows(q, tokens, heads_), rows(k, tokens, kv_heads_), rows(v, tokens, kv_heads_));
    cache_.prefill_attention(layer, id_, rows(q, tokens, heads_), rows(out, tokens, heads_));
  }
  void end_prefill() override { cache_.end_prefill(id_); }
  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    if (layer == 0 && is_draft_) draft_ = cache_.prepare_draft({id_}, tokens);
    if (layer == 0 && !is_draft_) step_ = cache_.prepare_step({id_}, tokens);
    const auto pass = [&](const auto& step) {
      cache_.decode(layer, step, rows(q, tokens, heads_), rows(k, tokens, kv_heads_), rows(v, tokens, kv_heads_),
                    rows(out, tokens, heads_));
    };
    is_draft_ ? pass(draft_) : pass(step_);
  }
  std::int64_t next_position() const override { return cache_.next_position(id_); }

 private:
  static Recipe recipe(tessera::index_t budget) {
    Recipe made;
    made.set_budget(budget);
    return made;
  }
  template <class T>
  static tessera::rows_view<T> rows(T* data, int tokens, int heads) {
    return tessera::nhd_rows(data, tokens, heads, head_dim);
  }

  int heads_, kv_heads_;
  tessera::cache<Recipe> cache_;
  tessera::index_t id_;
  tessera::batch step_;
  tessera::draft_step draft_;
  bool is_draft_ = false;
};

struct greedy_answer {
  std::vector<engine::token_t> tokens;
  std::vector<float> margins;  // by which the best logit leads
  int passes = 0;
};
float margin_of(std::span<const float> logits) {
  const auto best = engine::best_token(logits);
  float second = -1e30f;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (engine::token_t(i) != best) second = std::max(second, logits[i]);
  }
  return logits[std::size_t(best)] - second;
}
void take(greedy_answer& answer, std::span<const float> logits) {
  answer.tokens.push_back(engine::best_token(logits));
  answer.margins.push_back(margin_of(logits));
}

/// Drafts of four tokens behind the newest one: those of another answer, some of them wrong.
template <class Cache>
greedy_answer with_drafts(engine::llama& model, Cache& cache, std::vector<float> logits,
                          const std::vector<engine::token_t>& guesses, support::rng& random) {
  const std::size_t vocabulary = logits.size();
  greedy_answer answer;
  take(answer, logits);
  while (answer.tokens.size() < answer_tokens) {
    std::vector<engine::token_t> tokens{answer.tokens.back()};
    for (std::size_t t = 0; t < drafted && answer.tokens.size() + t < guesses.size(); ++t) {
      const bool is_right = random.chance(0.8);
      tokens.push_back(is_right ? guesses[answer.tokens.size() + t]
                                : engine::token_t(random.between(0, int(vocabulary) - 1)));
    }
    cache.draft();
    logits = model.decode(tokens, cache);
    ++answer.passes;
    tessera::index_t accepted = 0;
    for (bool goes_on = true; goes_on && answer.tokens.size() < answer_tokens; ++accepted) {
      take(answer, std::span(logits).subspan(std::size_t(accepted) * vocabulary, vocabulary));
      goes_on = std::size_t(accepted) + 1 < tokens.size() && tokens[std::size_t(accepted) + 1] == answer.tokens.back();
    }
    cache.accept(accepted);
  }
  return answer;
}

/// `rounding`: what logits may differ by. A method that chooses in steps reads, while a draft is judged, what single steps
/// would have dropped. Where steps retrieve, a draft's own tokens are read whatever is chosen, and those of single steps only
/// if they are chosen: such a method is given a budget that reads everything.
template <template <class, int, int, class> class Method, class T = float>
void answers_alike(const char* name, tessera::index_t budget, float rounding) {
  using recipe = Method<T, head_dim, head_dim, tessera::dense<T, head_dim, head_dim>>;
  CAPTURE(name);
  const auto workers = std::make_shared<tessera::cpu::executor>(2);
  auto model = engine::llama::load(source / "examples/model", *workers);
  const auto tokenizer = engine::tokenizer::load(source / "examples/model/tokenizer.model");
  const std::string book = engine::read_text_file(source / "examples/data/opticks.txt");
  support::rng random(77);
  int same = 0, passes = 0;
  for (int text = 0; text < 2; ++text) {
    CAPTURE(text);
    std::vector<engine::token_t> prompt = tokenizer.encode(book.substr(std::size_t(20000 + 9000 * text), 2400));
    if (tokenizer.bos()) prompt.insert(prompt.begin(), *tokenizer.bos());
    speculative_cache<recipe> plain(model.config(), budget, workers), drafting(model.config(), budget, workers);
    std::vector<float> logits = model.prefill(prompt, plain);
    greedy_answer expected;
    take(expected, logits);
    while (expected.tokens.size() < answer_tokens)
      take(expected, model.decode(std::span(&expected.tokens.back(), 1), plain));
    const greedy_answer got = with_drafts(model, drafting, model.prefill(prompt, drafting), expected.tokens, random);
    std::size_t at = 0;
    while (at < answer_tokens && got.tokens[at] == expected.tokens[at]) ++at;
    same += at == answer_tokens;
    passes += got.passes;
    if (at < answer_tokens) CHECK(expected.margins[at] < rounding);  // from there on the texts are others
  }
  std::printf("%s: %d of 2 answers of %d tokens the same, %d passes in place of %d\n", name, same, answer_tokens,
              passes, 2 * (answer_tokens - 1));
  CHECK(passes < 2 * answer_tokens * 2 / 3);
}

}  // namespace

TEST_CASE("greedy answers with drafts of four tokens are those without") {
  answers_alike<tessera::full>("full", 256, 1e-3f);
  answers_alike<tessera::snapkv>("snapkv", 256, 1e-3f);
  answers_alike<tessera::h2o>("h2o", 256, 0.1f);
  answers_alike<tessera::quest>("quest", 4096, 1e-3f);
  answers_alike<tessera::rocketkv>("rocketkv", 4096, 1e-3f);
}
