// tessera run
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <utility>

#include "engine/checkpoint.hpp"
#include "engine/files/input_file.hpp"
#include "engine/text/chat_template.hpp"
#include "engine/tokenizer.hpp"
#include "tool/backend.hpp"
#include "tool/commands.hpp"
#include "tool/eval/report.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"
#include "tool/progress.hpp"
#include "tool/rows/row_settings.hpp"
#include "tool/run/session_file.hpp"

namespace tool {
namespace {

/// What `run` reports: of a chat the last turn's cache, and the tokens of all turns.
struct outcome {
  std::string style;               ///< of the chat template; empty: plain text
  std::vector<std::string> texts;  ///< a turn each
  std::size_t prompt_tokens = 0, new_tokens = 0;
  double kept = 0;  ///< tokens per layer and KV head after the prompt, on average
  double bytes_held = 0, bytes_full = 0, bytes_read_per_step = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  std::vector<parameter_info> parameters;  ///< as the cache had them
};

class stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

double mean_kept(const method_cache& cache, const engine::llama_config& config) {
  double total = 0;
  for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
    for (index_t head = 0; head < config.num_key_value_heads; ++head) {
      total += double(cache.positions(layer, head).size());
    }
  }
  return total / (double(config.num_hidden_layers) * config.num_key_value_heads);
}

/// The model's own template, or the one that the options name; none for plain text.
std::optional<engine::chat_template> chosen_template(const run_options& given) {
  require_one_of("--template", given.chat_template, {"auto", "none", "chatml", "llama3"});
  if (given.chat_template == "none") return std::nullopt;
  if (given.chat_template == "chatml") return engine::chat_template{engine::chat_style::chatml};
  if (given.chat_template == "llama3") return engine::chat_template{engine::chat_style::llama3, true, true};
  const std::optional<std::string> text = engine::template_text(given.model);
  return text ? std::optional(engine::recognise_template(*text)) : std::nullopt;
}

std::string checked_prompt(const std::string& path) {
  std::string prompt = engine::read_text_file(path);
  tessera::require(!trimmed(prompt).empty(), path == "-" ? "standard input" : "prompt file " + engine::printable(path),
                   "empty", "text", "write a prompt into it");
  return prompt;
}

/// A model and the cache of one conversation with it.
class conversation_run {
 public:
  conversation_run(const run_options& given, const method_info& method)
      : given_(given),
        method_(method),
        budget_(given.method.parsed_budget(method)),
        element_(parse_element(given.dtype)),
        max_new_(std::int32_t(parse_count("--max-new", given.max_new, 1))),
        where_(require_backend(given.method.backend)) {
    for (const std::string& path : given.prompts) messages_.push_back(checked_prompt(path));
    workers_ = make_workers(given.threads);
    const std::filesystem::path folder = given.model;
    config_ = engine::config_of_model(folder);
    tokenizer_.emplace(engine::tokenizer::of_model(folder));
    engine::require_agreement(folder, config_, tokenizer_->vocab_size());
    if (const auto turns = chosen_template(given)) chat_.emplace(*turns, *tokenizer_, config_.eos);
    tessera::require(chat_ || messages_.size() == 1, "--prompt",
                     messages_.empty() ? "missing" : "given " + std::to_string(messages_.size()) + " times",
                     "one file, as there is no chat template", "pass --prompt FILE once, - for standard input");
    tessera::require(given.load.empty() || !given.system_prompt, "--system", "given", "none with --load",
                     "leave it out: a conversation that goes on has its beginning");
    tessera::require(chat_ || !given.system_prompt, "--system", "given", "none for plain text",
                     "leave it out, or pass a model with a chat template");
  }

  /// Answers every turn; `show` gets each reply as it is there.
  template <class Show>
  outcome run(const Show& show) {
    if (!messages_.empty()) {
      prepare(first_tokens(messages_[0]));
      load();
      for (std::size_t i = 0; i < messages_.size(); ++i) show(ask(i, messages_[i]));
    } else {
      const bool is_person = isatty(STDIN_FILENO);
      std::string line;
      for (std::size_t i = 0; is_person && std::fputs("> ", stderr), std::getline(std::cin, line);) {
        if (trimmed(line).empty()) continue;
        if (i == 0) prepare(first_tokens(line)), load();
        show(ask(i++, line));
      }
      tessera::require(!result_.texts.empty(), "standard input", "empty", "text, each line of which is a turn",
                       "write one, or pass --prompt");
    }
    if (!given_.save.empty()) save_session(given_.save, digest_of_model(given_.model), {reply_, rotates()}, *cache_);
    return result_;
  }

