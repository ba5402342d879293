// tessera agree
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>

#include "agreement.hpp"
#include "engine/checkpoint.hpp"
#include "engine/files/input_file.hpp"
#include "engine/files/output_file.hpp"
#include "engine/tokenizer.hpp"
#include "tool/backend.hpp"
#include "tool/commands.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"
#include "tool/progress.hpp"

namespace tool {

void agree(const agree_options& given) {
  const backend where = require_backend(given.backend);
  std::vector<variant> variants = parse_variants(given);
  const bool has_full = std::ranges::any_of(variants, [](const variant& row) { return row.method->name == "full"; });
  if (!has_full) variants.insert(variants.begin(), {&find_method("full"), {}, {}});
  std::ranges::stable_partition(variants, [](const variant& row) { return row.method->name == "full"; });
  const element_type element = parse_element(given.dtype);
  const auto count = std::size_t(parse_count("--count", given.count, 1, 1'000'000));
  const std::int64_t prompt = parse_count("--prompt", given.prompt, 2), steps = parse_count("--steps", given.steps, 1);
  const auto workers = make_workers(given.threads);
  if (!given.json.empty()) engine::require_writable(given.json);
  const std::filesystem::path folder = given.model;
  const engine::llama_config config = engine::config_of_model(folder);
  tessera::require(prompt + steps <= config.max_position_embeddings, "--prompt and --steps together", prompt + steps,
                   "at most the model's context, which is " + std::to_string(config.max_position_embeddings),
                   "pass smaller ones");
  const auto tokenizer = engine::tokenizer::of_model(folder);
  engine::require_agreement(folder, config, tokenizer.vocab_size());
  require_caches(variants, config, element, workers);
  const std::vector<engine::token_t> text = tokenizer.encode(engine::read_text_file(given.text));
  std::vector<engine::token_t> first;
  if (tokenizer.bos()) first.push_back(*tokenizer.bos());
  const std::vector<text_piece> pieces = pieces_of(text, first, count, prompt, steps);
  const auto model = [&] {
    progress_line progress("loading the model");
    return load_model(folder, where, *workers);
  }();
  agreement_run compared(*model, tokenizer, variants, element, workers);
  const gentle_end gentle;
  const auto start = std::chrono::steady_clock::now();
  std::size_t finished = 0;
  std::optional<interrupted> stopped;
  try {
    progress_line progress("pieces of text");
    compared.call_often([] { throw_if_interrupted(); });
    for (; finished < pieces.size(); ++finished) {
      progress.update(std::int64_t(finished), std::int64_t(pieces.size()));
      compared.run(pieces[finished]);
    }
  } catch (const interrupted& signal) {
    stopped = signal;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (finished > 0) {
    if (!given.json.empty()) engine::write_file(given.json, agreement_json(compared.variants(), compared.sums()));
    std::printf(
        "%s\n%zu pieces of %lld tokens and %lld steps each in %s. KL(full, method) of the next token, in nats.\n",
        agreement_table(compared.variants(), compared.sums()).c_str(), finished, static_cast<long long>(prompt),
        static_cast<long long>(steps), duration_text(seconds).c_str());
  }
  if (stopped) {
    std::fflush(stdout);
    std::fprintf(stderr, "tessera: interrupted after %zu of %zu pieces; %s\n", finished, pieces.size(),
                 finished > 0 ? "the result counts these alone" : "there is no result");
    throw *stopped;
  }
}

}  // namespace tool
