// Asks a model the same questions under many methods and budgets and counts the right answers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/tokenizer.hpp"
#include "prompt_pairs.hpp"
#include "questions.hpp"
#include "tool/backend.hpp"
#include "tool/methods/method_cache.hpp"
#include "tool/prefix/prefix_use.hpp"
#include "tool/prefix/prompt_readers.hpp"
#include "tool/prefix/question_groups.hpp"
#include "tool/score/metrics.hpp"

namespace tool {

/// One row of the table: a method at a budget.
struct variant {
  const method_info* method;
  std::optional<index_t> budget;  ///< none for a method that has none
  std::vector<setting> settings;
  std::string differs{};  ///< in what it differs from the method's other rows, "name=value"; empty: in nothing
};

/// Sums over the questions of one (variant, family, turn).
struct cell {
  std::size_t variant = 0;  ///< index
  std::string family;
  int turn = 1;
  std::int64_t questions = 0, right = 0;  ///< right: with the best score
  /// Answer limits of its conversations, the shortest and the longest: what `max_new` is where no setting says it.
  index_t least_limit = 0, most_limit = 0;
  double bytes_held = 0, bytes_full = 0;  ///< right after the turn's prefill
  double bytes_read = 0;                  ///< of all decode steps of the answers
  std::int64_t steps = 0;
  std::int64_t prompt_tokens = 0, reused_tokens = 0;  ///< of the turn's prompts; of these, what was not read again
  pair_count pairs;                                   ///< of the turn's prompt; none where its rows attend everything
  std::vector<std::string> answers;                   ///< what the model wrote, question by question
  std::vector<bool> verdicts;                         ///< and whether it was right
  std::vector<double> scores;                         ///< from 0 to 1

  double score() const;  ///< their sum
  double mean_score() const { return questions ? score() / double(questions) : 0; }

  double mean_held() const { return questions ? bytes_held / double(questions) : 0; }
  double mean_full() const { return questions ? bytes_full / double(questions) : 0; }
  double mean_read() const { return steps ? bytes_read / double(steps) : 0; }
};

/// A conversation of a model. Errors: it does not fit into the model's context; the message begins with `place`.
std::vector<planned_turn> plan_turns(const conversation& conversation, const std::string& place,
                                     const engine::llama_config& config, const engine::tokenizer& tokenizer);

/// Makes each variant's cache once, empty, on the CPU. Errors: a budget or a number that a method rejects for this model.
void require_caches(const std::vector<variant>& variants, const engine::llama_config& config, element_type element,
                    const std::shared_ptr<tessera::cpu::executor>& workers);

/// Runs conversations and keeps the cells.
class evaluation {
 public:
  /// Keeps references: model, tokenizer and the methods must outlive it.
  /// Errors: a budget that a method rejects.
  evaluation(runner& model, const engine::tokenizer& tokenizer, std::vector<variant> variants, element_type element,
             std::shared_ptr<tessera::cpu::executor> workers);

  /// Asks every variant the questions of one conversation. The first prompt passes through the model once for all;
  /// later turns run by themselves, because what a method has dropped changes what the model says.
  /// A method with the parameter `max_new` gets `longest_answer(turns)` unless the variant's settings have their own.
  /// What `tick` throws (see `call_often`) leaves the cells as they were before the conversation.
  void run(const std::string& family, const std::vector<planned_turn>& turns);

  /// Passes the first turn's prompt through the model for every variant, as `run` does, and hands each variant's cache and
  /// the logits behind the prompt to `visit(variant, logits, cache)`, in the variants' order.
  using visitor = std::function<void(std::size_t, std::vector<float>, method_cache&)>;
  void prompt_all(const std::vector<planned_turn>& turns, const visitor& visit);

  /// The next `group.count` conversations are those of a group. The beginning that their prompts share is read once, and each question
  /// goes on with a fork of it: answers, bytes and pairs are those of questions that are read whole.
  void begin_group(const question_group& group);

  /// Whether beginnings are stored; if not, every prompt is read whole, in the same chunks.
  void store_prefixes(bool on) { stores_prefixes_ = on; }
  const prefix_use& use_of_prefixes() const { return use_; }

  /// How answers are scored from now on; by their beginning unless this is called.
  void score_by(scoring how) { scoring_ = how; }

  /// Called after every chunk of a prompt and every token of an answer.
  void call_often(std::function<void()> tick) { tick_ = std::move(tick); }

  const std::vector<variant>& variants() const { return variants_; }

  /// Cells by family in order of appearance, then turn, then variant.
  const std::vector<cell>& cells() const { return cells_; }

 private:
  /// Caches that read first prompts together, and what is stored of these.
  struct prompt_pass {
    std::vector<std::size_t> members;  // indices into first_of_method_
    bool stores = false;
    prompt_readers sequences{};
    engine::prefix_cache<prompt_readers> prefixes{sequences, false};
    pair_count pairs{};  // of the stored beginning
  };
  /// A cache that has read a first prompt, whose prefill has not ended.
  struct first_prompt {
    std::unique_ptr<method_cache> cache;
    std::vector<float> logits;
    pair_count pairs;
    std::size_t reused = 0;  // tokens that were not read again
    bool is_fork = false;    // or was stored: the cache has other sequences
  };

  void ask_all(const std::string& family, const std::vector<planned_turn>& turns);
  bool plans_by_answer(const variant& row) const;
  void make_passes();
  void read_first(prompt_pass& pass, const std::vector<planned_turn>& turns, const engine::prefill_options& options);
  engine::prefill_options ticking() const;
  engine::prefill_options counting(const method_info& method, const method_cache& cache,
                                   engine::prefill_options options, pair_count& pairs) const;
  void answer(std::size_t variant, const std::string& family, const std::vector<planned_turn>& turns,
              std::vector<float> logits, method_cache& cache);
  std::unique_ptr<method_cache> empty_cache(const variant& variant, const std::vector<planned_turn>& turns,
                                            index_t forks) const;
  cell& cell_of(std::size_t variant, const std::string& family, int turn);
  std::vector<engine::token_t> generate(const planned_turn& turn, const std::vector<float>& logits,
                                        method_cache& cache) const;
  bool ends(const std::vector<engine::token_t>& answer, const std::string& expected) const;

  runner& model_;
  const engine::tokenizer& tokenizer_;
  std::vector<variant> variants_;
  cache_request request_;
  // The first variant of each run that differs in its budget alone: those share a cache.
  std::vector<std::size_t> first_of_method_;
  static constexpr std::size_t own_prefill =
      std::size_t(-1);                         // compresses a prompt while it comes in, or stores it otherwise
  std::vector<std::size_t> cache_of_variant_;  // index into first_of_method_, or own_prefill
  question_group group_;
  std::size_t left_ = 0;  // conversations of the group to come
  std::vector<std::unique_ptr<prompt_pass>> passes_;
  std::vector<first_prompt> first_;  // by first_of_method_
  pair_count own_pairs_;             // of the first prompt that a variant reads by itself
  bool stores_prefixes_ = true;
  prefix_use use_;
  std::vector<cell> cells_;
  scoring scoring_;
  std::function<void()> tick_ = [] {};
};

}  // namespace tool