 private:
  void load() {
    if (given_.load.empty()) return;
    reply_ = load_session(given_.load, digest_of_model(given_.model), rotates(), *cache_).reply;
    goes_on_ = true;
  }

  bool rotates() const {
    std::vector<setting> settings = given_.method.parsed_settings();
    return row_settings::taken_from(settings).rotates;
  }

  std::vector<engine::token_t> first_tokens(const std::string& message) const {
    if (chat_) return chat_->first_turn(given_.system_prompt, message);
    std::vector<engine::token_t> tokens = tokenizer_->encode(message);
    if (tokenizer_->bos()) tokens.insert(tokens.begin(), *tokenizer_->bos());
    return tokens;
  }

  std::vector<engine::token_t> next_tokens(const std::string& message) const {
    if (chat_) return chat_->next_turn(reply_, message);
    std::vector<engine::token_t> tokens = tokenizer_->encode(message);
    if (!reply_.empty()) tokens.insert(tokens.begin(), reply_.back());  // it has not passed through the model
    return tokens;
  }

  // Positions that are left behind a prompt of so many tokens.
  std::int64_t room_behind(std::size_t tokens) const {
    const std::int64_t before = cache_ ? cache_->next_position() : 0;
    const std::int64_t room = config_.max_position_embeddings - before - std::int64_t(tokens);
    tessera::require(room >= 0, "prompt",
                     std::to_string(tokens) + " tokens" + (before > 0 ? " behind " + std::to_string(before) : ""),
                     "at most the model's context, which is " + std::to_string(config_.max_position_embeddings),
                     before > 0 ? "start a new chat" : "shorten it");
    return room;
  }

  // The last new token takes no position.
  std::int32_t most_new(std::size_t tokens) const {
    return std::int32_t(std::min<std::int64_t>(max_new_, room_behind(tokens) + 1));
  }

  // At most this many tokens in all turns: the device's memory is made for them.
  std::int64_t upper_bound(const std::vector<engine::token_t>& first) const {
    if (messages_.empty() || !given_.load.empty()) return config_.max_position_embeddings;
    std::int64_t total = std::int64_t(first.size()) + max_new_;
    for (std::size_t i = 1; i < messages_.size(); ++i)
      total += std::int64_t(chat_->next_turn({}, messages_[i]).size()) + 1 + max_new_;
    return std::min<std::int64_t>(total, std::int64_t(config_.max_position_embeddings) + 1);
  }

  void prepare(const std::vector<engine::token_t>& first) {
    const auto settings = with_answer_limit(method_, given_.method.parsed_settings(), index_t(most_new(first.size())));
    cache_ = make_cache(
        method_, where_,
        {shape_of(config_), config_.head_dim, element_, budget_, settings, workers_, index_t(upper_bound(first))});
    if (!given_.save.empty() || !given_.load.empty()) cache_->require_saves();
    progress_line progress("loading the model");
    model_ = load_model(given_.model, where_, *workers_);
    result_.parameters = method_.configured(settings);
    if (chat_) result_.style = chat_->turns().style == engine::chat_style::chatml ? "chatml" : "llama3";
  }

  const std::string& ask(std::size_t turn, const std::string& message) {
    const std::vector<engine::token_t> tokens = turn == 0 && !goes_on_ ? first_tokens(message) : next_tokens(message);
    const std::int32_t longest = most_new(tokens.size());
    const std::vector<float> logits = read(tokens);
    result_.prompt_tokens += tokens.size();
    result_.kept = mean_kept(*cache_, config_);
    result_.bytes_held = double(cache_->bytes());
    result_.bytes_full = double(cache_->full_bytes(index_t(cache_->next_position())));
    reply_ = write(logits, longest);
    result_.new_tokens += reply_.size();
    if (cache_->reads().steps > 0)
      result_.bytes_read_per_step = double(cache_->reads().bytes) / double(cache_->reads().steps);
    result_.texts.push_back(tokenizer_->decode(reply_));
    return result_.texts.back();
  }

