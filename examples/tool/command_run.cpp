// tessera run
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "backend.hpp"
#include "commands.hpp"
#include "engine/checkpoint.hpp"
#include "engine/files/input_file.hpp"
#include "engine/tokenizer.hpp"
#include "progress.hpp"
#include "tool/eval/report.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace tool {
namespace {

/// What `run` reports.
struct outcome {
  std::string text;
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

outcome answer(const run_options& given, const method_info& method) {
  const auto budget = given.method.parsed_budget(method);
  const element_type element = parse_element(given.dtype);
  const auto max_new = std::int32_t(parse_count("--max-new", given.max_new, 1));
  const std::string prompt = engine::read_text_file(given.prompt);
  tessera::require(!trimmed(prompt).empty(),
                   given.prompt == "-" ? "standard input" : "prompt file " + engine::printable(given.prompt), "empty",
                   "text", "write a prompt into it");
  const auto workers = make_workers(given.threads);
  const std::filesystem::path folder = given.model;
  const engine::llama_config config = engine::config_of_model(folder);
  const auto tokenizer = engine::tokenizer::of_model(folder);
  engine::require_agreement(folder, config, tokenizer.vocab_size());
  std::vector<engine::token_t> tokens = tokenizer.encode(prompt);
  if (tokenizer.bos()) tokens.insert(tokens.begin(), *tokenizer.bos());
  const std::int64_t room = config.max_position_embeddings - std::int64_t(tokens.size());
  tessera::require(room >= 0, "prompt", std::to_string(tokens.size()) + " tokens",
                   "at most the model's context, which is " + std::to_string(config.max_position_embeddings),
                   "shorten it");
  const backend where = require_backend(given.method.backend);
  const std::int64_t most_new = std::min<std::int64_t>(max_new, room + 1);  // the last one takes no position
  const auto settings = with_answer_limit(method, given.method.parsed_settings(), index_t(most_new));
  const auto cache = make_cache(method, where,
                                {shape_of(config), config.head_dim, element, budget, settings, workers,
                                 index_t(std::int64_t(tokens.size()) + most_new)});
  const auto model = [&] {
    progress_line progress("loading the model");
    return load_model(folder, where, *workers);
  }();

  outcome result;
  result.parameters = method.configured(settings);
  result.prompt_tokens = tokens.size();
  const stopwatch prefill_watch;
  std::vector<float> logits;
  {
    progress_line progress("reading the prompt");
    engine::prefill_options prefill;
    prefill.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
    const std::vector<std::uint8_t> boundaries = tokenizer.boundaries(tokens);
    prefill.boundaries = boundaries;
    cache->announce(index_t(tokens.size()));
    prefill.repeat = repeat_sentences(tokenizer);
    logits = model->prefill(tokens, *cache, prefill);
  }
  result.prefill_seconds = prefill_watch.seconds();
  result.kept = mean_kept(*cache, config);
  result.bytes_held = double(cache->bytes());
  result.bytes_full = double(cache->full_bytes(index_t(tokens.size())));

  const stopwatch decode_watch;
  progress_line progress("answering");
  engine::generate_options generate;
  generate.max_new = std::int32_t(most_new);
  generate.ends_segment = tokenizer.ends_segment();
  const auto breaks = tokenizer.newline_tokens();
  generate.stop = [&](std::span<const engine::token_t> answer) {
    progress.update(std::int64_t(answer.size()), generate.max_new);
    const auto is = [&](auto list) { return std::find(list.begin(), list.end(), answer.back()) != list.end(); };
    return is(config.eos) || (given.one_line && is(breaks) && !trimmed(tokenizer.decode(answer)).empty());
  };
  const auto generated = model->extend(logits, *cache, generate);
  result.decode_seconds = decode_watch.seconds();
  result.text = tokenizer.decode(generated);
  result.new_tokens = generated.size();
  if (cache->reads().steps > 0) result.bytes_read_per_step = double(cache->reads().bytes) / cache->reads().steps;
  return result;
}

void print_text(const outcome& result, const method_info& method) {
  std::printf("%s\n\n", std::string(trimmed(result.text)).c_str());
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
  all["text"] = result.text;
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
  const outcome result = answer(given, method);
  given.as_json ? print_json(result, given, method) : print_text(result, method);
}

}  // namespace tool
