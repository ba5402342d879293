// The tool's subcommands: what each is told on the command line, as text, and what it does.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/config.hpp"
#include "engine/tokenizer.hpp"
#include "tool/eval/document.hpp"
#include "tool/eval/evaluate.hpp"
#include "tool/eval/questions.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

/// Options that choose one method and its budget.
struct method_options {
  std::string method, budget, backend = "cpu";
  std::vector<std::string> settings;

  /// The method, checked. Errors: unknown method, parameter or backend, a value of the wrong type.
  const method_info& checked_method() const;
  std::vector<setting> parsed_settings() const;
  /// Errors: no budget although the method has one; a budget below 1.
  std::optional<index_t> parsed_budget(const method_info& method) const;
};

struct list_options {
  bool as_json = false;
};

struct run_options {
  method_options method;
  std::string model, chat_template = "auto", dtype = "bf16", max_new = "64", threads = "0";
  std::vector<std::string> prompts;          ///< files, in a chat a turn each; none: lines of standard input
  std::optional<std::string> system_prompt;  ///< of a chat, in place of the template's
  std::string save, load;                    ///< files of a conversation; empty: none
  bool one_line = false, as_json = false;
};

struct eval_options : document_options {
  std::string model, methods, budgets, questions, json, metric = "prefix", how_to_ask = usual_template;
  bool normalise = false, separately = false;
  std::string backend = "cpu", dtype = "bf16", count = "40", threads = "0", chunk = "2048", prefix_cache = "on";
  std::vector<std::string> settings, varied;
};

struct agree_options : eval_options {
  agree_options() { count = "4"; }
  std::string prompt, prompts, steps = "128";  ///< no prompt: `usual_prompt` tokens
  static constexpr const char* usual_prompt = "2048";
};

struct heads_options {
  eval_options documents;  ///< those that choose questions, and the model
  std::string out, sinks = "4", recent = "256";
};

struct compress_file_options {
  method_options method;
  bool scores = false;
  std::string in, out, threads = "0";
};

struct calibrate_options : document_options {
  std::string model, method = "snapkv", out;
  std::string share = "0.3", samples = "50", alpha = "2", threads = "0";
  bool renormalise = false;
  std::vector<std::string> settings;
};

struct strategies_options : document_options {
  std::string model, channels = "0.25", group = "1", block = "8", samples = "10", threads = "0";
};

// Each prints its result on stdout. Errors: tessera::error, before any output file exists.
void list_methods(const list_options& given);
void run_prompt(const run_options& given);
void evaluate(const eval_options& given);
void agree(const agree_options& given);
void compress_file(const compress_file_options& given);
void calibrate(const calibrate_options& given);
void find_heads(const heads_options& given);
void find_strategy_limits(const strategies_options& given);

/// Every method at every budget; a method without a budget, or with a profile, once. Errors: what the options ask for
/// makes no sense.
std::vector<variant> parse_variants(const eval_options& given);

/// The questions of `eval` and `heads`: the user's, or documents that the tool makes.
class question_source {
 public:
  /// Checks the options before anything else is read or computed; reads the user's questions, or the tasks file.
  explicit question_source(const eval_options& given);

  /// Errors: what the options ask for cannot be made for this model.
  std::vector<conversation> conversations(const engine::llama_config& config, const engine::tokenizer& tokenizer) &&;

 private:
  std::vector<conversation> questions_;        // the user's
  std::optional<document_request> documents_;  // otherwise
};

/// A thread pool of so many workers, 0 for every core. Errors: no whole number from 0 to 1024.
std::shared_ptr<tessera::cpu::executor> make_workers(const std::string& threads);

}  // namespace tool