  std::vector<float> read(const std::vector<engine::token_t>& tokens) {
    const stopwatch watch;
    progress_line progress("reading the prompt");
    engine::prefill_options prefill;
    prefill.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
    const std::vector<std::uint8_t> boundaries = tokenizer_->boundaries(tokens);
    prefill.boundaries = boundaries;
    cache_->announce(index_t(tokens.size()));
    prefill.repeat = repeat_sentences(*tokenizer_);
    std::vector<float> logits = model_->prefill(tokens, *cache_, prefill);
    result_.prefill_seconds += watch.seconds();
    return logits;
  }

  std::vector<engine::token_t> write(const std::vector<float>& logits, std::int32_t longest) {
    const stopwatch watch;
    progress_line progress("answering");
    engine::generate_options generate;
    generate.max_new = longest;
    generate.ends_segment = tokenizer_->ends_segment();
    const std::span<const engine::token_t> ends = chat_ ? chat_->ends() : std::span(std::as_const(config_.eos));
    const auto breaks = tokenizer_->newline_tokens();
    generate.stop = [&](std::span<const engine::token_t> answer) {
      progress.update(std::int64_t(answer.size()), generate.max_new);
      const auto is = [&](auto list) { return std::find(list.begin(), list.end(), answer.back()) != list.end(); };
      return is(ends) || (given_.one_line && is(breaks) && !trimmed(tokenizer_->decode(answer)).empty());
    };
    std::vector<engine::token_t> reply = model_->extend(logits, *cache_, generate);
    result_.decode_seconds += watch.seconds();
    return reply;
  }

  const run_options& given_;
  const method_info& method_;
  std::optional<index_t> budget_;
  element_type element_;
  std::int32_t max_new_;
  backend where_;
  std::vector<std::string> messages_;
  std::shared_ptr<tessera::cpu::executor> workers_;
  engine::llama_config config_{};
  std::optional<engine::tokenizer> tokenizer_;
  std::optional<engine::chat> chat_;
  std::unique_ptr<method_cache> cache_;
  std::unique_ptr<runner> model_;
  std::vector<engine::token_t> reply_;
  bool goes_on_ = false;  ///< a conversation that was loaded
  outcome result_;
};

void print_text(const outcome& result, const method_info& method) {
  std::printf("%s: %zu prompt tokens, %.1f kept per KV head; %s held (full: %s, %.1f %%); %s read per step\n",
              method.name.c_str(), result.prompt_tokens, result.kept, bytes_text(result.bytes_held).c_str(),
              bytes_text(result.bytes_full).c_str(), 100 * result.bytes_held / result.bytes_full,
              bytes_text(result.bytes_read_per_step).c_str());
  if (result.bytes_held > result.bytes_full) {
    std::printf(
        "held above 100 %%: room for the answer, positions and bookkeeping, which a short prompt does not pay for\n");
  }
  std::printf("prompt read in %s, %zu tokens written in %s\n", duration_text(result.prefill_seconds).c_str(),
              result.new_tokens, duration_text(result.decode_seconds).c_str());
}

void print_json(const outcome& result, const run_options& given, const method_info& method) {
  nlohmann::ordered_json all;
  all["method"] = method.name;
  const auto budget = given.method.parsed_budget(method);
  all["budget"] = budget ? nlohmann::ordered_json(*budget) : nlohmann::ordered_json(nullptr);
  for (const parameter_info& parameter : result.parameters) all["parameters"][parameter.name] = parameter.value;
  if (!result.style.empty()) all["template"] = result.style;
  all["text"] = result.texts.back();
  if (result.texts.size() > 1) all["turns"] = result.texts;
  all["prompt_tokens"] = result.prompt_tokens;
  all["new_tokens"] = result.new_tokens;
  all["kept_per_head"] = result.kept;
  all["bytes_held"] = result.bytes_held;
  all["bytes_full"] = result.bytes_full;
  all["bytes_read_per_step"] = result.bytes_read_per_step;
  all["prefill_seconds"] = result.prefill_seconds;
  all["decode_seconds"] = result.decode_seconds;
  std::printf("%s\n", all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

}  // namespace

void run_prompt(const run_options& given) {
  const method_info& method = given.method.checked_method();
  conversation_run conversation(given, method);
  const outcome result = conversation.run([&](const std::string& reply) {
    if (!given.as_json) std::printf("%s\n\n", std::string(trimmed(reply)).c_str());
    std::fflush(stdout);
  });
  given.as_json ? print_json(result, given, method) : print_text(result, method);
}

}  // namespace tool
